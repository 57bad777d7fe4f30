"""Short ways to say what a job is and what was observed, and hypothesis strategies for both."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from zeus_flows.core import policy
from zeus_flows.core.job import Job
from zeus_flows.core.power import best_setting, epoch_cost
from zeus_flows.core.power_profile import Gpu, PowerProfile, SettingMeasurement
from zeus_flows.core.records import Ask, Decision, EnergySource, Observation, Outcome, decision_seed

V100 = Gpu("V100", 1, 250.0)
P100 = Gpu("P100", 1, 250.0)
ARMS = (8, 16, 32, 64, 128)
SAMPLES = 1_000
LIMITS = (100.0, 175.0, 250.0)


def job(policy_name: str = "thompson", **changes: Any) -> Job:
    """A job of five arms; b0 is 32."""
    base = Job(name="t", batch_sizes=ARMS, default_batch_size=32, max_epochs=50, policy=policy_name)
    return replace(base, **changes)


def profile(batch_size: int, gpu: Gpu = V100, *, complete: bool = True, speed: float = 1.0) -> PowerProfile:
    """A profile in which larger batches are faster with a diminishing return."""
    measurements = tuple(
        SettingMeasurement(w, 0.9 * w, speed * 100 * (1 - 20 / w) * batch_size / (batch_size + 20)) for w in LIMITS
    )
    return PowerProfile(batch_size, gpu, measurements, complete=complete)


def observation(
    recurrence: int,
    batch_size: int,
    epochs: int,
    *,
    outcome: Outcome = Outcome.CONVERGED,
    attempt: int = 1,
    gpu: Gpu = V100,
    profiled: bool = False,
    samples: int = SAMPLES,
    for_job: Job | None = None,
    **changes: Any,
) -> Observation:
    """An attempt that trained at the best limit; its costs follow from the profile."""
    known = profile(batch_size, gpu)
    at = best_setting(for_job or job(), known)
    time_s = epochs * samples / at.samples_per_s
    values: dict[str, Any] = {
        "energy_j": time_s * at.average_power_w,
        "time_s": time_s,
        "setting": at.setting,
        "profile": known if profiled else None,
        "profiling_time_s": 1.0 if profiled else 0.0,
        **changes,
    }
    return Observation(
        recurrence=recurrence,
        attempt=attempt,
        batch_size=batch_size,
        outcome=outcome,
        epochs=epochs,
        gpu=gpu,
        energy_source=EnergySource.SIMULATED,
        samples_per_epoch=samples,
        **values,
    )


def ask(recurrence: int = 1_000, attempt: int = 1, **changes: Any) -> Ask:
    """A question about a recurrence after all others."""
    base = Ask(recurrence, attempt, decision_seed(0, recurrence, attempt), V100, SAMPLES)
    return replace(base, **changes)


def decide(a_job: Job, observations: Iterable[Observation], an_ask: Ask | None = None) -> Decision:
    """What would be decided after these observations."""
    return policy.decide(a_job, policy.fold(a_job, observations), an_ask or ask())


def cost_of_epoch(a_job: Job, batch_size: int, gpu: Gpu = V100) -> float:
    """EpochCost by the profile above, in joules."""
    return epoch_cost(a_job, profile(batch_size, gpu), samples_per_epoch=SAMPLES)


GPUS = st.sampled_from([V100, P100, Gpu("A40", 4, 1200.0)])
OUTCOMES = st.sampled_from(list(Outcome))
READINGS = (
    *(1.0, 0.5, 20.0, 150.0, 250.0, 3_600.0, 1e5, 1e7, 1e12, 1e16, 1e100, 1e300, sys.float_info.max),
    *(0.0, -0.0, 1e-9, 1e-16, 1e-300, 5e-324, math.nan, math.inf, -math.inf, -1.0, -1e-300, -1e300),
)


@st.composite
def wild_observations(draw: st.DrawFn, recurrence: int | None = None, attempt: int | None = None) -> Observation:
    """Any observation that can be made at all, however strange."""
    gpu = draw(GPUS)
    batch_size = draw(st.sampled_from([*ARMS, 7, 4096]))
    profiles = st.one_of(
        st.none(),
        st.builds(lambda c, s: profile(batch_size, gpu, complete=c, speed=s), st.booleans(), st.floats(1e-3, 1e3)),
        st.just(PowerProfile(batch_size, gpu, ())),
    )
    return Observation(
        recurrence=recurrence if recurrence is not None else draw(st.integers(1, 40)),
        attempt=attempt if attempt is not None else draw(st.integers(1, 5)),
        batch_size=batch_size,
        outcome=draw(OUTCOMES),
        epochs=draw(st.one_of(st.integers(0, 60), st.just(10**9))),
        energy_j=draw(st.one_of(st.floats(0, 1e7), st.sampled_from([0.0, 1e300]))),
        time_s=draw(st.one_of(st.floats(0, 1e6), st.sampled_from([0.0, 1e-9]))),
        gpu=gpu,
        energy_source=EnergySource.SIMULATED,
        samples_per_epoch=draw(st.sampled_from([0, 1, 1_000, 60_000])),
        setting=draw(st.sampled_from([None, 100.0, 250.0])),
        profile=draw(profiles),
        profiling_time_s=draw(st.sampled_from([0.0, 1.0])),
        epochs_allowed=draw(st.sampled_from([None, 0, 1, 30])),
        energy_complete=draw(st.booleans()),
        foreign_limit_w=draw(st.sampled_from([None, None, 180.0])),
    )


HISTORIES = st.lists(wild_observations(), max_size=12)
