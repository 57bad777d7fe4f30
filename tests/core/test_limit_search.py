"""Which limits are left out and which is measured again, on published traces, fitted jobs, and with wrong readings."""

from __future__ import annotations

import csv
import functools
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import SHARED
from tests.data import make_traces
from zeus_flows.core.limit_search import odd_limit, worth_measuring
from zeus_flows.core.power_profile import SettingMeasurement
from zeus_flows.gpu.power_control import candidate_limits
from zeus_flows.gpu.simulated import CHIPS, Load

Readings = tuple[SettingMeasurement, ...]
KINDS = ("v100", "p100")
MAX_POWER_W = 250.0


@dataclass(frozen=True)
class Aim:
    """What a limit is chosen by."""

    eta: float
    max_slowdown: float | None = None

    def cost_of(self, m: SettingMeasurement) -> float:
        return (self.eta * m.average_power_w + (1 - self.eta) * MAX_POWER_W) / m.samples_per_s

    def choose(self, measured: Sequence[SettingMeasurement]) -> float:
        slowdown = self.max_slowdown or float("inf")
        fastest = max(m.samples_per_s for m in measured)
        allowed = [m for m in measured if m.samples_per_s * slowdown >= fastest]
        return min(allowed, key=lambda m: (self.cost_of(m), -m.setting)).setting


AIMS = [*(Aim(eta) for eta in (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)), Aim(1.0, max_slowdown=1.1)]


@functools.cache
def traces(kind: str) -> dict[tuple[str, int, str], Readings]:
    """Return the published profiles of a GPU, by network, batch size and optimizer with data set."""
    path = SHARED / "traces" / f"summary_power_{kind}.csv"
    if not path.exists():
        pytest.skip("the published traces are not beside this checkout")
    return _profiles(path)


@functools.cache
def made(kind: str) -> dict[tuple[str, int, str], Readings]:
    """Return the profiles of the traces in this repository, which are of one GPU."""
    return _profiles(make_traces.FOLDER / f"summary_power_{kind}.csv") if kind == make_traces.GPU else {}


def _profiles(path: Path) -> dict[tuple[str, int, str], Readings]:
    found = defaultdict(list)
    with path.open() as file:
        for r in csv.DictReader(file):
            found[r["network"], int(r["batch_size"]), f"{r['optimizer']} {r['dataset']}"].append(
                SettingMeasurement(float(r["power_limit"]), float(r["average_power"]), 1e4 / float(r["time_per_epoch"]))
            )
    return {name: tuple(sorted(rows, key=lambda m: -m.setting)) for name, rows in found.items()}


@functools.cache
def fitted(kind: str) -> dict[tuple[str, int, str], Readings]:
    """Return what simulated GPUs measure of the fitted jobs."""
    path = SHARED / "gpu_model" / f"fit_{kind}.json"
    if not path.exists():
        pytest.skip("the fitted GPU models are not beside this checkout")
    found = {}
    for number, job in enumerate(json.loads(path.read_text())["jobs"]):
        load, measured = Load(job["T0"], job["Pd"], job["u"], job["b"]), []
        for limit in candidate_limits(*CHIPS[kind].limits_w):
            seconds, watts = CHIPS[kind].epoch(load, limit)
            measured.append(SettingMeasurement(limit, watts, 1000 / seconds))
        found[job["network"], job["batch_size"], str(number)] = tuple(measured)
    return found


def go_down(readings: Readings, known: Readings, aim: Aim) -> Readings:
    """Return what is known after going down the limits once, as the profiler does."""
    measured = {m.setting: m for m in known}
    for m in readings:
        if m.setting not in measured and worth_measuring(
            m.setting, tuple(measured.values()), cost_of=aim.cost_of, max_slowdown=aim.max_slowdown
        ):
            measured[m.setting] = m
    return tuple(measured.values())


@functools.lru_cache(maxsize=1)  # asked twice in a row, with different second readings
def first_search(readings: Readings, aim: Aim) -> tuple[Readings, float | None]:
    """Return what is measured at first, and which of it is odd."""
    measured = go_down(readings, (), aim)
    return measured, odd_limit(measured, cost_of=aim.cost_of)


def search(first: Readings, second: Readings, aim: Aim) -> tuple[Readings, int]:
    """Go down the limits as the profiler does; return what is measured in the end and in how many spans."""
    measured, odd_w = first_search(first, aim)
    if odd_w is None:
        return measured, len(measured)
    again = {m.setting: m for m in second}
    mended = tuple(again[odd_w] if m.setting == odd_w else m for m in measured)
    in_the_end = go_down(first, mended, aim)
    return in_the_end, len(in_the_end) + 1


