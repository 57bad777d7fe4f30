"""Training commands as they are: what they print becomes epochs, steps and outcomes, and they end when told to."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.builders import decision
from tests.docs_blocks import blocks
from zeus_flows.core.attempt import AttemptFailed
from zeus_flows.core.records import Observation, Outcome
from zeus_flows.errors import CommandFailed, ConfigError
from zeus_flows.job_file import JobFile, parse_job
from zeus_flows.job_sections.wording import filled
from zeus_flows.settings import read_settings
from zeus_flows.training.forms.child import LAST_LINES, MOST_KEPT, Child, left_behind
from zeus_flows.training.trainer import LocalTrainer

EPOCHS = """
import sys, time
for epoch in range(int(sys.argv[2])):
    print(f"epoch {epoch}: acc={0.5 + 0.1 * epoch:.2f}")
"""
Run = Callable[..., Observation]


def job(folder: Path, command: list[str] | None = None, *, max_epochs: int = 8, **train: Any) -> JobFile:
    words = command or ["python", "train.py", "{batch_size}", "{max_epochs}"]
    train = {"metric": {"pattern": "acc=([0-9.]+)"}, "folder": str(folder), "grace_seconds": 1} | train
    return JobFile.model_validate(
        {
            "name": "nightly",
            "target": {"metric": "accuracy", "value": 0.9, "better": "higher"},
            "batch_sizes": [32, 64, 128],
            "default_batch_size": 64,
            "max_epochs": max_epochs,
            "device": "simulated-v100",
            "train": {"command": words} | train,
        }
    )


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Trains one attempt of a script."""

    def train(script: str, batch_size: int = 64, **changes: Any) -> Observation:
        (tmp_path / "train.py").write_text(textwrap.dedent(script))
        job_file = job(tmp_path, **changes)
        trainer = LocalTrainer(job_file, read_settings())
        return trainer.train(job_file.core(), decision(1, batch_size=batch_size), None, lambda _: None)

    return train


def test_each_match_ends_an_epoch_and_the_target_ends_the_attempt(run: Run) -> None:
    observed = run(EPOCHS)
    assert (observed.outcome, observed.epochs, observed.metric) == (Outcome.CONVERGED, 5, 0.9)
    assert observed.detail == "accuracy reached 0.9 in epoch 5"
    assert [level for _, level in observed.curve] == [0.5, 0.6, 0.7, 0.8, 0.9]


def test_a_command_that_ends_before_the_target_is_exhausted(run: Run) -> None:
    observed = run(EPOCHS.replace("int(sys.argv[2])", "3"))
    assert (observed.outcome, observed.epochs) == (Outcome.EXHAUSTED, 3)
    assert "ended by itself after 3 epochs" in observed.detail


def test_an_exit_code_is_a_failure_with_the_last_lines(run: Run) -> None:
    with pytest.raises(AttemptFailed) as caught:
        run("print('loading')\nprint('acc=0.5')\nraise SystemExit(7)")
    detail = caught.value.observation.detail
    assert "exit code 7" in detail
    assert "  loading" in detail
    assert not caught.value.observation.outcome.blames_the_arm


def test_running_out_of_memory_is_about_the_batch_size(run: Run) -> None:
    observed = run("import sys\nprint('torch.OutOfMemoryError: CUDA out of memory.', file=sys.stderr)\nsys.exit(1)")
    assert observed.outcome is Outcome.OUT_OF_MEMORY


def test_a_pattern_that_never_matches_is_named_with_what_was_printed(run: Run) -> None:
    with pytest.raises(AttemptFailed) as caught:
        run("print('accuracy: 0.5')")
    assert "no line matched 'acc=([0-9.]+)'" in caught.value.observation.detail
    assert "accuracy: 0.5" in caught.value.observation.detail


