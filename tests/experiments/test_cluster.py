"""Groups of recurring jobs that overlap: by hand, from files, drawn, and shared out."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.builders import observation
from tests.conftest import SHARED
from tests.experiments.by_hand import GPU, trace_by_hand
from zeus_flows.cli import main
from zeus_flows.core import policy
from zeus_flows.core.job import Job
from zeus_flows.core.json import to_text
from zeus_flows.core.records import Ask, Decision, Observation
from zeus_flows.errors import ConfigError
from zeus_flows.experiments.cluster import simulating
from zeus_flows.experiments.cluster.comparing import GroupOutcome, compare_groups, shares, tabulated
from zeus_flows.experiments.cluster.groups import Arrivals, DrawnGroup, ReadGroup, draw_groups, read_groups
from zeus_flows.experiments.cluster.ordered_fold import OrderedFold
from zeus_flows.experiments.cluster.request import ClusterRequest, answer
from zeus_flows.experiments.cluster.simulating import GroupSums, Submission, simulate
from zeus_flows.experiments.fan_out import in_turn
from zeus_flows.experiments.replay.comparison import find_traces
from zeus_flows.experiments.replay.replaying import TraceTrainer, replay, replay_job
from zeus_flows.experiments.replay.traces import SAMPLES_PER_EPOCH, Trace

INFERRED = SHARED / "cluster" / "alibaba_v2023_pseudo_groups.csv"


@pytest.fixture
def by_hand() -> Trace:
    return trace_by_hand()


def watched(
    monkeypatch: pytest.MonkeyPatch, trace: Trace, name: str, starts_s: list[float], **changes: object
) -> tuple[GroupSums, list[Decision]]:
    """Simulate a group; return its sums and its decisions in the order they were taken."""
    decisions: list[Decision] = []

    class Watched(TraceTrainer):
        def train(self, job: Job, decision: Decision, *args: Any, **named: Any) -> Observation:
            decisions.append(decision)
            return super().train(job, decision, *args, **named)

    monkeypatch.setattr(simulating, "TraceTrainer", Watched)
    return simulate(trace, replay_job(trace, name, **changes), map(Submission, starts_s), seed=0), decisions


def test_the_default_takes_what_its_epochs_take_times_each_ratio(by_hand: Trace) -> None:
    submissions = [Submission(0.0, 1.0), Submission(50.0, 2.0), Submission(500.0, 0.5)]
    sums = simulate(by_hand, replay_job(by_hand, "default"), submissions, seed=0)
    assert (sums.jobs, sums.attempts, sums.missed) == (3, 3, 0)
    assert sums.time_s == pytest.approx(100.0 * 3.5)  # ten epochs of 10 s, times 1 + 2 + 0.5
    assert sums.energy_j == pytest.approx(100.0 * 100.0 * 3.5)
    assert sums.cost_j == pytest.approx(0.5 * sums.energy_j + 0.5 * 100.0 * sums.time_s)
    assert sums.overlapping == 1  # the second begins at 50 s, the first ends at 100 s; the second ends at 250 s
    assert sums.end_s == pytest.approx(550.0)
    assert sums.most_in_flight == 2


def test_a_job_that_is_submitted_while_pruning_tries_an_arm_runs_the_best_known_one(
    by_hand: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The first run of 8 ends at 100 s. At 200 s pruning goes up to 16, which takes 50 s; at 210 s that is under way.
    sums, decisions = watched(monkeypatch, by_hand, "zeus-paper", [0.0, 200.0, 210.0, 400.0])
    assert [(d.recurrence, d.batch_size, d.explores) for d in decisions] == [
        (1, 8, False),
        (2, 16, True),
        (3, 8, False),
        (4, 32, True),
        (4, 16, True),  # 32 was stopped, and pruning goes on from 16, the cheapest
    ]
    asked = decisions[2].asked
    assert asked is not None
    assert [(f.recurrence, f.batch_size) for f in asked.in_flight] == [(2, 16)]
    assert asked.folded == 1
    assert sums.overlapping == 1


def test_an_observation_that_comes_late_takes_its_place_in_the_order_of_recurrences(
    by_hand: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recurrence 1 takes ten times as long as 2: what recurrence 3 decides on is the fold of 2 alone, then of 1, 2."""
    seen: list[int] = []
    decide = policy.decide

    def told(job: Job, state: policy.State, ask: Ask) -> Decision:
        seen.append(state.observations)
        return decide(job, state, ask)

    monkeypatch.setattr(policy, "decide", told)
    submissions = [Submission(0.0, 10.0), Submission(1.0, 1.0), Submission(300.0, 1.0), Submission(2_000.0, 1.0)]
    sums = simulate(by_hand, replay_job(by_hand, "power"), submissions, seed=0)
    assert seen == [0, 0, 1, 3]
    assert sums.most_kept == 3


