"""SIGKILL at every named point of a pass over models: after the next one there is one version, verdict and champion."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.processes import fork_server
from tests.training.model_rig import ModelRig
from zeus_flows import killpoints

POINTS = [
    *("after-create-model", "after-send-model", "after-name-model", "after-sent", "after-create-version"),
    *("after-name-version", "after-judge", "after-verdict", "after-move", "after-alias", "after-moved"),
]


def die_in_a_pass(point: str, uri: str, folder: Path) -> None:
    """Make a pass and be killed at a named point of it (in a process of its own)."""

    def hook(name: str) -> None:
        if name == point:
            os.kill(os.getpid(), signal.SIGKILL)

    killpoints.listen(hook)
    ModelRig(uri, folder).make_pass()


@pytest.mark.slow
@pytest.mark.xdist_group("model-kill")
@pytest.mark.parametrize("point", POINTS)
def test_killed_in_a_pass_at(point: str, sqlite_uri: str, tmp_path: Path) -> None:
    rig = ModelRig(sqlite_uri, tmp_path)
    rig.recur(0.80)
    rig.make_pass()
    rig.recur(0.81)
    process = fork_server().Process(target=die_in_a_pass, args=(point, sqlite_uri, tmp_path))
    process.start()
    process.join(timeout=120)
    assert process.exitcode == -signal.SIGKILL, f"it was never there (exit {process.exitcode})"

    promoted = rig.make_pass()

    assert promoted.champion is not None
    assert promoted.champion.recurrence == 2
    assert not promoted.by_hand
    assert sorted(rig.versions()) == [1, promoted.champion.number]
    assert rig.aliases() == {"champion": promoted.champion.number}
    runs = rig.client.search_runs(["1"], "params.`zf.model` != ''")
    assert len(runs) == 2
    assert all("zf.verdict.1" in run.data.params and "zf.verdict.2" not in run.data.params for run in runs)
    assert list((tmp_path / "state" / "models").iterdir()) == []
    rig.client.set_registered_model_alias(rig.name, "champion", "1")  # whatever was killed, a hand is seen
    assert rig.make_pass().by_hand
    assert rig.aliases()["champion"] == 1
