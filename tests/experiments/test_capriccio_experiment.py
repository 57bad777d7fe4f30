"""An experiment: its file, its models, its curves, its recurrences in MLflow, and taking it up again."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from mlflow import MlflowClient

from tests.experiments.capriccio_builders import write_experiment
from tests.processes import Forked, fork_server, run_forked
from zeus_flows import killpoints as points
from zeus_flows.cli.capriccio import capriccio_command
from zeus_flows.errors import ConfigError, StoreError
from zeus_flows.experiments.capriccio import stages
from zeus_flows.experiments.capriccio.contenders import Experiment, open_experiment
from zeus_flows.experiments.capriccio.curves import CellTrainer, Curves, open_curves
from zeus_flows.experiments.capriccio.file import load_experiment, parse_experiment
from zeus_flows.experiments.capriccio.models import score
from zeus_flows.settings import read_settings

Records = dict[str, list[dict[str, Any]]]


pytestmark = pytest.mark.usefixtures("own_cache")


def opened(path: Path, uri: str) -> Experiment:
    return open_experiment(path, data=None, tracking_uri=uri, settings=read_settings())


def run_all(path: Path, uri: str) -> Experiment:
    experiment = opened(path, uri)
    for part in experiment.slices:
        experiment.run_slice(part)
    return experiment


def copied(uri: str, name: str) -> str:
    """Return another database like a test's empty one."""
    path = Path(uri.removeprefix("sqlite:///"))
    with sqlite3.connect(path) as empty:
        empty.execute("vacuum into ?", (str(path.with_name(name)),))
    return f"sqlite:///{path.with_name(name)}"


def records(uri: str, *jobs: str) -> Records:
    """Return every job's decisions and observations, by attempt; the ids of runs and processes left out."""
    client, found = MlflowClient(tracking_uri=uri), {}
    for job in jobs:
        experiment = client.get_experiment_by_name(job)
        assert experiment is not None
        runs = client.search_runs([experiment.experiment_id], "tags.`zf.kind` = 'attempt'", max_results=1000)
        assert {r.info.status for r in runs} == {"FINISHED"}
        both = [(r.data.params["zf.decision"], r.data.params["zf.observation"]) for r in runs]
        read = [{"decision": json.loads(d), "observation": json.loads(o)} for d, o in both]
        found[job] = sorted(read, key=lambda r: (r["decision"]["recurrence"], r["decision"]["attempt"]))
    return found


def test_an_experiment_file_that_is_wrong_names_the_line() -> None:
    text = Path(__file__).parents[2].joinpath("deployments/experiments/tweets.yaml").read_text()
    for old, new, expected in (
        ("  kind: sentiment140", "  kind: sentiment", r"x.yaml:\d+: data.kind"),
        ("  fraction: 0.3125", "  fraction: 0.3125\n  rows: 3", r"x.yaml:\d+: slices: .*exactly one of"),
        ("name: capriccio-tweets", "name: a/b", r"x.yaml:\d+: name"),
        ("  max_epochs: 24", "  max_epochs: none", r"x.yaml:\d+: job.max_epochs"),
        ("metric: log_loss_ratio", "metric: f1", r"x.yaml:\d+: job.target.metric must be one of accuracy"),
        ("{policy: thompson}", "{policy: tomson}", r"x.yaml:\d+: contenders.drift-reset.policy.*did you mean"),
        ("{policy: zeus, window: 10}", "{policy: zeus, window: 1}", r"x.yaml:\d+: contenders.window-10.window"),
        (
            "  device: simulated-v100",
            "  device: simulated-v100\n  train: {}",
            r"x.yaml:\d+: train is the experiment's own",
        ),
        ("science: {", "science: [", r"x.yaml:\d+: not valid YAML"),
    ):
        assert old in text
        with pytest.raises(ConfigError, match=expected):
            parse_experiment(text.replace(old, new), source="x.yaml")


@pytest.mark.parametrize("name", ["tweets", "flights"])
def test_the_files_that_come_with_it_are_right(name: str) -> None:
    file = load_experiment(Path(__file__).parents[2] / "deployments" / "experiments" / f"{name}.yaml")

    assert list(file.contenders) == ["window-10", "no-window", "drift-reset", "no-reset", "default", "power"]
    assert file.job_file("window-10").core().window == 10
    assert file.job_file("no-window").core().window is None


