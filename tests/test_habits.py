"""Habits of every command: one document with --json, lines that fit, no database made by looking, all documented."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from mlflow import MlflowClient

import zeus_flows.errors
from tests.docs_blocks import ROOT
from tests.processes import ZEUS_FLOWS, run_forked
from tests.training_functions import write_job
from zeus_flows.cli.commands import main
from zeus_flows.errors import ZeusFlowsError
from zeus_flows.job_file import JobFile

#: What only looks; with a job file, and where it says more, that too.
LOOKS: dict[str, tuple[str, ...]] = {
    "status": ("JOB",),
    "explain": ("JOB",),
    "drift": ("JOB",),
    "models": ("JOB",),
    "report": ("JOB",),
    "statement": ("JOB", "1"),
    "fleet": (),
    "run": ("JOB", "--dry-run"),
    "ledger verify": ("JOB",),
    "what-if": ("JOB", "--seeds", "2"),
}
#: What changes something: MLflow, Prefect, power limits, or files that it was told to write.
ACTS = {
    *("init", "views", "janitor", "reset", "import", "deploy", "serve", "capriccio", "restore-power"),
    *("ledger repair", "ledger traces", "replay", "paper", "cluster", "doctor", "completion"),
}


def commands(group: click.Group = main, prefix: str = "") -> Iterator[tuple[str, click.Command]]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}", command


def words(name: str, job: Path) -> list[str]:
    return [*name.split(), *(str(job) if word == "JOB" else word for word in LOOKS[name])]


@pytest.fixture(scope="module")
def a_job(prefect_api: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str], Any]:
    """A job that ran twice, what its commands are to be run with, and how the first run ended."""
    folder = tmp_path_factory.mktemp("habits")
    job = write_job(folder / "job.yaml", "loud", model={"name": "loud"})
    env = os.environ | {
        "PREFECT_API_URL": prefect_api,
        "PREFECT_HOME": str(tmp_path_factory.mktemp("prefect")),
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db",
        "ZEUS_FLOWS_STATE_DIR": str(tmp_path_factory.mktemp("state")),
    }
    env.pop("COLUMNS", None)
    done = run_forked(ZEUS_FLOWS, "run", str(job), "-n", "2", "--json", cwd=folder, env=env)
    client = MlflowClient(env["MLFLOW_TRACKING_URI"])
    experiment = client.get_experiment_by_name("nightly")
    assert experiment is not None, done.stderr
    (run, *_) = client.search_runs([experiment.experiment_id], "tags.`zf.kind` = 'attempt'", max_results=1)
    client.create_registered_model("loud", {"zf.job": "nightly"})
    client.create_model_version("loud", str(folder / "model"), run.info.run_id)
    return job, env, done


@pytest.mark.slow
def test_whatever_the_train_function_prints_json_is_one_document(a_job: tuple[Path, dict[str, str], Any]) -> None:
    done = a_job[2]
    assert done.returncode == 0, done.stderr
    assert [r["recurrence"] for r in json.loads(done.stdout)["recurrences"]] == [1, 2]
    for text in ("printed", "written", "to the number of the stream", "by a child"):
        assert text in done.stderr
        assert text not in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOKS)
def test_what_looks_prints_one_document_or_plain_lines_that_fit(
    name: str, a_job: tuple[Path, dict[str, str], Any]
) -> None:
    job, env, _ = a_job
    takes_json = any("--json" in parameter.opts for parameter in dict(commands())[name].params)
    if takes_json:
        told = run_forked(ZEUS_FLOWS, *words(name, job), "--json", cwd=job.parent, env=env)
        assert told.returncode == 0, told.stderr
        assert isinstance(json.loads(told.stdout), dict | list)
    shown = run_forked(ZEUS_FLOWS, *words(name, job), cwd=job.parent, env=env)
    assert shown.returncode == 0, shown.stderr
    assert "\x1b" not in shown.stdout
    if name != "statement":  # Markdown has lines as long as they are
        lines = [line.rstrip() for line in shown.stdout.splitlines() if str(job) not in line]
        assert max(map(len, lines)) <= 80


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOKS)
def test_looking_makes_no_database_and_says_what_to_type(
    name: str, tmp_path: Path, a_job: tuple[Path, dict[str, str], Any]
) -> None:
    job = write_job(tmp_path / "job.yaml", model={"name": "none"})
    env = {k: v for k, v in a_job[1].items() if k != "MLFLOW_TRACKING_URI"}
    done = run_forked(ZEUS_FLOWS, *words(name, job), cwd=tmp_path, env=env)
    assert {path.name for path in tmp_path.iterdir()} == {"job.yaml"}
    assert "Traceback" not in done.stderr
    if done.returncode:
        assert done.returncode == 2, done.stderr
        assert f"type `zeus-flows run {job}`" in done.stderr
    else:
        assert done.stdout.strip()


def test_every_command_either_looks_or_acts() -> None:
    assert {name for name, _ in commands()} == {*LOOKS, *ACTS}


def test_json_is_the_same_option_everywhere() -> None:
    for name, command in commands():
        for parameter in command.params:
            if "--json" in parameter.opts:
                assert getattr(parameter.callback, "__module__", "") == "zeus_flows.cli.documents", name
    for module in (ROOT / "zeus_flows/cli").glob("*.py"):
        if module.name != "documents.py":
            assert "json.dumps" not in module.read_text(encoding="utf-8"), module


def test_every_command_is_on_a_page_that_somebody_wrote() -> None:
    pages = [p for p in (ROOT / "docs").rglob("*.md") if p.parent.name != "reference"]
    text = "\n".join(p.read_text(encoding="utf-8") for p in [*pages, ROOT / "README.md"])
    assert not [name for name, _ in commands() if f"zeus-flows {name}" not in text]


def errors_of(error: type[ZeusFlowsError]) -> Iterator[type[ZeusFlowsError]]:
    yield error
    for other in error.__subclasses__():
        yield from errors_of(other)


def test_every_exit_code_is_documented() -> None:
    page = (ROOT / "docs/robustness.md").read_text(encoding="utf-8").partition("## Exit codes")[2]
    documented = {int(code) for row in re.findall(r"^\| ([\d, ]+) \|", page, re.MULTILINE) for code in row.split(",")}
    raised = {error.exit_code for error in errors_of(zeus_flows.errors.ZeusFlowsError)}
    assert raised | {0, 1, 2, 130, 143} <= documented
    helped = CliRunner().invoke(main, ["--help"]).output
    assert all(re.search(rf"\b{code} ", helped.partition("Exit codes")[2]) for code in raised)


def keys(model: Any = JobFile, prefix: str = "") -> Iterator[str]:
    from typing import get_args

    from pydantic import BaseModel

    for name, field in model.model_fields.items():
        yield f"{prefix}{name}"
        kinds = [field.annotation, *get_args(field.annotation)]
        for section in [k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)]:
            yield from keys(section, f"{prefix}{name}.")


def test_every_key_of_every_section_is_in_the_template() -> None:
    text = (ROOT / "zeus_flows/templates/job.yaml").read_text(encoding="utf-8")
    assert not [key for key in keys() if not re.search(rf"\b{key.rpartition('.')[2]}:", text)]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_is_told_how_to_complete(shell: str) -> None:
    done = CliRunner().invoke(main, ["completion", shell])
    assert done.exit_code == 0, done.output
    assert f"_ZEUS_FLOWS_COMPLETE={shell}_complete" in done.output
    asked = {"_ZEUS_FLOWS_COMPLETE": "bash_complete", "COMP_WORDS": "zeus-flows re", "COMP_CWORD": "1"}
    found = CliRunner(env=asked).invoke(main, [], prog_name="zeus-flows")
    assert {"plain,report", "plain,reset"} <= set(found.output.split())
