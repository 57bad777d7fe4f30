"""Sixteen processes decide and report at once: no number is given twice, no observation is lost."""

from __future__ import annotations

import os
import uuid
from dataclasses import replace
from pathlib import Path

import pytest

from tests.builders import JOB
from tests.ledger import crowd
from tests.processes import fork_server
from zeus_flows.core.records import EnergySource
from zeus_flows.ledger.open_ledger import open_direct

PROCESSES = 16
#: Fifty take minutes on two cores; `ZEUS_FLOWS_TEST_ROUNDS=50` for the whole of it.
ROUNDS = int(os.environ.get("ZEUS_FLOWS_TEST_ROUNDS", "4"))


@pytest.mark.slow
@pytest.mark.xdist_group("ledger-servers")
@pytest.mark.parametrize("store", ["postgres_uri", "server_on_sqlite"])
def test_sixteen_at_once(store: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    uri = request.getfixturevalue(store)
    processes = fork_server()
    name, all_ready = f"crowd-{uuid.uuid4().hex[:8]}", processes.Barrier(PROCESSES)
    args = (name, uri, ROUNDS, tmp_path, all_ready)
    crew = [processes.Process(target=crowd.take_part, args=args) for _ in range(PROCESSES)]
    for process in crew:
        process.start()
    for process in crew:
        process.join(timeout=1800)
    assert [process.exitcode for process in crew] == [0] * PROCESSES

    notes = [line.split() for path in tmp_path.iterdir() for line in path.read_text().splitlines()]
    written = {int(number): float(energy_j) for number, energy_j in notes}
    assert sorted(int(number) for number, _ in notes) == list(range(1, PROCESSES * ROUNDS + 1))
    ledger = open_direct(replace(JOB, name=name), tracking_uri=uri, energy_source=EnergySource.SIMULATED)
    assert {o.recurrence: o.energy_j for o in ledger.observations()} == written
    assert ledger.verify() == (True, PROCESSES * ROUNDS)
    assert ledger.open_claims() == {}
