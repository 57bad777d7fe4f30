"""The stored form of decisions and observations: compact, canonical, within MLflow's limits, and read for ever."""

from __future__ import annotations

import base64
import json
import random
import string
import zlib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import GPU, decision, observation, profile
from zeus_flows.core.early_stop import CostCut, Cut, NoCut, PlannedCut
from zeus_flows.core.job import Mode
from zeus_flows.core.json import jsonable
from zeus_flows.core.power_profile import Gpu, Knob, Part, Parts, PowerProfile, SettingMeasurement
from zeus_flows.core.reasons import ArmBelief, ArmStatus, Reason, ReasonKind
from zeus_flows.core.records import Asked, InFlight, Observation, Outcome
from zeus_flows.errors import StoreError, UnreadableRecord
from zeus_flows.ledger.mlflow.packing import pack, unpack
from zeus_flows.ledger.mlflow.record_text import (
    MAX_PARAM,
    MAX_TAG,
    dump_arms,
    dump_decision,
    dump_observation,
    is_same_decision,
    is_same_observation,
    load_decision,
    load_observation,
)

# What the version before schema numbers wrote.
DECISIONS = {
    "no cut": (
        '{"recurrence":1,"attempt":1,"batch_size":64,"reason":{"kind":"first-run","text":"nothing is known: '
        'the default batch size 64 runs","arms":[],"numbers":{}},"seed":7331,"policy":"thompson","cut":{},"ex'
        'plores":false,"degraded":false,"tune_power":true,"power_limit_w":null}'
    ),
    "cost cut": (
        '{"recurrence":2,"attempt":1,"batch_size":32,"reason":{"kind":"prune","text":"32 is tried","arms":[],'
        '"numbers":{}},"seed":7331,"policy":"thompson","cut":{"threshold_j":10250.0},"explores":true,"degrade'
        'd":false,"tune_power":true,"power_limit_w":null}'
    ),
    "planned cut": (
        '{"recurrence":3,"attempt":1,"batch_size":128,"reason":{"kind":"explore","text":"128 may be cheaper",'
        '"arms":[{"batch_size":32,"runs":0,"expected_cost_j":null,"spread":null,"sampled_cost_j":null,"status'
        '":"untried","chance_best":null,"gain_j":null,"noise":null},{"batch_size":64,"runs":2,"expected_cost_'
        'j":5125.5,"spread":0.12,"sampled_cost_j":4990.25,"status":"known","chance_best":0.7,"gain_j":null,"n'
        'oise":0.05},{"batch_size":128,"runs":0,"expected_cost_j":9000.0,"spread":null,"sampled_cost_j":null,'
        '"status":"out of reach","chance_best":null,"gain_j":-'
        '12.5,"noise":null}],"numbers":{"budget_j":1200.0,"horizon":20.0}},"seed":7331,"policy":"thompson","c'
        'ut":{"log_epochs":1.75,"variance":0.5,"noise":0.01,"never":0.05,"best_cost_j":5125.5,"horizon":20.0,'
        '"at_least":2,"at_most_j":8000.0,"room_j":null},"explores":true,"degraded":false,"tune_power":true,"p'
        'ower_limit_w":null}'
    ),
    "grid": (
        '{"recurrence":4,"attempt":1,"batch_size":64,"reason":{"kind":"grid","text":"next","arms":[],"numbers'
        '":{}},"seed":7331,"policy":"thompson","cut":{},"explores":false,"degraded":true,"tune_power":false,"'
        'power_limit_w":150.0}'
    ),
}
OBSERVATIONS = {
    "complete profile": (
        '{"recurrence":1,"attempt":1,"batch_size":64,"outcome":"converged","epochs":5,"energy_j":5000.1234567'
        '89,"time_s":40.5,"gpu":{"model":"Simulated V100","count":1,"max_power_w":250.0},"energy_source":"sim'
        'ulated","samples_per_epoch":1000,"power_limit_w":150.0,"profile":{"batch_size":64,"gpu":{"model":"Si'
        'mulated V100","count":1,"max_power_w":250.0},"measurements":[{"power_limit_w":250.0,"average_power_w'
        '":200.123456789,"samples_per_s":100.0,"begun_s":null},{"power_limit_w":150.0,"average_power_w":130.0'
        ',"samples_per_s":90.987654321,"begun_s":null}],"complete":true,"made_with":"","stale_w":[]},"profili'
        'ng_energy_j":300.0,"profiling_time_s":2.5,"epochs_allowed":9,"metric":0.91,"energy_complete":true,"e'
        'xplores":true,"fingerprint":"f0","detail":"reached 0.91","traceback":""}'
    ),
    "partial profile": (
        '{"recurrence":2,"attempt":1,"batch_size":64,"outcome":"failed","epochs":0,"energy_j":12.0,"time_s":1'
        '.0,"gpu":{"model":"Simulated V100","count":1,"max_power_w":250.0},"energy_source":"simulated","sampl'
        'es_per_epoch":1000,"power_limit_w":null,"profile":{"batch_size":64,"gpu":{"model":"Simulated V100","'
        'count":1,"max_power_w":250.0},"measurements":[{"power_limit_w":250.0,"average_power_w":200.123456789'
        ',"samples_per_s":100.0,"begun_s":null},{"power_limit_w":150.0,"average_power_w":130.0,"samples_per_s'
        '":90.987654321,"begun_s":1.5}],"complete":false,"made_with":"","stale_w":[]},"profiling_energy_j":0.'
        '0,"profiling_time_s":0.0,"epochs_allowed":null,"metric":null,"energy_complete":false,"explores":fals'
        'e,"fingerprint":"f0","detail":"broke","traceback":"Traceback\\n  ValueError: \\"x\\""}'
    ),
}

