"""Opening the ledger of a job as its runs say it is, to look: whatever GPUs this machine has. Makes nothing."""

from __future__ import annotations

from zeus_flows.core.job import Job
from zeus_flows.core.records import EnergySource
from zeus_flows.job_file import JobFile
from zeus_flows.ledger.mlflow import names
from zeus_flows.ledger.mlflow.address import may_exist
from zeus_flows.ledger.mlflow.ledger import MlflowLedger
from zeus_flows.ledger.open_ledger import open_direct


def open_recorded(job_file: JobFile, tracking_uri: str) -> tuple[Job, MlflowLedger] | None:
    """Return the job, with the objective that its newest runs have, and its ledger; None where it has never run."""
    if not may_exist(tracking_uri):
        return None
    ledger = open_direct(job_file.core(), tracking_uri=tracking_uri, energy_source=EnergySource.MEASURED)
    if not ledger.layout.exists():
        return None
    source = EnergySource(ledger.layout.look().tags[names.ENERGY_SOURCE])
    job = job_file.core(source)
    ledger = open_direct(job, tracking_uri=tracking_uri, energy_source=source, comparable=job_file.comparable)
    return job, ledger
