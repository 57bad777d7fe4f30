"""A job's own history under another policy, eta or mode."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from tests.experiments.by_hand import trace_by_hand
from tests.training_functions import write_job
from zeus_flows.cli import main
from zeus_flows.core.job import Job, Mode
from zeus_flows.core.records import EnergySource, Observation
from zeus_flows.errors import ConfigError
from zeus_flows.experiments.cluster.what_if import OwnHistory, own_history, variants, what_if
from zeus_flows.experiments.replay.replaying import TraceTrainer, replay, replay_job
from zeus_flows.experiments.replay.workloads import model_trace
from zeus_flows.job_file import load_job
from zeus_flows.ledger.open_ledger import open_direct
from zeus_flows.recurrence.loop import run_recurrence
from zeus_flows.recurrence.steps import LocalSteps


def recorded(policy: str, recurrences: int) -> tuple[Job, list[Observation]]:
    """Return a job on the trace without luck, and what its recurrences observed."""
    trace, seen = trace_by_hand(), list[Observation]()
    job = replay_job(trace, policy)
    replay(trace, job, recurrences=recurrences, watch=lambda r: seen.extend(o for _, o in r.attempts))
    return job, seen


@pytest.fixture
def history() -> OwnHistory:
    return own_history(*recorded("lookahead", 12))


def test_without_luck_the_job_as_it_is_takes_what_happened(history: OwnHistory) -> None:
    happened, as_it_is, *_ = what_if(history, variants(history.job, policies=(), etas=(), modes=()), seeds=3)
    assert as_it_is.energy_j.mean == pytest.approx(happened.energy_j.mean)
    assert as_it_is.cost_j.low == pytest.approx(happened.cost_j.mean) == pytest.approx(as_it_is.cost_j.high)
    assert happened.missed == as_it_is.missed == 0


def test_the_default_takes_its_epochs_at_the_greatest_limit(history: OwnHistory) -> None:
    rows = {r.name: r for r in what_if(history, variants(history.job, policies=(), etas=(), modes=()), seeds=2)}
    assert rows["default"].time_s.mean == pytest.approx(12 * 100.0)  # ten epochs of 10 s
    assert rows["default"].energy_j.mean == pytest.approx(12 * 100.0 * 100.0)


def test_a_mode_that_keeps_the_batch_size_saves_what_its_power_limit_saves(history: OwnHistory) -> None:
    jobs = variants(history.job, policies=(), etas=(), modes=[Mode.POWER, Mode.OFF])
    rows = {r.name: r for r in what_if(history, jobs, seeds=2)}
    profiling_j = 10.0 * 75.0  # the first epoch of all: 5 s at 100 W, 5 s at 50 W
    assert rows["mode power"].energy_j.mean == pytest.approx(12 * 100.0 * 50.0 - 10.0 * 50.0 + profiling_j)
    assert rows["mode off"].energy_j.mean == pytest.approx(rows["default"].energy_j.mean)


def test_every_combination_of_what_is_asked_is_a_row(history: OwnHistory) -> None:
    jobs = variants(history.job, policies=["thompson", "grid"], etas=[0.2, 1.0], modes=[])
    assert list(jobs) == [
        *("as it is", "default"),
        *("thompson, eta 0.2", "thompson, eta 1", "grid, eta 0.2", "grid, eta 1"),
    ]
    assert jobs["grid, eta 0.2"].eta == 0.2
    assert jobs["as it is"] == history.job


def test_what_was_never_run_is_left_out_and_what_was_only_stopped_never_arrives(history: OwnHistory) -> None:
    assert history.trace.epochs[32] == (None,)
    assert any("batch sizes 32 were only ever stopped" in line for line in history.assumed)
    job, seen = recorded("power", 3)
    alone = own_history(job, seen)
    assert alone.job.batch_sizes == (8,)
    assert any("batch sizes 16, 32 were never run with a complete power profile" in line for line in alone.assumed)


def test_a_larger_data_set_counts_for_more() -> None:
    job, seen = recorded("power", 2)
    from dataclasses import replace

    double = replace(seen[0], samples_per_epoch=2 * seen[1].samples_per_epoch)
    assert [s.ratio for s in own_history(job, [double, seen[1]]).submissions] == [2.0, 1.0]


def test_without_a_run_of_the_default_there_is_nothing_to_compare_with() -> None:
    job, seen = recorded("lookahead", 12)
    with pytest.raises(ConfigError, match="default batch size 8 has no run with a complete power profile"):
        own_history(job, [o for o in seen if o.batch_size == 16])
    with pytest.raises(ConfigError, match="has no runs to simulate from"):
        own_history(job, [])


def test_the_command_reads_a_jobs_runs_from_mlflow(tmp_path: Path, sqlite_uri: str) -> None:
    file = write_job(tmp_path / "job.yaml", batch_sizes=[8, 16, 32, 56], default_batch_size=56)
    job_file = load_job(file)
    job = job_file.core()
    ledger = open_direct(
        job, tracking_uri=sqlite_uri, energy_source=EnergySource.SIMULATED, comparable=job_file.comparable
    )
    trace = model_trace("squad", "v100")
    trainer = TraceTrainer(trace, job, np.random.default_rng(0))
    for _ in range(3):
        run_recurrence(job, LocalSteps(job, ledger, trainer))
    flags = ["what-if", str(file), "--tracking-uri", sqlite_uri, "--seeds", "3"]
    shown = CliRunner().invoke(main, [*flags, "--policy", "zeus-paper"])
    assert shown.exit_code == 0, shown.output
    assert "nightly: 3 recurrences on v100 x1, runs whose energy was simulated" in shown.output
    assert max(map(len, shown.output.splitlines())) <= 100
    (told,) = json.loads(CliRunner().invoke(main, [*flags, "--eta", "1", "--json"]).stdout)["jobs"]
    assert [r["name"] for r in told["rows"]] == ["what happened", "as it is", "default", "eta 1"]
    assert told["energy_source"] == "simulated"


def test_the_command_names_what_is_wrong(tmp_path: Path) -> None:
    file = write_job(tmp_path / "job.yaml")
    missing = f"sqlite:///{tmp_path / 'none.db'}"
    never = CliRunner().invoke(main, ["what-if", str(file), "--tracking-uri", missing])
    assert never.exit_code == 2
    assert "has never run at" in never.output
    assert not (tmp_path / "none.db").exists()
    unknown = CliRunner().invoke(main, ["what-if", str(file), "--policy", "best"])
    assert unknown.exit_code == 2
    assert "there is no best" in unknown.output
