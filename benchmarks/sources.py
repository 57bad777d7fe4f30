"""Traces from sources that tell how long training takes, and nothing of power: recipes, one file each.

A recipe (`sources/*.toml`) names a file, its hash, whom to cite, and its columns. The amounts are real; time and power
of an epoch follow the simulated GPU's laws, at several batch sizes of half throughput, and the default batch size is
the smallest, the middle or the largest that always reaches the target: each combination is a cell.
"""

from __future__ import annotations

import csv
import hashlib
import math
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from zeus_flows.core.power_profile import Gpu, LimitMeasurement, PowerProfile
from zeus_flows.experiments.replay.traces import SAMPLES_PER_EPOCH, Trace
from zeus_flows.gpu.simulated import CHIPS, Workload

RECIPES = Path(__file__).parent / "sources"
HALF_POINTS = (16.0, 64.0, 256.0)
SMALLEST_ARM = 16  # batch sizes are scaled so that the smallest is this one, and half-points mean the same everywhere
SHORTEST = 10.0  # epochs of the batch size that needs fewest, where amounts are samples
CHIP = "v100"
LIMITS_W = tuple(range(250, 99, -25))
PATIENCE = 2  # max_epochs, in units of the longest run that reached the target

Runs = list[tuple[int | None, tuple[tuple[int, float], ...]]]  # epochs to the target, and (epoch, level) on the way


@dataclass(frozen=True, slots=True)
class Recipe:
    """Where a source's data are and what their columns mean.

    Attributes:
        name: Of the source.
        citation: Whom to cite.
        licence: Of the data.
        file: Below the data folder.
        sha256: Of the file.
        columns: `amount`, and where there are such columns `unit` (epochs or samples) and `level` (1 is the target).
    """

    name: str
    citation: str
    licence: str
    file: str
    sha256: str
    columns: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Cell:
    """One workload at one half-point from one default batch size."""

    name: str
    workload: str
    trace: Trace


def recipes() -> list[Recipe]:
    """Return the recipes there are."""
    return [Recipe(name=f.stem, **tomllib.loads(f.read_text())) for f in sorted(RECIPES.glob("*.toml"))]


def cells(recipe: Recipe, data: Path) -> list[Cell]:
    """Return the cells of a source."""
    return [
        cell
        for workload, arms in sorted(_read(recipe, data).items())
        for half in HALF_POINTS
        for cell in _cells(f"{recipe.name}/{workload}", arms, half)
    ]


def _cells(workload: str, arms: Mapping[int, Runs], half: float) -> Iterator[Cell]:
    chip = CHIPS[CHIP]
    gpu = Gpu(CHIP, 1, float(LIMITS_W[0]))
    load = Workload(60.0, half, utilisation=0.9, least_utilisation=0.5)
    profiles = {}
    for b in arms:
        epochs = [(float(w), *chip.epoch(load.at(b, chip), float(w))) for w in LIMITS_W]
        measured = (LimitMeasurement(limit, watts, SAMPLES_PER_EPOCH / seconds) for limit, seconds, watts in epochs)
        profiles[b] = PowerProfile(b, gpu, tuple(measured))
    usable = [b for b, runs in arms.items() if all(needed is not None for needed, _ in runs)]
    longest = max(needed for b in usable for needed, _ in arms[b] if needed is not None)
    picks = {"smallest": usable[0], "middle": usable[len(usable) // 2], "largest": usable[-1]}
    for which, b0 in picks.items():
        trace = Trace(
            workload=workload,
            gpu=gpu,
            epochs={b: tuple(needed for needed, _ in runs) for b, runs in arms.items()},
            profiles=profiles,
            default_batch_size=b0,
            max_epochs=PATIENCE * longest,
            curves={b: tuple(curve for _, curve in runs) for b, runs in arms.items() if any(c for _, c in runs)},
        )
        yield Cell(f"{workload}, half {half:g}, b0 {which}", workload, trace)


def _read(recipe: Recipe, data: Path) -> dict[str, dict[int, Runs]]:
    """Return each workload's arms, ascending and scaled, with their runs in whole epochs."""
    content = (data / recipe.file).read_bytes()
    if hashlib.sha256(content).hexdigest() != recipe.sha256:
        sys.exit(f"{data / recipe.file} is not the file that sources/{recipe.name}.toml describes: its hash differs")
    amounts: dict[str, dict[int, dict[str, dict[float, float | None]]]] = {}
    in_samples = set()
    for row in csv.DictReader(content.decode().splitlines()):
        level = float(row[recipe.columns["level"]]) if "level" in recipe.columns else 1.0
        amount = row[recipe.columns["amount"]]
        arms = amounts.setdefault(row["workload"], {})
        run = arms.setdefault(int(row["batch_size"]), {}).setdefault(row["run"], {})
        run[level] = float(amount) if amount else None
        if row.get(recipe.columns.get("unit", ""), "epochs") == "samples":
            in_samples.add(row["workload"])
    return {w: _in_epochs(arms, samples=w in in_samples) for w, arms in amounts.items()}


def _in_epochs(arms: Mapping[int, Mapping[str, Mapping[float, float | None]]], *, samples: bool) -> dict[int, Runs]:
    least = min(arms)
    means = [_mean(run.get(1.0) for run in runs.values()) for runs in arms.values()]
    per_epoch = min(means) / SHORTEST if samples else 1.0

    def epochs(amount: float | None) -> int | None:
        return None if amount is None else max(1, math.ceil(amount / per_epoch - 1e-9))

    found: dict[int, Runs] = {}
    for b, runs in sorted(arms.items()):
        scaled = round(SMALLEST_ARM * b / least)
        found[scaled] = [
            (
                epochs(levels.get(1.0)),
                _curve({level: epochs(amount) for level, amount in levels.items()}),
            )
            for levels in runs.values()
        ]
    return found


def _curve(levels: Mapping[float, int | None]) -> tuple[tuple[int, float], ...]:
    """Return (epoch, greatest level reached by then); nothing where only the target is told."""
    if len(levels) < 2:
        return ()
    best = {epoch: level for level, epoch in sorted(levels.items()) if epoch is not None}
    return tuple(sorted(best.items()))


def _mean(values: Iterator[float | None]) -> float:
    known = list(values)
    return math.inf if None in known else math.fsum(v for v in known if v is not None) / len(known)