ARMS = (
    ArmBelief(32, 0),
    ArmBelief(64, 2, 5125.5, 0.12, 4990.25, ArmStatus.KNOWN, 0.7, None, 0.05),
    ArmBelief(128, 0, 9000.0, status=ArmStatus.OUT_OF_REACH, gain_j=-12.5),
)
PARTS = Parts(Part(1, 120.5, 3.25), ((150.0, Part(4, 80.0, 2.0)), (250.0, Part(1, 30.0, 0.5))), Part(5, 10.0, 1.0))
ASKED = Asked(
    gpu=GPU,
    samples_per_epoch=1000,
    in_flight=(InFlight(3, 1, 128, explores=True), InFlight(4, 2, 64, explores=False)),
    tried=(32,),
    out_of_memory=(32,),
    power_limits_w=(250.0, 150.0),
    folded=7,
    newest=(2, 1),
    under_way=(3, 4),
)
CUTS = (NoCut(), CostCut(10250.0), PlannedCut(1.75, 0.5, 0.01, 0.05, 5125.5, 20.0, 2, 8000.0, None))

_6 = st.integers(min_value=1, max_value=999_999).map(lambda n: n / 1000)
_parts = st.builds(Part, st.integers(0, 50), _6, _6)


# -- there and back --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", CUTS, ids=lambda cut: type(cut).__name__)
def test_a_decision_comes_back_as_it_was_and_is_written_as_it_was(cut: Cut) -> None:
    reason = Reason(ReasonKind.EXPLORE, "128 may be cheaper", ARMS, {"budget_j": 1200.0, "horizon": float("inf")})
    written = decision(5, 2, 128, reason=reason, cut=cut, explores=True, tune_power=False, control=True)
    written = replace(written, mode=Mode.FULL, setting=150.0, asked=ASKED)
    text = dump_decision(written)
    assert load_decision(text) == written
    assert dump_decision(load_decision(text)) == text
    assert load_decision(dump_decision(decision(1, cut=cut))) == decision(1, cut=cut)


