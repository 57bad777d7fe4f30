"""Several processes and one experiment: one run of it, one run per slice, and one process of a machine at a time."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run

from tests.experiments.capriccio_builders import start_together, write_experiment
from zeus_flows.errors import ConfigError, StoreError
from zeus_flows.experiments.capriccio.contenders import Experiment, open_experiment
from zeus_flows.experiments.capriccio.curves import open_curves
from zeus_flows.experiments.capriccio.lock import alone
from zeus_flows.experiments.capriccio.tracking import Tracking
from zeus_flows.ledger.mlflow.client import Store
from zeus_flows.settings import read_settings

pytestmark = pytest.mark.usefixtures("own_cache")


def opened(path: Path, uri: str) -> Experiment:
    return open_experiment(path, data=None, tracking_uri=uri, settings=read_settings())


def track(path: Path, uri: str) -> Tracking:
    trainer = open_curves(str(path)).trainer
    return Tracking(Store(uri, patience_s=10.0), trainer.experiment, trainer.dataset, trainer.slices)


def runs_of_kind(uri: str, kind: str) -> list[Run]:
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("small")
    assert experiment is not None
    return list(client.search_runs([experiment.experiment_id], f"tags.`zf.kind` = '{kind}'"))


def named_run(uri: str) -> str:
    companion = MlflowClient(tracking_uri=uri).get_experiment_by_name("small.experiment")
    assert companion is not None
    return str(companion.tags["zf.root"])


# -- one run of the experiment ---------------------------------------------------------------------------------------


def test_of_runs_that_several_make_at_once_all_go_with_the_same(
    tmp_path: Path, sqlite_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, several = write_experiment(tmp_path), 4
    open_curves(str(path))
    together, name_root = threading.Barrier(several), Store.name_root
    made: list[str] = []

    def after_all_have_made_one(self: Store, name: str, run_id: str) -> tuple[str, str]:
        made.append(run_id)
        together.wait(timeout=60)
        return name_root(self, name, run_id)

    monkeypatch.setattr(Store, "name_root", after_all_have_made_one)
    monkeypatch.setattr(Tracking, "_search", lambda *_: [])  # nobody sees what the others are making

    with ThreadPoolExecutor(several) as pool:
        found = list(pool.map(lambda _: track(path, sqlite_uri).run_id, range(several)))

    assert len(set(made)) == several
    assert len(set(found)) == 1
    assert [str(run.info.run_id) for run in runs_of_kind(sqlite_uri, "experiment")] == [found[0]]
    assert named_run(sqlite_uri) == found[0]
    (run,) = runs_of_kind(sqlite_uri, "experiment")
    assert run.inputs is not None
    assert len(run.inputs.dataset_inputs) == 1


MACHINE = """
import sys
from pathlib import Path
from zeus_flows.experiments.capriccio.contenders import open_experiment
from zeus_flows.settings import read_settings
settings = read_settings()
print("ready", flush=True)
sys.stdin.readline()
experiment = open_experiment(Path(sys.argv[1]), data=None, tracking_uri=sys.argv[2], settings=settings)
for part in experiment.slices:
    experiment.tracking.write(part, {})
