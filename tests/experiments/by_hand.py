"""A trace without luck, so that results can be worked out by hand."""

from __future__ import annotations

from zeus_flows.core.power_profile import Gpu, PowerProfile, SettingMeasurement
from zeus_flows.experiments.replay.traces import SAMPLES_PER_EPOCH, Trace

GPU = Gpu("by-hand", 1, 100.0)


def profile(batch_size: int, *, epoch_s: float) -> PowerProfile:
    """Return what an epoch takes: 100 W at 100 W, and half of the power at 50 W without being slower."""
    speed = SAMPLES_PER_EPOCH / epoch_s
    rows = (SettingMeasurement(100.0, 100.0, speed), SettingMeasurement(50.0, 50.0, speed))
    return PowerProfile(batch_size, GPU, rows)


def trace_by_hand() -> Trace:
    """Return a trace in which 8 takes ten epochs of 10 s, 16 takes five of 10 s, and 32 never reaches the target."""
    return Trace(
        workload="by-hand",
        gpu=GPU,
        epochs={8: (10,), 16: (5,), 32: (None,)},
        profiles={b: profile(b, epoch_s=10.0) for b in (8, 16, 32)},
        default_batch_size=8,
        max_epochs=20,
    )
