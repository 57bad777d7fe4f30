"""Many processes that decide and report on one ledger at the same time."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from threading import Barrier

from tests.builders import GPU, JOB, observation
from zeus_flows.core import policy
from zeus_flows.core.records import Ask, EnergySource, decision_seed
from zeus_flows.ledger.open_ledger import open_direct


def take_part(name: str, uri: str, rounds: int, folder: Path, all_ready: Barrier) -> None:
    """Decide and report, round by round, all at once; write down the number and the energy of each."""
    try:
        _take_part(name, uri, rounds, folder, all_ready)
    except BaseException:
        all_ready.abort()  # else the others would wait for ever
        raise


def _take_part(name: str, uri: str, rounds: int, folder: Path, all_ready: Barrier) -> None:
    os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] = "120"  # sixteen wait for one server on a busy machine
    job = replace(JOB, name=name)
    ledger = open_direct(job, tracking_uri=uri, energy_source=EnergySource.SIMULATED)
    ledger.last_recurrence()
    with (folder / f"{os.getpid()}").open("w") as notes:
        for round_ in range(rounds):
            all_ready.wait()
            number = ledger.begin()
            history = ledger.history()
            in_flight = tuple(f for f in history.in_flight if f.recurrence != number)
            ask = Ask(number, 1, decision_seed(job.seed, number, 1), gpu=GPU, in_flight=in_flight)
            decision = policy.decide(job, history.state, ask)
            attempt = ledger.decided(decision, {})
            energy_j = 5000.0 + (os.getpid() % 100_000) + round_ / 1000
            observed = observation(
                number, batch_size=decision.batch_size, energy_j=energy_j, explores=decision.explores
            )
            ledger.observed(attempt, observed)
            ledger.ended(number, [observed])
            notes.write(f"{number} {energy_j}\n")
