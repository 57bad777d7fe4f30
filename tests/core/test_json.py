"""Records to JSON and back: one way, with a tag where a field may be one of several."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given

from tests.core.builders import ask, decide, job, observation, profile, wild_observations
from zeus_flows.core.early_stop import CostCut, Cut, NoCut, PlannedCut
from zeus_flows.core.json import compact, from_plain, from_text, jsonable, plain_text, to_text
from zeus_flows.core.power_profile import PowerProfile
from zeus_flows.core.records import Decision, Observation

ROOT = Path(__file__).parents[2]
#: What else reads JSON: records of an older schema, a state by its policy, a protocol, rows by the million.
READERS = {
    "core/json.py",
    "ledger/mlflow/record_text.py",
    "ledger/mlflow/snapshot.py",
    "gpu/zeusd.py",
    "experiments/capriccio/curves.py",
}


@given(wild_observations())
def test_a_record_survives_json(record: Observation) -> None:
    assert from_text(Observation, to_text(record)) == record
    assert from_text(Observation, plain_text(compact(record), allow_nan=False)) == record


@pytest.mark.parametrize("cut", [NoCut(), CostCut(7.5), PlannedCut(1.5, 0.5, 0.25, 0.05, 100.0, 20.0)])
def test_a_union_says_which_one_it_is(cut: Cut) -> None:
    assert jsonable(cut)["kind"] == compact(cut)["kind"] == cut.tag
    for written in (jsonable(cut), compact(cut)):
        assert from_plain(Cut, written) == cut  # type: ignore[arg-type]
    with pytest.raises(LookupError):
        from_plain(Cut, {"kind": "another"})  # type: ignore[arg-type]


def test_a_whole_decision_survives_json() -> None:
    for cut in ("zeus", "thompson"):
        decided = decide(job(cut), [observation(1, 32, 5, profiled=True)], ask(2))
        assert not isinstance(decided.cut, NoCut)
        assert from_text(Decision, to_text(decided)) == decided


def test_records_are_read_in_one_place() -> None:
    package = ROOT / "zeus_flows"
    reading = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if any(call in path.read_text(encoding="utf-8") for call in ("json.loads(", "json.load(", "asdict("))
    }
    not_records = {"experiments/capriccio/results.py", "experiments/capriccio/model_gate.py"}
    # what a command writes, and what ranks and the session tell one another
    not_records |= {f"training/forms/{name}.py" for name in ("metric_source", "rank_session", "ranks")}
    # a pool's template, what is told of a kept model, a tag for people, and a row on its way to another process
    not_records |= {"orchestration/pools.py", "training/keeping.py", "reporting/drift_report.py", "ledger/outbox.py"}
    # saved views, in MLflow's own format
    not_records |= {"ledger/mlflow/page_state.py", "ledger/mlflow/views.py"}
    assert reading - not_records == READERS


def test_what_an_earlier_version_did_not_write_gets_its_default() -> None:
    data = jsonable(profile(32))
    del data["complete"]
    assert from_plain(PowerProfile, data) == profile(32)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises((TypeError, ValueError)):
        from_plain(PowerProfile, {"batch_size": "many", "gpu": {}, "measurements": []})
