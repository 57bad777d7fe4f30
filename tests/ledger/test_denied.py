"""Credentials that expire while a job trains: nothing that was acknowledged is lost."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import PERMISSION_DENIED
from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

from tests.builders import JOB, decision, observation
from tests.ledger import brief
from zeus_flows.core.records import EnergySource
from zeus_flows.ledger.open_ledger import open_direct

WRITES = ("log_batch", "log_param", "log_metric", "set_tag", "update_run_info", "create_run")


class Permission:
    """Whether MLflow lets anybody write."""

    granted = True

    def asked(self, write: Callable[..., Any]) -> Callable[..., Any]:
        def checked(*args: Any, **options: Any) -> Any:
            if not self.granted:
                raise MlflowException("the token has expired", error_code=PERMISSION_DENIED)
            return write(*args, **options)

        return checked


@pytest.fixture
def permission(monkeypatch: pytest.MonkeyPatch) -> Permission:
    permission = Permission()
    for name in WRITES:
        monkeypatch.setattr(SqlAlchemyStore, name, permission.asked(getattr(SqlAlchemyStore, name)))
    return permission


def test_what_is_denied_is_kept_and_delivered_once_by_the_next_recurrence(
    permission: Permission, sqlite_uri: str, tmp_path: Path
) -> None:
    with brief.opened(sqlite_uri, tmp_path) as ledger:
        number = ledger.begin()
        attempt = ledger.decided(decision(number), {})
        permission.granted = False
        observed = observation(number, energy_j=7777.0)
        ledger.observed(attempt, observed)
        ledger.ended(number, [observed])
    direct = open_direct(JOB, tracking_uri=sqlite_uri, energy_source=EnergySource.SIMULATED)
    assert direct.observations() == ()

    permission.granted = True
    following = brief.recur(sqlite_uri, tmp_path)

    direct = open_direct(JOB, tracking_uri=sqlite_uri, energy_source=EnergySource.SIMULATED)
    assert [o.order for o in direct.observations()] == [(number, 1), (following.number, 1)]
    assert [o.energy_j for o in direct.observations()].count(7777.0) == 1
    assert direct.open_claims() == {}
    assert direct.verify() == (True, 2)


def test_what_is_denied_for_a_while_is_delivered_by_the_same_process(
    permission: Permission, sqlite_uri: str, tmp_path: Path
) -> None:
    with brief.opened(sqlite_uri, tmp_path) as ledger:
        number = ledger.begin()
        attempt = ledger.decided(decision(number), {})
        permission.granted = False
        ledger.observed(attempt, observation(number, energy_j=7777.0))
        permission.granted = True
        ledger.ended(number, [observation(number, energy_j=7777.0)])
        direct = open_direct(JOB, tracking_uri=sqlite_uri, energy_source=EnergySource.SIMULATED)
        give_up = time.monotonic() + 60
        while direct.open_claims() and time.monotonic() < give_up:
            time.sleep(0.1)
        assert [o.energy_j for o in direct.observations()] == [7777.0]
        assert direct.open_claims() == {}