def test_a_pattern_that_never_matches_is_given_up_on_after_three_epochs_of_samples(run: Run) -> None:
    script = "import time\nfor step in range(10_000):\n    print(f'step {step + 1}')\n    time.sleep(0.001)\n"
    with pytest.raises(AttemptFailed) as caught:
        run(script, progress={"pattern": r"step (\d+)"}, samples_per_epoch=640)
    assert isinstance(caught.value.__cause__, CommandFailed)
    assert "did not come in 3 epochs" in caught.value.observation.detail
    assert "  step " in caught.value.observation.detail


def test_a_pattern_that_never_matches_is_given_up_on_where_only_progress_tells_of_epochs(run: Run) -> None:
    script = """
    for epoch in range(1_000):
        for step in range(1, 5):
            print("at", step)
    import time
    time.sleep(600)
    """
    with pytest.raises(AttemptFailed) as caught:
        run(script, progress={"pattern": r"at (\d+)"})
    assert "did not come in 10 passes over the data: no line matched" in caught.value.observation.detail


def test_a_nan_diverges(run: Run) -> None:
    assert run("print('acc=nan')", metric={"pattern": "acc=(.*)"}).outcome is Outcome.DIVERGED


def test_words_and_environment_have_their_placeholders_filled(run: Run, tmp_path: Path) -> None:
    script = """
    import json, os, sys
    json.dump([sys.argv[1:], os.environ["RATE"], os.path.isdir(sys.argv[3]), os.getcwd()], open("seen.json", "w"))
    print("acc=0.95")
    """
    words = ["python", "-u", "train.py", "--b={batch_size}", "{recurrence}.{attempt}", "{checkpoint_folder}", "{{x}}"]
    run(script, 128, command=words, environment={"RATE": "{learning_rate}"})
    import json

    argv, rate, is_folder, where = json.loads((tmp_path / "seen.json").read_text())
    assert (argv[:2], argv[3], rate) == (["--b=128", "1.1"], "{x}", f"{1e-3 * 2**0.5:g}")
    assert is_folder
    assert where == str(tmp_path)
    assert not Path(argv[2]).exists()


def test_the_metric_may_come_from_a_file_of_json_lines(run: Run, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"acc": 0.99}\n')  # of an earlier training
    script = """
    import json, time
    with open("metrics.jsonl", "a") as file:
        for epoch in range(1, 6):
            file.write(json.dumps({"loss": 1}) + "\\n" + json.dumps({"acc": epoch * 0.19}) + "\\n")
            file.flush()
            time.sleep(0.15)
    """
    observed = run(script, metric={"file": "metrics.jsonl", "key": "acc"})
    assert (observed.outcome, observed.epochs, observed.metric) == (Outcome.CONVERGED, 5, 0.95)


def test_without_steps_an_epoch_is_one_and_one_power_limit_is_tried_per_epoch(run: Run) -> None:
    observed = run(EPOCHS, max_epochs=30)
    assert observed.samples_per_epoch == 1
    assert observed.profile is not None
    assert 2 <= len(observed.profile.measurements) <= observed.epochs


@pytest.mark.parametrize("unit", ["steps", "samples"])
@pytest.mark.parametrize("running", ["epoch", "all"])
def test_a_progress_pattern_tells_of_steps(run: Run, unit: str, running: str) -> None:
    script = f"""
    for epoch in range(8):
        for step in range(1, 11):
            done = step + (epoch * 10 if {running == "all"} else 0)
            print("at", done * (64 if {unit == "samples"} else 1))
        print(f"acc={{0.5 + 0.1 * epoch}}")
    """
    observed = run(script, progress={"pattern": r"at (\d+)", "unit": unit})
    assert (observed.outcome, observed.epochs, observed.samples_per_epoch) == (Outcome.CONVERGED, 5, 640)


def test_a_stated_length_of_epochs_tunes_the_limit_in_the_first_one(run: Run) -> None:
    script = """
    for epoch in range(8):
        for step in range(100):
            print("step")
        print(f"acc={0.5 + 0.1 * epoch}")
    """
    stated = run(script, progress={"pattern": "step"}, samples_per_epoch=6400)
    assert stated.samples_per_epoch == 6400
    assert stated.profile is not None
    assert stated.profile.complete