@given(
    st.lists(st.tuples(_6, _6, _6, st.none() | _6), max_size=6),
    st.none() | st.builds(Parts, _parts, st.lists(st.tuples(_6, _parts), max_size=3).map(tuple), _parts),
    st.lists(st.tuples(st.integers(1, 99), _6), max_size=5).map(tuple),
    st.floats(min_value=0, max_value=1e12),
)
def test_an_observation_comes_back_as_it_was_and_is_written_as_it_was(
    measured: list[tuple[float, float, float, float | None]],
    parts: Parts | None,
    curve: tuple[tuple[int, float], ...],
    energy_j: float,
) -> None:
    rows = tuple(SettingMeasurement(*row) for row in measured)
    written = observation(
        *(3, 2, 32),
        energy_j=energy_j,
        profile=PowerProfile(64, GPU, rows, complete=False, made_with="torch 2", stale=(150.0,)),
        parts=parts,
        curve=curve,
        mode=Mode.POWER,
        setting_before=250.0,
        host_energy_j=33.0,
        control=True,
        metric=0.91,
    )
    text = dump_observation(written)
    assert load_observation(text) == written
    assert dump_observation(load_observation(text)) == text


def test_an_observation_says_its_knob_and_setting_and_repeats_nothing() -> None:
    data = json.loads(dump_observation(observation(1, parts=PARTS, curve=((1, 0.5), (4, 0.91)))))
    assert (data["schema"], data["knob"], data["setting"]) == (2, "power_limit", 150)
    assert "power_limit_w" not in data
    assert data["profile"] == {"measurements": [[250, 200, 100], [150, 130, 90]]}
    assert data["parts"] == {
        "once": [1, 120.5, 3.25],
        "evaluation": [[150, 4, 80, 2], [250, 1, 30, 0.5]],
        "rest": [5, 10, 1],
    }
    assert data["curve"] == [[1, 0.5], [4, 0.91]]
    assert "detail" not in data


def test_an_observation_of_clocks_says_so_once_and_names_no_watts() -> None:
    gpu = replace(GPU, knob=Knob.CLOCKS)
    rows = (SettingMeasurement(1380.0, 200.0, 100.0), SettingMeasurement(1200.0, 150.0, 95.0))
    written = observation(1, gpu=gpu, setting=1200.0, setting_before=1380.0, profile=PowerProfile(64, gpu, rows))
    text = dump_observation(written)
    data = json.loads(text)
    assert (data["knob"], data["setting"], data["setting_before"]) == ("clocks", 1200, 1380)
    assert "limit_before_w" not in data
    assert text.count("clocks") == 1
    assert load_observation(text) == written


def test_a_decision_says_which_kind_of_cut_it_has() -> None:
    kinds = [json.loads(dump_decision(decision(1, cut=cut)))["cut"]["kind"] for cut in CUTS]
    assert kinds == ["none", "cost", "planned"]
    data = json.loads(dump_decision(decision(1, setting=175.0)))
    assert (data["schema"], data["knob"], data["setting"]) == (2, "power_limit", 175)


def test_measured_numbers_have_six_digits_and_settings_and_totals_all_of_theirs() -> None:
    rows = (SettingMeasurement(183.3333333, 123.456789, 9876.54321),)
    seen = observation(1, energy_j=5000.123456789, setting=183.3333333, profile=PowerProfile(64, GPU, rows))
    read = load_observation(dump_observation(seen))
    assert read.profile is not None
    assert read.profile.measurements == (SettingMeasurement(183.3333333, 123.457, 9876.54),)
    assert (read.energy_j, read.setting) == (5000.123456789, 183.3333333)


def test_a_profile_of_another_gpu_names_it() -> None:
    other = Gpu("P100", 2, 500.0)
    seen = observation(1, profile=replace(profile(), gpu=other))
    assert load_observation(dump_observation(seen)) == seen


def test_a_record_takes_a_third_of_what_its_fields_would() -> None:
    rows = tuple(SettingMeasurement(100.0 + i, 100 / 3 + i, 1000 / 7 + i) for i in range(20))
    seen = observation(1, profile=PowerProfile(64, GPU, rows))
    assert len(dump_observation(seen)) < len(json.dumps(jsonable(seen))) / 3


