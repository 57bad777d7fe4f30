"""Iterations of a training that tells of none: counted by the period that power and utilisation show, from outside.

A thread samples the GPUs ten times a second. Once a period stands out, time is counted in periods, each taken for a
step. At another setting of the knob the period is another one: it is found anew there, within what the change allows,
before anything is told, and then told for all the time since. A period may be a multiple of an iteration: as long as
it is the same one at every setting, ratios of speed hold.
"""

from __future__ import annotations

import logging
import math
import random
import threading
from collections.abc import Callable, Sequence
from types import TracebackType

from zeus_flows.core.period import IRREGULAR, MULTIPLES, Aperiodic, GpuTrace, Period, detect_period, evenly, stretched
from zeus_flows.core.power_profile import Knob
from zeus_flows.core.records import EnergySource
from zeus_flows.errors import DeviceError
from zeus_flows.gpu.group import Gpus

log = logging.getLogger(__name__)

#: Seconds between samples, and between two looks for a period.
STEP_S, LOOK_EVERY_S = 0.1, 1.0
#: Ends of the trace that are looked at, in seconds: start-up is no iteration, and the whole would never be periodic.
WINDOWS_S = (96.0, 48.0, 24.0, 12.0, 8.0)
#: Two looks in a row must agree so far on the first period.
AGREE = 0.05
#: What follows a change of the setting within so many seconds is not looked at.
SETTLE_S = 0.3
#: Without a period for so long, there is none.
GIVE_UP_S = 2 * WINDOWS_S[0]
#: From one power limit to the next a period grows at most so many times: less than twice, which would be a multiple.
LONGER, ABOUT = 1.6, 0.05

#: Power in watts over all GPUs, then utilisations in per cent.
Reading = Sequence[float]