def test_the_command_ends_with_a_sentence_and_exit_code_2(tmp_path: Path) -> None:
    from zeus_flows.errors import ZeusFlowsError

    result = CliRunner().invoke(capriccio_command, [str(tmp_path / "none.yaml")])

    assert isinstance(result.exception, ZeusFlowsError)
    assert result.exception.exit_code == 2
    assert not list(tmp_path.iterdir())


def test_balanced_accuracy_of_a_constant_guess_is_a_half_however_labels_are_balanced() -> None:
    labels = torch.tensor([1.0] * 9 + [0.0])

    found = score(torch.ones(10), labels, 1.0)

    assert found.accuracy == pytest.approx(0.9)
    assert found.balanced_accuracy == pytest.approx(0.5)


def test_the_same_cell_trains_the_same_curve(tmp_path: Path) -> None:
    file = load_experiment(write_experiment(tmp_path))
    trainer = CellTrainer(file, file.data.read(keep_text=False))
    cell = trainer.cells()[0]

    assert trainer.curve(cell) == trainer.curve(cell)
    assert trainer.curve(cell)[-1].balanced_accuracy >= 0.85


def test_a_text_classifier_learns_which_words_are_which(tmp_path: Path) -> None:
    rows = [
        f"2026-01-{1 + i // 100:02d},{i % 2},{'good lovely happy' if i % 2 else 'bad awful sad'} day {i}"
        for i in range(600)
    ]
    (tmp_path / "rows.csv").write_text("\n".join(["when,label,text", *rows]))
    data = {"kind": "csv", "path": "rows.csv", "time": "when", "label": "label", "text": "text"}
    path = write_experiment(tmp_path, data=data, model={"kind": "bag", "buckets": 64}, slices={"days": 3})

    file = load_experiment(path)
    trainer = CellTrainer(file, file.data.read(keep_text=False))

    assert trainer.curve(trainer.cells()[0])[-1].balanced_accuracy >= 0.85


def test_a_model_for_other_features_is_an_error(tmp_path: Path) -> None:
    file = load_experiment(write_experiment(tmp_path, model={"kind": "bag"}))
    trainer = CellTrainer(file, file.data.read(keep_text=False))

    with pytest.raises(ConfigError, match=r"bag does not fit rows\.csv, which has columns"):
        trainer.curve(trainer.cells()[0])


def test_curves_outlive_the_process_and_a_line_cut_short_is_trained_again(tmp_path: Path) -> None:
    file = load_experiment(write_experiment(tmp_path))
    dataset = file.data.read(keep_text=False)
    first = Curves(file, dataset, tmp_path / "cache")
    cells = first.trainer.cells()[:2]
    kept = [first.get(cell) for cell in cells]
    text = first.path.read_text()
    first.path.write_text(text[: len(text) - 20])

    again = Curves(file, dataset, tmp_path / "cache")

    assert [again.get(cell) for cell in cells] == kept


def test_contenders_that_choose_alike_see_the_same_training(tmp_path: Path, sqlite_uri: str) -> None:
    experiment = opened(write_experiment(tmp_path), sqlite_uri)

    outcomes = experiment.run_slice(experiment.slices[0])

    assert outcomes["window-4"] == outcomes["drift-reset"]  # the first run is the default batch size for both
    scores = outcomes["window-4"].scores
    assert scores is not None
    assert scores.balanced_accuracy >= 0.85


def test_slices_are_runs_under_the_experiment_s_run_with_their_dataset(tmp_path: Path, sqlite_uri: str) -> None:
    experiment = opened(write_experiment(tmp_path), sqlite_uri)
    for part in experiment.slices[:2]:
        experiment.run_slice(part)

    client = MlflowClient(tracking_uri=sqlite_uri)
    runs = client.search_runs([experiment.tracking.experiment_id], "tags.`zf.kind` = 'slice'")
    run: Any = client.get_run(runs[0].info.run_id)

    assert len(runs) == 2
    assert run.info.status == "FINISHED"
    assert run.data.tags["mlflow.parentRunId"] == experiment.tracking.run_id
    dataset = run.inputs.dataset_inputs[0].dataset
    assert json.loads(dataset.profile)["num_rows"] == experiment.slices[1].rows
    assert {"zf.cost_j/window-4", "zf.balanced_accuracy/drift-reset", "zf.majority_accuracy"} <= set(run.data.metrics)
    parent: Any = client.get_run(experiment.tracking.run_id)
    assert json.loads(parent.inputs.dataset_inputs[0].dataset.profile)["num_rows"] == 600
    series = client.get_metric_history(experiment.tracking.run_id, "zf.cost_j/window-4")
    assert [point.step for point in series] == [1, 2]
    attempts = client.get_experiment_by_name("small.window-4")
    assert attempts is not None
    found: list[Any] = list(client.search_runs([attempts.experiment_id], "tags.`zf.kind` = 'attempt'"))
    for attempt in found:
        assert not attempt.inputs.dataset_inputs  # they would slow every search


