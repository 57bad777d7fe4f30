"""What is told of regret on several sources, held against small figures made by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import regret_sources
from regret_sources import Result, alarms, costs, goals, neighbours, ratios, run, summary, take_half, told, without_each
from regret_transfers import Outcome, in_common
from regret_transfers import regret as regret_on_second
from regret_transfers import summary as transfers_told
from scores import Goals, geometric
from sources import Cell

from zeus_flows.experiments.replay.replaying import replay, replay_job
from zeus_flows.experiments.replay.workloads import model_trace


def result(cell: str, policy: str, regret: float, **changes: object) -> Result:
    made = Result(
        source="made",
        cell=cell,
        workload=cell,
        policy=policy,
        regret=dict.fromkeys(regret_sources.REGRET_AT, (regret,)),
        cost={10: 1.1, 20: 1.0, 50: 0.9},
        best_epochs=10.0,
        default_cost=2.0,
        neighbours=0,
        completed=0,
        as_cheap=0,
        alarms=0,
        recurrences=200,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def test_a_ratio_is_that_of_mean_regrets_and_both_have_a_floor() -> None:
    two_seeds: dict[int, tuple[float, ...]] = dict.fromkeys(regret_sources.REGRET_AT, (1.0, 3.0))
    results = [
        *(result("a", "zeus-paper", 4.0), replace(result("a", "lookahead", 0.0), regret=two_seeds)),
        *(result("b", "zeus-paper", 0.001), result("b", "lookahead", -0.2)),
    ]
    assert ratios(results, "lookahead", 50) == {"made": {"a": 0.5, "b": 1.0}}


def test_the_worst_cell_and_the_shares_of_bad_cells_are_told() -> None:
    figures = told({"a": 0.25, "b": 1.05, "c": 1.2, "d": 1.0})
    assert figures["mean"] == pytest.approx((0.25 * 1.05 * 1.2) ** 0.25)
    assert (figures["worst"], figures["worst_cell"]) == (1.2, "c")
    assert (figures["above_1"], figures["above_1.1"], figures["cells"]) == (0.5, 0.25, 4)


def test_every_source_weighs_the_same_when_one_is_left_out() -> None:
    sources = {"a": told({"x": 0.1}), "b": told({"y": 0.4, "z": 0.4, "u": 0.4}), "c": told({"v": 0.9})}
    found = without_each(sources)
    assert found["c"] == {"mean": pytest.approx(0.2), "worst": 0.4}
    assert found["a"]["worst"] == 0.9
    assert without_each({"a": sources["a"]}) == {}, "nothing would be left"


def test_cost_over_default_is_told_apart_where_the_default_is_nearly_best() -> None:
    some = [result("a", "zeus", 1.0), result("b", "zeus", 1.0, default_cost=1.02, cost={10: 1.3, 20: 1.2, 50: 1.0})]
    found = costs(some)
    assert (found["cells"], found["nearly_best_cells"]) == (2, 1)
    assert found[10]["mean"] == pytest.approx(1.2)
    assert (found[10]["worst"], found[10]["worst_cell"]) == (1.3, "b")
    assert found[50]["nearly_best_mean"] == found[50]["nearly_best_worst"] == 1.0
    assert math.isnan(costs(some[:1])[50]["nearly_best_mean"])


def test_alarms_are_counted_for_short_and_long_jobs() -> None:
    some = [result("a", "zeus", 1.0, best_epochs=5.0, alarms=3), result("b", "zeus", 1.0, alarms=1)]
    assert alarms(some) == {"short": 1.5, "long": 0.5}
    assert math.isnan(alarms(some[:1])["long"])


def test_neighbours_are_counted_over_all_runs() -> None:
    some = [result("a", "zeus", 1.0, neighbours=10, completed=9, as_cheap=10), result("b", "zeus", 1.0)]
    assert neighbours(some) == {"runs": 10, "completed": 0.9, "as_cheap": 1.0}


def test_halves_share_no_workload_and_leave_none_out() -> None:
    trace = model_trace("cifar100", "v100")
    every = [Cell(f"{w}, {b}", w, trace) for w in "dbca" for b in ("smallest", "largest")]
    design, kept = ({c.workload for c in take_half(every, half)} for half in ("design", "kept"))
    assert (design, kept) == ({"a", "c"}, {"b", "d"})
    assert take_half(every, None) == every


def test_a_run_is_the_replay_of_its_seeds() -> None:
    trace = model_trace("squad", "v100")
    found = run("made", Cell("cell", "squad", trace), "lookahead", 2)
    job = replay_job(trace, "lookahead")
    for seed in range(2):
        assert found.regret[20][seed] == pytest.approx(replay(trace, job, recurrences=20, seed=seed).regret)
    assert found.recurrences == 400
    assert found.completed <= found.as_cheap <= found.neighbours


def test_goals_are_met_or_not_and_sources_without_any_have_none() -> None:
    results = [
        replace(result("a", policy, regret), source=source)
        for source in ("mlperf", "new")
        for policy, regret in {"zeus-paper": 10.0, "zeus": 10.0, "lookahead": 1.0, "thompson": 9.0}.items()
    ]
    goal = Goals()
    goals(summary(results), goal)
    met = {text: met for text, _, met in goal.lines}
    assert met["lookahead, mlperf, at 50, regret / zeus-paper: at most 0.3"]
    assert not met["thompson, mlperf, at 50, regret / zeus-paper: at most 0.3"]
    assert met["zeus, new, at 200, worst workload, regret / zeus-paper: at most 1.15"]
    assert not any("lookahead, new" in text for text in met)


def test_a_goal_that_could_not_be_measured_is_not_met() -> None:
    goal = Goals()
    goal.at_most("a", math.nan, 1.0)
    goal.at_least("b", math.nan, 1.0)
    assert [met for _, _, met in goal.lines] == [False, False]


def test_a_geometric_mean_of_nothing_is_no_number() -> None:
    assert math.isnan(geometric([]))
    assert geometric([0.5, 2.0]) == pytest.approx(1.0)


def test_a_transfer_has_the_batch_sizes_of_both_gpus() -> None:
    first, second = model_trace("squad", "v100"), model_trace("squad", "a40")
    fewer = replace(second, epochs={b: second.epochs[b] for b in (16, 24, 48)}, default_batch_size=48)
    pair = in_common(first, fewer)
    assert [t.batch_sizes for t in pair] == [(16, 24, 48)] * 2
    assert [t.default_batch_size for t in pair] == [24, 24], "32 is the first one's default, and only 24 is below it"


def test_a_job_that_knows_another_gpu_regrets_less_than_one_that_starts_anew() -> None:
    first, second = model_trace("movielens", "v100"), model_trace("movielens", "a40")
    job = replay_job(second, "lookahead")
    anew = regret_on_second(job, None, second, seed=0)
    assert anew == pytest.approx(replay(second, job, recurrences=50, seed=0).regret)
    assert regret_on_second(job, first, second, seed=0) < 0.5 * anew


def test_transfers_are_told_with_the_worst() -> None:
    found = transfers_told(
        [Outcome("traced", "a", "lookahead", 1.0, 2.0), Outcome("traced", "b", "lookahead", 0.0, 0.025)]
    )
    figures = found["lookahead"]["traced"]
    assert figures["mean"] == pytest.approx(0.5**0.5)
    assert (figures["worst"], figures["worst_transfer"], figures["above"]) == (1.0, "b", 0)
