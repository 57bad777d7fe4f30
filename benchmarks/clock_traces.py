"""Traces of power and utilisation as a GPU's sensors would show them, with a known period or none.

Iterations have phases at 1 ms, whose length jitters; sensors average, update, and are read at their own times.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.signal import lfilter

from zeus_flows.core.period import IRREGULAR, GpuTrace, evenly

Floats = npt.NDArray[np.float64]

FINE_S = 0.001
#: Phases of an iteration: share of its time, power in watts, SM and memory utilisation in per cent.
SHAPES: dict[str, tuple[tuple[float, float, float, float], ...]] = {
    "forward and backward": ((0.12, 60, 5, 5), (0.33, 210, 90, 55), (0.45, 245, 98, 70), (0.10, 130, 60, 80)),
    "waits for data": ((0.35, 55, 2, 2), (0.65, 230, 95, 60)),
    "six micro-batches": ((0.10, 60, 3, 3), *(((0.09, 240, 95, 60), (0.06, 190, 80, 50)) * 6)),
    "a short gap": ((0.05, 70, 10, 5), (0.95, 240, 97, 65)),
}


@dataclass(frozen=True)
class Sensor:
    """How power and utilisation are seen: averaged over `window_s`, updated every `update_s`, read every `step_s`.

    Attributes:
        irregular: By how much of a step readings come early or late, at random.
    """

    step_s: float = 0.1
    update_s: float = 0.02
    window_s: float = 0.025
    irregular: float = IRREGULAR
    noise: float = 0.01


#: As studies of NVML found them, read at 100 ms.
SENSORS = {
    "quick": Sensor(),  # V100
    "seldom": Sensor(update_s=0.1),  # A100: a quarter of the time is seen
    "100 ms mean": Sensor(update_s=0.1, window_s=0.1),
    "1 s mean": Sensor(update_s=0.1, window_s=1.0),  # power on Ampere and later
}


def periodic(
    period_s: float,
    seconds: float,
    rng: np.random.Generator,
    *,
    shape: str = "forward and backward",
    jitter: float = 0.02,
    sensor: Sensor | None = None,
) -> tuple[GpuTrace, float]:
    """Return a trace of iterations whose length jitters by a share, and how long those in it took on average."""
    sensor = sensor or Sensor()
    count = int(seconds / period_s * 1.2) + 8
    lengths = period_s * np.clip(1 + jitter * rng.standard_normal(count), 0.5, 1.5)
    shares = np.array([phase[0] for phase in SHAPES[shape]])
    levels = np.array([phase[1:] for phase in SHAPES[shape]], dtype=float)
    ends = (np.cumsum(np.r_[0.0, lengths])[:-1, None] + lengths[:, None] * np.cumsum(shares / shares.sum())).ravel()
    fine = np.arange(int((seconds + 2 * sensor.window_s + 1) / FINE_S)) * FINE_S
    phase = np.minimum(np.searchsorted(ends, fine), len(ends) - 1) % len(shares)
    values = levels[phase]
    values[:, 0] *= 1 + 0.04 * rng.standard_normal(len(values))
    inside = lengths[: np.searchsorted(np.cumsum(lengths), seconds)]
    return seen(values, seconds, rng, sensor), float(inside.mean())


def aimless(kind: str, samples: int, rng: np.random.Generator, *, alike: bool) -> GpuTrace:
    """Return a trace without a period at 100 ms: `noise`, `walk`, `wander`, `switch`, `ramp` or `warming`.

    Args:
        kind: White noise, a random walk, one that comes back to its mean, random switching, and slow drifts with noise.
        samples: How many.
        rng: Where randomness comes from.
        alike: Whether all channels move together, as they do on a GPU; otherwise each on its own.
    """
    wave = _wave(kind, samples, rng)
    waves = [wave, wave, wave] if alike else [wave, _wave(kind, samples, rng), _wave(kind, samples, rng)]
    sm, memory = (
        np.clip(np.round(middle + swing * w), 0, 100) for middle, swing, w in ((60, 15, waves[1]), (40, 10, waves[2]))
    )
    return GpuTrace(0.1, 150 + 30 * wave, (sm, memory))


def _wave(kind: str, samples: int, rng: np.random.Generator) -> Floats:
    noise, passed = rng.standard_normal(samples), np.arange(samples) / samples
    match kind:
        case "walk":
            wave = np.cumsum(noise)
        case "wander":
            wave = lfilter([1.0], [1.0, -0.9], noise)
        case "switch":
            wave = np.cumsum(rng.random(samples) < 0.05) % 2 + 0.01 * noise
        case "ramp":
            wave = 3 * passed + 0.1 * noise
        case "warming":
            wave = 1 - np.exp(-4 * passed) + 0.1 * noise
        case _:
            wave = noise
    return np.asarray((wave - wave.mean()) / wave.std(), dtype=float)


AIMLESS = ("noise", "walk", "wander", "switch", "ramp", "warming")


def seen(values: Floats, seconds: float, rng: np.random.Generator, sensor: Sensor) -> GpuTrace:
    """Return what a sensor shows of values at 1 ms: columns power, SM and memory utilisation."""
    width = max(1, round(sensor.window_s / FINE_S))
    total = np.cumsum(np.vstack([np.zeros(values.shape[1]), values]), axis=0)
    averaged = (total[width:] - total[:-width]) / width
    at_s = np.arange(int(seconds / sensor.step_s)) * sensor.step_s
    at_s = np.maximum(0.0, at_s + sensor.irregular * sensor.step_s * rng.uniform(-1, 1, len(at_s)))
    phase = rng.uniform(0, sensor.update_s)
    updated = np.maximum(0.0, np.floor((at_s - phase) / sensor.update_s) * sensor.update_s + phase)
    read = averaged[np.minimum((updated / FINE_S).astype(int), len(averaged) - 1)]
    read = read * (1 + sensor.noise * rng.standard_normal(read.shape) * [1, 0, 0])
    power, sm, memory = evenly(at_s.tolist(), read.T, step_s=sensor.step_s)
    return GpuTrace(sensor.step_s, power, (np.round(sm), np.round(memory)), max(sensor.update_s, sensor.step_s))
