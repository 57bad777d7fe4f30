"""Prefect tasks and flows around `zeus_flows.recurrence`."""

from zeus_flows.orchestration.flow import recurrence

__all__ = ["recurrence"]
