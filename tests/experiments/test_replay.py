"""Replay: production's loop over traces and models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.conftest import SHARED
from tests.data import make_traces
from zeus_flows.cli.replay import replay as command
from zeus_flows.core import policy
from zeus_flows.core.policy import POLICIES
from zeus_flows.core.records import Outcome
from zeus_flows.errors import ConfigError
from zeus_flows.experiments.replay.comparison import compare, dearest, default_run, find_traces
from zeus_flows.experiments.replay.replaying import replay, replay_job, replay_many
from zeus_flows.experiments.replay.shifts import SHIFTS, VARIANTS, Shift, across, shifted
from zeus_flows.experiments.replay.traces import Trace, jobs_in, read_trace
from zeus_flows.experiments.replay.workloads import JOBS, MODELS, model_trace
from zeus_flows.recurrence.loop import Recurrence

PUBLISHED = SHARED / "traces"
needs_published = pytest.mark.skipif(
    not PUBLISHED.is_dir(), reason="the published traces are not beside the repository"
)
EVERY_FOLDER = pytest.mark.parametrize(
    "folder",
    [pytest.param(make_traces.FOLDER, id="made"), pytest.param(PUBLISHED, id="published", marks=needs_published)],
)


@pytest.fixture(scope="module")
def cifar() -> Trace:
    return model_trace("cifar100", "v100")


@pytest.mark.parametrize("name", list(POLICIES))
def test_every_policy_replays_and_the_same_seed_gives_the_same_replay(name: str, cifar: Trace) -> None:
    job = replay_job(cifar, name)
    once, again = (replay(cifar, job, recurrences=15, seed=3) for _ in range(2))
    assert once == again
    assert all(once.converged)
    assert len(once.costs_j) == 15


@EVERY_FOLDER
@pytest.mark.parametrize("name", list(POLICIES))
def test_many_seeds_at_once_are_what_each_is_alone(name: str, folder: Path) -> None:
    workload = next(iter(jobs_in(folder, JOBS)))
    (trace,) = find_traces(folder=folder, gpu="v100", workloads=[workload])
    job, seeds = replay_job(trace, name, eta=0.7), (0, 3, 17)
    alone = [replay(trace, job, recurrences=25, seed=seed) for seed in seeds]
    assert replay_many(trace, job, recurrences=25, seeds=seeds) == alone


@pytest.mark.parametrize("name", ["thompson", "lookahead", "zeus", "zeus-paper"])
def test_learning_policies_end_near_the_best_arm(name: str, cifar: Trace) -> None:
    (row,) = compare([cifar], [name], seeds=3, recurrences=60)
    assert row.last_cost_ratio < 1.08
    assert row.energy_saved_percent > 40


def test_the_better_policies_have_less_regret_than_the_published_one(cifar: Trace) -> None:
    regret = {
        r.policy: r.regret for r in compare([cifar], ["lookahead", "thompson", "zeus-paper"], seeds=3, recurrences=50)
    }
    assert regret["lookahead"] < 0.5 * regret["zeus-paper"]
    assert regret["thompson"] < 0.5 * regret["zeus-paper"]


def test_tuning_only_power_beats_the_default_and_tuning_both_beats_that(cifar: Trace) -> None:
    rows = compare([cifar], ["default", "power", "thompson"], seeds=4, recurrences=40)
    default, power, both = (r.energy_saved_percent for r in rows)
    assert abs(default) < 8
    assert default < power < both


def test_the_first_run_of_an_arm_pays_for_profiling_and_the_next_does_not(cifar: Trace) -> None:
    seen: list[Recurrence] = []
    replay(cifar, replay_job(cifar, "power"), recurrences=2, watch=seen.append)
    first, second = (r.attempts[0][1] for r in seen)
    assert first.profile is not None
    assert first.profiling_energy_j > 0
    assert second.profile is None
    assert second.profiling_energy_j == 0


def test_the_default_policy_trains_at_the_greatest_limit_without_profiling(cifar: Trace) -> None:
    seen: list[Recurrence] = []
    replay(cifar, replay_job(cifar, "default"), recurrences=1, watch=seen.append)
    ran = seen[0].attempts[0][1]
    expected = default_run(cifar, replay_job(cifar, "default"))
    assert ran.profile is None
    assert ran.energy_j / ran.time_s == pytest.approx(expected.energy_j / expected.time_s)


def test_grid_tries_every_limit_of_what_it_does_not_drop_and_then_keeps_the_cheapest(cifar: Trace) -> None:
    job = replay_job(cifar, "grid")
    count = len(cifar.batch_sizes) * len(cifar.power_limits_w)
    seen: list[Recurrence] = []
    replay(cifar, job, recurrences=count + 5, watch=seen.append)
    tried = {(r.attempts[0][1].batch_size, r.attempts[0][1].setting) for r in seen}
    dropped = {o.batch_size for r in seen for _, o in r.attempts if not o.converged}
    assert {(b, w) for b in cifar.batch_sizes if b not in dropped for w in cifar.power_limits_w} <= tried
    assert all(cifar.expected_costs(job)[b] > 1.5 * cifar.best_cost_j(job) for b in dropped)
    assert {r.attempts[0][0].decision.reason.kind for r in seen[-3:]} == {"exploit"}


@pytest.mark.parametrize("workload", list(MODELS))
def test_grid_has_more_regret_than_the_published_policy_but_not_by_orders_of_magnitude(workload: str) -> None:
    trace = model_trace(workload, "v100")
    rows = compare([trace], ["grid", "zeus-paper"], seeds=2, recurrences=None)
    regret = {r.policy: r.regret for r in rows}
    assert 1 < regret["grid"] / regret["zeus-paper"] < 10, "the paper's worst is 72"


@pytest.mark.slow
@pytest.mark.parametrize("gpu", ["v100", "p100"])
@EVERY_FOLDER
def test_zeus_plateaus_as_the_published_policy_does(folder: Path, gpu: str) -> None:
    if not (folder / f"summary_power_{gpu}.csv").exists():
        pytest.skip(f"there is no trace of a {gpu}")
    seeds = 10
    for trace in find_traces(folder=folder, gpu=gpu, workloads=()):
        regret = {
            name: sum(replay(trace, replay_job(trace, name), recurrences=200, seed=s).regret for s in range(seeds))
            for name in ("zeus", "zeus-paper")
        }
        assert regret["zeus"] <= 1.15 * regret["zeus-paper"], trace.workload


def test_a_run_refused_by_the_published_rule_costs_nothing_there_and_a_profile_elsewhere(cifar: Trace) -> None:
    job = replay_job(cifar, "zeus-paper", beta=1.0)
    kinds = {}
    for free in (True, False):
        seen: list[Recurrence] = []
        replay(cifar, job, recurrences=25, free_refusals=free, watch=seen.append)
        refused = [o for r in seen for _, o in r.attempts if o.epochs_allowed == 0 and o.outcome is Outcome.STOPPED]
        kinds[free] = [o.energy_j > 0 for o in refused if o.profile is not None]
    assert not any(kinds[True])
    assert all(kinds[False])


def test_replay_decides_as_a_fold_of_what_it_observed_does(cifar: Trace) -> None:
    job = replay_job(cifar, "thompson")
    seen: list[Recurrence] = []
    replay(cifar, job, recurrences=20, watch=seen.append)
    last = seen[-1].attempts[0][0].decision
    history = [o for r in seen[:-1] for _, o in r.attempts]
    from zeus_flows.core.records import Ask, decision_seed

    ask = Ask(20, 1, decision_seed(0, 20, 1), cifar.gpu, power_limits_w=cifar.power_limits_w)
    assert policy.decide(job, policy.fold(job, history), ask) == last


@pytest.mark.parametrize("workload", list(MODELS))
@pytest.mark.parametrize("gpu", ["v100", "p100", "a40", "rtx6000"])
def test_every_built_in_model_has_an_arm_that_always_reaches_the_target(workload: str, gpu: str) -> None:
    trace = model_trace(workload, gpu)
    assert trace.default_batch_size in trace.batch_sizes
    assert trace.best_cost_j(replay_job(trace, "zeus")) > 0


def test_a_budget_is_kept_from_the_tenth_recurrence_on(cifar: Trace) -> None:
    traces = [cifar, *(model_trace(w, "v100") for w in ("movielens", "sentiment140", "librispeech", "squad"))]
    held = compare(traces, ["lookahead"], seeds=5, recurrences=30, exploration_budget=0.05)
    assert {r.workload: r.dearest for r in held if r.dearest > 1.05} == {}


def test_where_a_trial_fails_early_a_budget_is_kept_later() -> None:
    trace = model_trace("imagenet", "v100", default_batch_size=192)
    job = replay_job(trace, "lookahead", exploration_budget=0.02)
    replays = [replay(trace, job, recurrences=40, seed=s) for s in range(5)]
    assert dearest(replays, default_run(trace, job).cost_j, since=20) <= 1.02


def test_a_budget_does_not_freeze_a_job() -> None:
    trace = model_trace("movielens", "v100")
    job = replay_job(trace, "lookahead", exploration_budget=0.02)
    spent = [sum(replay(trace, job, recurrences=40, seed=s).costs_j) for s in range(3)]
    assert sum(spent) / 3 < 0.8 * 40 * default_run(trace, job).cost_j, "one epoch is much of a run, and is risked yet"


def test_a_shift_moves_the_epochs_of_every_arm(cifar: Trace) -> None:
    moved = shifted(cifar, Shift("both", octaves=1.0, times=2.0))
    assert moved.epochs[128] == tuple(None if e is None else 2 * e for e in cifar.epochs[64])


def test_a_shift_is_noticed_and_the_target_still_reached(cifar: Trace) -> None:
    lookahead = next(v for v in VARIANTS if v.name == "lookahead, reset")
    slower = next(s for s in SHIFTS if s.name == "epochs x 2.5")
    result = across(cifar, slower, lookahead, before=15, after=15, seed=0)
    assert result.delay is not None
    assert result.delay <= 3
    assert result.unconverged == 0


def test_an_unknown_workload_or_gpu_is_named() -> None:
    with pytest.raises(ConfigError, match="there is no workload nope; there are librispeech"):
        find_traces(folder=None, gpu="v100", workloads=["nope"])
    with pytest.raises(ConfigError, match="no built-in model of GPU 'h100'"):
        find_traces(folder=None, gpu="h100", workloads=["squad"])
    with pytest.raises(ConfigError, match="--target needs --traces"):
        find_traces(folder=None, gpu="v100", workloads=["squad"], target=80.0)


def test_the_command_prints_a_table_or_json() -> None:
    arguments = ["--workload", "squad", "--policy", "thompson,default", "--recurrences", "8", "--seeds", "1"]
    table = CliRunner().invoke(command, arguments, catch_exceptions=False)
    assert table.exit_code == 0
    assert "squad" in table.output
    document = CliRunner().invoke(command, [*arguments, "--json"], catch_exceptions=False)
    rows = json.loads(document.output)["rows"]
    assert [r["policy"] for r in rows] == ["thompson", "default"]


def test_the_command_names_policies_that_do_not_exist() -> None:
    with pytest.raises(ConfigError, match="--policy: there is no zeuss"):
        CliRunner().invoke(command, ["--policy", "zeuss"], catch_exceptions=False)


@needs_published
def test_the_published_policy_saves_what_the_paper_reports() -> None:
    traces = find_traces(folder=PUBLISHED, gpu="v100", workloads=tuple(JOBS))
    saved = [r.energy_saved_percent for r in compare(traces, ["zeus-paper"], seeds=2, recurrences=None)]
    assert 15 < min(saved) < 24
    assert 70 < max(saved) < 80


@EVERY_FOLDER
def test_lookahead_and_thompson_beat_the_published_policy_on_traces(folder: Path) -> None:
    traces = find_traces(folder=folder, gpu="v100", workloads=("librispeech", "cifar100", "movielens"))
    rows = compare(traces, ["zeus-paper", "lookahead", "thompson"], seeds=3, recurrences=50)
    for trace in traces:
        regret = {r.policy: r.regret for r in rows if r.workload == trace.workload}
        assert regret["lookahead"] < 0.6 * regret["zeus-paper"]
        assert regret["thompson"] < 0.6 * regret["zeus-paper"]


@EVERY_FOLDER
def test_another_target_and_default_batch_size_can_be_replayed(folder: Path) -> None:
    trace = read_trace(folder, "cifar100", "v100", JOBS["cifar100"], target=0.5, default_batch_size=64)
    assert trace.default_batch_size == 64
    assert trace.mean_epochs(128) < 19
    assert trace.mean_epochs(128) < read_trace(folder, "cifar100", "v100", JOBS["cifar100"]).mean_epochs(128)


@pytest.mark.parametrize("workload", make_traces.WORKLOADS)
def test_a_model_written_as_a_trace_is_read_as_the_same(workload: str) -> None:
    (read,), model = (
        find_traces(folder=make_traces.FOLDER, gpu="v100", workloads=[workload]),
        model_trace(workload, "v100"),
    )
    assert read.epochs == model.epochs
    assert read.power_limits_w == model.power_limits_w
    assert (read.gpu, read.default_batch_size) == (model.gpu, model.default_batch_size)
    job = replay_job(model, "zeus")
    assert read.expected_costs(job) == pytest.approx(model.expected_costs(job), rel=1e-4)


def test_the_traces_in_the_repository_are_what_their_script_writes(tmp_path: Path) -> None:
    make_traces.write(tmp_path)
    for path in sorted(tmp_path.iterdir()):
        assert path.read_text() == (make_traces.FOLDER / path.name).read_text(), "python -m tests.data.make_traces"


def test_a_folder_without_traces_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"summary_train\.csv: there is no such file"):
        find_traces(folder=tmp_path, gpu="v100", workloads=["squad"])
