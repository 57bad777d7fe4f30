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
from dataclasses import dataclass, fields
from pathlib import Path

from zeus_flows.core.power_profile import Gpu, PowerProfile, SettingMeasurement
from zeus_flows.experiments.replay.traces import SAMPLES_PER_EPOCH, Trace
from zeus_flows.gpu.simulated import CHIPS, Workload

RECIPES = Path(__file__).parent / "sources"
HALF_POINTS = (16.0, 64.0, 256.0)
SMALLEST_ARM = 16  # batch sizes are scaled so that the smallest is this one, and half-points mean the same everywhere
SHORTEST = 10.0  # epochs of the batch size that needs fewest, where amounts are samples
CHIP = "v100"
LIMITS_W = tuple(range(250, 99, -25))
COLUMNS = {"workload", "batch_size", "run", "amount", "unit", "level"}
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
        columns: What the file calls `workload`, `batch_size` and `run`, where not so; `amount`, in epochs unless
            a column `unit` says samples; and `level`, where curves are told (1 is the target).
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


def recipes(folder: Path = RECIPES) -> list[Recipe]:
    """Return the recipes there are; leave with a message where one is broken."""
    return [_recipe(file) for file in sorted(folder.glob("*.toml"))]


def _recipe(file: Path) -> Recipe:
    try:
        content = tomllib.loads(file.read_text())
    except tomllib.TOMLDecodeError as error:
        sys.exit(f"{file}: {error}")
    wanted = {field.name for field in fields(Recipe)} - {"name"}
    if content.keys() != wanted:
        sys.exit(f"{file}: a recipe has {', '.join(sorted(wanted))}; this one has {', '.join(sorted(content))}")
    columns = content["columns"]
    if "amount" not in columns or not COLUMNS.issuperset(columns):
        sys.exit(
            f"{file}: columns are {', '.join(sorted(COLUMNS))}, amount at least; here {', '.join(sorted(columns))}"
        )
    return Recipe(name=file.stem, **content)


def cells(recipe: Recipe, data: Path) -> list[Cell]:
    """Return the cells of a source; leave with a message where its file is not as the recipe says."""
    found: list[Cell] = []
    for workload, arms in sorted(_read(recipe, data).items()):
        if not _usable(arms):
            print(f"{recipe.name}/{workload} is left out: no batch size always reaches the target", file=sys.stderr)
            continue
        for half in HALF_POINTS:
            found += _cells(f"{recipe.name}/{workload}", arms, half)
    return found


def _usable(arms: Mapping[int, Runs]) -> list[int]:
    """Return the batch sizes that always reach the target."""
    return [b for b, runs in arms.items() if all(needed is not None for needed, _ in runs)]


def _cells(workload: str, arms: Mapping[int, Runs], half: float) -> Iterator[Cell]:
    chip = CHIPS[CHIP]
    gpu = Gpu(CHIP, 1, float(LIMITS_W[0]))
    load = Workload(60.0, half, utilisation=0.9, least_utilisation=0.5)
    profiles = {}
    for b in arms:
        epochs = [(float(w), *chip.epoch(load.at(b, chip), float(w))) for w in LIMITS_W]
        measured = (SettingMeasurement(limit, watts, SAMPLES_PER_EPOCH / seconds) for limit, seconds, watts in epochs)
        profiles[b] = PowerProfile(b, gpu, tuple(measured))
    usable = _usable(arms)
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
    file = data / recipe.file
    try:
        content = file.read_bytes()
    except OSError as error:
        sys.exit(f"{error}; sources/{recipe.name}.toml says where it comes from: {recipe.citation}")
    if hashlib.sha256(content).hexdigest() != recipe.sha256:
        sys.exit(f"{file} is not the file that sources/{recipe.name}.toml describes: its hash differs")
    reader = csv.DictReader(content.decode().splitlines())
    named = {"workload": "workload", "batch_size": "batch_size", "run": "run"} | dict(recipe.columns)
    if missing := [column for column in named.values() if column not in (reader.fieldnames or ())]:
        sys.exit(f"{file} has no column {', '.join(missing)}, which sources/{recipe.name}.toml names")
    amounts: dict[str, dict[int, dict[str, dict[float, float | None]]]] = {}
    in_samples = set()
    for line in reader:
        if None in line or None in line.values():
            sys.exit(
                f"{file}:{reader.line_num}: the header has {len(reader.fieldnames or ())} cells, this line has not"
            )
        row = {name: line[column] for name, column in named.items()}
        try:
            batch_size, level = int(row["batch_size"]), float(row.get("level", 1.0))
            amount = float(row["amount"]) if row["amount"] else None
        except ValueError as error:
            sys.exit(f"{file}:{reader.line_num}: {error}")
        arms = amounts.setdefault(row["workload"], {})
        arms.setdefault(batch_size, {}).setdefault(row["run"], {})[level] = amount
        if row.get("unit") == "samples":
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
