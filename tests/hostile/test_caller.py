"""Whoever calls: flags, parameters, environment. What must not be shown, and what is refused before anything runs."""

from __future__ import annotations

import json
import logging
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from tests.hostile.conftest import Command
from tests.ledger.servers import PASSWORD, USER
from tests.training_functions import write_job
from zeus_flows.errors import ConfigError, StoreUnavailable
from zeus_flows.ledger.mlflow.views import all_views
from zeus_flows.masking import mask_logs, masked, remember, secrets_of_uri, without_secrets
from zeus_flows.reporting.links import run_url, ui_command, view_url
from zeus_flows.settings import Settings, public_uri, read_settings
from zeus_flows.training.trainer import LocalTrainer

#: URIs with `hunter2` as a secret in them.
SECRETIVE = [
    "http://bob:hunter2@mlflow.example:5000",
    "https://hunter2@mlflow.example/base",
    "https://bob:hunter2%40home@mlflow.example",
    "postgresql://bob:hunter2@db/mlflow?sslmode=require",
    "postgresql://db/mlflow?user=bob&password=hunter2",
    "mysql+pymysql://db/mlflow?passwd=hunter2",
    "https://mlflow.example?token=hunter2",
    "https://mlflow.example/?access_token=hunter2&page=1",
    "https://mlflow.example/?X-Api-Key=hunter2",
]


@pytest.mark.parametrize("uri", SECRETIVE)
def test_no_secret_of_a_uri_is_shown_whatever_its_form(uri: str) -> None:
    said = (
        without_secrets(uri),
        masked(f"cannot reach '{uri}': refused"),
        str(StoreUnavailable(f"no answer from {uri}")),
        run_url(uri, "1"),
        view_url(uri, "1", all_views(joules=True)),
        view_url(uri, "1", ()),
        ui_command(uri) or "",
        repr(read_settings({"MLFLOW_TRACKING_URI": uri})),
    )
    assert all("hunter2" not in text for text in said)
    assert "mlflow" in without_secrets(uri)


@pytest.mark.parametrize("uri", SECRETIVE)
def test_no_flag_and_no_parameter_may_hold_a_secret(uri: str) -> None:
    with pytest.raises(ConfigError, match="--tracking-uri holds a secret; put it into MLFLOW_TRACKING_URI"):
        public_uri(uri, "--tracking-uri")


@pytest.mark.parametrize(
    "uri", ["sqlite:///mlflow.db", "http://host:5000", "postgresql:///mlflow?host=/run/pg&sslmode=disable", "file:/x@y"]
)
def test_a_uri_without_secrets_stays_as_it_is(uri: str) -> None:
    assert without_secrets(uri) == uri
    assert public_uri(uri, "--tracking-uri") == uri
    assert masked(uri) == uri


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"MY_API_KEY": "sk-0815-4711"}, "denied: sk-0815-4711."),
        ({"AWS_SECRET_ACCESS_KEY": "wJalr/XUtnFEMI"}, "key='wJalr/XUtnFEMI'"),
        ({"HF_TOKEN": "hf_abcdefgh"}, "Bearer hf_abcdefgh"),
        ({"MLFLOW_TRACKING_PASSWORD": "correct horse"}, "correct horse was refused"),
        ({"PREFECT_API_AUTH_STRING": "admin:pass-word"}, "admin:pass-word"),
        ({"DATABASE_URL": "postgresql://me:battery7@db/x"}, "authentication with battery7 failed"),
        ({"MLFLOW_TRACKING_URI": "http://me:b%40ttery@h"}, "authentication with b@ttery failed"),
    ],
)
def test_secrets_of_the_environment_are_masked_in_any_text(variables: dict[str, str], text: str) -> None:
    read_settings(variables)
    assert "***" in masked(text)
    secret = next(iter(secrets_of_uri(next(iter(variables.values())))), next(iter(variables.values())))
    assert secret not in masked(text)


def test_what_only_looks_like_a_secret_is_left_alone() -> None:
    harmless = {
        "TOKENIZERS_PARALLELISM": "false",
        "SSH_AUTH_SOCK": "/run/agent",
        "PWD": "/home/me",
        "KEYBOARD": "qwertzui",
    }
    read_settings(harmless | {"DATABASE_URL": "postgresql://mlflow:mlflow@db/mlflow", "SSH_KEY": sys.executable})
    for text in (*harmless.values(), "type `mlflow ui`", f"{sys.executable} is Python"):
        assert masked(text) == text


def test_a_secret_is_masked_in_every_log_with_its_traceback() -> None:
    remember("zebra-crossing")
    log, written = logging.getLogger("somebody.else"), StringIO()
    handler = logging.StreamHandler(written)
    log.addHandler(handler)
    mask_logs()
    try:
        log.warning("from %s", "http://bob:pw@host")
        try:
            raise ValueError("the key is zebra-crossing")
        except ValueError:
            log.exception("broken")
    finally:
        log.removeHandler(handler)
    assert "from http://***@host" in written.getvalue()
    assert "the key is ***" in written.getvalue()


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"data_pth": "x"}, "train.parameters: needs takes no 'data_pth'; did you mean 'data_path'?"),
        ({"data_path": "x", "colour": 1}, "needs takes no 'colour'; there are data_path, rows"),
        ({}, "missing a required argument: 'data_path'"),
        ({"data_path": "x", "session": 1}, "multiple values for argument 'session'"),
    ],
)
def test_parameters_that_the_train_function_does_not_take_are_found_before_anything_runs(
    tmp_path: Path, parameters: dict[str, Any], words: str
) -> None:
    from zeus_flows.job_file import load_job

    train = {"function": "tests.hostile.misbehaviour:needs", "parameters": parameters}
    with pytest.raises(ConfigError) as caught:
        LocalTrainer(load_job(write_job(tmp_path / "job.yaml", train=train)), Settings(tmp_path, tmp_path))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_wrong_parameter_exits_2_in_one_line_for_a_dry_run_too(zeus_flows: Command, tmp_path: Path) -> None:
    train = {"function": "tests.hostile.misbehaviour:needs", "parameters": {"data_pth": "x"}}
    write_job(tmp_path / "job.yaml", train=train)
    for words in ((), ("--dry-run",)):
        done = zeus_flows("run", "job.yaml", *words, cwd=tmp_path)
        assert done.returncode == 2
        assert done.stderr.splitlines() == [
            "zeus-flows: train.parameters: needs takes no 'data_pth'; did you mean 'data_path'?"
        ]