@pytest.mark.parametrize("metric", [float("nan"), float("inf")])
def test_a_run_that_diverged_has_no_metric_and_its_text_is_json(metric: float) -> None:
    text = dump_observation(observation(1, outcome=Outcome.DIVERGED, metric=metric, curve=((1, 0.5),)))
    json.loads(text, parse_constant=pytest.fail)
    assert load_observation(text).metric is None


def test_half_a_character_in_a_traceback_does_not_cost_the_record() -> None:
    seen = observation(1, traceback='b\udc80roke \x00 "here"')
    text = dump_observation(seen)
    text.encode()
    assert load_observation(text) == seen


# -- earlier and later versions --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DECISIONS)
def test_a_decision_of_schema_1_is_read(name: str) -> None:
    read = load_decision(DECISIONS[name])
    data = json.loads(DECISIONS[name])
    assert (read.schema, read.mode, read.asked, read.control) == (1, None, None, False)
    assert (read.recurrence, read.batch_size, read.seed) == (data["recurrence"], data["batch_size"], 7331)
    assert (read.explores, read.tune_power, read.setting) == (
        *(data["explores"], data["tune_power"], data["power_limit_w"]),
    )
    assert read.cut == dict(zip(DECISIONS, (*CUTS, NoCut()), strict=True))[name]
    assert read.reason.arms == (ARMS if name == "planned cut" else ())


def test_an_observation_of_schema_1_is_read() -> None:
    read = load_observation(OBSERVATIONS["complete profile"])
    rows = (SettingMeasurement(250.0, 200.123456789, 100.0), SettingMeasurement(150.0, 130.0, 90.987654321))
    assert (read.schema, read.parts, read.mode, read.curve) == (1, None, None, ())
    assert (read.outcome, read.energy_j, read.setting) == (Outcome.CONVERGED, 5000.123456789, 150.0)
    assert (read.knob, read.setting_before, read.host_energy_j) == (Knob.POWER_LIMIT, None, 0.0)
    assert read.profile == PowerProfile(64, GPU, rows)


def test_a_partial_profile_of_schema_1_is_read() -> None:
    read = load_observation(OBSERVATIONS["partial profile"])
    assert (read.schema, read.parts, read.mode, read.metric) == (1, None, None, None)
    assert read.profile is not None
    assert [m.begun_s for m in read.profile.measurements] == [None, 1.5]
    assert not read.profile.complete
    assert read.traceback == 'Traceback\n  ValueError: "x"'


def test_the_same_record_is_known_again_whichever_version_wrote_it() -> None:
    for old in DECISIONS.values():
        assert is_same_decision(old, dump_decision(load_decision(old)))
    for old in OBSERVATIONS.values():
        text = dump_observation(load_observation(old))
        assert is_same_observation(old, text)
        assert not is_same_observation(old, dump_observation(replace(load_observation(old), energy_j=1.0)))


@pytest.mark.parametrize("load", [load_decision, load_observation])
def test_a_record_of_a_newer_version_says_what_to_install(load: object) -> None:
    with pytest.raises(StoreError, match=r"has schema 4, .* install the version that wrote it, or a newer one$"):
        load('{"schema":4,"all":"new"}')  # type: ignore[operator]


@pytest.mark.parametrize("load", [load_decision, load_observation])
@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "7", "null", "{}", '{"schema":2}', '{"schema":[]}', '{"schema":-1e999}', "[" * 100_000),
        *(text[: len(text) // 2] for text in (*DECISIONS.values(), *OBSERVATIONS.values())),
        dump_observation(observation(1)).replace("5000", "-1"),
        dump_observation(observation(1)).replace("power_limit", "phase_of_the_moon"),
        dump_observation(observation(1)).replace("[250,200,100]", "[250]"),
        dump_decision(decision(1)).replace('"none"', '"guillotine"'),
    ],
)
def test_a_broken_record_is_one_sentence(load: object, text: str) -> None:
    with pytest.raises(UnreadableRecord, match="cannot be read") as error:
        load(text)  # type: ignore[operator]
    assert "\n" not in str(error.value)
    assert error.value.__cause__ is None


