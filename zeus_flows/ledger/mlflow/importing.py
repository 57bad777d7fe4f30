"""Bring your history: existing MLflow runs become observations, so that the first decision is not blind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from mlflow.entities import Run

from zeus_flows.core.job import Job
from zeus_flows.core.power_profile import Gpu
from zeus_flows.core.reasons import Reason, ReasonKind
from zeus_flows.core.records import Decision, EnergySource, Observation, Outcome
from zeus_flows.errors import ConfigError
from zeus_flows.job_file import Target
from zeus_flows.ledger.mlflow import names
from zeus_flows.ledger.mlflow.client import Store
from zeus_flows.ledger.mlflow.ledger import MlflowLedger

#: Epochs, joules, seconds, a metric: whatever is greater was not measured.
_MOST: Final = 1e15


@dataclass(frozen=True, slots=True)
class Columns:
    """Where a foreign run holds what an observation needs, as `params.NAME`, `metrics.NAME` or `tags.NAME`."""

    batch_size: str = "params.batch_size"
    epochs: str = "metrics.epochs"
    energy_j: str = "metrics.energy_j"
    time_s: str = "metrics.time_s"
    metric: str = "metrics.accuracy"


@dataclass(frozen=True, slots=True)
class Imported:
    """What an import did."""

    imported: int
    known_before: int
    left_out: Mapping[str, str]  # run id -> why


def import_runs(
    job: Job,
    ledger: MlflowLedger,
    store: Store,
    *,
    experiment: str,
    columns: Columns,
    target: Target,
    gpu: Gpu,
    energy_source: EnergySource,
    samples_per_epoch: int,
) -> Imported:
    """Turn an experiment's finished runs into observations, oldest first. Doing it again adds only what is new.

    A run that lacks something, or holds what cannot have been measured, is left out and named.

    Args:
        job: Whose history it becomes.
        ledger: The job's ledger.
        store: Where the foreign runs are.
        experiment: Their experiment.
        columns: Where they hold what is needed.
        target: A run whose last metric meets it has converged.
        gpu: What they trained on.
        energy_source: Where their joules come from.
        samples_per_epoch: Training samples in an epoch.

    Raises:
        ConfigError: there is no such experiment, or no run of it can be used.
    """
    found = store.experiment(experiment)
    if found is None:
        raise ConfigError(f"there is no experiment {experiment!r} to import from")
    before = _imported_before(ledger, store)
    left_out: dict[str, str] = {}
    imported = known = 0
    for run in _search(store, str(found.experiment_id), "attributes.status = 'FINISHED'"):
        if run.info.run_id in before:
            known += 1
            continue
        try:
            observation = _observation(
                run, columns, target, job, gpu=gpu, energy_source=energy_source, samples_per_epoch=samples_per_epoch
            )
        except ValueError as error:
            left_out[run.info.run_id] = str(error)
            continue
        _record(job, ledger, observation, source=run.info.run_id)
        imported += 1
    if left_out and not imported and not known:
        run_id, why = next(iter(left_out.items()))
        raise ConfigError(f"none of {len(left_out)} runs of {experiment} can be used; run {run_id}: {why}")
    return Imported(imported, known, left_out)


def _imported_before(ledger: MlflowLedger, store: Store) -> frozenset[str]:
    """Return the foreign runs that observations which count were made of, by what their attempts' runs say."""
    counting = {o.order for o in ledger.observations()}
    if not counting:
        return frozenset()
    found = _search(store, ledger.experiment_id, f"tags.`{names.IMPORTED_FROM}` LIKE '%'")
    return frozenset(
        run.data.tags[names.IMPORTED_FROM]
        for run in found
        if (int(run.data.tags[names.RECURRENCE]), int(run.data.tags[names.ATTEMPT])) in counting
    )


def _search(store: Store, experiment_id: str, query: str) -> list[Run]:
    """Return all runs of an experiment that a filter finds, oldest first."""
    runs: list[Run] = []
    token = None
    while True:
        page = store.client.search_runs(
            [experiment_id],
            query,
            order_by=["attributes.start_time ASC"],
            max_results=1000,
            page_token=token,
        )
        runs.extend(page)
        token = page.token
        if not token:
            return runs


def _observation(
    run: Run,
    columns: Columns,
    target: Target,
    job: Job,
    *,
    gpu: Gpu,
    energy_source: EnergySource,
    samples_per_epoch: int,
) -> Observation:
    batch_size = _whole(run, columns.batch_size)
    if batch_size not in job.batch_sizes:
        raise ValueError(f"batch size {batch_size} is not one of the job's")
    metric = _value(run, columns.metric)
    if not -_MOST < metric < _MOST:
        raise ValueError(f"{columns.metric} is {metric:g}")
    return Observation(
        recurrence=0,
        attempt=1,
        batch_size=batch_size,
        outcome=Outcome.CONVERGED if target.reached(metric) else Outcome.EXHAUSTED,
        epochs=_whole(run, columns.epochs),
        energy_j=0.0 if energy_source is EnergySource.NONE else _positive(run, columns.energy_j),
        time_s=_positive(run, columns.time_s),
        gpu=gpu,
        energy_source=energy_source,
        samples_per_epoch=samples_per_epoch,
        metric=metric,
        fingerprint=job.fingerprint,
    )


def _whole(run: Run, column: str) -> int:
    value = _positive(run, column)
    if value != int(value):
        raise ValueError(f"{column} is {value:g}, not a whole number")
    return int(value)


def _positive(run: Run, column: str) -> float:
    value = _value(run, column)
    if not 0 < value < _MOST:  # MLflow gives an infinite metric back as the greatest number there is
        raise ValueError(f"{column} is {value:g}; it must be positive and finite")
    return value


def _value(run: Run, column: str) -> float:
    kind, _, name = column.partition(".")
    if kind not in ("params", "metrics", "tags") or not name:
        raise ConfigError(f"{column!r} is not params.NAME, metrics.NAME or tags.NAME")
    value = getattr(run.data, kind).get(name)
    if value is None:
        raise ValueError(f"it has no {column}")
    try:
        return float(value)
    except ValueError:
        raise ValueError(f"{column} is {str(value)[:40]!r}, not a number") from None


def _record(job: Job, ledger: MlflowLedger, observation: Observation, *, source: str) -> None:
    number = ledger.begin()
    decision = Decision(
        recurrence=number,
        attempt=1,
        batch_size=observation.batch_size,
        reason=Reason(ReasonKind.IMPORTED, "this run was there before the job was"),
        seed=0,
        policy=job.policy,
    )
    run_id = ledger.decided(decision, {names.IMPORTED_FROM: source})
    numbered = replace(observation, recurrence=number, detail=f"imported from run {source}")
    ledger.observed(run_id, numbered)
    ledger.ended(number, [numbered])