print(experiment.tracking.run_id)
"""


@pytest.mark.slow
def test_on_several_machines_at_once_there_is_one_run_of_the_experiment_and_one_of_each_slice(
    tmp_path: Path, sqlite_uri: str
) -> None:
    path = write_experiment(tmp_path)
    folders = [{"STATE": tmp_path / f"machine-{number}"} for number in range(6)]
    machines = start_together(MACHINE, str(path), sqlite_uri, folders=folders)

    codes = [machine.wait(timeout=120) for machine in machines]
    assert codes == [0] * len(machines), [machine.stderr[-2000:] for machine in machines]
    found = {machine.stdout.splitlines()[1] for machine in machines}
    assert {str(run.info.run_id) for run in runs_of_kind(sqlite_uri, "experiment")} == found
    assert len(found) == 1
    slices = runs_of_kind(sqlite_uri, "slice")
    assert sorted(int(run.data.tags["zf.slice"]) for run in slices) == [1, 2, 3, 4, 5, 6]
    assert {run.info.status for run in slices} == {"FINISHED"}
    (run,) = runs_of_kind(sqlite_uri, "experiment")
    named = {value for name, value in run.data.params.items() if name.startswith("zf.slice.")}
    assert named == {str(run.info.run_id) for run in slices}


def test_an_experiment_that_an_earlier_version_began_is_taken_up(tmp_path: Path, sqlite_uri: str) -> None:
    path = write_experiment(tmp_path)
    client = MlflowClient(tracking_uri=sqlite_uri)
    begun = client.create_run(client.create_experiment("small"), tags={"zf.kind": "experiment"}, run_name="small")
    trainer = open_curves(str(path)).trainer
    client.log_param(begun.info.run_id, "zf.digest", trainer.experiment.digest(trainer.dataset))

    tracking = track(path, sqlite_uri)

    assert tracking.run_id == begun.info.run_id == named_run(sqlite_uri)
    assert track(path, sqlite_uri).run_id == tracking.run_id
    assert len(runs_of_kind(sqlite_uri, "experiment")) == 1


def test_killed_before_the_run_was_named_it_is_taken_up(
    tmp_path: Path, sqlite_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_experiment(tmp_path)

    def die(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Store, "name_root", die)
        with pytest.raises(KeyboardInterrupt):
            track(path, sqlite_uri)

    tracking = track(path, sqlite_uri)

    (run,) = runs_of_kind(sqlite_uri, "experiment")
    assert tracking.run_id == run.info.run_id == named_run(sqlite_uri)


def test_killed_before_a_slice_s_run_was_named_it_is_taken_up(
    tmp_path: Path, sqlite_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_experiment(tmp_path)
    first = track(path, sqlite_uri)
    part = open_curves(str(path)).trainer.slices[0]

    def die(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Store, "set_once", die)
        with pytest.raises(KeyboardInterrupt):
            first.write(part, {})
    again = track(path, sqlite_uri)
    again.write(part, {})

    (run,) = runs_of_kind(sqlite_uri, "slice")
    assert run.info.status == "FINISHED"
    assert again.written == 1


def test_a_run_that_was_deleted_is_not_begun_anew_behind_its_user_s_back(tmp_path: Path, sqlite_uri: str) -> None:
    path = write_experiment(tmp_path)
    run_id = track(path, sqlite_uri).run_id
    client = MlflowClient(tracking_uri=sqlite_uri)
    client.delete_run(run_id)

    with pytest.raises(ConfigError, match=f"was deleted; bring it back with `mlflow runs restore --run-id {run_id}`"):
        track(path, sqlite_uri)
    client.restore_run(run_id)
    assert track(path, sqlite_uri).run_id == run_id


def test_somebody_else_s_experiment_of_the_companion_s_name_is_left_alone(tmp_path: Path, sqlite_uri: str) -> None:
    MlflowClient(tracking_uri=sqlite_uri).create_experiment("small.experiment")

    with pytest.raises(StoreError, match=r"small\.experiment was not made by zeus_flows; rename it, or small"):
        track(write_experiment(tmp_path), sqlite_uri)


# -- one process of a machine ----------------------------------------------------------------------------------------


@contextmanager
def child_process(held: AbstractContextManager[None]) -> Iterator[int]:
    """Let a child of this process enter a context and stay in it; give its id. It is killed, the hard way."""
    ready, tell = os.pipe()
    child = os.fork()
    if child == 0:  # has no way back: it is killed
        with held:
            os.write(tell, b"x")
            while True:
                signal.pause()
    os.close(tell)
    try:
        assert os.read(ready, 1) == b"x"
        yield child
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ready)


def test_a_second_process_is_told_which_one_runs_the_experiment_and_gets_it_when_that_is_killed(tmp_path: Path) -> None:
    uri = "sqlite:///mlflow.db"
    with child_process(alone("small", tracking_uri=uri, state_dir=tmp_path)) as process:
        refusal = rf"small in sqlite:.* is being run by process {process}; wait for it, or give this one another name"
        with pytest.raises(ConfigError, match=refusal), alone("small", tracking_uri=uri, state_dir=tmp_path):
            pass
        with alone("other", tracking_uri=uri, state_dir=tmp_path):
            pass
        with alone("small", tracking_uri="sqlite:///other.db", state_dir=tmp_path):
            pass

    with alone("small", tracking_uri=uri, state_dir=tmp_path):
        pass


def test_the_lock_is_let_go_when_the_experiment_breaks(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), alone("small", tracking_uri="http://host", state_dir=tmp_path):
        raise RuntimeError

    with alone("small", tracking_uri="http://host", state_dir=tmp_path):
        pass


def test_a_child_of_the_process_does_not_keep_the_lock(tmp_path: Path) -> None:
    lock = ExitStack()
    lock.enter_context(alone("small", tracking_uri="http://host", state_dir=tmp_path))

    with child_process(nullcontext()):
        lock.close()
        with alone("small", tracking_uri="http://host", state_dir=tmp_path):
            pass


def test_where_locks_cannot_be_kept_the_error_names_the_setting(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file, not a folder")

    with (
        pytest.raises(ConfigError, match="set ZEUS_FLOWS_STATE_DIR to a folder that can be written to"),
        alone("small", tracking_uri="http://host", state_dir=tmp_path / "state"),
    ):
        pass


@pytest.mark.slow
@pytest.mark.usefixtures("prefect_server")
def test_the_flow_begins_nothing_while_another_process_runs_the_experiment_and_runs_when_it_was_killed(
    tmp_path: Path, sqlite_uri: str
) -> None:
    from zeus_flows.orchestration.capriccio_flow import capriccio

    science = {"seeds": 1, "replays": 0, "workers": 1}
    path = write_experiment(tmp_path, slices={"days": 5, "most": 2}, science=science)
    out = str(tmp_path / "out")

    with (
        child_process(alone("small", tracking_uri=sqlite_uri, state_dir=read_settings().state_dir)) as process,
        pytest.raises(ConfigError, match=f"is being run by process {process}"),
    ):
        capriccio(str(path), tracking_uri=sqlite_uri, out=out)
    assert MlflowClient(tracking_uri=sqlite_uri).get_experiment_by_name("small") is None
    summary = capriccio(str(path), tracking_uri=sqlite_uri, out=out)
    again = capriccio(str(path), tracking_uri=sqlite_uri, out=out)

    assert summary.slices == 2
    assert summary.run_id == again.run_id
    (run,) = runs_of_kind(sqlite_uri, "experiment")
    assert {"zf.holder.1", "zf.released.1", "zf.holder.2", "zf.released.2"} <= set(run.data.params)