def test_a_command_that_ignores_sigterm_is_killed(run: Run, tmp_path: Path) -> None:
    script = """
    import os, signal, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    open("pid", "w").write(str(os.getpid()))
    print("acc=0.95")
    time.sleep(600)
    """
    assert run(script, grace_seconds=0.3).outcome is Outcome.CONVERGED
    assert not is_alive(int((tmp_path / "pid").read_text()))


def test_what_a_command_forked_away_does_not_outlive_it(run: Run, tmp_path: Path) -> None:
    script = """
    import os, time
    if os.fork() == 0:
        os.setsid()
        open("pid", "w").write(str(os.getpid()))
        time.sleep(600)
    while not os.path.exists("pid") or not open("pid").read():
        time.sleep(0.01)
    print("acc=0.5")
    """
    observed = run(script)
    assert observed.outcome is Outcome.EXHAUSTED
    assert not is_alive(int((tmp_path / "pid").read_text()))


def test_megabytes_of_output_are_bounded_and_the_end_is_kept(tmp_path: Path) -> None:
    words = [sys.executable, "-c", "for i in range(300_000): print('x' * 90, i)\nprint('y' * 5_000_000)"]
    kept = tmp_path / "output.txt"
    child = Child(words, folder=tmp_path, environment=dict(os.environ), mark="m", output=kept, grace_s=1)
    with child:
        lines = sum(1 for line in child.read() if line is not None)
    assert lines == 300_001
    assert kept.stat().st_size < 1.2 * MOST_KEPT
    assert "bytes left out" in kept.read_text()
    assert len(child.last_lines) == LAST_LINES
    assert child.last_lines[-2].endswith(" 299999")


def test_a_command_dies_with_the_process_that_started_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os, time\nopen('pid', 'w').write(str(os.getpid()))\nprint('acc=0.1')\ntime.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-m", "tests.training.test_command", str(tmp_path)])
    pid = wait_for(tmp_path / "pid")
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    until = time.monotonic() + 30
    while is_alive(pid) and time.monotonic() < until:
        time.sleep(0.05)
    assert not is_alive(pid)


def test_a_command_that_outlives_a_killed_process_is_ended_by_the_next_attempt(run: Run, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "train.py").write_text(
        "import os, signal, time\nsignal.signal(signal.SIGTERM, lambda *_: open('heard', 'w').write('1'))\n"
        "print('acc=0.1', flush=True)\nopen('pid', 'w').write(str(os.getpid()))\ntime.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-m", "tests.training.test_command", str(elsewhere)])
    pid = wait_for(elsewhere / "pid")
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert wait_for(elsewhere / "heard")  # and it goes on, until an attempt comes: this one, or another test's
    run(EPOCHS)
    assert not is_alive(pid)


def test_what_is_left_behind_is_found_by_its_mark() -> None:
    words = [sys.executable, "-c", "import time; time.sleep(60)"]
    with subprocess.Popen(words, env={**os.environ, "ZEUS_FLOWS_ATTEMPT": "abc"}) as process:
        try:
            assert left_behind("abc") == [process.pid]
            assert left_behind("abcd") == []
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("train", "says"),
    [
        ("{command: [no-such-program, '{batch_size}'], metric: {pattern: 'a=(.)'}}", "there is no program"),
        ("{command: [python, gone.py, '{batch_size}'], metric: {pattern: 'a=(.)'}}", "there is no file gone.py"),
        (
            "{command: [python, t.py, '{batch_size}'], folder: /no/such, metric: {pattern: 'a=(.)'}}",
            "there is no folder /no/such",
        ),
    ],
)
def test_what_is_not_there_is_named_before_anything_runs(train: str, says: str) -> None:
    job_file = parse_job(_file(train))
    with pytest.raises(ConfigError, match=says):
        LocalTrainer(job_file, read_settings())