def spans_down_to_the_first_loser(readings: Readings, aim: Aim) -> int:
    """Return how many spans the rule took that one reading 15 % slower and 2 % dearer was enough for."""
    for i in range(1, len(readings)):
        above, lowest = readings[:i], readings[i - 1]
        slowdown, fastest = aim.max_slowdown or float("inf"), max(m.samples_per_s for m in above)
        best = min((m for m in above if m.samples_per_s * slowdown >= fastest), key=aim.cost_of)
        slower = lowest.samples_per_s * 1.15 < best.samples_per_s
        dearer = aim.cost_of(lowest) > 1.02 * aim.cost_of(best)
        if (slower and dearer) or lowest.samples_per_s * slowdown * 1.15 < fastest:
            return i
    return len(readings)


def with_one_wrong(readings: Readings, i: int, *, speed: float = 0.0, power: float = 0.0) -> Readings:
    m = readings[i]
    wrong = replace(m, samples_per_s=m.samples_per_s * (1 + speed), average_power_w=m.average_power_w * (1 + power))
    return (*readings[:i], wrong, *readings[i + 1 :])


def true_cost(readings: Readings, aim: Aim, limit_w: float) -> float:
    return next(aim.cost_of(m) for m in readings if m.setting == limit_w)


#: ResNet-50 with a batch of 128 on a V100, as published.
RESNET = tuple(
    SettingMeasurement(*m)
    for m in [
        (250.0, 222.4, 2.78),
        (225.0, 205.6, 2.71),
        (200.0, 184.3, 2.63),
        (175.0, 165.3, 2.53),
        (150.0, 145.5, 2.36),
        (125.0, 122.7, 1.94),
        (100.0, 99.5, 1.47),
    ]
)


def test_a_limit_that_reads_ten_percent_slow_does_not_hide_the_best_one_below_it() -> None:
    energy = Aim(1.0)
    wrong = with_one_wrong(RESNET, 3, speed=-0.1)
    assert spans_down_to_the_first_loser(wrong, energy) == 4
    missed = true_cost(RESNET, energy, 200.0) / true_cost(RESNET, energy, 150.0) - 1
    assert missed > 0.13
    assert energy.choose(search(wrong, wrong, energy)[0]) == 150.0


def test_a_greatest_limit_that_reads_too_fast_does_not_hide_all_others() -> None:
    energy = Aim(1.0)
    wrong = with_one_wrong(RESNET, 0, speed=0.15)
    assert energy.choose(search(wrong, wrong, energy)[0]) == 150.0


def test_the_fourth_limit_is_always_measured() -> None:
    falling = [SettingMeasurement(*m) for m in [(250.0, 240.0, 100.0), (225.0, 220.0, 80.0), (200.0, 200.0, 60.0)]]
    assert worth_measuring(175.0, falling, cost_of=Aim(0.5).cost_of)
    falling.append(SettingMeasurement(175.0, 175.0, 40.0))
    assert not worth_measuring(150.0, falling, cost_of=Aim(0.5).cost_of)


def test_limits_slower_than_the_bound_allows_are_left_out_although_they_are_cheaper() -> None:
    cheap = [SettingMeasurement(250.0 - 25 * i, 240.0 / 2**i, 100.0 - 10 * i) for i in range(5)]
    assert worth_measuring(125.0, cheap, cost_of=Aim(1.0).cost_of)
    assert not worth_measuring(125.0, cheap, cost_of=Aim(1.0).cost_of, max_slowdown=1.1)


def test_only_what_was_measured_above_a_limit_says_whether_it_is_worth_measuring() -> None:
    assert not worth_measuring(90.0, RESNET, cost_of=Aim(0.5).cost_of)
    assert worth_measuring(180.0, RESNET, cost_of=Aim(0.5).cost_of)


@pytest.mark.parametrize("share", [0.1, -0.1])
@pytest.mark.parametrize("what", ["speed", "power"])
def test_the_odd_one_is_the_reading_that_fits_the_fewest_others(what: str, share: float) -> None:
    flat = tuple(SettingMeasurement(limit, 90.0, 100.0) for limit in (250.0, 225.0, 200.0, 175.0, 150.0, 125.0, 100.0))
    assert odd_limit(flat, cost_of=Aim(0.5).cost_of) is None
    for i in range(2, 5):
        wrong = with_one_wrong(flat, i, **{what: share})
        assert odd_limit(wrong, cost_of=Aim(0.5).cost_of) == flat[i].setting