def test_the_fold_is_the_same_in_whatever_order_observations_arrive(by_hand: Trace) -> None:
    job = replay_job(by_hand, "thompson")
    history = [
        observation(n, batch_size=b, epochs=e, gpu=GPU, samples_per_epoch=SAMPLES_PER_EPOCH, energy_j=900.0 + n)
        for n, b, e in zip(count(1), (8, 16, 8, 16, 16, 8, 16, 8), (10, 5, 11, 5, 6, 9, 5, 10), strict=False)
    ]
    expected = to_text(policy.to_json(policy.fold(job, history, account=False)))
    for seed in range(20):
        arriving = random.Random(seed).sample(history, len(history))
        fold, ended = OrderedFold(job), set[int]()
        for o in arriving:
            fold.add(o)
            ended.add(o.recurrence)
            fold.state()
            oldest = next(n for n in count(1) if n not in ended)
            fold.settle(oldest)
            assert len(fold) == sum(n > oldest for n in ended)
        assert len(fold) == 0
        assert to_text(policy.to_json(fold.state())) == expected


@pytest.mark.parametrize("name", ["zeus-paper", "thompson", "lookahead", "default", "grid", "power"])
def test_one_after_the_other_is_what_replay_does(name: str) -> None:
    (trace,) = find_traces(folder=None, gpu="v100", workloads=["cifar100"])
    job = replay_job(trace, name)
    one_by_one = replay(trace, job, recurrences=30, seed=5)
    sums = simulate(trace, job, (Submission(1e9 * i) for i in range(30)), seed=5)
    assert sums.energy_j == pytest.approx(sum(one_by_one.energies_j), rel=1e-12)
    assert sums.cost_j == pytest.approx(sum(one_by_one.costs_j), rel=1e-12)
    assert sums.attempts == sum(one_by_one.attempts)


def test_what_is_kept_does_not_grow_with_the_jobs_that_have_ended() -> None:
    (trace,) = find_traces(folder=None, gpu="v100", workloads=["squad"])
    job, kept = replay_job(trace, "zeus-paper"), []
    for jobs in (200, 2_000):
        group = DrawnGroup("a", "squad", jobs, gap_s=4_000.0, seed=3)
        asked = iter(group.submissions())
        sums = simulate(trace, job, asked, seed=1)
        assert sums.jobs == jobs
        assert sums.overlapping > jobs / 4
        kept.append(sums.most_in_flight + sums.most_kept)
    assert kept[1] <= 2 * kept[0] < 40


def test_submissions_are_read_as_they_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    (trace,) = find_traces(folder=None, gpu="v100", workloads=["squad"])
    read, began = [0], list[int]()

    def submissions() -> Iterator[Submission]:
        for i in range(10):
            read[0] = i + 1
            yield Submission(1e6 * i)

    class Watched(TraceTrainer):
        def train(self, *args: Any, **named: Any) -> Observation:
            began.append(read[0])
            return super().train(*args, **named)

    monkeypatch.setattr(simulating, "TraceTrainer", Watched)
    simulate(trace, replay_job(trace, "default"), submissions(), seed=0)
    assert began == list(range(1, 11))


def test_a_recipe_draws_the_same_groups_for_the_same_seed_and_as_many_jobs_as_asked() -> None:
    traces = find_traces(folder=None, gpu="v100", workloads=())
    once, again, other = (draw_groups(traces, jobs=3_000, seed=s) for s in (1, 1, 2))
    assert once == again != other
    assert sum(g.jobs for g in once.groups) == 3_000
    first = once.groups[0]
    assert list(first.submissions()) == list(first.submissions())
    assert len(list(first.submissions())) == first.jobs
    assert "3,000 jobs drawn with seed 1" in once.source


def write(folder: Path, text: str) -> Path:
    file = folder / "groups.csv"
    file.write_text(text, encoding="utf-8")
    return file


def test_groups_are_read_in_the_format_of_the_papers_trace(tmp_path: Path) -> None:
    traces = find_traces(folder=None, gpu="v100", workloads=["cifar100", "movielens"])
    file = write(
        tmp_path,
        "group,start_time,end_time,dataset,runtime_ratio\n"
        "g1,100,200,cifar100,0.5\ng2,0,10,movielens-1m,1.5\ng1,50,90,cifar100,2\n",
    )
    arrivals = read_groups(file, traces)
    assert not arrivals.matched
    first, second = arrivals.groups
    assert (first.name, first.workload, second.workload) == ("g1", "cifar100", "movielens")
    assert list(first.submissions()) == [Submission(50.0, 2.0), Submission(100.0, 0.5)]


