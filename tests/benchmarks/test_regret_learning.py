"""A prior learnt from other jobs, as the benchmark has it: what is learnt, from whom, and what is told of it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import regret_learning
from regret_learning import Learnt, Taught, believing, goals, learn, measure, regret, summary, taught
from scores import Goals
from sources import Cell

from zeus_flows.core import laws
from zeus_flows.core.belief import NOISE, EpochsBelief
from zeus_flows.core.job import Job
from zeus_flows.experiments.replay.replaying import replay, replay_job
from zeus_flows.experiments.replay.workloads import model_trace

ARMS = (16, 32, 64, 128)


def job_with(workload: str, *epochs: int, runs: Sequence[float] = (1.0, 1.0)) -> Taught:
    """A job from the largest batch size, each with these epochs times those factors."""
    job = Job(workload, ARMS, ARMS[-1], 1000)
    believed = EpochsBelief.empty(ARMS, ARMS[-1])
    for batch_size, needed in zip(ARMS, epochs, strict=True):
        for factor in runs:
            believed = believed.complete(job, batch_size, needed * factor)
    return Taught("made", workload, believed)


def critical(learnt: Learnt) -> float:
    """Where the critical batch size is expected, in octaves from b0."""
    return float(learnt.laws @ np.array(laws.CRITICAL))


def plain_laws() -> list[float]:
    """How likely each law is before any run."""
    likely: list[float] = EpochsBelief.empty(ARMS, ARMS[-1]).posterior.laws.tolist()
    return likely


def test_laws_are_learnt_from_how_epochs_grow() -> None:
    flat = learn([job_with("a", 20, 20, 20, 20), job_with("b", 31, 30, 31, 30)])
    steep = learn([job_with("a", 10, 20, 40, 80), job_with("b", 8, 15, 30, 60)])
    assert flat.laws.sum() == pytest.approx(1.0)
    assert critical(steep) < sum(laws.CRITICAL) / len(laws.CRITICAL) < critical(flat)


def test_noise_is_learnt_from_how_runs_vary() -> None:
    calm = learn([job_with("a", 20, 20, 20, 20)])
    wild = learn([job_with("a", 20, 20, 20, 20, runs=(0.7, 1.4))])
    assert calm.noise < NOISE < wild.noise


def test_a_workload_counts_once_however_many_jobs_it_has() -> None:
    flat, steep = job_with("a", 20, 20, 20, 20), job_with("b", 10, 20, 40, 80, runs=(0.7, 1.4))
    once, often = learn([flat, steep]), learn([flat, flat, flat, steep])
    assert often.laws == pytest.approx(once.laws)
    assert often.noise == pytest.approx(once.noise)


def test_jobs_begin_with_what_was_learnt_and_only_while_it_is_said() -> None:
    before = plain_laws()
    learnt = learn([job_with("a", 10, 20, 40, 80)])
    with believing(learnt):
        assert plain_laws() == pytest.approx(learnt.laws.tolist())
        assert EpochsBelief.empty(ARMS, ARMS[-1]).posterior.noise[0] == pytest.approx(learnt.noise**2)
    assert plain_laws() == before
    assert EpochsBelief.empty(ARMS, ARMS[-1]).posterior.noise[0] == pytest.approx(NOISE**2)


def test_regret_is_that_of_the_first_ten_recurrences() -> None:
    trace = model_trace("movielens", "v100")
    job = replay_job(trace, "lookahead")
    mean = sum(replay(trace, job, recurrences=10, seed=seed).regret for seed in range(2)) / 2
    assert regret(Cell("cell", "movielens, v100", trace), "lookahead", 2) == pytest.approx(mean)


def test_nothing_of_a_workload_is_learnt_on_any_gpu_where_it_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {
        "one": [Cell(n, n, model_trace(*n.split(", "))) for n in ("squad, v100", "squad, a40", "cifar100, v100")],
        "two": [Cell(n, n, model_trace(*n.split(", "))) for n in ("movielens, v100",)],
    }
    learnt_from: list[set[str]] = []

    def spied(jobs: Sequence[Taught]) -> Learnt:
        learnt_from.append({job.workload for job in jobs})
        return learn(jobs)

    monkeypatch.setattr(regret_learning, "learn", spied)
    measured = measure(found, seeds=1, processes=1)
    assert learnt_from == [
        *({"squad", "movielens"}, {"squad"}, {"cifar100"}),
        *({"cifar100", "movielens"}, {"cifar100"}, {"squad"}),
        *({"squad", "cifar100"}, {"movielens"}),
    ], "all others, those of the same source where there are any, and its own"
    assert set(measured["thompson"]["all others"]["one"]) == {"squad", "cifar100"}
    assert "two" not in measured["thompson"]["same source"]


def test_a_job_that_is_learnt_from_has_run_thirty_recurrences() -> None:
    job = taught("one", Cell("cell", "squad, v100", model_trace("squad", "v100")))
    assert (job.workload, job.belief.completions) == ("squad", 30)


def test_the_worst_workload_is_told_and_a_goal_is_met_or_not() -> None:
    ratios = {"all others": {"one": {"a": 0.5, "b": 1.25}, "two": {"c": 0.8}}, "same source": {}}
    found = summary({"thompson": ratios})
    figures = found["thompson"]["all others"]
    assert figures["mean"] == pytest.approx(0.5 ** (1 / 3))
    assert (figures["worst"], figures["worst_workload"], figures["above"]) == (1.25, "b", 1)
    assert figures["sources"] == {"one": pytest.approx(0.625**0.5), "two": pytest.approx(0.8)}
    goal = Goals()
    goals(found, goal)
    assert [met for _, _, met in goal.lines] == [True, False]
