"""SIGKILL at every named point of a recurrence: nothing acknowledged is lost, and the next one explores on."""

from __future__ import annotations

import re
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from mlflow import MlflowClient

from tests.builders import JOB, decision, observation
from tests.faults.test_model_kill import POINTS as MODEL_POINTS
from tests.ledger import brief
from tests.processes import fork_server
from zeus_flows.core.reasons import ReasonKind
from zeus_flows.core.records import EnergySource
from zeus_flows.ledger.open_ledger import open_direct

FOLDER = Path(__file__).resolve().parents[2] / "zeus_flows"

#: Where -> what the process was doing there. `known`: a second recurrence and more; `fresh`: the first one of all;
#: `changed`: the first with a new fingerprint; `dead`: another one died before; `outage`: MLflow is away until the
#: decision was spooled; `gated`: a drift gate is asked and wants training; `skipping`: it does not.
POINTS = {
    "fresh": ["after-create-root", "after-name-root", "after-create-page", "after-link-page", "before-claim"],
    "known": [
        *("after-settle", "after-claim", "after-begin", "after-snapshot", "after-decide", "after-create-run"),
        *("after-log-decision", "after-link-decision", "after-decided", "after-spool-epoch", "after-heartbeat"),
        *("after-train", "after-spool-observation", "before-deliver", "before-observation", "after-observation"),
        *("after-outcome", "after-terminate", "after-deliver", "after-remove", "after-observe", "after-spool-end"),
        *("after-series", "after-boundary", "after-end"),
    ],
    "changed": ["after-create-window", "after-link-window"],
    "dead": ["after-declare-dead", "after-bury", "after-close-dead"],
    "outage": ["after-spool-decision", "after-late-claim"],
    "gated": ["after-create-gate", "after-link-gate", "after-ask", "after-check"],
    "skipping": ["after-spool-gate", "after-gate", "after-skip"],
}
GATE_ENDS = {"gated": {"KILLED"}, "skipping": {"FINISHED"}}
CASES = [(scenario, point) for scenario, named in POINTS.items() for point in named]


def test_every_named_point_is_tried() -> None:
    literal = re.compile(r'reached\("([a-z-]+)"\)')
    named = {point for path in FOLDER.rglob("*.py") for point in literal.findall(path.read_text())}
    assert named == {point for _, point in CASES} | set(MODEL_POINTS)
    assert len(named) >= 20


@pytest.fixture(scope="module")
def known_history(_migrated_database: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with nine recurrences at the default batch size: the next one wants to explore."""
    path = tmp_path_factory.mktemp("known") / "known.db"
    shutil.copy(_migrated_database, path)
    ledger = open_direct(JOB, tracking_uri=f"sqlite:///{path}", energy_source=EnergySource.SIMULATED)
    for _ in range(9):
        number = ledger.begin()
        observed = observation(number, energy_j=5000.0 + number)
        ledger.observed(ledger.decided(decision(number), {}), observed)
        ledger.ended(number, [observed])
    return path


@pytest.mark.slow
@pytest.mark.xdist_group("ledger-kill")
@pytest.mark.parametrize(("scenario", "point"), CASES, ids=[point for _, point in CASES])
def test_killed_at(
    scenario: str,
    point: str,
    sqlite_uri: str,
    tmp_path: Path,
    known_history: Path,
) -> None:
    if scenario != "fresh":
        shutil.copy(known_history, sqlite_uri.removeprefix("sqlite:///"))
    if scenario == "dead":
        _run_to_its_death(brief.leave_open, sqlite_uri, tmp_path)
    _run_to_its_death(brief.die_at, point, sqlite_uri, tmp_path, scenario)

    job = replace(JOB, fingerprint="f1") if scenario == "changed" else JOB
    after = [brief.recur(sqlite_uri, tmp_path, energy_j=9000.0 + 10 * i, job=job) for i in range(2)]

    ledger = open_direct(job, tracking_uri=sqlite_uri, energy_source=EnergySource.SIMULATED)
    read = ledger.observations()
    assert len({o.order for o in read}) == len(read), "an attempt has two observations"
    energies = [o.energy_j for o in read]
    for energy_j in brief.acknowledged(tmp_path):
        assert energies.count(energy_j) == 1, f"the observation with {energy_j} J was acknowledged"
    if scenario in ("gated", "skipping"):
        assert set(_gates_by_status(sqlite_uri)) <= (
            {"RUNNING"} if point == "after-create-gate" else GATE_ENDS[scenario]
        )
    assert ledger.open_attempts() == ()
    assert ledger.open_claims() == {}
    assert ledger.verify() == (True, len(read))
    assert [done.attempts[0][0].decision.reason.kind for done in after].count(ReasonKind.IN_FLIGHT) == 0
    if scenario not in ("fresh", "changed"):
        explored = any(done.attempts[0][0].decision.explores for done in after)
        assert explored or {o.batch_size for o in read} == set(JOB.batch_sizes)
    assert after[1].number == after[0].number + 1
    if scenario != "fresh":
        assert _energies_before(sqlite_uri) >= {5000.0 + number for number in range(1, 10)}


def _run_to_its_death(target: object, *args: object) -> None:
    process = fork_server().Process(target=target, args=args)  # type: ignore[arg-type]
    process.start()
    process.join(timeout=300)
    assert process.exitcode == -signal.SIGKILL, f"it was never there (exit {process.exitcode})"


def _gates_by_status(uri: str) -> list[str]:
    """Return how the runs of gates ended; one that was never linked is left to the janitor's command."""
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name(JOB.name)
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id], "tags.`zf.kind` = 'gate'")
    assert len(runs) == 1
    return [str(run.info.status) for run in runs]


@pytest.mark.slow
@pytest.mark.xdist_group("ledger-kill")
@pytest.mark.parametrize("point", ["after-spool-end", "after-series", "after-create-window", "after-boundary"])
def test_a_boundary_is_written_once_wherever_the_one_who_found_it_is_killed(
    point: str, sqlite_uri: str, tmp_path: Path
) -> None:
    job = replace(JOB, window=2)
    brief.recur(sqlite_uri, tmp_path, job=job)
    _run_to_its_death(brief.die_at, point, sqlite_uri, tmp_path, "windowed")
    for _ in range(3):
        brief.recur(sqlite_uri, tmp_path, job=job)
    client = MlflowClient(tracking_uri=sqlite_uri)
    experiment = client.get_experiment_by_name(JOB.name)
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id], "tags.`zf.kind` = 'drift-window'", order_by=["start_time"])
    linked = [run for run in runs if "zf.next_window" in run.data.params or run.info.status == "RUNNING"]
    first = [int(run.data.params["zf.first_recurrence"]) for run in linked if "zf.ended_by" in run.data.tags]
    assert first == [1, 3]
    series = {tuple(sorted({p.step for p in client.get_metric_history(r.info.run_id, "zf.cost_j")})) for r in linked}
    assert series - {()} == {(1, 2), (3, 4), (5,)}


def _energies_before(uri: str) -> set[float]:
    before = open_direct(JOB, tracking_uri=uri, energy_source=EnergySource.SIMULATED)
    return {o.energy_j for o in before.observations()}