def test_without_datasets_groups_are_matched_by_mean_runtime_and_ratios_follow(tmp_path: Path) -> None:
    traces = find_traces(folder=None, gpu="v100", workloads=["cifar100", "imagenet"])  # imagenet takes longer
    file = write(
        tmp_path,
        "group,start_time,end_time\nshort,0,10\nshort,20,40\nbrief,0,12\nlong,0,1000\nlong,0,3000\n",
    )
    arrivals = read_groups(file, traces)
    assert arrivals.matched
    assert "synthetic" in arrivals.source
    groups = {g.name: g for g in arrivals.groups}
    assert {name: g.workload for name, g in groups.items()} == {
        "short": "cifar100",
        "brief": "cifar100",
        "long": "imagenet",
    }
    mean_s = (10 + 20 + 12) / 3
    assert [s.ratio for s in groups["short"].submissions()] == pytest.approx([10 / mean_s, 20 / mean_s])
    assert [s.ratio for s in groups["long"].submissions()] == pytest.approx([0.5, 1.5])


HEADER = "group,start_time,end_time,dataset,runtime_ratio\n"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "groups.csv:1: the columns group, start_time, end_time are missing"),
        ("group,start_time\n", "groups.csv:1: the columns end_time are missing"),
        (HEADER, "there are no jobs in it"),
        (HEADER + "g,0,10,cifar100,1\ng,x,10,cifar100,1\n", "groups.csv:3: start_time must be a number"),
        (HEADER + "g,0,10,cifar100,1\ng,0,inf,cifar100,1\n", "groups.csv:3: end_time must be finite"),
        (HEADER + "g,10,0,cifar100,1\n", "groups.csv:2: end_time 0 is before start_time 10"),
        (HEADER + "g,0,10,cifar100,0\n", "groups.csv:2: runtime_ratio must be positive"),
        (HEADER + "g,0,10,cifar100,1,9\n", "groups.csv:2: 6 cells where the header has 5"),
        (HEADER + ",0,10,cifar100,1\n", "groups.csv:2: group must not be empty"),
        (HEADER + "g,0,10,coco,1\n", "groups.csv:2: there is no trace of the dataset"),
        (HEADER + "g,0,10,cifar100,1\ng,0,10,squad,1\n", "groups.csv:3: group"),
        ("group,start_time,end_time,dataset\ng,0,10,cifar100\n", "groups.csv:1: the column runtime_ratio is missing"),
        ("group,start_time,end_time\ng,0,10\n", "1 groups cannot be matched to 6 workloads"),
    ],
)
def test_a_malformed_file_is_refused_with_its_line(text: str, complaint: str, tmp_path: Path) -> None:
    file = write(tmp_path, text)
    result = CliRunner().invoke(main, ["cluster", "--groups", str(file)])
    assert result.exit_code == 2
    assert complaint in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--policies", "best"], "there is no best"),
        (["--policies", ","], "there is no policy"),
        (["--workload", "coco"], "there is no workload coco"),
        (["--gpu", "h900"], "no built-in model of GPU"),
        (["--groups", "missing.csv"], "there is no such file; --groups names the file"),
        (["--groups", "missing.csv", "--jobs", "3"], "do not go together"),
        (["--jobs", "20", "--policies", "default", "--runner", "elsewhere"], "there is no runner"),
    ],
)
def test_a_wrong_flag_is_named(flags: list[str], complaint: str) -> None:
    result = CliRunner().invoke(main, ["cluster", *flags])
    assert result.exit_code == 2
    assert complaint in result.output


def outcome(group: str, workload: str, name: str, energy_j: float) -> GroupOutcome:
    return GroupOutcome(group, workload, name, 10, 10.0, energy_j, 2 * energy_j, energy_j, 0.0, 5.0)


def test_shares_are_of_sums_and_intervals_resample_groups() -> None:
    outcomes = [
        *(outcome(g, "a", "default", 100.0) for g in ("1", "2", "3")),
        *(outcome(g, "a", "zeus-paper", e) for g, e in (("1", 50.0), ("2", 80.0), ("3", 80.0))),
        outcome("4", "b", "default", 700.0),
        outcome("4", "b", "zeus-paper", 350.0),
    ]
    rows = {r.workload: r for r in tabulated(outcomes, ["zeus-paper"])}
    assert rows["a"].energy.value == pytest.approx(210 / 300)
    assert rows["a"].energy.low is not None
    assert rows["a"].energy.low == pytest.approx(0.5)  # one resample in 27 has group 1 three times
    assert rows["a"].energy.high == pytest.approx(0.8)
    assert (rows["b"].energy.low, rows["b"].energy.high) == (None, None)  # one group tells no interval
    assert rows["all"].energy.value == pytest.approx(560 / 1000)
    assert (rows["all"].groups, rows["all"].jobs) == (4, 40)


