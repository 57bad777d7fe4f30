"""The model that an attempt keeps: what may be kept, when it counts, and that it survives its process."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.builders import decision
from tests.processes import fork_server
from tests.training.frameworks import LinearModule, Task, bert_trainer, fit
from tests.training.model_rig import keep_twice_and_die
from tests.training.rig import SAMPLES, Loader, job_file, v100
from zeus_flows import ZeusLightningCallback, ZeusTrainerCallback
from zeus_flows.core.records import Outcome
from zeus_flows.errors import ConfigError, TrainingError
from zeus_flows.job_file import JobFile, parse_job
from zeus_flows.settings import read_settings
from zeus_flows.training.keeping import Keeper, Staging, open_model, stage
from zeus_flows.training.session import Session
from zeus_flows.training.trainer import LocalTrainer


def build() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))


def kept(folder: Path) -> list[Path]:
    """Return what waits below a state directory to be sent."""
    return [path for _, path, _ in Staging(folder / "models").take("ledger")]


def keeper(folder: Path) -> Keeper:
    return Keeper(folder / "models", lambda: "ledger", "attempt")


# -- what may be kept ------------------------------------------------------------------------------------------------


def test_a_module_comes_back_as_it_was_and_nothing_is_pickled(tmp_path: Path) -> None:
    model, again = build(), build()
    stage(model, {"width": 8}, tmp_path / "model")
    found = open_model(str(tmp_path / "model"))
    found.load_into(again)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert found.about == {"width": 8}
    assert sorted(file.name for file in found.folder.iterdir()) == ["about.json", "model.safetensors"]


def test_weights_that_are_shared_are_kept_too(tmp_path: Path) -> None:
    model, again = build(), build()
    for module in (model, again):
        module.register_parameter("tied", module[0].weight)  # type: ignore[index]
    stage(model, {}, tmp_path / "model")
    open_model(str(tmp_path / "model")).load_into(again)
    assert torch.equal(again.tied, model[0].weight)  # type: ignore[index,arg-type]


def test_weights_by_name_may_be_kept(tmp_path: Path) -> None:
    stage({"a": torch.arange(3.0)}, {}, tmp_path / "model")
    assert torch.equal(open_model(str(tmp_path / "model")).weights()["a"], torch.arange(3.0))


def test_a_file_and_a_folder_are_kept_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "out" / "deep").mkdir(parents=True)
    (tmp_path / "out" / "deep" / "net.onnx").write_bytes(b"net")
    stage(tmp_path / "out", {}, tmp_path / "folder")
    stage(str(tmp_path / "out" / "deep" / "net.onnx"), {"opset": 17}, tmp_path / "file")
    assert (tmp_path / "folder" / "deep" / "net.onnx").read_bytes() == b"net"
    assert sorted(file.name for file in (tmp_path / "file").iterdir()) == ["about.json", "net.onnx"]


@pytest.mark.parametrize(
    ("model", "about", "says"),
    [
        (object(), {}, "takes a torch module, its weights by name, or a path, not a object"),
        ({"a": 1}, {}, "not a dict"),
        ("nowhere.bin", {}, "there is no file or folder nowhere.bin"),
        ({"a": torch.zeros(1)}, {"made": object()}, "takes numbers, texts, lists and dicts"),
        ({"a": torch.zeros(1)}, {"made": float("nan")}, "takes numbers, texts, lists and dicts"),
    ],
)
def test_what_cannot_be_kept_is_refused_and_the_model_before_stays(
    model: object, about: dict[str, Any], says: str, tmp_path: Path
) -> None:
    stage({"a": torch.zeros(1)}, {}, tmp_path / "model")
    with pytest.raises(TrainingError, match=says):
        stage(model, about, tmp_path / "model")
    assert [file.name for file in tmp_path.iterdir()] == ["model"]
    assert open_model(str(tmp_path / "model")).weights()


# -- when it counts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("levels", "counts"), [((0.5, 0.95), True), ((0.5,) * 10, False), ((0.5, float("nan")), False)]
)
def test_only_an_attempt_that_reached_the_target_keeps_its_newest_model(
    levels: tuple[float, ...], counts: bool, tmp_path: Path
) -> None:
    own = keeper(tmp_path)
    with v100(tmp_path) as gpus:
        session = Session(job_file(), job_file().core(), decision(1), gpus, keeper=own)
        for epoch in session.epochs():
            for _ in session.steps(Loader(SAMPLES, 64)):
                pass
            session.keep({"a": torch.zeros(1)}, epoch=epoch)
            session.report_metric(levels[epoch - 1])
        session.keep({"a": torch.ones(1)}, epoch=99)
        own.close(converged=session.observation().converged)
    found = kept(tmp_path)
    assert [open_model(str(folder)).about["epoch"] for folder in found] == ([99] if counts else [])
    assert len(list((tmp_path / "models").iterdir())) == len(found)


@pytest.mark.slow
def test_what_a_killed_process_kept_goes_unless_its_attempt_had_reached_the_target(tmp_path: Path) -> None:
    process = fork_server().Process(target=keep_twice_and_die, args=(tmp_path,))
    process.start()
    process.join(timeout=120)
    assert process.exitcode == -signal.SIGKILL
    assert len(list((tmp_path / "models").iterdir())) == 2
    assert len(kept(tmp_path)) == 1
    assert len(list((tmp_path / "models").iterdir())) == 1


def test_a_model_that_is_still_being_kept_is_left_alone(tmp_path: Path) -> None:
    own = keeper(tmp_path)
    own.keep({"a": torch.zeros(1)}, {})
    assert kept(tmp_path) == []
    assert own.holds
    own.close(converged=True)
    assert len(kept(tmp_path)) == 1


def test_outside_of_a_job_nothing_is_kept_and_that_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with v100(tmp_path) as gpus:
        Session(job_file(), job_file().core(), decision(1), gpus).keep({"a": torch.zeros(1)})
    assert "nothing is kept" in caplog.text


# -- commands --------------------------------------------------------------------------------------------------------

SCRIPT = """
import pathlib, sys
for epoch in range(3):
    if {writes}:
        pathlib.Path(sys.argv[1]).write_text(f"epoch {{epoch}}")
    print(f"acc={{0.6 + 0.2 * epoch:.2f}}")
