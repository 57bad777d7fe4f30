"""`zeus-flows report`: what a job took and saved, read from MLflow, and as a document.

`report_text` shows it in a terminal, `report_page` makes it one HTML file.

It is read from the snapshot, the newest drift windows and the newest recurrences, so it takes as long after fifty
thousand recurrences as after a hundred; only where all are asked for, every run is read. Nothing is written.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from zeus_flows.core import job_report as core
from zeus_flows.core import policy, savings
from zeus_flows.core.drift_windows import beliefs
from zeus_flows.core.job import Job, Mode
from zeus_flows.core.job_report import Against, TimelineEntry
from zeus_flows.core.json import jsonable
from zeus_flows.core.pareto import SettingPoint, settings_of_runs
from zeus_flows.core.prices import Charged, EnergyRate, Tariff
from zeus_flows.core.reasons import ArmBelief
from zeus_flows.core.records import EnergySource
from zeus_flows.core.rollout import in_force
from zeus_flows.core.savings import Savings
from zeus_flows.job_file import JobFile
from zeus_flows.ledger.mlflow.attempts import Progress, untold
from zeus_flows.ledger.mlflow.ledger import MlflowLedger
from zeus_flows.reporting.drift_report import DriftHistory, drift_of
from zeus_flows.reporting.models_report import ModelsOf, models_document, read_models

#: Recurrences that are read one by one, the newest ones, where not all are asked for.
NEWEST: Final = 100
SOURCES: Final = {
    EnergySource.MEASURED: "measured",
    EnergySource.SIMULATED: "SIMULATED",
    EnergySource.NONE: "no joules: compared by time",
}


@dataclass(frozen=True, slots=True)
class JobReport:
    """What a job's report is made of.

    Attributes:
        at: When it was read.
        where: The tracking server, without secrets.
        source: Where the joules come from.
        recurrences: How many have begun, those that do not count included.
        saved: What was saved, by the fold.
        entries: The newest recurrences that count, oldest first, or all of them.
        complete: Whether those are all.
        tariff: What energy costs and emits.
        settings: Expected energy and time at every batch size and limit.
        arms: What is believed of every batch size.
        drift: The newest drift windows.
        models: The registered model; None where the job has none.
    """

    job: Job
    at: datetime
    where: str
    source: EnergySource
    gpu: str
    recurrences: int
    saved: Savings
    entries: tuple[TimelineEntry, ...]
    complete: bool
    tariff: Tariff
    settings: tuple[SettingPoint, ...]
    arms: tuple[ArmBelief, ...]
    drift: DriftHistory
    models: ModelsOf | None

    @property
    def charged(self) -> Charged:
        """What the recurrences that were read cost and emitted."""
        return sum((entry.charged for entry in self.entries), Charged())

    @property
    def rate(self) -> EnergyRate:
        """What a kilowatt hour cost and emitted on average; the flat rate where nothing was read."""
        return self.charged.mean if self.entries else self.tariff.flat

    @property
    def so_far(self) -> Against | None:
        """What was saved so far."""
        return core.so_far(self.saved, self.rate)

    @property
    def from_now_on(self) -> Against | None:
        """What one more recurrence is expected to save."""
        return core.from_now_on(self.saved, self.rate)

    @property
    def acts(self) -> bool:
        """Whether the job's mode changes anything; otherwise nothing is saved, only seen."""
        return self.saved.mode not in (Mode.OFF, Mode.OBSERVE)

    @property
    def mark(self) -> str:
        """What stands beside every heading: where the joules come from."""
        return SOURCES[self.source]


def read_report(
    job_file: JobFile,
    opened: tuple[Job, MlflowLedger],
    *,
    uri: str,
    where: str,
    tariff: Tariff,
    at: datetime,
    most: int | None = NEWEST,
    told: Progress = untold,
) -> JobReport:
    """Return a job's report.

    Args:
        job_file: The job.
        opened: The job as its newest runs have it, and its ledger.
        uri: The tracking server.
        where: The same, without secrets.
        tariff: What energy costs and emits.
        at: When this is.
        most: How many recurrences are read one by one; None: all.
        told: How far that is.
    """
    job, ledger = opened
    state = ledger.state()
    newest = ledger.last_recurrence(looked=True)
    account = state.account or savings.Account()
    overheads = state.all_overheads(job)
    attempts = ledger.newest_attempts(most, told)
    counting = [
        (a.began_s, a.observation) for a in attempts if a.observation is not None and ledger.counts(a.observation)
    ]
    now = in_force(job, max(newest, 1))
    return JobReport(
        job=job,
        at=at,
        where=where,
        source=account.energy_source if state.observations else EnergySource.NONE,
        gpu=account.gpu,
        recurrences=newest,
        saved=policy.saved(now, state),
        entries=core.timeline(job, counting, tariff),
        complete=most is None or newest <= most,
        tariff=tariff,
        settings=settings_of_runs(job, account, profiles=state.profiles, overheads=overheads),
        arms=beliefs(job, state) if state.observations else (),
        drift=drift_of(job, ledger, state),
        models=read_models(job_file, uri) if job_file.model is not None else None,
    )


def report_document(report: JobReport) -> dict[str, Any]:
    """Return it as JSON values; without joules where there are none."""
    charged, tariff = report.charged, report.tariff
    document = {
        "job": report.job.name,
        "at": report.at.isoformat(),
        "tracking_uri": report.where,
        "energy_source": report.source.value,
        "gpu": report.gpu,
        "recurrences": report.recurrences,
        "interval": savings.COVERAGE,
        "saved": {"so_far": _plain(report.so_far), "each_from_now_on": _plain(report.from_now_on)},
        "savings": savings.document(report.saved),
        "prices": {
            "currency": tariff.currency or None,
            "hourly": tariff.by_hour,
            "mean": jsonable(report.rate),
            "hours_without_price": [_iso(hour) for hour in sorted(charged.unpriced)] if tariff.prices else [],
            "hours_without_carbon": [_iso(hour) for hour in sorted(charged.uncharted)] if tariff.carbon else [],
        },
        "read": {
            "recurrences": len(report.entries),
            "all": report.complete,
            "energy_j": charged.energy_j,
            "money": charged.money if charged.priced_j else None,
            "priced_j": charged.priced_j,
            "carbon_kg": charged.carbon_g / 1000 if charged.carbon_j else None,
            "carbon_j": charged.carbon_j,
        },
        "settings": jsonable(report.settings),
        "arms": jsonable(report.arms),
        "windows": jsonable(report.drift.runs),
        "earlier_windows": report.drift.earlier,
        "timeline": [_entry(entry) for entry in report.entries],
        "models": None if report.models is None else models_document(report.models),
    }
    plain: dict[str, Any] = savings.without_joules(document) if report.job.in_seconds else document
    return plain


def _plain(against: Against | None) -> Any:
    return None if against is None else jsonable(against)


def _entry(entry: TimelineEntry) -> dict[str, Any]:
    plain: dict[str, Any] = jsonable(entry)
    charged = plain.pop("charged")
    began = datetime.fromtimestamp(entry.began_s, UTC).isoformat()
    priced, charted = entry.charged.priced_j > 0, entry.charged.carbon_j > 0
    return plain | {
        "began": began,
        "money": charged["money"] if priced else None,
        "carbon_kg": charged["carbon_g"] / 1000 if charted else None,
    }


def _iso(hour: int) -> str:
    return datetime.fromtimestamp(hour * 3600, UTC).isoformat()
