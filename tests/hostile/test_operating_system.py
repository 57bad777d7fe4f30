"""Whoever shares the machine: planted links, folders that others may read, signals. Add a line to `PLANTED`."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from zeus_flows.errors import ConfigError, StoreError
from zeus_flows.gpu.journal import Entry, Journal
from zeus_flows.ledger.lease import this_process
from zeus_flows.ledger.outbox import Outbox
from zeus_flows.private_files import open_private, private_folder, read_private
from zeus_flows.process_lock import ProcessLock
from zeus_flows.training.checkpoint import Checkpoints, Progress

ENTRY = Entry("GPU-1", 250.0, clocks_locked=False, pid=1)


def save_checkpoint(folder: Path) -> Checkpoints:
    checkpoints = Checkpoints(folder)
    checkpoints.save({"epoch": 1}, Progress(1), None)
    return checkpoints


#: What is written into the state directory: where a link may be planted, and what then writes there.
PLANTED: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "the outbox": ("outbox.db", Outbox),
    "a journal's draft": ("power/GPU-1.draft", lambda state: Journal(state / "power").write(ENTRY)),
    "the journals": ("power", lambda state: Journal(state / "power").write(ENTRY)),
    "a journal": ("power/GPU-1.json", lambda state: Journal(state / "power").read("GPU-1")),
    "a GPU's lock": ("power/GPU-1.lock", lambda state: Journal(state / "power").lock("GPU-1").acquire()),
    "an experiment's lock": ("experiments/x.lock", lambda state: ProcessLock(state / "experiments/x.lock").acquire()),
    "the checkpoints": ("checkpoints", lambda state: save_checkpoint(state / "checkpoints")),
}


@pytest.mark.parametrize("what", PLANTED)
@pytest.mark.parametrize("kind", ["symbolic", "hard", "dangling"])
def test_a_planted_link_is_not_followed_and_what_it_names_is_left_alone(what: str, kind: str, tmp_path: Path) -> None:
    name, act = PLANTED[what]
    state, victim = tmp_path / "state", tmp_path / "victim"
    is_folder = not Path(name).suffix
    if is_folder and kind == "hard":
        kind = "symbolic"  # folders have no other
    if kind != "dangling":
        victim.mkdir() if is_folder else victim.write_text("precious")
    link = state / name
    link.parent.mkdir(parents=True)
    link.hardlink_to(victim) if kind == "hard" else link.symlink_to(victim)
    with pytest.raises((OSError, ConfigError, StoreError)) as caught:
        act(state)
    assert "link" in str(caught.value) or "no file of its own" in str(caught.value)
    if kind == "dangling":
        assert not victim.exists()
    elif is_folder:
        assert not list(victim.iterdir())
    else:
        assert victim.read_text() == "precious"


def test_everything_in_the_state_directory_is_its_owner_s_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        state = tmp_path / "deep" / "state"
        outbox = Outbox(state)
        outbox.put("l", "a", "epoch", "{}", owner=this_process().dump(), wall_s=0.0)
        Journal(state / "power").write(ENTRY)
        lock, checkpoints = ProcessLock(state / "experiments" / "x.lock"), save_checkpoint(state / "checkpoints")
        lock.acquire()
        modes = {str(p.relative_to(tmp_path)): stat.S_IMODE(p.stat().st_mode) for p in tmp_path.rglob("*")}
        lock.release()
        checkpoints.close()
    finally:
        os.umask(before)
    assert {"deep/state/outbox.db", "deep/state/power/GPU-1.json", "deep/state/experiments/x.lock"} < set(modes)
    assert any(name.endswith("state.pt") for name in modes)
    assert {name: oct(mode) for name, mode in modes.items() if mode & 0o077} == {}


def test_a_state_directory_of_an_earlier_version_is_made_private(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "outbox.db").touch(0o644)
    Outbox(tmp_path)
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "outbox.db").stat().st_mode) == 0o600


@pytest.mark.parametrize("what", ["somebody's home", "a folder for all"])
def test_a_folder_that_is_more_than_a_state_directory_stays_as_it_is(what: str, tmp_path: Path) -> None:
    mode = 0o755 if what == "somebody's home" else 0o1777
    (tmp_path / "else").mkdir()
    tmp_path.chmod(mode)
    Outbox(tmp_path)
    private_folder(tmp_path, tighten=mode == 0o1777)
    assert stat.S_IMODE(tmp_path.stat().st_mode) == mode
    assert stat.S_IMODE((tmp_path / "outbox.db").stat().st_mode) == 0o600


def test_the_state_directory_itself_may_be_a_link_of_our_own(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "state").symlink_to(tmp_path / "disk")
    Outbox(tmp_path / "state")
    assert (tmp_path / "disk" / "outbox.db").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_what_belongs_to_somebody_else_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    os.chown(theirs, 12345, 12345)
    with pytest.raises(PermissionError, match="belongs to another user"):
        private_folder(theirs)
    (tmp_path / "file").touch()
    os.chown(tmp_path / "file", 12345, 12345)
    with pytest.raises(PermissionError, match="belongs to another user"):
        open_private(tmp_path / "file", os.O_RDONLY)
    monkeypatch.setenv("SUDO_UID", "12345")  # as `sudo zeus-flows restore-power` has it
    private_folder(theirs)
    os.close(open_private(tmp_path / "file", os.O_RDONLY))


def test_a_pipe_in_a_file_s_place_holds_nobody_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "GPU-1.lock")
    os.mkfifo(tmp_path / "GPU-1.json")
    with pytest.raises(OSError, match="is no file of its own"):
        ProcessLock(tmp_path / "GPU-1.lock").acquire()
    with pytest.raises(ConfigError, match="cannot be read"):
        Journal(tmp_path).read("GPU-1")


def journal(previous_w: str) -> str:
    return f'{{"uuid":"GPU-1","previous_w":{previous_w},"clocks_locked":false,"pid":1}}'


@pytest.mark.parametrize(
    "text",
    [
        *map(journal, ("NaN", "-1", "0", "Infinity", "1e999", "null", "[]")),
        *('{"previous_w": NaN}', "[]", "{", '"x"', "\0"),
        pytest.param("x" * 1_000_000, id="long"),
    ],
)
def test_a_journal_that_makes_no_sense_is_named_in_one_sentence(text: str, tmp_path: Path) -> None:
    (tmp_path / "GPU-1.json").write_text(text)
    with pytest.raises(ConfigError) as caught:
        Journal(tmp_path).read("GPU-1")
    assert "GPU-1.json is not a journal of power limits" in str(caught.value)
    assert "look at it and delete it" in str(caught.value)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1_000


def test_a_link_s_text_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("precious")
    (tmp_path / "link").symlink_to(tmp_path / "secret")
    with pytest.raises(PermissionError, match="is a link"):
        read_private(tmp_path / "link")