class Iterations:
    """Counts time in periods. `sample` may be called by another thread.

    Args:
        read: Reads the GPUs.
        setting: Returns the knob's setting in force, without asking a GPU.
        knob: Which knob that is.
        now_s: Returns monotonic seconds.

    Attributes:
        why_not: Why no period was found, once that is given up; empty before.
    """

    def __init__(
        self, read: Callable[[], Reading], setting: Callable[[], float], knob: Knob, now_s: Callable[[], float]
    ) -> None:
        self._read, self._setting, self._knob, self._now_s = read, setting, knob, now_s
        self._lock = threading.Lock()
        self._samples: list[tuple[float, Reading]] = []
        self._of, self._since_s = setting(), now_s()
        self._told_s: float | None = None
        self._looked_s = self._since_s
        self._periods: dict[float, Period] = {}
        self._before: Period | Aperiodic = Aperiodic("nothing was sampled")
        self._began_s = self._since_s
        self.why_not = ""

    def sample(self) -> None:
        """Take one sample; what fails is left out."""
        try:
            reading = self._read()
        except DeviceError as error:
            log.debug("a sample failed: %s", error)
            return
        with self._lock:
            self._samples.append((self._now_s(), reading))
            first_s = self._samples[-1][0] - WINDOWS_S[0] - 1.0
            if self._samples[0][0] < first_s and len(self._samples) > 2 * WINDOWS_S[0] / STEP_S:
                self._samples = [s for s in self._samples if s[0] >= first_s]

    def passed(self, samples: int) -> int:
        """Return the samples of the time since they were last told, so many a period; 0 while it is not known."""
        now_s, setting = self._now_s(), self._setting()
        if setting != self._of:
            self._begin(setting, now_s)
        period = self._periods.get(setting) or self._look(now_s)
        if period is None or self._told_s is None:
            return 0
        whole = int(samples * (now_s - self._told_s) / period.period_s + 1e-9)
        self._told_s += whole / samples * period.period_s
        return whole

    def rest(self, samples: int) -> int:
        """Return the samples that are not told yet, at an epoch's end: by the nearest setting's period, if need be."""
        if not self._periods or self._told_s is None:
            return 0
        now_s, setting = self._now_s(), self._setting()
        nearest = min(self._periods, key=lambda known: abs(known - setting))
        left = round(samples * (now_s - self._told_s) / self._periods[nearest].period_s)
        self._told_s = now_s
        return left

    @property
    def found(self) -> bool:
        """Whether there is a period: then steps are told."""
        return bool(self._periods)

    def give_up(self, why: str) -> None:
        """Look no further."""
        self.why_not = why
        log.info("iterations cannot be told by power and utilisation: %s", why)

    def _begin(self, setting: float, now_s: float) -> None:
        """Begin a trace at another setting; time until now was told as the last one's."""
        self._of, self._since_s, self._looked_s = setting, now_s, now_s
        self._before = Aperiodic("the setting has changed")
        if self._told_s is not None:
            self._told_s = now_s

    def _look(self, now_s: float) -> Period | None:
        """Return the period at the setting in force; None while it is not known."""
        if self.why_not or now_s - self._looked_s < LOOK_EVERY_S:
            return None
        self._looked_s = now_s
        first = not self._periods
        found = self._detected(now_s)
        if isinstance(found, Aperiodic):
            self._before = found
            if first and now_s - self._since_s > GIVE_UP_S:
                self.give_up(found.why)
            return None
        before, self._before = self._before, found
        if first and not (isinstance(before, Period) and _alike(before.period_s, found.period_s)):
            return None
        self._periods[self._of] = found
        if self._told_s is None:
            self._told_s = self._load_began_s(found)
            log.info("an iteration takes %.2f s, by power and utilisation: steps are counted by that", found.period_s)
        return found

    def _detected(self, now_s: float) -> Period | Aperiodic:
        with self._lock:
            samples = [s for s in self._samples if s[0] >= self._since_s + SETTLE_S]
        within = self._within()
        found: Period | Aperiodic = Aperiodic("too little was sampled")
        have_s = samples[-1][0] - samples[0][0] if samples else 0.0
        windows = [w for w in WINDOWS_S if w <= have_s + STEP_S] if within is None else [have_s]
        for window_s in windows:
            at_s, readings = zip(*(s for s in samples if s[0] >= now_s - window_s - STEP_S), strict=True)
            power_w, *others = evenly(at_s, zip(*readings, strict=True), step_s=STEP_S)
            if len(power_w) > 2:
                found = detect_period(GpuTrace(STEP_S, power_w, tuple(others)), within=within)
            if isinstance(found, Period):
                return found
        return found

    def _within(self) -> tuple[float, float] | None:
        """Return what the period can be at this setting, by that at the nearest one; None where none is known."""
        if not self._periods:
            return None
        nearest = min(self._periods, key=lambda known: abs(known - self._of))
        period_s = self._periods[nearest].period_s
        if self._knob is Knob.CLOCKS:
            return stretched(period_s, clock=nearest, to=self._of)
        low, high = (1.0, LONGER) if self._of < nearest else (1 / LONGER, 1.0)
        return period_s * low * (1 - ABOUT), period_s * high * (1 + ABOUT)

    def _load_began_s(self, found: Period) -> float:
        """Return when the GPUs began to work: when they first drew half way from the least to what they draw now."""
        with self._lock:
            samples = list(self._samples)
        least_w = min(reading[0] for _, reading in samples)
        return next(at_s for at_s, reading in samples if reading[0] >= (least_w + found.power_w) / 2)


def _alike(one_s: float, other_s: float) -> bool:
    """Return whether two periods are the same, or one a few of the other."""
    times = max(one_s, other_s) / min(one_s, other_s)
    return round(times) <= MULTIPLES and abs(times / round(times) - 1) <= AGREE


class IterationWatch(Iterations):
    """Counts periods of GPUs that work now: a thread samples them until it is closed."""

    def __init__(self, gpus: Gpus) -> None:
        devices = gpus.devices

        def read() -> Reading:
            watts = math.fsum(device.power_w() for device in devices)
            utilisations = [device.utilisation_percent() for device in devices]
            return (watts, *(sum(kind) / len(devices) for kind in zip(*utilisations, strict=True)))

        super().__init__(read, lambda: gpus.control.last, gpus.control.knob, gpus.now_s)
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="zeus-flows-iterations", daemon=True)
        self._thread.start()

    def __enter__(self) -> IterationWatch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop sampling. Safe to call twice."""
        self._done.set()
        self._thread.join(timeout=2.0)

    def _run(self) -> None:
        early = random.Random(0)  # noqa: S311
        due_s = self._now_s()
        while not self._done.is_set() and not self.why_not:
            due_s = max(due_s + STEP_S, self._now_s())
            at_s = due_s + STEP_S * IRREGULAR * early.uniform(-1, 1)
            if self._done.wait(max(at_s - self._now_s(), 0.0)):
                return
            self.sample()


def can_watch(gpus: Gpus) -> bool:
    """Return whether iterations of these GPUs could be seen from outside, and would be of use."""
    return gpus.energy_source is EnergySource.MEASURED and gpus.control.can_set
