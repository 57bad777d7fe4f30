"""Long histories, made fast: the records that production would write, straight into MLflow's tables.

The first recurrence is written by the ledger itself. Of each further one its run, its lines on a page and its point of
the drift window's series are rows like those of the first. Beyond a thousand recurrences only each hundredth point says
what was saved so far, which takes long to compute and nobody reads back; everything else is the same, and
`tests/benchmarks/test_histories.py` holds it against what production writes.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from sqlalchemy import Connection, MetaData, Table, create_engine, delete, insert, select

from zeus_flows.core import policy
from zeus_flows.core.attempt import EpochReport
from zeus_flows.core.drift_windows import boundary
from zeus_flows.core.job import Job
from zeus_flows.core.power_profile import Gpu, PowerProfile, SettingMeasurement
from zeus_flows.core.reasons import Reason, ReasonKind
from zeus_flows.core.records import Decision, EnergySource, Observation, Outcome, decision_seed
from zeus_flows.job_file import JobFile, load_job
from zeus_flows.ledger.mlflow import charts, names, pages, snapshot
from zeus_flows.ledger.mlflow import record_text as codec
from zeus_flows.ledger.mlflow.ledger import MlflowLedger
from zeus_flows.ledger.mlflow.run_words import belief_tags, run_name
from zeus_flows.ledger.open_ledger import open_direct, open_durable

GPU: Final = Gpu("Simulated V100", 1, 250.0)
LIMITS: Final = (250.0, 225.0, 200.0, 175.0, 150.0, 125.0, 100.0)
SIZES: Final = (8, 16, 32, 64, 128, 256, 512, 1024, 2048)
SOURCE: Final = EnergySource.SIMULATED
EPOCH: Final = EpochReport(1, energy_j=10_000.0, time_s=80.0, setting=150.0, metric=0.5)
#: Recurrences that a snapshot lags behind: the same however long the history is, so that what is read is comparable.
LAG: Final = 4
_TABLES: Final = ("runs", "params", "tags", "metrics", "latest_metrics")
_TOGETHER: Final = 500


def job_file(folder: Path, name: str) -> JobFile:
    path = folder / f"{name}.yaml"
    path.write_text(
        f"name: {name}\n"
        'train: {function: "histories:untrained"}\n'
        "target: {metric: m, value: 1.0, better: higher}\n"
        f"batch_sizes: {list(SIZES)}\n"
        "default_batch_size: 1024\nmax_epochs: 30\ndevice: simulated-v100\n",
        encoding="utf-8",
    )
    return load_job(path)


def untrained(_session: object) -> None:
    raise NotImplementedError


def decision(job: Job, recurrence: int) -> Decision:
    return Decision(
        recurrence=recurrence,
        attempt=1,
        batch_size=SIZES[recurrence % len(SIZES)],
        reason=Reason(ReasonKind.FIRST_RUN, "because"),
        seed=decision_seed(job.seed, recurrence, 1),
        policy=job.policy,
    )


def observation(job: Job, recurrence: int) -> Observation:
    size = SIZES[recurrence % len(SIZES)]
    measurements = tuple(SettingMeasurement(w, 0.8 * w, 90.0 + w / 25 + size**0.5) for w in LIMITS)
    return Observation(
        recurrence=recurrence,
        attempt=1,
        batch_size=size,
        outcome=Outcome.CONVERGED,
        epochs=5 + recurrence // len(SIZES) % 2,
        energy_j=50_000.0 + recurrence % 7,
        time_s=400.0,
        gpu=GPU,
        energy_source=SOURCE,
        samples_per_epoch=8192,
        setting=150.0,
        profile=PowerProfile(size, GPU, measurements),
        fingerprint=job.fingerprint,
    )


def write_one(uri: str, job: Job, state_dir: Path) -> int:
    """Write a recurrence as production does; return its number."""
    with closing(open_durable(job, tracking_uri=uri, energy_source=SOURCE, state_dir=state_dir)) as ledger:
        ledger.sweep()
        number = ledger.begin()
        ledger.history()
        attempt = ledger.decided(decision(job, number), {names.GPU: GPU.key})
        ledger.epoch(attempt, EPOCH)
        observed = observation(job, number)
        ledger.observed(attempt, observed)
        ledger.ended(number, [observed])
    return number


@dataclass(frozen=True)
class Point:
    """A recurrence of a history: what was observed, the state after it, and its point of the series."""

    observed: Observation
    text: str
    state: policy.State
    series: dict[str, float]


def points(job: Job, recurrences: int) -> Iterator[Point]:
    """Yield a history, one recurrence at a time.

    Raises:
        ValueError: it drifts, which these rows do not tell.
    """
    state, every = policy.initial(job), 1 if recurrences <= 1000 else 100
    for n in range(1, recurrences + 1):
        text = codec.dump_observation(observation(job, n))
        observed, before = codec.load_observation(text), state
        state = policy.advance(job, state, observed)
        if boundary(job, before, state, [observed], recurrences=n) is not None:
            raise ValueError(f"recurrence {n} ends a drift window")
        saved: Mapping[str, float | None] = {}
        if n % every == 0 or n in (1, recurrences):
            saved = charts.of_savings(policy.saved(job, state))
        series = {**charts.of_recurrence(job, [observed]), **saved}
        yield Point(observed, text, state, {name: value for name, value in series.items() if value is not None})


def record_history(uri: str, job: Job, recurrences: int, state_dir: Path) -> None:
    """Write a history of recurrences that have ended, with its snapshot."""
    write_one(uri, job, state_dir)
    ledger = open_direct(job, tracking_uri=uri, energy_source=SOURCE)
    for number in range(pages.number_of(recurrences) + 1):
        ledger.layout.page(number)
    ledger.layout.look()
    engine, tables = create_engine(uri), MetaData()
    tables.reflect(engine, only=_TABLES)
    with engine.begin() as connection:
        covered, last = _Rows(connection, tables, ledger, job).write(recurrences)
    engine.dispose()
    window = ledger.layout.look()
    kept = snapshot.Snapshot(covered.observed.recurrence, covered.state)
    tags = snapshot.dump(kept) | belief_tags(job, last.state)
    ledger.store.log(window.run_id, tags=tags)


class _Rows:
    """Writes rows like those of the first recurrence."""

    def __init__(self, connection: Connection, tables: MetaData, ledger: MlflowLedger, job: Job) -> None:
        self._connection, self._tables, self._ledger, self._job = connection, tables.tables, ledger, job
        page = ledger.layout.read_page(0)
        self._template, self._claim = page.attempts[1, 1], json.loads(page.claims[1])
        self._window = ledger.layout.current().run_id
        self._rows = {name: self._of(name, self._template) for name in _TABLES}

    def _of(self, name: str, run_id: str) -> list[dict[str, Any]]:
        table: Table = self._tables[name]
        rows = self._connection.execute(select(table).where(table.c.run_uuid == run_id))
        return [dict(row) for row in rows.mappings()]

    def write(self, recurrences: int) -> tuple[Point, Point]:
        """Write all recurrences but the first; return the last one that a snapshot covers, and the last."""
        batch: dict[str, list[dict[str, Any]]] = {name: [] for name in _TABLES}
        newest: dict[str, dict[str, Any]] = {}
        for point in points(self._job, recurrences):
            newest |= {k: {"key": k, "value": v, "step": point.observed.recurrence} for k, v in point.series.items()}
            if point.observed.recurrence == recurrences - LAG:
                covered = point
            if point.observed.recurrence > 1:
                for name, rows in self._of_point(point).items():
                    batch[name] += rows
            if len(batch["runs"]) == _TOGETHER or point.observed.recurrence == recurrences:
                for name, rows in batch.items():
                    if rows:
                        self._connection.execute(insert(self._tables[name]), rows)
                        rows.clear()
        latest, like = self._tables["latest_metrics"], self._rows["latest_metrics"][0] | {"run_uuid": self._window}
        self._connection.execute(delete(latest).where(latest.c.run_uuid == self._window))
        self._connection.execute(insert(latest), [like | row for row in newest.values()])
        return covered, point

    def _of_point(self, point: Point) -> dict[str, list[dict[str, Any]]]:
        n, run_id = point.observed.recurrence, uuid.uuid4().hex
        decided = decision(self._job, n)
        name = run_name(point.observed, point.observed.setting)
        later = {"start_time": self._rows["runs"][0]["start_time"] + 1000 * n}
        later["end_time"] = later["start_time"] + 500
        artifacts = self._rows["runs"][0]["artifact_uri"].replace(self._template, run_id)
        params = {
            names.BATCH_SIZE: str(decided.batch_size),
            names.SEED: str(decided.seed),
            names.DECISION: codec.dump_decision(decided),
            names.OBSERVATION: point.text,
        }
        tags = {names.RECURRENCE: str(n), "mlflow.runName": name}
        shown = {k: v for k, v in charts.of_attempt(self._job, point.observed).items() if v is not None}
        page = {
            names.claim(n): json.dumps(self._claim | {"token": uuid.uuid4().hex + ".1"}, separators=(",", ":")),
            names.attempt_run(n, 1): run_id,
            names.end(n): pages.ENDED,
        }
        of_page = self._ledger.layout.page(pages.number_of(n))
        own: dict[str, Any] = {"run_uuid": run_id}
        stamp = self._rows["metrics"][0]["timestamp"] + 1000 * n
        series = self._rows["metrics"][0] | {"run_uuid": self._window, "step": n, "timestamp": stamp, "is_nan": False}

        def measured(row: dict[str, Any]) -> dict[str, Any]:
            if row["key"] not in shown:
                return row | own
            return row | own | {"value": shown[row["key"]], "step": n, "timestamp": stamp}

        return {
            "runs": [r | own | later | {"name": name, "artifact_uri": artifacts} for r in self._rows["runs"]],
            "params": [r | own | {"value": params[r["key"]]} for r in self._rows["params"]]
            + [{"key": k, "value": v, "run_uuid": of_page} for k, v in page.items()],
            "tags": [r | own | {"value": tags.get(r["key"], r["value"])} for r in self._rows["tags"]],
            "metrics": [measured(r) for r in self._rows["metrics"]]
            + [series | {"key": k, "value": v} for k, v in point.series.items()],
            "latest_metrics": [measured(r) for r in self._rows["latest_metrics"]],
        }
