"""Finds the best setting of the knob in an attempt and keeps it: profiles what is not known, then checks what is.

Where whole epochs show that evaluation shifts the balance, the setting is chosen again at an epoch's end.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial

from zeus_flows.core.clock_search import clock_to_measure
from zeus_flows.core.job import Job, Mode
from zeus_flows.core.overheads import NOTHING, Overheads
from zeus_flows.core.power import best_setting, epoch_cost
from zeus_flows.core.power_profile import Knob, Part, PowerProfile, SettingMeasurement
from zeus_flows.core.records import Decision, EnergySource
from zeus_flows.core.text import setting_text
from zeus_flows.errors import DeviceError, DeviceLost
from zeus_flows.gpu.group import Gpus
from zeus_flows.job_sections.gpu_section import PowerLimitSection
from zeus_flows.training.profiler import PowerProfiler
from zeus_flows.training.setting_readings import Search

log = logging.getLogger(__name__)

_NAMES = {Knob.POWER_LIMIT: "power limit", Knob.CLOCKS: "clock"}

#: A stored profile whose power or speed is off by more than this is measured again.
TOLERANCE = 0.05
#: A look at the power limit, whether it is still ours, may take 20 ms: where nothing is profiled, one in so many
#: seconds.
LOOK_S = 5.0
#: The setting is changed within an attempt only where whole epochs are cheaper by this share.
WORTH_A_CHANGE = 0.005


class SettingTuner:
    """The knob of one attempt.

    Args:
        gpus: What is tuned.
        section: How settings are chosen and profiled.
        job: The job as decisions see it.
        decision: What was decided.
        known: What earlier attempts measured at this batch size.
        overheads: What is known of an epoch beside its steps.
        made_with: Major versions that a profile depends on.
        least_span_s: What the sensor needs to measure a setting.

    Attributes:
        before: The setting that was there before, per GPU.
        settled: The setting that was settled on; None while that is open.
        samples_per_epoch: How long an epoch is; 0 while that is not known.
        measuring: What measures between steps now; None: nothing does.
    """

    def __init__(
        self,
        gpus: Gpus,
        section: PowerLimitSection,
        job: Job,
        decision: Decision,
        *,
        known: PowerProfile | None,
        overheads: Overheads = NOTHING,
        made_with: str = "",
        least_span_s: float,
    ) -> None:
        self._gpus, self._section, self._job, self._decision = gpus, section, job, decision
        self._least_span_s = least_span_s
        self.overheads = overheads
        self.before = gpus.control.read()
        self.settled: float | None = None
        self.samples_per_epoch = 0
        self._profiler = self._make_profiler(known, made_with)
        self._checker: PowerProfiler | None = None
        self._looked_s = gpus.now_s()
        self.measuring: PowerProfiler | None = None

    @property
    def profile(self) -> PowerProfile | None:
        """What is known of settings now, complete or not; None where nothing is."""
        return self._profiler.profile

    @property
    def setting(self) -> float:
        """The setting in force, per GPU, without asking one."""
        return self._gpus.control.last

    @property
    def average_power_w(self) -> float | None:
        """What steps draw at the setting in force, by the profile; None while that is not known."""
        said = self._said_of(self.setting) if self.settled is not None else None
        return None if said is None else said.average_power_w

    @property
    def profiling(self) -> Part:
        """What was spent while profiling in this attempt."""
        return Part(0, self._profiler.energy_j, self._profiler.time_s)

    @property
    def may_tune(self) -> bool:
        """Whether this attempt looks for the best setting."""
        return (
            self._gpus.control.can_set
            and self._job.mode is not Mode.OFF
            and self._decision.setting is None
            and (self._decision.tune_power or self._job.mode is Mode.OBSERVE)
        )

    def look(self, *, after_s: float = LOOK_S) -> None:
        """Find out whether somebody else has changed the power limit, where the last look was so many seconds ago."""
        now_s = self._gpus.now_s()
        if now_s - self._looked_s >= after_s:
            self._looked_s = now_s
            with suppress(DeviceError):  # a GPU that is lost says so to whoever measures
                self._gpus.control.read()

    def begin(self) -> None:
        """Apply the best known setting when training begins."""
        if not self._profiler.active:
            self._settle()

    # -- between steps -------------------------------------------------------------------------------------------

    def resume(self) -> None:
        """Go on measuring, where something is to be measured: steps begin."""
        measuring = self._profiler if self._profiler.active else self._checker
        if measuring is None:
            self.look()
        else:
            measuring.samples_per_epoch = self.samples_per_epoch
            measuring.begin()
        self.measuring = measuring

    def pause(self) -> None:
        """Keep the unfinished measurement while no steps run: they have ended, or an evaluation begins."""
        measuring, self.measuring = self.measuring, None
        if measuring is None:
            self.look()
        elif measuring.end():
            self._conclude(measuring)

    def measured(self) -> None:
        """Use the finished measurement, and begin the next one."""
        measuring, self.measuring = self.measuring, None
        if measuring is not None:
            self._conclude(measuring)
        self.resume()

    def drop(self) -> None:
        """Discard the current span: something other than ordinary steps happened in it."""
        measuring, self.measuring = self.measuring, None
        if measuring is not None:
            measuring.drop()

    def reconsider(self, overheads: Overheads) -> None:
        """Choose the setting again after an epoch, with the measured cost of whole epochs."""
        self.overheads = overheads
        profile = self._profiler.profile
        if self.settled is None or profile is None or not profile.complete or not self._chooses:
            return
        kept = tuple(m for m in profile.measurements if m.setting == self.settled)
        if not kept:
            return
        samples = self.samples_per_epoch or 1

        def cost(of: PowerProfile) -> float:
            return epoch_cost(self._job, of, samples_per_epoch=samples, overheads=overheads)

        if cost(profile) < (1 - WORTH_A_CHANGE) * cost(replace(profile, measurements=kept)):
            self._apply(best_setting(self._job, profile, samples_per_epoch=samples, overheads=overheads).setting)

    # -- conclusions ---------------------------------------------------------------------------------------------

    @property
    def _chooses(self) -> bool:
        return self.may_tune and self._job.mode is not Mode.OBSERVE

    def _make_profiler(self, known: PowerProfile | None, made_with: str) -> PowerProfiler:
        section, decision, control = self._section, self._decision, self._gpus.control
        settings: Iterable[float]
        search: Search | None = None
        if not self.may_tune:
            settings = (decision.setting or self.before,)
        elif control.knob is Knob.CLOCKS:
            settings = control.settings
            search = partial(clock_to_measure, self._job, self._gpus.gpu, control.settings)
        elif section.limits == "all":
            settings = control.settings
        else:
            settings = section.limits
        compared = self._job.mode is Mode.OBSERVE or decision.batch_size == self._job.default_batch_size
        return PowerProfiler(
            self._gpus,
            job=self._job,
            batch_size=decision.batch_size,
            micro_batch_size=decision.micro_batch_size,
            settings=settings,
            known=known,
            profile_s=section.profile_seconds,
            warmup_s=section.warmup_seconds,
            made_with=made_with,
            least_s=self._least_span_s,
            always=(self.before,) if self.may_tune and compared else (),
            skip_losers=search is not None or not section.profile_all_limits,
            search=search,
        )

    def _conclude(self, measuring: PowerProfiler) -> None:
        if measuring is self._profiler:
            self._settle()
            return
        self._checker = None
        measured = measuring.profile.measurements[0] if measuring.profile and not measuring.broken else None
        if measured is not None and self._is_off(measured):
            self._profiler.distrust(measured)
            if not self._profiler.active:
                self._settle()

    def _settle(self) -> None:
        """Apply the best setting: the profile is complete, or will not be."""
        profile = self._profiler.profile
        wanted = self._decision.setting or self.before
        if profile and profile.complete and self._chooses:
            samples = self.samples_per_epoch or 1
            overheads = self.overheads if self.samples_per_epoch else NOTHING
            wanted = best_setting(self._job, profile, samples_per_epoch=samples, overheads=overheads).setting
        if self._profiler.broken:
            log.warning("power profiling was given up: %s", self._profiler.broken)
        self._apply(wanted)
        if self._gpus.control.knob is Knob.CLOCKS and profile is not None and self._profiler.time_s:
            log.info("clocks: %s", self._came_of_it(profile, wanted))
        if self.may_tune and self._profiler.time_s == 0 and self._said_of(wanted) is not None:
            section = self._section
            self._checker = PowerProfiler(
                self._gpus,
                job=self._job,
                batch_size=self._decision.batch_size,
                settings=(wanted,),
                known=None,
                profile_s=section.profile_seconds,
                warmup_s=section.warmup_seconds,
                least_s=self._least_span_s,
            )

    def _came_of_it(self, profile: PowerProfile, chosen: float) -> str:
        """Return what the search for a clock has come to, for people."""
        at, default = self._said_of(chosen), self._said_of(self.before)
        count = f"{len(profile.measurements)} clocks measured"
        if chosen == self.before or at is None or default is None:
            return f"none is better than the default, they stay as they were; {count}"
        time = default.samples_per_s / at.samples_per_s
        energy = time * at.average_power_w / default.average_power_w
        changes = f"{100 * (energy - 1):+.1f} % energy, {100 * (time - 1):+.1f} % time"
        return f"{setting_text(chosen, Knob.CLOCKS)}: {changes} against the default; {count}"

    def _apply(self, wanted: float) -> None:
        control = self._gpus.control
        if control.can_set:
            try:
                if control.read() != wanted and control.foreign_w is None:
                    control.set(wanted)
            except DeviceLost:
                raise
            except DeviceError as error:
                log.warning("the %s stays as it is: %s", _NAMES[control.knob], error)
                wanted = self.before
        if control.foreign_w is None:
            self.settled = wanted

    def _said_of(self, setting: float) -> SettingMeasurement | None:
        profile = self._profiler.profile
        return next((m for m in profile.measurements if m.setting == setting), None) if profile else None

    def _is_off(self, measured: SettingMeasurement) -> bool:
        """Return whether a measurement contradicts the stored profile. If so, the log says it."""
        said = self._said_of(measured.setting)
        if said is None:
            return False
        speed = measured.samples_per_s / said.samples_per_s - 1
        power = measured.average_power_w / said.average_power_w - 1
        if self._gpus.energy_source is EnergySource.NONE:
            power = 0.0
        if max(abs(power), abs(speed)) <= TOLERANCE:
            return False
        log.warning(
            "the stored power profile of batch size %d is off by %+.0f %% in power, %+.0f %% in speed: measuring again",
            self._decision.batch_size,
            100 * power,
            100 * speed,
        )
        return True
