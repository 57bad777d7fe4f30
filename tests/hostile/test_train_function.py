"""A train function that misbehaves: the attempt is closed, what converged is kept, and the process ends. Add a line."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from tests.builders import decision
from tests.hostile.conftest import Command
from tests.processes import ZEUS_FLOWS, Forked
from tests.training_functions import write_job
from zeus_flows.core.attempt import AttemptFailed
from zeus_flows.core.json import jsonable, plain_text
from zeus_flows.core.records import Observation, Outcome
from zeus_flows.job_file import load_job
from zeus_flows.ledger.mlflow.record_text import load_observation
from zeus_flows.settings import read_settings
from zeus_flows.training.forms.child import Child, left_behind
from zeus_flows.training.trainer import LocalTrainer

#: Functions that break, their parameters, and what is kept of it.
BREAKS: dict[str, tuple[dict[str, Any], str]] = {
    "unspeakable": ({}, "Unspeakable: (its text cannot be made)"),
    "circular": ({}, "RuntimeError: round and round"),
    "surrogate": ({}, "ValueError: half  a character and [31m colour"),
    "enormous": ({}, "ValueError: xxxx"),
    "orders": ({}, "Order: out of the way"),
    "exits": ({"code": 0}, "TrainFunctionFailed: the train function called sys.exit(0)"),
    "leaves": ({}, "TrainFunctionFailed: the train function called sys.exit('so long')"),
}


def misbehaving(folder: Path, function: str, parameters: dict[str, Any] | None = None, **changes: Any) -> Path:
    train = {"function": f"tests.hostile.misbehaviour:{function}", "parameters": parameters or {}, "retries": 0}
    return write_job(folder / "job.yaml", train=train, **changes)


@pytest.mark.parametrize("function", BREAKS)
def test_whatever_it_raises_the_attempt_has_an_observation_that_can_be_kept(function: str, tmp_path: Path) -> None:
    parameters, words = BREAKS[function]
    job_file = load_job(misbehaving(tmp_path, function, parameters))
    trainer = LocalTrainer(job_file, read_settings())
    with pytest.raises(AttemptFailed) as caught:
        trainer.train(job_file.core(), decision(1, batch_size=64), None, lambda _: None)
    observation = caught.value.observation
    assert (observation.outcome, observation.detail[: len(words)]) == (Outcome.FAILED, words)
    assert len(plain_text(jsonable(observation)).encode()) < 6_000
    cause = caught.value.__cause__
    assert len(f"{cause!s}{cause!r}") > 0, "what Prefect logs and stores can be told"


def outcomes(uri: str, job: str = "nightly") -> list[Observation]:
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name(job)
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id], "tags.`zf.kind` = 'attempt'", order_by=["start_time"])
    assert all(run.info.status != "RUNNING" for run in runs)
    return [load_observation(run.data.params["zf.observation"]) for run in runs]


@pytest.mark.parametrize("function", ["exits", "unspeakable"])
def test_a_train_function_that_breaks_oddly_exits_1_and_its_attempt_is_closed(
    function: str, zeus_flows: Command, sqlite_uri: str, tmp_path: Path
) -> None:
    done = zeus_flows("run", str(misbehaving(tmp_path, function)), cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert BREAKS[function][1].partition(": ")[2] in done.stderr
    assert [o.outcome for o in outcomes(sqlite_uri)] == [Outcome.FAILED]


#: What a function may do after it has reached the target: the observation counts, and the process ends.
HARMS = [
    "closes standard output",
    "leaves a thread",
    "deletes the state directory",
    "forks",
    "forks and comes back",
    "prints much, moves away and hears no signal",
]


@pytest.mark.parametrize("what", HARMS)
def test_what_converged_is_kept_and_the_process_ends_whatever_is_done_then(
    what: str, zeus_flows: Command, sqlite_uri: str, tmp_path: Path
) -> None:
    job = misbehaving(tmp_path, "converges_then", {"what": what})
    done = zeus_flows("run", str(job), cwd=tmp_path, timeout=60)
    seen = outcomes(sqlite_uri)
    assert [o.outcome for o in seen] == [Outcome.CONVERGED], done.stderr
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


def test_a_train_function_that_closes_all_files_loses_nothing_and_the_process_ends(
    zeus_flows: Command, sqlite_uri: str, tmp_path: Path
) -> None:
    """Connections to MLflow and Prefect are gone; the next recurrence delivers what waits in the outbox."""
    job = misbehaving(tmp_path, "converges_then", {"what": "closes all files"})
    done = zeus_flows("run", str(job), cwd=tmp_path, timeout=60)
    assert "training closed this process's files; the next recurrence delivers what it brought" in done.stderr
    assert done.returncode in (0, 1)  # 1 where ending the recurrence needs a file that is gone: a race
    assert zeus_flows("janitor", str(job), cwd=tmp_path).returncode == 0
    assert [o.outcome for o in outcomes(sqlite_uri)] == [Outcome.CONVERGED]


def test_sigterm_ends_a_training_that_catches_everything(prefect_api: str, sqlite_uri: str, tmp_path: Path) -> None:
    job = misbehaving(tmp_path, "deaf")
    environment = os.environ | {"PREFECT_API_URL": prefect_api, "MLFLOW_TRACKING_URI": sqlite_uri}
    process = Forked(ZEUS_FLOWS, "run", str(job), cwd=tmp_path, env=environment)
    try:
        process.wait_until_it_says("training")
        process.send_signal(signal.SIGTERM)
        assert process.wait(40) == 143
    finally:
        process.kill()
    assert process.stderr.strip().splitlines()[-1].startswith("zeus-flows: SIGTERM: training did not stop")
    assert "Traceback" not in process.stderr


#: Scripts that misbehave, and how their attempt ends; None: it fails.
SCRIPTS: dict[str, tuple[str, Outcome | None]] = {
    "a line without end": ("print('x' * 30_000_000)\nprint('acc=1.0')", Outcome.CONVERGED),
    "bytes of any kind": (
        "import os\nnoise = bytes(b for b in range(256) if b not in b'\\x1e\\x1f')\n"
        "os.write(1, 4_000 * noise)\nprint('\\nacc=1.0')",
        Outcome.CONVERGED,
    ),
    "a thread that goes on": (
        "import threading, time\nprint('acc=1.0')\nthreading.Thread(target=time.sleep, args=(45,)).start()",
        Outcome.CONVERGED,
    ),
    "processes that fork away": (
        "import os, time\nfor _ in range(50):\n    if os.fork() == 0:\n        os.setsid()\n        time.sleep(45)\n"
        "        os._exit(0)\nprint('acc=1.0')",
        Outcome.CONVERGED,
    ),
    "no SIGTERM": (
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('acc=1.0')\ntime.sleep(45)",
        Outcome.CONVERGED,
    ),
    "output that is closed": ("import os, time\nos.close(1); os.close(2)\ntime.sleep(0.5); os._exit(0)", None),
    "an exit": ("import sys\nprint('acc=0.5', flush=True)\nsys.exit(0)", Outcome.EXHAUSTED),
    "a kill of its own": ("import os\nos.kill(os.getpid(), 9)", None),
    "more memory than there is": (
        "import resource\nresource.setrlimit(resource.RLIMIT_AS, (10**9, 10**9))\nleak = []\n"
        "while True:\n    leak.append(bytearray(10**8))",
        None,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", SCRIPTS)
def test_a_script_that_misbehaves_is_bounded_and_leaves_no_process(
    what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, outcome = SCRIPTS[what]
    (tmp_path / "train.py").write_text(script)
    train: dict[str, Any] = {"command": ["python", "train.py", "{batch_size}"], "metric": {"pattern": "acc=([0-9.]+)"}}
    train |= {"folder": str(tmp_path), "grace_seconds": 0.5}
    job_file = load_job(write_job(tmp_path / "job.yaml", train=train))
    marks, told = marked_children(monkeypatch), list[str]()
    try:
        seen = LocalTrainer(job_file, read_settings()).train(
            job_file.core(), decision(1, batch_size=64), None, lambda _: None
        )
    except AttemptFailed as failure:
        seen = failure.observation
        told.append(seen.detail)
    assert seen.outcome is (outcome or Outcome.FAILED)
    assert bool(told) == (outcome is None)
    assert len(plain_text(jsonable(seen))) < 6_000
    assert len(caplog.text) < 1_000_000
    assert [pid for mark in marks for pid in left_behind(mark)] == []


@pytest.mark.slow
@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("function", ["rowdy", "exits"])
def test_ranks_that_misbehave_are_bounded_and_leave_no_process(
    function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_file = load_job(misbehaving(tmp_path, function, gpus=2))
    marks = marked_children(monkeypatch)
    monkeypatch.setattr("zeus_flows.training.forms.ranks._GRACE_S", 1.0)
    trainer = LocalTrainer(job_file, read_settings())
    if function == "rowdy":
        seen = trainer.train(job_file.core(), decision(1, batch_size=64), None, lambda _: None)
        assert seen.outcome is Outcome.CONVERGED
    else:
        with pytest.raises(AttemptFailed) as caught:
            trainer.train(job_file.core(), decision(1, batch_size=64), None, lambda _: None)
        assert "left session.epochs() by itself" in caught.value.observation.detail
    assert len(marks) == 1
    assert left_behind(marks[0]) == []


def marked_children(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the marks of the commands that are started from now on, by which their processes are found."""
    marks, begin = list[str](), Child.__init__

    def noted(self: Child, *args: Any, mark: str, **options: Any) -> None:
        marks.append(mark)
        begin(self, *args, mark=mark, **options)

    monkeypatch.setattr(Child, "__init__", noted)
    return marks
