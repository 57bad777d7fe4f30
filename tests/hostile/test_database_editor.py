"""Somebody who edits MLflow's database: nothing that was not measured reaches a decision. Add a line to `EDITS`."""

from __future__ import annotations

import json
import math
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.builders import GPU, JOB, decision, observation
from zeus_flows.core import policy
from zeus_flows.core.json import jsonable, plain_text
from zeus_flows.core.records import Ask, EnergySource
from zeus_flows.errors import StoreError
from zeus_flows.ledger.mlflow.ledger import MlflowLedger
from zeus_flows.ledger.open_ledger import open_direct

Edit = Callable[[dict[str, Any]], object]


def with_(**changes: Any) -> Edit:
    return lambda record: record | changes


def in_profile(**changes: Any) -> Edit:
    def edit(record: dict[str, Any]) -> object:
        text = json.dumps(record)
        for name, value in changes.items():
            text = text.replace(f'"{name}": {json.dumps(200.0)}', f'"{name}": {json.dumps(value)}')
        return json.loads(text)

    return edit


#: What is made of an observation, by hand.
EDITS: dict[str, Edit] = {
    "negative energy": with_(energy_j=-5000.0),
    "negative time": with_(time_s=-1.0),
    "negative epochs": with_(epochs=-3),
    "no epochs": with_(epochs=0),
    "epochs without end": with_(epochs=10**400),
    "energy that is no number": with_(energy_j=math.nan),
    "time without end": with_(time_s=math.inf),
    "energy beyond measure": with_(energy_j=1e308),
    "time of nothing": with_(time_s=5e-324),
    "a batch size of none": with_(batch_size=0),
    "a batch size that is not the job's": with_(batch_size=7),
    "a batch size below none": with_(batch_size=-64),
    "a recurrence that is another's": with_(recurrence=1),
    "a recurrence of the future": with_(recurrence=10**18),
    "another attempt": with_(attempt=99),
    "an outcome that there is not": with_(outcome="triumph"),
    "a GPU that is a word": with_(gpu="V100"),
    "no samples": with_(samples_per_epoch=0),
    "samples below none": with_(samples_per_epoch=-1000),
    "a limit below none": with_(setting=-150.0),
    "a profile that is a word": with_(profile="fast"),
    "a profile of nothing": in_profile(average_power_w=0.0),
    "a profile below nothing": in_profile(average_power_w=-1.0),
    "a profile that is no number": in_profile(average_power_w=math.nan),
    "a metric that is a list": with_(metric=[1, 2, 3]),
    "a newer schema": with_(schema=10**6),
    "a list": lambda _: [1, 2, 3],
    "a word": lambda _: "reached",
    "nothing": lambda _: None,
    "no JSON": lambda _: ...,
    "much": with_(detail="x" * 200_000),
    "deep": with_(detail=json.loads("[" * 500 + "]" * 500)),
}


def open_ledger(uri: str) -> MlflowLedger:
    return open_direct(JOB, tracking_uri=uri, energy_source=EnergySource.SIMULATED)


@pytest.fixture(scope="module")
def four_recurrences(_migrated_database: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database of four recurrences."""
    path = tmp_path_factory.mktemp("edited") / "mlflow.db"
    shutil.copy(_migrated_database, path)
    ledger = open_ledger(f"sqlite:///{path}")
    for batch_size in (64, 128, 32, 64):
        number = ledger.begin()
        ledger.history()
        done = observation(number, batch_size=batch_size)
        ledger.observed(ledger.decided(decision(number, batch_size=batch_size), {}), done)
        ledger.ended(number, [done])
    return path


@pytest.fixture
def history(four_recurrences: Path, tmp_path: Path) -> str:
    """Where a copy of it is."""
    shutil.copy(four_recurrences, tmp_path / "mlflow.db")
    return f"sqlite:///{tmp_path / 'mlflow.db'}"


def edit(uri: str, recurrence: int, change: Edit) -> None:
    """Change the observation of a recurrence behind MLflow's back."""
    with sqlite3.connect(uri.removeprefix("sqlite:///")) as database:
        rows = database.execute("select run_uuid, value from params where key = 'zf.observation'").fetchall()
        ((run, value),) = [(run, value) for run, value in rows if json.loads(value)["recurrence"] == recurrence]
        made = change(json.loads(value))
        text = "{" if made is ... else json.dumps(made)
        database.execute("update params set value = ? where run_uuid = ? and key = 'zf.observation'", (text, run))
    database.close()


@pytest.mark.parametrize("what", EDITS)
def test_an_observation_that_was_edited_stops_no_decision_and_teaches_nothing_impossible(
    what: str, history: str
) -> None:
    edit(history, 3, EDITS[what])
    if what == "a newer schema":  # what a newer version wrote is not set aside
        with pytest.raises(StoreError, match="install the version that wrote it, or a newer one"):
            open_ledger(history).history()
        return
    state = open_ledger(history).history().state
    said = policy.decide(JOB, state, Ask(5, 1, 7, gpu=GPU))
    assert said.batch_size in JOB.batch_sizes
    plain_text(jsonable(said), allow_nan=False)
    expected = [arm.expected_cost_j for arm in said.reason.arms if arm.expected_cost_j is not None]
    assert all(0 < cost < 1e12 for cost in expected)
    saved = policy.saved(JOB, state)
    plain_text(jsonable(saved), allow_nan=False)
    open_ledger(history).verify()
