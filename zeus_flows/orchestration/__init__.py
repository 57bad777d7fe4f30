"""Prefect tasks and flows around `zeus_flows.recurrence.loop`."""