@pytest.mark.parametrize(
    ("train", "says"),
    [
        ("{}", "needs a function or a command"),
        (
            "{command: [python, t.py, '{batch_size}'], function: 'a:b', metric: {pattern: '(.)'}}",
            "function or a command",
        ),
        ("{command: [python, t.py, '{batch_size}']}", "a command needs a metric"),
        ("{command: python t.py, metric: {pattern: '(.)'}}", "must be a list of words"),
        ("{command: [python, '{batchsize}'], metric: {pattern: '(.)'}}", "did you mean '{batch_size}'"),
        ("{command: [python, t.py], metric: {pattern: '(.)'}}", "train.command has no {batch_size}"),
        ("{command: [t, '{batch_size}'], metric: {pattern: 'acc'}}", "must have one group"),
        ("{command: [t, '{batch_size}'], metric: {pattern: '('}}", "is no regular expression"),
        ("{command: [t, '{batch_size}'], metric: {file: a}}", "file and key go together"),
        (
            "{command: [t, '{batch_size}'], metric: {pattern: '(.)', mlflow: a}}",
            "needs one of pattern, file and mlflow",
        ),
        ("{function: 'a:b', folder: x}", "folder: only for a command"),
    ],
)
def test_a_wrong_command_is_refused_with_what_would_be_right(train: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_job(_file(train))
    assert says in str(caught.value)


def test_braces_are_written_twice() -> None:
    assert filled('{{"b": {batch_size}}}', {"batch_size": 8}) == '{"b": 8}'


def test_the_same_training_gives_the_same_records_as_a_function(run: Run, tmp_path: Path) -> None:
    script = """
    for epoch in range(8):
        for step in range(100):
            print("step")
        print(f"acc={0.5 + 0.1 * epoch}")
    """
    by_command = run(script, progress={"pattern": "step"}, samples_per_epoch=6400)
    job_file = job(tmp_path).model_copy(update={"train": JobFile.model_validate(_FUNCTION).train})
    by_function = LocalTrainer(job_file, read_settings()).train(job_file.core(), decision(1), None, lambda _: None)
    assert replace(by_command, fingerprint="") == replace(by_function, fingerprint="")


@pytest.mark.slow
def test_the_guides_script_trains_as_the_guide_says(tmp_path: Path) -> None:
    written = {block.language: block.text for block in blocks() if block.page == "docs/guides/scripts.md"}
    (tmp_path / "train.py").write_text(written["python"])
    job_file = parse_job(f"device: simulated-v100\n{written['yaml']}")
    job_file = job_file.model_copy(update={"train": job_file.train.model_copy(update={"folder": str(tmp_path)})})
    trainer = LocalTrainer(job_file, read_settings())
    observed = trainer.train(job_file.core(), decision(1, batch_size=256), None, lambda _: None)
    assert (observed.outcome, observed.samples_per_epoch) == (Outcome.CONVERGED, 4096)


_FUNCTION = {
    "name": "nightly",
    "target": {"metric": "accuracy", "value": 0.9, "better": "higher"},
    "batch_sizes": [64],
    "default_batch_size": 64,
    "max_epochs": 8,
    "train": {"function": "tests.training.test_command:by_function"},
}


def by_function(session: Any) -> None:
    from tests.training.rig import Loader

    for epoch in session.epochs():
        list(session.steps(Loader(6400, 64)))
        session.report_metric(0.5 + 0.1 * (epoch - 1))


def _file(train: str) -> str:
    return (
        "name: a\ntarget: {metric: m, value: 1, better: higher}\nbatch_sizes: [8, 16]\ndefault_batch_size: 8\n"
        f"max_epochs: 3\ndevice: simulated-v100\ntrain: {train}\n"
    )


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(path: Path, seconds: float = 60) -> int:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if path.exists() and (text := path.read_text()):
            return int(text)
        time.sleep(0.05)
    raise AssertionError(f"{path} never came")


if __name__ == "__main__":
    started = job(Path(sys.argv[1]))
    LocalTrainer(started, read_settings()).train(started.core(), decision(1), None, lambda _: None)