def test_work_is_shared_out_evenly_and_whole() -> None:
    groups = [ReadGroup(str(n), "a", [0.0] * n, [1.0] * n) for n in range(1, 30)]
    parts = shares(groups, 5)
    assert len(parts) == 5
    assert [g for part in parts for g in part] == groups
    assert max(sum(g.jobs for g in part) for part in parts) < 2 * sum(g.jobs for g in groups) / 5


def test_the_order_in_which_pieces_are_done_changes_nothing() -> None:
    traces = find_traces(folder=None, gpu="v100", workloads=["cifar100", "squad"])
    drawn = [DrawnGroup(f"{w}-{i}", w, 30, gap_s=900.0, seed=i) for w in ("cifar100", "squad") for i in range(3)]
    arrivals = Arrivals(tuple(drawn), "by hand")

    def backwards(work, items, told=None):  # type: ignore[no-untyped-def]
        return [work(item) for item in reversed(items)][::-1]

    forwards = compare_groups(arrivals, traces, ["thompson"], seeds=[1, 2], fan_out=in_turn)
    assert forwards == compare_groups(arrivals, traces, ["thompson"], seeds=[1, 2], fan_out=backwards)
    assert len(forwards) == 3
    assert all(0 < r.energy.value < 1.2 for r in forwards)


def test_the_command_prints_says_what_is_simulated_and_writes_files(tmp_path: Path) -> None:
    flags = ["cluster", "--jobs", "150", "--policies", "zeus-paper,default", "--workload", "cifar100"]
    shown = CliRunner().invoke(main, [*flags, "--out", str(tmp_path / "out")])
    assert shown.exit_code == 0, shown.output
    assert shown.output.startswith("SIMULATED")
    assert "drawn with seed 1, not observed anywhere" in " ".join(shown.output.split())
    assert max(map(len, shown.output.splitlines())) <= 100
    assert {f.name for f in (tmp_path / "out").iterdir()} == {"cluster.csv", "cluster.svg", "cluster.png"}
    told = json.loads(CliRunner().invoke(main, [*flags, "--json"]).output)
    assert told["simulated"] is True
    assert [(r["workload"], r["policy"], r["jobs"]) for r in told["rows"]] == [
        ("cifar100", "zeus-paper", 150),
        ("cifar100", "default", 150),
    ]
    assert told["rows"][1]["energy"]["value"] == 1.0


@pytest.mark.skipif(not INFERRED.exists(), reason="the inferred groups are not beside the repository")
def test_inferred_groups_are_called_synthetic_and_never_stand_beside_the_published_figures() -> None:
    result = CliRunner().invoke(main, ["cluster", "--groups", str(INFERRED), "--policies", "default"])
    assert result.exit_code == 0, result.output
    assert "synthetic" in result.output
    assert not any(published in result.output for published in ("52", "7 %", "33 %", "16 %"))


@pytest.mark.slow
@pytest.mark.usefixtures("prefect_server")
def test_on_a_runner_the_rows_are_the_same_and_the_flow_writes_one_run_to_mlflow(sqlite_uri: str) -> None:
    from mlflow import MlflowClient

    flags = ["cluster", "--jobs", "400", "--policies", "zeus-paper,default", "--json"]
    alone = CliRunner().invoke(main, flags)
    for runner in ("threads", "processes"):
        shared = CliRunner().invoke(main, [*flags, "--runner", runner, "--tracking-uri", sqlite_uri])
        assert shared.exit_code == 0, shared.output
        assert json.loads(shared.stdout)["rows"] == json.loads(alone.stdout)["rows"]
    client = MlflowClient(sqlite_uri)
    experiment = client.get_experiment_by_name("cluster")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    assert [run.info.status for run in runs] == ["FINISHED", "FINISHED"]
    assert runs[0].data.tags["zf.energy_source"] == "simulated"
    assert runs[0].data.params["zf.jobs"] == "400"
    row = json.loads(alone.stdout)["rows"][0]
    assert runs[0].data.metrics[f"zf.over_default/energy/{row['workload']}/zeus-paper"] == row["energy"]["value"]
    assert {a.path for a in client.list_artifacts(runs[0].info.run_id)} == {
        "cluster.csv",
        "cluster.svg",
        "cluster.png",
    }


def test_a_request_without_policies_is_refused() -> None:
    with pytest.raises(ConfigError, match="there is no policy"):
        answer(ClusterRequest(policies=()), in_turn)