def test_an_experiment_that_has_changed_must_have_another_name(tmp_path: Path, sqlite_uri: str) -> None:
    opened(write_experiment(tmp_path), sqlite_uri)
    open_curves.cache_clear()

    with pytest.raises(ConfigError, match="small was begun with other data, slices, model or job"):
        opened(write_experiment(tmp_path, slices={"days": 4}), sqlite_uri)
    open_curves.cache_clear()
    with pytest.raises(ConfigError, match="another policy for window-4"):
        opened(write_experiment(tmp_path, contenders={"window-4": {"policy": "default"}}), sqlite_uri)


def test_another_contender_may_join_later(tmp_path: Path, sqlite_uri: str) -> None:
    contenders = {"window-4": {"policy": "zeus", "window": 4}}
    first = opened(write_experiment(tmp_path, contenders=contenders), sqlite_uri)
    first.run_slice(first.slices[0])
    open_curves.cache_clear()

    second = opened(write_experiment(tmp_path, contenders=contenders | {"power": {"policy": "power"}}), sqlite_uri)
    outcomes = second.run_slice(second.slices[0])

    assert set(outcomes) == {"window-4", "power"}


def test_a_job_that_somebody_else_has_run_is_not_taken_up(tmp_path: Path, sqlite_uri: str) -> None:
    experiment = opened(write_experiment(tmp_path), sqlite_uri)
    experiment.contenders[0]._ledger.begin()

    with pytest.raises(StoreError, match="somebody else ran this job"):
        experiment.run_slice(experiment.slices[0])


def run_until_killed(path: Path, uri: str, point: str, *, times: int) -> None:
    """Run an experiment in a process that is killed when it is at a point for so many times.

    It is not forked from this one: torch has threads here, and could not train there.
    """
    child = fork_server().Process(target=_be_killed, args=(path, uri, point, times, os.environ["ZEUS_FLOWS_CACHE_DIR"]))
    child.start()
    child.join(timeout=300)
    assert child.exitcode == -signal.SIGKILL


def _be_killed(path: Path, uri: str, point: str, times: int, cache: str) -> None:
    os.environ["ZEUS_FLOWS_CACHE_DIR"] = cache
    seen = []

    def kill(reached: str) -> None:
        seen.append(reached)
        if seen.count(point) == times:
            os.kill(os.getpid(), signal.SIGKILL)

    points.listen(kill)
    run_all(path, uri)


class Uninterrupted:
    """Experiments that nobody interrupts, each run once for all tests that compare with it."""

    def __init__(self, database: Path, folders: pytest.TempPathFactory) -> None:
        self._database, self._folders = database, folders
        self._uris: dict[str, str] = {}

    def uri(self, **changes: Any) -> str:
        """Return where the records of an experiment with such changes are."""
        name = json.dumps(changes, sort_keys=True)
        if name not in self._uris:
            folder = self._folders.mktemp("uninterrupted")
            shutil.copy(self._database, folder / "mlflow.db")
            self._uris[name] = f"sqlite:///{folder / 'mlflow.db'}"
            run_all(write_experiment(folder, **changes), self._uris[name])
        return self._uris[name]


@pytest.fixture(scope="module")
def uninterrupted(_migrated_database: Path, tmp_path_factory: pytest.TempPathFactory) -> Uninterrupted:
    return Uninterrupted(_migrated_database, tmp_path_factory)


@pytest.mark.slow
@pytest.mark.parametrize(
    "point",
    [
        "after-claim",
        "after-create-run",
        "after-link-decision",
        "before-observation",
        "after-observation",
        "after-series",
    ],
)
def test_killed_at_any_point_and_taken_up_the_records_are_those_of_an_uninterrupted_run(
    tmp_path: Path, sqlite_uri: str, point: str, uninterrupted: Uninterrupted
) -> None:
    changes = {"slices": {"days": 5, "most": 3}}
    path, whole = write_experiment(tmp_path, **changes), uninterrupted.uri(**changes)

    run_until_killed(path, sqlite_uri, point, times=4)
    experiment = run_all(path, sqlite_uri)

    jobs = ("small.window-4", "small.drift-reset")
    assert records(sqlite_uri, *jobs) == records(whole, *jobs)
    assert experiment.tracking.written == 3


