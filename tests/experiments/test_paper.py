"""The paper's figures from made-up traces, and its claims from the published ones."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.conftest import SHARED
from tests.data import make_traces
from tests.docs_blocks import ROOT
from zeus_flows.cli import main
from zeus_flows.experiments.paper.registry import FIGURES, LEFT_OUT, traces_for
from zeus_flows.experiments.paper.result import range_claim
from zeus_flows.experiments.paper.sweeps import Configuration, front

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
def test_on_the_published_traces_two_claims_are_not_met_and_the_page_says_so() -> None:
    document = json.loads(run("all", "--traces", str(PUBLISHED), "--json"))
    claims = [claim for figure in document["figures"] for claim in figure["claims"]]
    missed = [claim["what"] for claim in claims if not claim["met"]]
    assert missed == ["Grid's regret until convergence over Zeus's, worst case", "cifar100: profiling adds"]
    assert (ROOT / "docs/paper.md").read_text(encoding="utf-8").count("**not met**") == len(missed)