def everything_prefect_knows(job: str) -> str:
    """Return flow runs with their parameters and states, task runs, logs and artifacts, as text."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import LogFilter

    told = []
    with get_client(sync_client=True) as client:
        runs = [run for run in client.read_flow_runs() if job in str(run.parameters)]
        assert runs
        for run in runs:
            told += [
                run.model_dump_json(),
                *(
                    log.message
                    for log in client.read_logs(LogFilter.model_validate({"flow_run_id": {"any_": [run.id]}}))
                ),
            ]
            told += [task.model_dump_json() for task in client.read_task_runs() if task.flow_run_id == run.id]
        told += [artifact.model_dump_json() for artifact in client.read_artifacts()]
    return "\n".join(told)


def everything_mlflow_knows(uri: str, folder: Path) -> str:
    """Return experiments, runs and text artifacts, as text."""
    client, told = MlflowClient(tracking_uri=uri), []
    for experiment in client.search_experiments():
        told.append(json.dumps([experiment.name, dict(experiment.tags)]))
        for run in client.search_runs([experiment.experiment_id]):
            told.append(json.dumps(run.to_dictionary()["data"]))
            for file in client.list_artifacts(run.info.run_id):
                if not file.is_dir:
                    told.append(Path(client.download_artifacts(run.info.run_id, file.path, str(folder))).read_text())
    return "\n".join(told)


SCRIPT = """\
import os
uri = os.environ["MLFLOW_TRACKING_URI"]
assert ":" in uri.split("//")[1].split("@")[0], "the script needs the real one"
print("runs go to", uri)
print("acc=1.0")
"""


@pytest.mark.parametrize("form", ["function", "command"])
def test_a_planted_secret_is_nowhere_but_in_the_training_s_environment(
    form: str, zeus_flows: Command, prefect_server: str, server_with_authentication: str, tmp_path: Path
) -> None:
    """A function whose job file states the URI, and a command whose environment does."""
    uri = server_with_authentication.replace("://", f"://{USER}:{PASSWORD}@")
    name, environment, stated = f"secretive-{form}", {"MY_API_KEY": "sk-planted-key"}, {}
    if form == "function":
        train: dict[str, Any] = {"function": "tests.hostile.misbehaviour:tells_secrets", "parameters": {"uri": uri}}
        stated = {"tracking_uri": uri}
    else:
        train = {"command": [sys.executable, "train.py", "{batch_size}"], "metric": {"pattern": "acc=([0-9.]+)"}}
        environment["MLFLOW_TRACKING_URI"] = uri
        (tmp_path / "train.py").write_text(SCRIPT)
    job = write_job(tmp_path / f"{name}.yaml", name=name, train=train, **stated)
    done = zeus_flows("run", str(job), cwd=tmp_path, **environment)
    assert done.returncode == (1 if form == "function" else 0), done.stderr
    prefect, mlflow = everything_prefect_knows(name), everything_mlflow_knows(server_with_authentication, tmp_path)
    assert "://***@" in mlflow
    assert ("://***@" in prefect) == (form == "function"), "a command's output is beneath the level of this log"
    for text in (done.stdout, done.stderr, prefect, mlflow):
        assert PASSWORD not in text
        assert "sk-planted-key" not in text


#: What is missing or wrong around the command: the environment, the exit code and what the one sentence says.
AROUND: dict[str, tuple[dict[str, str], int, str]] = {
    "Prefect is away": (
        {"PREFECT_API_URL": "http://me:pw@127.0.0.1:9/api"},
        5,
        "Prefect does not answer at http://127",
    ),
    "a driver is missing": ({"MLFLOW_TRACKING_URI": "mssql://db/mlflow"}, 2, "needs the module pyodbc, which is not"),
    "a store of no kind": ({"MLFLOW_TRACKING_URI": "foo://bar"}, 5, "unsupported URI 'foo://bar'"),
    "a state directory that is a file": ({"ZEUS_FLOWS_STATE_DIR": "job.yaml"}, 5, "set ZEUS_FLOWS_STATE_DIR"),
    "a state directory that cannot be": ({"ZEUS_FLOWS_STATE_DIR": "/proc/x"}, 5, "set ZEUS_FLOWS_STATE_DIR"),
}


@pytest.mark.parametrize("what", AROUND)
def test_what_is_wrong_around_the_command_is_one_sentence_and_an_exit_code(
    what: str, zeus_flows: Command, tmp_path: Path
) -> None:
    environment, code, words = AROUND[what]
    write_job(tmp_path / "job.yaml")
    done = zeus_flows("run", "job.yaml", cwd=tmp_path, **environment)
    assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr
    (sentence,) = [line for line in done.stderr.splitlines() if line.startswith("zeus-flows: ")]
    assert words in done.stderr[done.stderr.index(sentence) :]
    assert "pw@" not in done.stdout + done.stderr