def test_interrupted_between_two_slices_it_goes_on_with_the_next(tmp_path: Path, sqlite_uri: str) -> None:
    path = write_experiment(tmp_path, slices={"days": 5, "most": 2})
    first = opened(path, sqlite_uri)
    first.run_slice(first.slices[0])

    second = opened(path, sqlite_uri)

    assert [contender.done for contender in second.contenders] == [1, 1]
    assert second.tracking.written == 1


CHILD = """
import sys
from pathlib import Path
from zeus_flows.experiments.capriccio.contenders import open_experiment
from zeus_flows.settings import read_settings
experiment = open_experiment(Path(sys.argv[1]), data=None, tracking_uri=sys.argv[2], settings=read_settings())
for part in experiment.slices:
    experiment.run_slice(part)
"""


def slices_written(uri: str) -> int:
    try:
        with sqlite3.connect(uri.removeprefix("sqlite:///"), timeout=5) as database:
            return int(database.execute("select count(*) from tags where key = 'zf.slice'").fetchone()[0])
    except sqlite3.OperationalError:
        return 0


@pytest.mark.slow
def test_kill_minus_9_in_the_middle_and_resume_gives_the_same_records(tmp_path: Path, sqlite_uri: str) -> None:
    path = write_experiment(tmp_path)
    whole = copied(sqlite_uri, "whole.db")
    child = Forked(CHILD, str(path), sqlite_uri)
    give_up = time.monotonic() + 60
    while slices_written(sqlite_uri) < 3 and time.monotonic() < give_up:
        time.sleep(0.02)
    child.kill()
    assert child.wait() == -signal.SIGKILL
    before = slices_written(sqlite_uri)
    for uri in (sqlite_uri, whole):
        done = run_forked(CHILD, str(path), uri, timeout=120)
        assert done.returncode == 0, done.stderr

    assert 3 <= before < 6
    jobs = ("small.window-4", "small.drift-reset")
    assert records(sqlite_uri, *jobs) == records(whole, *jobs)
    assert slices_written(sqlite_uri) == 6


@pytest.mark.slow
def test_the_report_says_what_the_data_can_and_cannot_show(tmp_path: Path, sqlite_uri: str) -> None:
    experiment = opened(write_experiment(tmp_path, slices={"days": 5, "most": 4}), sqlite_uri)
    for part in experiment.slices:
        experiment.run_slice(part)
    for cell in experiment.curves.trainer.cells():
        experiment.curves.get(cell)
    placebo = Curves(experiment.file, experiment.curves.trainer.dataset, tmp_path / "cache", placebo=True)

    science = stages.examine(experiment, placebo)
    report = stages.report(experiment, science, tmp_path / "out")

    page = (tmp_path / "out" / "report.html").read_text()
    for words in ("Simulated energy", "can and cannot show", "balanced", "false alarm", "time shuffled", "<svg"):
        assert words in page
    assert {p.name for p in report.files} >= {
        *("report.html", "report.md", "figure-10-window-4.svg", "figure-10-window-4.png", "regret.svg", "arms.png"),
    }
    assert all(np.isfinite(value) for value in report.values.values())
    client = MlflowClient(tracking_uri=sqlite_uri)
    logged = {artifact.path for artifact in client.list_artifacts(experiment.tracking.run_id)}
    assert {"report.html", "figure-10-drift-reset.svg", "figure-10-drift-reset.png"} <= logged
    assert client.get_run(experiment.tracking.run_id).info.status == "FINISHED"
    again = stages.report(experiment, science, tmp_path / "again")
    assert again.files[0].read_text() == page