def test_of_two_that_do_not_fit_each_other_the_cheaper_is_odd() -> None:
    fast = with_one_wrong(RESNET, 1, speed=0.1)
    assert odd_limit(fast, cost_of=Aim(1.0).cost_of) == 225.0
    assert odd_limit(RESNET, cost_of=Aim(1.0).cost_of) is None
    assert odd_limit((), cost_of=Aim(1.0).cost_of) is None


@pytest.mark.parametrize("aim", AIMS)
@pytest.mark.parametrize(("profiles", "many"), [(made, 29), (traces, 113), (fitted, 113)])
def test_leaving_out_losers_never_misses_the_best_limit(
    profiles: Callable[[str], dict[tuple[str, int, str], Readings]], many: int, aim: Aim
) -> None:
    assert sum(len(profiles(kind)) for kind in KINDS) == many
    for kind in KINDS:
        for name, readings in profiles(kind).items():
            assert aim.choose(search(readings, readings, aim)[0]) == aim.choose(readings), (kind, name)


@pytest.mark.parametrize("noise", [0.01, 0.02])
def test_with_noisy_readings_leaving_out_losers_costs_nothing(noise: float) -> None:
    rng, aim, losses = np.random.default_rng(1), Aim(0.5), []
    for readings in [*fitted("v100").values(), *fitted("p100").values()] * 3:
        noisy, again = (noisily(readings, noise, rng) for _ in range(2))
        chosen = aim.choose(search(noisy, again, aim)[0])
        losses.append(true_cost(readings, aim, chosen) / true_cost(readings, aim, aim.choose(noisy)) - 1)
    assert np.mean(losses) <= 0
    assert max(losses) < 0.01


def noisily(readings: Readings, noise: float, rng: np.random.Generator) -> Readings:
    for i in range(len(readings)):
        speed, power = noise * rng.standard_normal(2)
        readings = with_one_wrong(readings, i, speed=speed, power=power)
    return readings


#: NCF leaves these GPUs all but idle (below 40 W). Its traces hold readings 13 to 16 % off by themselves, at which
#: the rule before stopped by chance; as wrong readings, they do not hide the limits below them any more.
WRONG_AS_PUBLISHED = {("v100", "ncf", 4), ("v100", "ncf", 32), ("p100", "ncf", 16384)}


@pytest.mark.parametrize("aim", AIMS)
@pytest.mark.parametrize("profiles", [made, traces, fitted])
def test_a_clean_profile_takes_at_most_one_span_more_than_if_one_loser_were_enough(
    profiles: Callable[[str], dict[tuple[str, int, str], Readings]], aim: Aim
) -> None:
    more = []
    for kind in KINDS:
        for (network, batch_size, rest), readings in profiles(kind).items():
            if profiles is not traces or (kind, network, batch_size) not in WRONG_AS_PUBLISHED:
                _, spans = search(readings, readings, aim)
                more.append(spans - spans_down_to_the_first_loser(readings, aim))
                assert more[-1] <= 1, (kind, network, batch_size, rest)
    assert np.mean(more) < 0.5


def wrong_readings(kind: str, seed: int) -> Iterator[tuple[Readings, Readings]]:
    """Yield every published profile with each of its limits off by 5 to 15 % in speed, in power, in both."""
    rng = np.random.default_rng(seed)
    for readings in traces(kind).values():
        for i in range(len(readings)):
            for share in (-0.15, -0.1, -0.05, 0.05, 0.1, 0.15):
                yield readings, with_one_wrong(readings, i, speed=share)
                yield readings, with_one_wrong(readings, i, power=share)
            for signs in ((-1, -1), (-1, 1), (1, -1), (1, 1)):
                speed, power = rng.uniform(0.05, 0.15, 2) * signs
                yield readings, with_one_wrong(readings, i, speed=speed, power=power)


@pytest.mark.parametrize("eta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_one_wrong_reading_costs_hardly_more_than_it_costs_the_full_profile(kind: str, eta: float) -> None:
    aim, losses, regrets, full_regrets = Aim(eta), [], [], []
    for readings, wrong in wrong_readings(kind, seed=5):
        least, full = (true_cost(readings, aim, aim.choose(seen)) for seen in (readings, wrong))
        for again in (readings, wrong):  # the second reading is right; it is as wrong as the first
            cost = true_cost(readings, aim, aim.choose(search(wrong, again, aim)[0]))
            losses.append(cost / full - 1)
            if again is readings:
                regrets.append(cost / least - 1)
                full_regrets.append(full / least - 1)
    assert np.mean(np.maximum(losses, 0)) <= 0.01
    assert max(losses) <= 0.03
    assert np.mean(regrets) < 0.6 * np.mean(full_regrets)
