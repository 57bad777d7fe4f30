"""The paper's figures from made-up traces, and its claims from the published ones."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from mlflow import MlflowClient

from tests.conftest import SHARED
from tests.data import make_traces
from tests.docs_blocks import ROOT
from zeus_flows.cli import main
from zeus_flows.core.job import Job
from zeus_flows.core.policy.base import Lesson
from zeus_flows.core.policy.zeus_paper import ZeusPaper
from zeus_flows.core.power import best_setting
from zeus_flows.experiments.paper.drawing import draw
from zeus_flows.experiments.paper.registry import FIGURES, LEFT_OUT, traces_for
from zeus_flows.experiments.paper.result import range_claim
from zeus_flows.experiments.paper.sweeps import Configuration, configurations, front
from zeus_flows.experiments.replay.replaying import replay, replay_job
from zeus_flows.recurrence.loop import Recurrence

PUBLISHED = SHARED / "traces"


def run(*args: str) -> str:
    result = CliRunner().invoke(main, ["paper", *args])
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize("number", list(FIGURES))
def test_every_figure_has_a_table_and_claims_on_made_up_traces(number: str) -> None:
    figure = FIGURES[number]
    result = figure.compute(traces_for(figure, make_traces.FOLDER, "v100"), 1, lambda _: None)
    assert result.rows
    assert all(len(row) == len(result.columns) for row in result.rows)
    drawn = {c for c in (result.chart.x, result.chart.y, result.chart.series, result.chart.panel) if c}
    assert drawn <= set(result.columns)
    assert result.claims


def test_without_a_figure_all_are_listed_with_what_is_left_out() -> None:
    listed = run()
    assert all(entry.title in listed for entry in FIGURES.values())
    assert all(why in listed for why in LEFT_OUT.values())


def test_a_figure_is_written_as_table_and_pictures(tmp_path: Path) -> None:
    document = json.loads(run("1", "--traces", str(make_traces.FOLDER), "--out", str(tmp_path), "--json"))
    (figure,) = document["figures"]
    with (tmp_path / "figure-1.csv").open(encoding="utf-8") as file:
        assert len(list(csv.DictReader(file))) == len(figure["rows"]) == 9
    assert (tmp_path / "figure-1.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "figure-1.svg").read_text(encoding="utf-8")


def test_a_figure_is_logged_to_mlflow_with_its_claims_and_files(sqlite_uri: str) -> None:
    run("11", "--traces", str(make_traces.FOLDER), "--tracking-uri", sqlite_uri)
    client = MlflowClient(sqlite_uri)
    experiment = client.get_experiment_by_name("zeus-paper-figures")
    assert experiment is not None
    (logged,) = client.search_runs([experiment.experiment_id])
    assert logged.data.params["figure"] == "11"
    claims = FIGURES["11"].compute(traces_for(FIGURES["11"], make_traces.FOLDER, "v100"), 1, lambda _: None).claims
    assert logged.data.metrics["zf.claims_met"] == sum(claim.met for claim in claims)
    assert all(claim.what in logged.data.tags["mlflow.note.content"] for claim in claims)
    kept = {file.path for file in client.list_artifacts(logged.info.run_id)}
    assert kept == {"figure-11.csv", "figure-11.png", "figure-11.svg"}


def test_a_walk_begins_at_the_default_and_the_map_has_every_configuration() -> None:
    figure = FIGURES["8"]
    (trace,) = traces_for(figure, make_traces.FOLDER, "v100")
    result = figure.compute([trace], 1, lambda _: None)
    rows = [dict(zip(result.columns, row, strict=True)) for row in result.rows if row[1] == "zeus-paper"]
    assert {(r["batch size"], r["limit (W)"]) for r in rows if not r["recurrence"]} == {
        (c.batch_size, c.power_limit_w) for c in configurations(trace)
    }
    assert min(float(r["regret"]) for r in rows if not r["recurrence"]) == 0
    assert next(r for r in rows if r["recurrence"] == 1)["batch size"] == trace.default_batch_size
    draw(result, title="walks").savefig(io.BytesIO())


def test_without_just_in_time_profiling_each_limit_takes_a_run_of_its_own() -> None:
    (trace,) = traces_for(FIGURES["8"], make_traces.FOLDER, "v100")
    job = replay_job(trace, "power")
    seen: list[Recurrence] = []
    replay(trace, job, recurrences=len(trace.power_limits_w) + 2, offline=True, watch=seen.append)
    limits = [done.attempts[-1][1].setting for done in seen]
    assert limits[: len(trace.power_limits_w)] == sorted(trace.power_limits_w, reverse=True)
    best = best_setting(job, trace.profiles[trace.default_batch_size], samples_per_epoch=trace.samples_per_epoch)
    assert set(limits[len(trace.power_limits_w) :]) == {best.setting}


def test_an_unpruned_batch_size_that_failed_is_run_again() -> None:
    job = Job(name="j", batch_sizes=(8, 16, 32), default_batch_size=16, max_epochs=10)
    failed = Lesson(recurrence=2, batch_size=8, epochs=5, converged=False, cost_j=9.0)
    begun = Lesson(recurrence=1, batch_size=16, epochs=5, converged=True, cost_j=5.0)
    for prunes in (True, False):
        policy = ZeusPaper(prunes=prunes)
        belief = policy.learn(job, policy.learn(job, policy.initial(job), begun), failed)
        assert (8 in belief.pruning.good) is not prunes


def test_models_are_not_compared_with_what_was_published() -> None:
    shown = run("1")
    assert "built-in models (simulated GPU)" in shown
    assert "not compared" in shown
    assert "NOT MET" not in shown


def test_an_unknown_figure_is_refused_with_those_there_are() -> None:
    result = CliRunner().invoke(main, ["paper", "99"])
    assert result.exit_code == 2
    assert "6.5" in result.stderr


def test_the_front_has_nothing_that_another_beats_in_both() -> None:
    known = [Configuration(8, 100, 3, 1), Configuration(16, 100, 2, 2), Configuration(32, 100, 4, 2)]
    assert [c.batch_size for c in front(known)] == [16, 8]


def test_a_claim_outside_its_tolerance_is_not_met() -> None:
    assert not range_claim("saved", (10, 20), [14, 20], tolerance=3).met


def test_the_page_names_every_figure() -> None:
    page = (ROOT / "docs/paper.md").read_text(encoding="utf-8")
    named = {n.strip() for line in page.splitlines() if line.startswith("| ") for n in line.split("|")[1].split(",")}
    assert set(FIGURES) <= named
    assert {n.strip() for key in LEFT_OUT for n in key.split(",")} <= named | {"23"}


@pytest.mark.slow
@pytest.mark.skipif(not PUBLISHED.is_dir(), reason="the published traces are not beside the repository")
def test_on_the_published_traces_four_claims_are_not_met_and_the_page_says_so() -> None:
    document = json.loads(run("all", "--traces", str(PUBLISHED), "--json"))
    claims = [claim for figure in document["figures"] for claim in figure["claims"]]
    missed = [claim["what"] for claim in claims if not claim["met"]]
    assert missed == [
        "Zeus benefits mostly from early stopping",
        "Grid's regret until convergence over Zeus's, worst case",
        "Zeus ends at the best configuration",
        "cifar100: profiling adds",
    ]
    assert (ROOT / "docs/paper.md").read_text(encoding="utf-8").count("**not met**") == len(missed)