@pytest.mark.slow
@pytest.mark.usefixtures("prefect_server")
def test_the_flow_runs_to_its_report_and_shows_it_in_prefect(
    tmp_path: Path, sqlite_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from prefect.client.orchestration import get_client

    from zeus_flows.orchestration.capriccio_flow import capriccio

    monkeypatch.chdir(tmp_path)
    path = write_experiment(tmp_path, slices={"days": 5, "most": 3})

    summary = capriccio(str(path), tracking_uri=sqlite_uri)

    assert summary.slices == 3
    assert Path(summary.report) == tmp_path / "small-report" / "report.html"
    assert set(summary.values) >= {"zf.regret/window-4", "zf.worth_of_adapting", "zf.false_alarms_per_100"}
    with get_client(sync_client=True) as client:
        shown = {a.key: a for a in client.read_artifacts()}
    assert "data:image/svg+xml;base64," in str(shown["small-report"].data)
    assert "small-mlflow-run" in shown


def test_a_killed_fill_is_taken_up_where_it_stopped(tmp_path: Path) -> None:
    file = load_experiment(write_experiment(tmp_path, slices={"days": 5, "most": 1}))
    curves = Curves(file, file.data.read(keep_text=False), tmp_path / "cache")
    told: list[tuple[int, int]] = []
    cells = curves.trainer.cells()
    for cell in cells[:-1]:
        curves.get(cell)

    curves.fill(lambda done, total: told.append((done, total)))

    assert told == [(len(cells) - 1, len(cells)), (len(cells), len(cells))]


@pytest.mark.slow
def test_a_gate_skips_slices_on_which_the_newest_model_is_still_good_enough(tmp_path: Path, sqlite_uri: str) -> None:
    contenders = {"drift-reset": {"policy": "thompson"}, "gated": {"policy": "thompson", "gate": True}}
    path = write_experiment(tmp_path, contenders=contenders, slices={"days": 5, "most": 3})

    experiment = run_all(path, sqlite_uri)
    outcomes = experiment.outcomes()
    report = stages.report(experiment, stages.examine(experiment, None), tmp_path / "out")

    assert set(outcomes["drift-reset"]) == {1, 2, 3}  # off by default
    skipped = {1, 2, 3} - set(outcomes["gated"])
    assert skipped
    client = MlflowClient(tracking_uri=sqlite_uri)
    job = client.get_experiment_by_name("small.gated")
    assert job is not None
    runs = client.search_runs([job.experiment_id], "tags.`zf.kind` = 'gate'")
    assert {int(r.data.tags["zf.recurrence"]) for r in runs if r.data.tags["zf.gate"] == "skip"} == skipped
    assert all("zf.gate/balanced_accuracy" in r.data.metrics for r in runs)
    assert "zf.regret/drift-reset" in report.values
    assert "zf.regret/gated" not in report.values
    again = opened(path, sqlite_uri)
    assert [contender.done for contender in again.contenders] == [3, 3]


def checks(uri: str) -> list[tuple[str, str, str, float]]:
    """Return what the gate found, check by check."""
    client = MlflowClient(tracking_uri=uri)
    job = client.get_experiment_by_name("small.gated")
    assert job is not None
    runs = client.search_runs([job.experiment_id], "tags.`zf.kind` = 'gate' and attributes.status = 'FINISHED'")
    names = ("zf.recurrence", "zf.gate", "zf.trained_in")
    found = [(*(r.data.tags[name] for name in names), r.data.metrics["zf.gate/value"]) for r in runs]
    return sorted(found)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("point", ["after-create-gate", "after-ask", "after-check", "after-gate", "after-train"])
def test_killed_around_its_gate_and_taken_up_a_contender_finds_the_same(
    tmp_path: Path, sqlite_uri: str, point: str, uninterrupted: Uninterrupted
) -> None:
    changes = {"contenders": {"gated": {"policy": "thompson", "gate": True}}, "slices": {"days": 5, "most": 4}}
    path, whole = write_experiment(tmp_path, **changes), uninterrupted.uri(**changes)

    run_until_killed(path, sqlite_uri, point, times=2)
    run_all(path, sqlite_uri)

    assert records(sqlite_uri, "small.gated") == records(whole, "small.gated")
    assert checks(sqlite_uri) == checks(whole)
    assert {verdict for _, verdict, _, _ in checks(whole)} == {"skip", "retrain"}


def test_a_gate_on_a_real_gpu_is_refused(tmp_path: Path) -> None:
    path = write_experiment(tmp_path, contenders={"gated": {"policy": "thompson", "gate": True}})
    path.write_text(path.read_text().replace("simulated-v100", "auto"))

    with pytest.raises(ConfigError, match=r"experiment\.yaml:\d+: contenders\.gated\.gate needs a simulated GPU"):
        load_experiment(path)
