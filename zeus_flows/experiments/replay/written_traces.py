"""A job's own runs as traces, in the published format (see `traces`), so that policies can be tried on them."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from zeus_flows.core.overheads import NOTHING, Overheads
from zeus_flows.core.power_profile import Gpu, Part
from zeus_flows.core.records import Observation, Outcome
from zeus_flows.errors import ConfigError
from zeus_flows.experiments.replay.traces import OVERHEAD_COLUMNS, POWER_COLUMNS, TRAIN_COLUMNS


@dataclass(frozen=True, slots=True)
class TraceLabels:
    """What the published columns say about a job of one's own."""

    dataset: str
    network: str
    optimizer: str
    target: float
    learning_rates: Mapping[int, float] = field(default_factory=dict)


def write_traces(observations: Iterable[Observation], folder: Path, labels: TraceLabels) -> list[Path]:
    """Write observations in the published format, so that a job of one's own can be replayed.

    A run that reached the target, or trained to the end without, is a repetition. A stopped one is not: nobody
    knows how long it would have taken. Power comes from complete profiles, the newest of each batch size.

    Args:
        observations: A job's history.
        folder: Where the files go; it is made, and files of the same name are replaced.
        labels: What the columns say.

    Returns:
        The files: `summary_train.csv`, and for each GPU with a profile one `summary_power_<gpu>.csv`, and one
        `summary_overheads_<gpu>.csv` where evaluation, start-up and the rest were measured.

    Raises:
        ConfigError: there is nothing to write.
    """
    history = sorted(observations, key=lambda o: o.order)
    ends = (Outcome.CONVERGED, Outcome.EXHAUSTED, Outcome.DIVERGED)
    runs = [o for o in history if o.outcome in ends]
    profiles = {
        (o.gpu, o.batch_size): (o.profile, o.samples_per_epoch)
        for o in history
        if o.profile is not None and o.profile.complete
    }
    if not runs or not profiles:
        raise ConfigError("there is no run that ended by itself, or no complete power profile, to write a trace of")
    folder.mkdir(parents=True, exist_ok=True)
    repetition: dict[int, int] = {}
    rows = []
    for o in runs:
        repetition[o.batch_size] = repetition.get(o.batch_size, 0) + 1
        rate = labels.learning_rates.get(o.batch_size)
        epoch = o.epochs if o.converged else ""
        rows.append(
            (
                *(labels.dataset, labels.network, o.batch_size, labels.optimizer, "" if rate is None else rate),
                *(repetition[o.batch_size], labels.target, epoch),
            )
        )
    files = [_write(folder / "summary_train.csv", TRAIN_COLUMNS, rows)]
    for gpu in sorted({gpu for gpu, _ in profiles}, key=lambda g: g.key):
        power = [
            (
                *(labels.dataset, labels.network, b, labels.optimizer),
                *(f"{m.setting:g}", samples / m.samples_per_s, m.average_power_w),
            )
            for (on, b), (profile, samples) in sorted(profiles.items(), key=lambda item: item[0][1])
            for m in profile.measurements
            if on == gpu
        ]
        files.append(_write(folder / f"summary_power_{file_name(gpu)}.csv", POWER_COLUMNS, power))
        if beside := _overhead_rows(history, gpu, labels):
            files.append(_write(folder / f"summary_overheads_{file_name(gpu)}.csv", OVERHEAD_COLUMNS, beside))
    return files


def _overhead_rows(history: Sequence[Observation], gpu: Gpu, labels: TraceLabels) -> list[tuple[object, ...]]:
    known: dict[int, Overheads] = {}
    for o in history:
        ours = o.outcome is not Outcome.FAILED and o.foreign_limit_w is None
        if ours and o.gpu == gpu and o.parts is not None and o.parts.rest.count:
            known[o.batch_size] = known.get(o.batch_size, NOTHING).add(o.parts)
    rows: list[tuple[object, ...]] = []
    for b, overheads in sorted(known.items()):
        once, rest, often = overheads.once_each, overheads.rest.each, overheads.evaluations_per_epoch
        for limit, part in overheads.evaluation or ((gpu.max_power_w, Part(1)),):
            each = part.each
            rows.append(
                (
                    *(labels.dataset, labels.network, b, labels.optimizer, f"{limit:g}", once.time_s, once.energy_j),
                    *(often, each.time_s, each.energy_j, rest.time_s, rest.energy_j),
                )
            )
    return rows


def file_name(gpu: Gpu) -> str:
    """Return a GPU's name as part of a file name.

    >>> file_name(Gpu("Tesla V100-SXM2", 2, 600.0))
    'tesla-v100-sxm2-x2'
    """
    plain = "".join(c if c.isalnum() else "-" for c in gpu.model.lower()).strip("-")
    return plain if gpu.count == 1 else f"{plain}-x{gpu.count}"


def _write(file: Path, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Path:
    with file.open("w", newline="", encoding="utf-8") as out:
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(rows)
    return file
