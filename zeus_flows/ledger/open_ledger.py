"""Opens a job's ledger as production uses it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from zeus_flows.core.job import Job
from zeus_flows.core.records import EnergySource
from zeus_flows.ledger.durable import DurableLedger
from zeus_flows.ledger.lease import this_process
from zeus_flows.ledger.mlflow.client import Store
from zeus_flows.ledger.mlflow.ledger import MlflowLedger
from zeus_flows.ledger.outbox import Outbox


def open_durable(
    job: Job,
    *,
    tracking_uri: str,
    energy_source: EnergySource,
    state_dir: Path,
    flow_run_id: str = "",
    comparable: Mapping[str, str] | None = None,
) -> DurableLedger:
    """Return the ledger that training relies on while MLflow is away; close it when the recurrence has ended.

    `comparable` is what the job's fingerprint is made of, in words, by name.
    """
    holder = this_process(flow_run_id=flow_run_id)
    return DurableLedger(
        job,
        lambda store: MlflowLedger(job, store, energy_source, holder=holder, comparable=comparable),
        tracking_uri=tracking_uri,
        outbox=Outbox(state_dir),
        holder=holder,
    )


def open_direct(
    job: Job, *, tracking_uri: str, energy_source: EnergySource, comparable: Mapping[str, str] | None = None
) -> MlflowLedger:
    """Return the ledger that reads and writes MLflow directly, for commands and reports."""
    return MlflowLedger(job, Store(tracking_uri, patience_s=10.0), energy_source, comparable=comparable)
