"""Deployable entry point: one recurrence of a job per flow run. `deployments/prefect.yaml` names it."""

from zeus_flows.orchestration.recurrence_flow import recurrence

if __name__ == "__main__":
    recurrence.serve(name="recurrence")
