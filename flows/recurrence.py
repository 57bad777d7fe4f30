"""Deployable entry point: one recurrence of a job per flow run. `zeus-flows deploy` names it by its module."""

from zeus_flows.orchestration.deployed import recurrence

__all__ = ["recurrence"]
