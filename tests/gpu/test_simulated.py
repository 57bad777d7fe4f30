from __future__ import annotations

import csv
import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeus_flows.core.records import EnergySource
from zeus_flows.errors import ConfigError, LimitOutOfRange
from zeus_flows.gpu.device import Device
from zeus_flows.gpu.group import Gpus
from zeus_flows.gpu.open_gpus import group_of_simulated, open_gpus
from zeus_flows.gpu.simulated import CHIPS, Load, SimulatedDevice, VirtualClock, Workload

DATA = Path(__file__).parents[3] / "shared" / "data"
RESNET = Load(seconds_per_epoch=3554.0, full_power_w=238.0, active=0.92, clock_bound=0.52)


def simulated(device: str = "simulated-v100", **changes: Any) -> Gpus:
    arguments: dict[str, Any] = {
        "workload": Workload(seconds_per_epoch=100.0, half_batch=64.0),
        "batch_size": 64,
        "samples_per_epoch": 1000,
        "state_dir": Path("unused"),
        "visible": None,
    }
    return open_gpus(device, **(arguments | changes))


def test_a_simulated_gpu_is_a_device() -> None:
    device: Device = SimulatedDevice("v100", VirtualClock())
    assert device.model == "Simulated V100"
    assert device.energy_source is EnergySource.SIMULATED


def test_an_epoch_takes_what_the_workload_says_at_the_greatest_limit() -> None:
    gpus = simulated()
    start = gpus.mark()
    for _ in range(10):
        gpus.ran(100)
    span = gpus.since(start)
    assert span.time_s == pytest.approx(200.0)  # A (1 + bh / b) with b = bh
    assert span.complete
    assert 34 < span.average_power_w < 250


@pytest.mark.parametrize("kind", sorted(CHIPS))
def test_lower_limits_never_draw_more_and_never_run_faster(kind: str) -> None:
    with simulated(f"simulated-{kind}", workload=Workload(half_batch=6.0, utilisation=0.9, least_utilisation=0.9)) as g:
        spans = []
        for limit_w in g.power.limits_w:
            g.power.set_limit_w(limit_w)
            start = g.mark()
            g.ran(100)
            spans.append(g.since(start))
    for higher, lower in pairwise(spans):
        assert lower.average_power_w <= higher.average_power_w * (1 + 1e-9)
        assert lower.time_s >= higher.time_s * (1 - 1e-9)


@given(st.lists(st.tuples(st.floats(0.001, 100), st.sampled_from([100.0, 150.0, 250.0]), st.booleans()), max_size=20))
def test_energy_is_the_exact_integral_of_power_over_the_virtual_clock(steps: list[tuple[float, float, bool]]) -> None:
    clock = VirtualClock()
    device = SimulatedDevice("v100", clock)
    device.carry(RESNET)
    expected = 0.0
    for seconds, limit_w, works in steps:
        device.set_power_limit_w(limit_w)
        if works:
            expected += seconds * device.chip.epoch(RESNET, limit_w)[1]
            device.work(seconds)
        else:
            expected += seconds * device.chip.idle_w
        clock.advance(seconds)
    assert device.energy_j() == pytest.approx(expected, rel=1e-9, abs=1e-6)


def test_spans_may_nest_and_overlap() -> None:
    gpus = simulated()
    a = gpus.mark()
    gpus.ran(100)
    b = gpus.mark()
    gpus.ran(200)
    first = gpus.since(a)
    gpus.ran(300)
    assert gpus.since(a).energy_j == pytest.approx(2 * first.energy_j)
    assert gpus.since(b).energy_j == pytest.approx(5 / 3 * first.energy_j)


def test_the_previous_limit_is_back_on_leaving() -> None:
    clock = VirtualClock()
    inner = SimulatedDevice("v100", clock)
    inner.set_power_limit_w(175)
    with group_of_simulated([inner], clock) as again:
        again.power.set_limit_w(100)
        assert inner.power_limit_w() == 100
    assert inner.power_limit_w() == 175


def test_two_gpus_share_the_batch_and_their_energy_adds_up() -> None:
    one, two = simulated(batch_size=64), simulated(batch_size=128, count=2)
    spans = []
    for gpus in (one, two):
        start = gpus.mark()
        gpus.ran(500)
        spans.append(gpus.since(start))
    assert two.gpu.count == 2
    assert two.gpu.max_power_w == 500
    assert spans[1].time_s == pytest.approx(spans[0].time_s / 2)
    assert spans[1].energy_j == pytest.approx(spans[0].energy_j)
    assert spans[1].per_gpu_j[0] == spans[1].per_gpu_j[1]


