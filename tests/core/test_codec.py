from __future__ import annotations

import json

import pytest
from hypothesis import given

from tests.core.builders import profile, wild_observations
from zeus_flows.core.json import from_plain, jsonable
from zeus_flows.core.power_profile import PowerProfile
from zeus_flows.core.records import Observation


@given(wild_observations())
def test_a_record_survives_json(record: Observation) -> None:
    assert from_plain(Observation, json.loads(json.dumps(jsonable(record)))) == record


def test_what_an_earlier_version_did_not_write_gets_its_default() -> None:
    data = jsonable(profile(32))
    del data["complete"]
    assert from_plain(PowerProfile, data) == profile(32)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises((TypeError, ValueError)):
        from_plain(PowerProfile, {"batch_size": "many", "gpu": {}, "measurements": []})
