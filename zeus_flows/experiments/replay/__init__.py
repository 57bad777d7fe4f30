"""Replaying jobs on traces: policies side by side, before anybody trusts one."""

from zeus_flows.experiments.replay.comparison import compare, find_traces

__all__ = ["compare", "find_traces"]
