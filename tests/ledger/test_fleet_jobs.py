"""All jobs of a tracking server, read together: what MLflow holds, in a few calls, whatever people have broken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from mlflow import MlflowClient

from tests.builders import JOB, decision, observation
from zeus_flows.core import policy
from zeus_flows.core.job import Job, Mode
from zeus_flows.core.job_summary import Concern, JobSummary, concerns, totals
from zeus_flows.core.reasons import Reason, ReasonKind
from zeus_flows.core.records import Asked, EnergySource, Outcome
from zeus_flows.ledger.mlflow import names
from zeus_flows.ledger.mlflow.client import Store
from zeus_flows.ledger.mlflow.fleet_jobs import read_fleet
from zeus_flows.ledger.mlflow.ledger import MlflowLedger

FIVE_DIGITS = 1e-4  # of joules and seconds among metrics


def job(name: str) -> Job:
    return replace(JOB, name=name)


def ledger_of(uri: str, name: str, source: EnergySource = EnergySource.SIMULATED) -> MlflowLedger:
    return MlflowLedger(job(name), Store(uri), source)


def recur(ledger: MlflowLedger, batch_size: int = 64, *, decided: dict[str, Any] | None = None, **changes: Any) -> int:
    """Run a recurrence to its end."""
    number = ledger.begin()
    run_id = ledger.decided(decision(number, batch_size=batch_size, **(decided or {})), {names.UNTUNABLE: ""})
    done = replace(observation(number, batch_size=batch_size, setting_before=250.0), **changes)
    ledger.observed(run_id, done)
    ledger.ended(number, [done])
    return number


def by_name(jobs: Sequence[JobSummary]) -> dict[str, JobSummary]:
    return {job.name: job for job in jobs}


class Counted(Store):
    """A store that counts what it is asked."""

    calls = 0

    def ask(self, call: Any) -> Any:
        self.calls += 1
        return super().ask(call)

    def search(self, experiment_ids: Sequence[str], query: str, *, most: int) -> Any:
        self.calls += 1
        return super().search(experiment_ids, query, most=most)


def test_a_fleet_is_what_mlflow_holds(sqlite_uri: str) -> None:
    for name, source in (("nightly", EnergySource.SIMULATED), ("hourly", EnergySource.MEASURED)):
        ledger = ledger_of(sqlite_uri, name, source)
        for batch_size, energy_j in ((64, 5000.0), (64, 5200.0), (32, 4000.0), (32, 4100.0)):
            recur(ledger, batch_size, energy_j=energy_j, energy_source=source, mode=Mode.FULL)
    found = by_name(read_fleet(Store(sqlite_uri)))
    assert set(found) == {"nightly", "hourly"}
    for name, summary in found.items():
        ledger = ledger_of(sqlite_uri, name, summary.energy_source)
        held = policy.saved(job(name), ledger.state()).so_far
        assert held is not None
        assert summary.saved is not None
        assert summary.saved.cost == pytest.approx(
            [a.cost_j for a in (held.total.amount, held.total.low, held.total.high)], rel=FIVE_DIGITS
        )
        told = [a.energy_j for a in (held.total.amount, held.total.low, held.total.high)]
        assert summary.saved.energy_j == pytest.approx(told, rel=FIVE_DIGITS)
        learning = held.line("learning")
        assert learning is not None
        assert summary.saved.learning == pytest.approx(learning.amount.cost_j, rel=FIVE_DIGITS)
        assert (summary.recurrences, summary.saved.recurrences, summary.under_way) == (4, 4, ())
        assert summary.newest == summary.ended
        assert summary.newest is not None
        assert (summary.newest.recurrence, summary.newest.batch_size, summary.newest.outcome) == (
            4,
            32,
            Outcome.CONVERGED,
        )
    together = totals(found.values())
    assert {source: total.jobs for source, total in together.items()} == {
        EnergySource.MEASURED: 1,
        EnergySource.SIMULATED: 1,
    }, "measured and simulated joules are never added up"


def test_what_somebody_should_look_at_is_named(sqlite_uri: str) -> None:
    recur(ledger_of(sqlite_uri, "good"))
    recur(
        ledger_of(sqlite_uri, "late"),
        decided={
            "reason": Reason(ReasonKind.LATE, "too late"),
            "mode": Mode.OBSERVE,
            "asked": Asked(mode_why="its roll-out, up to recurrence 3"),
        },
    )
    recur(ledger_of(sqlite_uri, "degraded"), decided={"degraded": True})
    recur(ledger_of(sqlite_uri, "failing"), outcome=Outcome.FAILED, detail="ZeroDivisionError")
    busy = ledger_of(sqlite_uri, "stuck")
    recur(busy)
    busy.decided(decision(busy.begin()), {names.UNTUNABLE: "no permission"})
    found = by_name(read_fleet(Store(sqlite_uri)))
    newest = found["stuck"].newest
    assert newest is not None
    soon, later = newest.began_s + 60, newest.began_s + 3601
    assert {name: concerns(job, now_s=later) for name, job in found.items()} == {
        "good": (),
        "late": (Concern.LATE,),
        "degraded": (Concern.DEGRADED,),
        "failing": (Concern.FAILING,),
        "stuck": (Concern.STUCK,),
    }
    assert concerns(found["stuck"], now_s=soon) == ()
    assert (found["stuck"].under_way, newest.untunable, newest.outcome) == ((2,), "no permission", None)
    ended, late = found["stuck"].ended, found["late"].newest
    assert ended is not None
    assert late is not None
    assert ended.recurrence == 1
    assert (late.mode, late.mode_why) == ("observe", "its roll-out, up to recurrence 3")


def test_many_jobs_cost_a_few_calls_and_a_longer_history_none_more(sqlite_uri: str) -> None:
    for number in range(6):
        recur(ledger_of(sqlite_uri, f"job-{number}"))

    def calls() -> int:
        store = Counted(sqlite_uri)
        assert len(read_fleet(store)) == 6
        return store.calls

    short = calls()
    assert short <= 6, "three for experiments and models, then runs by id a hundred at a time"
    for _ in range(5):
        recur(ledger_of(sqlite_uri, "job-0"))
    assert calls() == short


def test_a_stale_hint_is_put_right_by_the_root_and_the_chain_of_windows(sqlite_uri: str) -> None:
    ledger = ledger_of(sqlite_uri, "nightly")
    recur(ledger)
    ledger.reset()
    recur(ledger_of(sqlite_uri, "nightly"))
    before = read_fleet(Store(sqlite_uri))
    assert (before[0].window, before[0].recurrences) == (2, 2)
    client = MlflowClient(tracking_uri=sqlite_uri)
    experiment = client.get_experiment_by_name("nightly.ledger")
    assert experiment is not None
    for tag, value in ((names.CURRENT_WINDOW, experiment.tags[names.ROOT]), (names.CURRENT_PAGE, "0" * 32)):
        client.set_experiment_tag(experiment.experiment_id, tag, value)
        assert read_fleet(Store(sqlite_uri)) == before


def test_a_job_whose_ledger_was_deleted_or_edited_says_so_and_stops_no_other(sqlite_uri: str) -> None:
    for name in ("good", "deleted", "edited"):
        recur(ledger_of(sqlite_uri, name))
    client = MlflowClient(tracking_uri=sqlite_uri)
    gone, edited = client.get_experiment_by_name("deleted.ledger"), client.get_experiment_by_name("edited")
    assert gone is not None
    assert edited is not None
    client.delete_experiment(gone.experiment_id)
    (attempt,) = client.search_runs([edited.experiment_id], "tags.`zf.kind` = 'attempt'")
    client.set_tag(attempt.info.run_id, names.RECURRENCE, "x'; drop table runs")
    found = by_name(read_fleet(Store(sqlite_uri)))
    assert {name: bool(job.trouble) for name, job in found.items()} == {"good": False, "deleted": True, "edited": True}
    assert "zeus-flows ledger repair" in found["deleted"].trouble


def test_a_champion_is_told_from_the_newest_model(sqlite_uri: str) -> None:
    recur(ledger_of(sqlite_uri, "nightly"))
    recur(ledger_of(sqlite_uri, "hourly"))
    client = MlflowClient(tracking_uri=sqlite_uri)
    client.create_registered_model("ranker", tags={names.JOB: "nightly"})
    client.create_registered_model("not-ours")
    made = [client.create_model_version("ranker", source="somewhere") for _ in range(2)]
    for version in made:
        client.set_registered_model_alias("ranker", "champion", version.version)
        found = by_name(read_fleet(Store(sqlite_uri)))
        assert found["nightly"].champion_s == version.creation_timestamp / 1000
        assert found["hourly"].champion_s is None
    client.delete_model_version("ranker", made[1].version)
    assert by_name(read_fleet(Store(sqlite_uri)))["nightly"].champion_s is None


def test_experiments_of_others_are_no_jobs(sqlite_uri: str) -> None:
    client = MlflowClient(tracking_uri=sqlite_uri)
    client.create_experiment("somebody-else")
    client.create_experiment("pretender", tags={names.LEDGER: "no such id"})
    (found,) = read_fleet(Store(sqlite_uri))
    assert (found.name, bool(found.trouble)) == ("pretender", True)
