"""The published trace format, read and written."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.core.builders import P100, observation
from tests.core.test_overheads import with_parts
from zeus_flows.core.cost import observed_cost
from zeus_flows.core.power_profile import Gpu, Part
from zeus_flows.core.records import Outcome
from zeus_flows.errors import ConfigError
from zeus_flows.experiments.replay.replaying import replay, replay_job
from zeus_flows.experiments.replay.traces import TraceJob, read_trace
from zeus_flows.experiments.replay.written_traces import TraceLabels, file_name, write_traces

LABELS = TraceLabels("flights", "mlp", "adam", 0.8, learning_rates={32: 0.01})
SPEC = TraceJob("flights", "mlp", "adam", 0.8, max_epochs=50, default_batch_size=32)

TRAIN = "dataset,network,batch_size,optimizer,learning_rate,run,target_metric,target_epoch\n"
POWER = "dataset,network,batch_size,optimizer,power_limit,time_per_epoch,average_power\n"


def test_what_was_observed_can_be_written_read_and_replayed(tmp_path: Path) -> None:
    history = [
        observation(1, 32, 20, profiled=True),
        observation(2, 64, 5, outcome=Outcome.STOPPED, profiled=True),
        observation(2, 32, 22, attempt=2),
        observation(3, 64, 12),
        observation(4, 128, 50, outcome=Outcome.EXHAUSTED, profiled=True),
    ]
    files = write_traces(history, tmp_path, LABELS)
    assert [f.name for f in files] == ["summary_train.csv", "summary_power_v100.csv"]
    trace = read_trace(tmp_path, "flights", "v100", SPEC)
    assert trace.epochs == {32: (20, 22), 64: (12,), 128: (None,)}, "a stopped run is not a repetition"
    assert len(trace.power_limits_w) == 3
    again = replay(trace, replay_job(trace, "thompson"), recurrences=5)
    first = again.energies_j[0] / again.times_s[0]
    assert 80 < first < 250


def test_energy_survives_the_round_trip(tmp_path: Path) -> None:
    ran = observation(1, 32, 20, profiled=True)
    write_traces([ran], tmp_path, LABELS)
    trace = read_trace(tmp_path, "flights", "v100", SPEC)
    a_job = replay_job(trace, "zeus")
    assert trace.expected_costs(a_job)[32] == pytest.approx(observed_cost(a_job, ran))


def test_each_gpu_gets_its_power_trace(tmp_path: Path) -> None:
    history = [observation(1, 32, 20, profiled=True), observation(2, 32, 20, gpu=P100, profiled=True)]
    assert [f.name for f in write_traces(history, tmp_path, LABELS)][1:] == [
        "summary_power_p100.csv",
        "summary_power_v100.csv",
    ]


def test_nothing_to_write_is_an_error_and_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        write_traces([observation(1, 32, 20)], tmp_path / "new", LABELS)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("train", "power", "message"),
    [
        ("a,b\n1,2\n", POWER, r"summary_train\.csv:1: the columns dataset"),
        (TRAIN + "flights,mlp,32,adam,0.1,1,0.8\n", POWER, r"summary_train\.csv:2: 7 cells where the header has 8"),
        (TRAIN + "flights,mlp,many,adam,0.1,1,0.8,5\n", POWER, r"summary_train\.csv:2: batch_size must be a number"),
        (TRAIN + "flights,mlp,0,adam,0.1,1,0.8,5\n", POWER, r"batch_size must be a positive whole number"),
        (TRAIN + "flights,mlp,32,adam,0.1,1,0.8,0\n", POWER, r"target_epoch must be a positive whole number"),
        (TRAIN + f"{'x' * 200_000},mlp,32,adam,0.1,1,0.8,5\n", POWER, r"summary_train\.csv:2: field larger"),
        (TRAIN + "flights,mlp,32,adam,0.1,1,0.8,5\n", POWER, "has no runs of flights"),
        (
            TRAIN + "flights,mlp,32,adam,0.1,1,0.8,5\n",
            POWER + "flights,mlp,32,adam,100,-1,50\n",
            r"summary_power_v100\.csv:2: power limit, time and power must be positive",
        ),
        (TRAIN, POWER + "flights,mlp,32,adam,inf,1,50\n", r"power_limit must be finite"),
    ],
)
def test_a_broken_trace_names_its_file_and_line(tmp_path: Path, train: str, power: str, message: str) -> None:
    (tmp_path / "summary_train.csv").write_text(train)
    (tmp_path / "summary_power_v100.csv").write_text(power)
    with pytest.raises(ConfigError, match=message):
        read_trace(tmp_path, "flights", "v100", SPEC)


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "summary_train.csv").write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path, "flights", "v100", SPEC)


def test_a_gpu_name_cannot_leave_the_folder() -> None:
    assert "/" not in file_name(Gpu("../../etc/passwd", 1, 100.0))


def test_what_lies_beside_the_steps_survives_the_round_trip_and_is_replayed(tmp_path: Path) -> None:
    evaluation, once = Part(1, 3_000.0, 20.0), Part(1, 900.0, 15.0)
    runs = [with_parts(observation(n, 32, 20, profiled=n == 1), evaluation=evaluation, once=once) for n in (1, 2)]
    files = write_traces(runs, tmp_path, LABELS)
    assert [f.name for f in files] == ["summary_train.csv", "summary_power_v100.csv", "summary_overheads_v100.csv"]
    trace = read_trace(tmp_path, "flights", "v100", SPEC)
    job = replay_job(trace, "zeus")
    expected, ran = trace.expected_costs(job)[32], observed_cost(job, runs[-1])
    assert 0.99 * ran < expected <= ran, "whole epochs are a little cheaper at another limit"
    assert replay(trace, job, recurrences=3).costs_j[-1] == pytest.approx(expected)


def test_overheads_that_are_negative_are_refused(tmp_path: Path) -> None:
    runs = [with_parts(observation(1, 32, 20, profiled=True))]
    *_, file = write_traces(runs, tmp_path, LABELS)
    header, row = file.read_text().splitlines()
    file.write_text(f"{header}\n{row.rsplit(',', 1)[0]},-1\n")
    with pytest.raises(ConfigError, match=r"summary_overheads_v100\.csv:2: times, energies and counts"):
        read_trace(tmp_path, "flights", "v100", SPEC)