@given(st.text(max_size=200))
def test_whatever_text_stands_there_is_read_or_refused_by_name(text: str) -> None:
    for load in (load_decision, load_observation):
        with pytest.raises(StoreError):
            load(text)


# -- limits ----------------------------------------------------------------------------------------------------------


def noise(characters: int) -> str:
    """Return text that packing makes little of."""
    draw = random.Random(characters)
    return "".join(draw.choices(string.ascii_letters + string.digits + " /\n", k=characters))


def a_large_observation(limits: int, *, whole_watts: bool) -> Observation:
    """Return one of sixteen GPUs that measured and evaluated at each of many power limits."""
    draw = random.Random(limits)
    gpu = Gpu("NVIDIA A100-SXM4-80GB", 16, 6400.0)
    settings = [400.0 - (3.0 if whole_watts else 10 / 3) * i for i in range(limits)]
    rows = tuple(
        SettingMeasurement(w, round(draw.uniform(1e3, 6e3), 2), round(draw.uniform(1e3, 9e3), 2)) for w in settings
    )
    evaluations = tuple((w, Part(draw.randint(1, 9), draw.randint(1, 10**6), draw.randint(1, 10**6))) for w in settings)
    return observation(
        *(12_345, 3, 4096),
        gpu=gpu,
        profile=PowerProfile(4096, gpu, rows, made_with="torch 2, driver 550", stale=tuple(settings[: limits // 2])),
        parts=Parts(Part(1, 12_345.6, 21.5), evaluations, Part(40, 1234.5, 9.25)),
        curve=tuple((epoch, round(draw.random(), 6)) for epoch in range(1, 31)),
        setting=settings[-1],
        mode=Mode.FULL,
        setting_before=400.0,
        detail="reached accuracy >= 0.9 in epoch 40",
    )


@pytest.mark.parametrize("whole_watts", [True, False])
@pytest.mark.parametrize("limits", [60, 100])
def test_a_profile_of_a_hundred_limits_on_sixteen_gpus_loses_nothing(limits: int, whole_watts: bool) -> None:
    seen = a_large_observation(limits, whole_watts=whole_watts)
    text = dump_observation(seen)
    assert len(text) <= MAX_PARAM
    assert load_observation(text) == seen
    assert dump_observation(load_observation(text)) == text


def test_its_traceback_is_shortened_before_anything_that_was_measured() -> None:
    seen = replace(a_large_observation(100, whole_watts=True), traceback=noise(6000) + "ValueError: here")
    read = load_observation(dump_observation(seen))
    assert read.traceback.endswith("ValueError: here")
    assert replace(read, traceback="") == replace(seen, traceback="")


@pytest.mark.parametrize("to_spare", [-1, 0, 1])
def test_a_text_is_packed_only_where_it_does_not_fit_as_it_stands(to_spare: int) -> None:
    empty = len(dump_observation(observation(1, detail="x"))) - 1
    seen = observation(1, detail=noise(3000).replace("\n", " ") + "x" * (MAX_PARAM - empty - 3000 - to_spare))
    text = dump_observation(seen)
    assert json.loads(text)["schema"] == (2 if to_spare >= 0 else 3)
    assert load_observation(text) == seen
    assert is_same_observation(text, dump_observation(load_observation(text)))


def test_what_another_zlib_packed_is_the_same_record() -> None:
    seen = a_large_observation(100, whole_watts=False)
    plain = unpack(json.loads(dump_observation(seen))["zlib"])
    theirs = json.dumps({"schema": 3, "zlib": base64.b85encode(zlib.compress(plain.encode(), 1)).decode()})
    assert theirs != dump_observation(seen)
    assert is_same_observation(theirs, dump_observation(seen))
    assert not is_same_observation(theirs, dump_observation(replace(seen, energy_j=1.0)))


@pytest.mark.parametrize("packed", ["", "not packed", pack("{}")[:-5], pack("7")])
def test_a_packed_record_that_is_broken_says_so(packed: str) -> None:
    for load in (load_decision, load_observation):
        with pytest.raises(UnreadableRecord, match="cannot be read"):
            load(json.dumps({"schema": 3, "zlib": packed}))


def test_a_decision_about_fifty_arms_and_a_hundred_limits_loses_nothing() -> None:
    draw = random.Random(50)
    arms = tuple(
        replace(ARMS[1], batch_size=8 * b, expected_cost_j=draw.randint(1, 10**6), spread=0.123, stopped=b)
        for b in range(1, 51)
    )
    reason = Reason(ReasonKind.EXPLORE, "because " * 40, arms, {f"number {i}": i / 8 for i in range(20)})
    crowd = tuple(InFlight(12_000 + i, 1, 8 * i, explores=True) for i in range(16))
    asked = replace(ASKED, power_limits_w=tuple(400.0 - i for i in range(100)), in_flight=crowd)
    written = decision(12_345, reason=reason, cut=CUTS[2], asked=asked)
    text = dump_decision(written)
    assert len(text) <= MAX_PARAM
    assert load_decision(text) == written
    tag = dump_arms(arms)
    assert len(tag) <= MAX_TAG
    assert [arm["batch_size"] for arm in json.loads(tag)] == [8 * b for b in range(1, 51)]


def test_a_long_traceback_keeps_its_end_and_what_was_measured_stays() -> None:
    seen = observation(1, traceback=noise(25_000) + "ValueError: here", detail="broke", curve=((1, 0.5), (2, 0.6)))
    text = dump_observation(seen)
    read = load_observation(text)
    assert len(text) <= MAX_PARAM
    assert read.traceback.startswith("…")
    assert read.traceback.endswith("ValueError: here")
    assert replace(read, traceback="") == replace(seen, traceback="")
    assert dump_observation(read) == text


def test_a_long_curve_is_thinned_and_says_so() -> None:
    curve = tuple((epoch, 1 - 1 / (epoch + 7)) for epoch in range(1, 2001))
    text = dump_observation(observation(1, curve=curve, detail="reached 0.9"))
    read = load_observation(text)
    assert len(text) <= MAX_PARAM
    assert (read.curve[0][0], read.curve[-1][0]) == (1, 2000)
    assert 100 < len(read.curve) < 2000
    assert read.detail == "reached 0.9; its learning curve was thinned to fit"
    assert dump_observation(read) == text


def test_a_long_detail_is_cut_visibly_after_all_else() -> None:
    text = dump_observation(observation(1, detail='say "x" ' + noise(12_000), traceback=noise(12_000)))
    read = load_observation(text)
    assert len(text) <= MAX_PARAM
    assert read.traceback == "…"
    assert read.detail.startswith('say "x" ')
    assert read.detail.endswith("…")
    assert read.profile == profile()


def test_a_profile_that_cannot_fit_is_left_out_and_the_record_says_so() -> None:
    draw = random.Random(0)
    rows = tuple(SettingMeasurement(100.0 + i, draw.uniform(90, 99), draw.uniform(10, 99)) for i in range(900))
    read = load_observation(dump_observation(observation(1, profile=PowerProfile(64, GPU, rows))))
    assert read.profile is None
    assert "did not fit" in read.detail


def test_a_decision_about_many_arms_fits() -> None:
    arms = tuple(ArmBelief(b, 3, 1234.567, 0.12, 1200.3, ArmStatus.KNOWN, 0.01, -5.5, 0.03) for b in range(1, 400))
    written = decision(1, reason=Reason(ReasonKind.EXPLORE, "because " * 2000, arms, {str(i): 1.5 for i in range(900)}))
    written = replace(written, asked=ASKED)
    text = dump_decision(written)
    read = load_decision(text)
    assert len(text) <= MAX_PARAM
    assert read.reason.text.startswith("because")
    assert read.asked == ASKED
    assert dump_decision(read) == text


def test_a_decision_with_a_crowd_under_way_fits() -> None:
    crowd = Asked(under_way=tuple(range(100_000, 102_000)))
    assert len(dump_decision(replace(decision(1), asked=crowd))) <= MAX_PARAM


def test_whole_numbers_come_back_as_what_they_were() -> None:
    assert repr(load_observation(dump_observation(observation(1)))) == repr(observation(1))
