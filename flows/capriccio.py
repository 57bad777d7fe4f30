"""Deployable entry point: a Capriccio experiment, new or where it stopped."""

from zeus_flows.orchestration.deployed import capriccio

__all__ = ["capriccio"]