"""


def command(folder: Path, *, writes: bool) -> JobFile:
    (folder / "train.py").write_text(SCRIPT.format(writes=writes))
    model = str(folder / "model.bin")
    return job_file(
        train={
            "command": ["python", "train.py", model, "{batch_size}"],
            "metric": {"pattern": "acc=([0-9.]+)"},
            "folder": str(folder),
            "grace_seconds": 1,
        },
        model={"name": "ranker", "path": model},
        device="simulated-v100",
    )


def staged_files() -> list[str]:
    root = read_settings().state_dir / "models"
    return [file.read_text() for file in root.glob("*/model/*")]


@pytest.mark.slow
@pytest.mark.parametrize(("writes", "before"), [(True, False), (False, False), (False, True)])
def test_a_command_keeps_what_it_wrote_in_this_attempt(
    writes: bool, before: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if before:
        (tmp_path / "model.bin").write_text("of another day")
        time.sleep(0.05)
    job = command(tmp_path, writes=writes)
    observed = LocalTrainer(job, read_settings()).train(job.core(), decision(1), None, lambda _: None)
    assert observed.outcome is Outcome.CONVERGED
    assert staged_files() == (["epoch 2"] if writes else [])
    assert ("no model was kept" in caplog.text) is not writes
    assert ("let it save before it prints the metric" in caplog.text) is not writes


# -- job files -------------------------------------------------------------------------------------------------------

JOB = """\
name: nightly
train: {function: my.module:train}
target: {metric: accuracy, value: 0.9, better: higher}
batch_sizes: [32, 64]
default_batch_size: 64
max_epochs: 10
"""


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("{name: '../x'}", "letters, digits"),
        ("{name: ranker, promote: {margin: -1}}", "greater than or equal to 0"),
        ("{name: ranker, promote: {margin: 0.01}}", "needs a function that evaluates models"),
        ("{name: ranker, path: out}", "path is for a command"),
        ("{name: ranker, promote: {function: 'a:b', guards: {accuracy: {better: higher}}}}", "guards are for other"),
        ("{name: ranker, promote: {function: 'a:b', guards: {recall: {margin: 1}}}}", "better is missing"),
        ("{nam: ranker}", "did you mean 'name'"),
    ],
)
def test_a_wrong_model_section_is_refused_with_what_would_be_right(model: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_job(f"{JOB}model: {model}\n")


# -- callbacks -------------------------------------------------------------------------------------------------------


def by_trainer(session: Any, *, folder: str) -> None:
    """Keep what Hugging Face's Trainer saves."""
    task = Task(session)
    trainer = bert_trainer(task, folder, ZeusTrainerCallback())
    trainer.train()
    trainer.save_model(f"{folder}/saved")
    session.keep(f"{folder}/saved", labels=2)


def by_lightning(session: Any, *, folder: str) -> None:
    """Keep the weights of a LightningModule."""
    task = Task(session)
    module = LinearModule(task)
    fit(task, ZeusLightningCallback(), module=module)
    session.keep(module, labels=2)


@pytest.mark.parametrize(("form", "weights"), [("by_trainer", "classifier.weight"), ("by_lightning", "layer.weight")])
def test_what_a_framework_trains_under_a_callback_is_kept(form: str, weights: str, tmp_path: Path) -> None:
    train = {"function": f"tests.training.test_keeping:{form}", "parameters": {"folder": str(tmp_path)}}
    target = {"metric": "progress", "value": 1.0, "better": "higher"}
    job = job_file(train=train, target=target, device="simulated-v100")
    observed = LocalTrainer(job, read_settings()).train(job.core(), decision(1), None, lambda _: None)
    assert observed.outcome is Outcome.CONVERGED
    (folder,) = (read_settings().state_dir / "models").glob("*/model")
    kept_model = open_model(str(folder))
    assert weights in kept_model.weights()
    assert kept_model.about == {"labels": 2}
    assert not [file for file in folder.rglob("*") if file.suffix in (".pkl", ".ckpt")]
