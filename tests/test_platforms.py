"""Where zeus_flows runs: Linux; macOS with simulated GPUs; Windows is refused with a sentence."""

from __future__ import annotations

import builtins
import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.training.rig import attempt, v100
from zeus_flows import process_lock
from zeus_flows.cli import main
from zeus_flows.core.records import Outcome
from zeus_flows.errors import WrongPlatform
from zeus_flows.gpu.host import open_host_meter
from zeus_flows.ledger import lease
from zeus_flows.ledger.lease import is_gone, this_process

SENTENCE = "zeus_flows does not run on Windows; use Linux, or macOS with simulated GPUs"
NO_PROCESS = 2**22 + 1  # greater than any process id


@pytest.mark.parametrize("words", [["--help"], ["init"], ["run", "job.yaml"], ["replay"]])
def test_on_windows_every_command_ends_with_one_sentence(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    done = CliRunner().invoke(main, words)
    assert (done.exit_code, done.stdout, done.stderr) == (1, "", f"zeus-flows: {SENTENCE}\n")


def test_without_fcntl_the_library_says_so_too(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_fcntl(name: str, *rest: Any, **named: Any) -> Any:
        if name == "fcntl":
            raise ModuleNotFoundError("No module named 'fcntl'", name="fcntl")
        return real(name, *rest, **named)

    source = importlib.util.find_spec("zeus_flows.process_lock")
    assert source is not None
    assert source.loader is not None
    module = importlib.util.module_from_spec(source)
    monkeypatch.setattr(builtins, "__import__", without_fcntl)
    with pytest.raises(WrongPlatform, match=SENTENCE):
        source.loader.exec_module(module)
    assert process_lock.ProcessLock is not None  # the real one was left alone


@pytest.fixture
def no_linux_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """A system without /proc, /sys and /etc/machine-id, such as macOS."""
    real = Path.open

    def missing(path: Path) -> bool:
        return str(path).startswith(("/proc", "/sys", "/etc/machine-id"))

    def opened(path: Path, *rest: Any, **named: Any) -> Any:
        if missing(path):
            raise FileNotFoundError(str(path))
        return real(path, *rest, **named)

    def readlink(path: Path) -> Path:
        raise FileNotFoundError(str(path))

    exists = Path.exists
    monkeypatch.setattr(Path, "open", opened)
    monkeypatch.setattr(Path, "readlink", readlink)
    monkeypatch.setattr(Path, "exists", lambda path: not missing(path) and exists(path))
    monkeypatch.setattr(sys, "platform", "darwin")
    for cached in (lease._boot_id, lease._machine_id, lease._namespace):
        cached.cache_clear()
        # what was read here must not stay for other tests
        monkeypatch.setattr(lease, cached.__name__, cached.__wrapped__)


@pytest.mark.usefixtures("no_linux_files")
def test_without_linux_files_a_simulated_attempt_trains(tmp_path: Path) -> None:
    with v100(tmp_path) as gpus:
        observed, _ = attempt(gpus, 0.5, 0.95)
    assert (observed.outcome, observed.epochs) == (Outcome.CONVERGED, 2)


def tells_a_boot(folder: Path, said: dict[str, str]) -> str:
    """Write a `sysctl` that knows some names, as that of macOS does; return its path."""
    command = folder / "sysctl"
    cases = "".join(f"  {name}) echo '{value}';;\n" for name, value in said.items())
    command.write_text(f'#!/bin/sh\ncase "$2" in\n{cases}  *) exit 1;;\nesac\n')
    command.chmod(0o755)
    return str(command)


@pytest.mark.usefixtures("no_linux_files")
@pytest.mark.parametrize(
    "said",
    [
        {"kern.bootsessionuuid": "7C8F1B1E-0000-4000-8000-000000000001", "kern.boottime": "{ sec = 1, usec = 2 }"},
        {"kern.boottime": "{ sec = 1700000000, usec = 12 } Tue Nov 14 22:13:20 2023"},
    ],
    ids=["macOS", "FreeBSD"],
)
def test_without_proc_the_kernel_is_asked_which_boot_it_is(
    said: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "_SYSCTL_COMMANDS", ("/nonexistent/sysctl", tells_a_boot(tmp_path, said)))
    me = this_process()
    assert me.boot == next(iter(said.values()))
    assert is_gone(me) is False
    assert is_gone(replace(me, pid=NO_PROCESS)) is True
    assert is_gone(replace(me, pid=NO_PROCESS, boot="")) is None  # written by a version that could not tell


@pytest.mark.usefixtures("no_linux_files")
def test_where_no_boot_is_known_it_is_not_known_who_is_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "_SYSCTL_COMMANDS", (tells_a_boot(tmp_path, {}), "/nonexistent/sysctl"))
    me = this_process()
    assert (me.boot, me.namespace, me.machine) == ("", "", "")
    namesake = replace(me, pid=NO_PROCESS)  # alive, on another machine of this name
    assert (is_gone(me), is_gone(namesake)) == (None, None)


def test_where_there_is_no_rapl_the_host_is_not_measured(tmp_path: Path) -> None:
    assert open_host_meter(tmp_path / "powercap") is None