def test_the_number_of_samples_may_be_told_after_the_first_steps_which_are_then_charged() -> None:
    gpus = simulated(samples_per_epoch=None)
    gpus.ran(500)
    assert gpus.now_s() == 0.0
    gpus.samples_per_epoch = 1000
    gpus.ran(500)
    assert gpus.now_s() == pytest.approx(200.0)


def test_a_limit_outside_the_range_is_refused() -> None:
    with simulated() as gpus:
        with pytest.raises(LimitOutOfRange, match="100 to 250 W"):
            gpus.power.set_limit_w(99)
        assert gpus.power.limit_w() == 250


def test_locked_clocks_slow_the_job_down_until_they_are_reset() -> None:
    device = SimulatedDevice("v100", VirtualClock())
    device.carry(RESNET)
    full = device.seconds_for(1.0)
    device.lock_clocks_mhz(690, 690)
    half = device.seconds_for(1.0)
    assert full < half < 2 * full, "what does not wait for the clock goes on as before"
    device.lock_clocks_mhz(345, 345)
    assert device.seconds_for(1.0) > half
    device.reset_clocks()
    assert device.seconds_for(1.0) == full


def test_an_unknown_device_names_those_that_exist() -> None:
    with pytest.raises(ConfigError, match="simulated-v100"):
        simulated("simulated-h100")


@pytest.mark.parametrize("field", ["seconds_per_epoch", "half_batch", "utilisation", "saturated_power_w"])
def test_a_workload_that_makes_no_sense_is_refused(field: str) -> None:
    with pytest.raises(ConfigError, match="simulated job"):
        Workload(**{field: -1.0})
    with pytest.raises(ConfigError, match="simulated job"):
        Workload(**{field: math.nan})


@given(st.integers(1, 100_000), st.floats(0, 5000), st.sampled_from(sorted(CHIPS)))
def test_every_batch_size_gives_a_load_the_model_can_run(batch_size: int, half: float, kind: str) -> None:
    chip = CHIPS[kind]
    load = Workload(half_batch=half).at(batch_size, chip)
    assert 0 < load.clock_bound <= load.active <= 1
    for limit_w in chip.limits_w:
        seconds, watts = chip.epoch(load, limit_w)
        assert seconds >= load.seconds_per_epoch * (1 - 1e-9)
        assert chip.idle_w <= watts <= max(limit_w, chip.active_power_w(load, chip.slowest)) * (1 + 1e-9)


@pytest.mark.parametrize("kind", ["v100", "p100"])
def test_the_model_agrees_with_the_published_power_traces(kind: str) -> None:
    fit, trace = DATA / "gpu_model" / f"fit_{kind}.json", DATA / "traces" / f"summary_power_{kind}.csv"
    if not (fit.exists() and trace.exists()):
        pytest.skip("the published traces are not here (../shared/data)")
    chip = CHIPS[kind]
    jobs = {
        (j["dataset"], j["network"], j["optimizer"], j["batch_size"]): Load(j["T0"], j["Pd"], j["u"], j["b"])
        for j in json.loads(fit.read_text())["jobs"]
    }
    time_errors, power_errors = [], []
    for row in csv.DictReader(trace.open()):
        load = jobs.get((row["dataset"], row["network"], row["optimizer"], int(row["batch_size"])))
        if load is None:
            continue
        seconds, watts = chip.epoch(load, float(row["power_limit"]))
        time_errors.append(abs(seconds / float(row["time_per_epoch"]) - 1))
        power_errors.append(abs(watts / float(row["average_power"]) - 1))
    assert len(time_errors) > 200
    assert sum(time_errors) / len(time_errors) < 0.018
    assert sum(power_errors) / len(power_errors) < 0.018


def test_the_laws_for_unmeasured_jobs_describe_a_measured_one() -> None:
    fit = DATA / "gpu_model" / "fit_v100.json"
    if not fit.exists():
        pytest.skip("the fitted jobs are not here (../shared/data)")
    resnet = [j for j in json.loads(fit.read_text())["jobs"] if j["network"] == "resnet50"]
    workload = Workload(seconds_per_epoch=3400.0, half_batch=6.0, utilisation=0.92, least_utilisation=0.92)
    for job in resnet:
        law = workload.at(job["batch_size"], CHIPS["v100"])
        for limit_w in (250.0, 175.0, 100.0):
            seconds, watts = CHIPS["v100"].epoch(law, limit_w)
            fitted = CHIPS["v100"].epoch(Load(job["T0"], job["Pd"], job["u"], job["b"]), limit_w)
            assert seconds == pytest.approx(fitted[0], rel=0.12)
            assert watts == pytest.approx(fitted[1], rel=0.12)
