"""Observer Mode (section 5): what the best power limit, or another batch size that was tried, would have saved."""

from __future__ import annotations

import math
from dataclasses import dataclass

from zeus_flows.core.amounts import Amount
from zeus_flows.core.cost import price
from zeus_flows.core.job import Job
from zeus_flows.core.overheads import Overheads
from zeus_flows.core.policy.state import State
from zeus_flows.core.power import best_setting, run_at
from zeus_flows.core.power_profile import Knob, SettingMeasurement
from zeus_flows.core.records import Observation
from zeus_flows.core.text import setting_text


@dataclass(frozen=True, slots=True)
class WouldHaveSaved:
    """What an attempt would have saved at the best setting of its own profile.

    Attributes:
        setting: What it trained at.
        best_setting: The best one, by the job's selector.
        spent: What its epochs take at that, by the profile.
        saved: How much less they would have taken at the best one; negative where more (time, mostly).
        knob: What they are settings of.
    """

    setting: float
    best_setting: float
    spent: Amount
    saved: Amount
    knob: Knob = Knob.POWER_LIMIT

    @property
    def sentence(self) -> str:
        """The saving in words.

        >>> WouldHaveSaved(250.0, 150.0, Amount(100.0, 10.0, 200.0), Amount(20.0, -1.0, 10.0)).sentence
        'at 150 W instead of 250 W it would have taken 20.0 % less energy, 10.0 % more time, 5.0 % less cost'
        """
        if self.best_setting == self.setting:
            best = "the best power limit" if self.knob is Knob.POWER_LIMIT else "the best clock"
            return f"{setting_text(self.setting, self.knob)} is {best} for it already"
        share = self.saved.percent_of(self.spent)
        changes = (("energy", share.energy_j), ("time", share.time_s), ("cost", share.cost_j))
        parts = [f"{abs(saved):.1f} % {'less' if saved >= 0 else 'more'} {what}" for what, saved in changes]
        best, had = setting_text(self.best_setting, self.knob), setting_text(self.setting, self.knob)
        return f"at {best} instead of {had} it would have taken {', '.join(parts)}"


@dataclass(frozen=True, slots=True)
class TriedBatchSize:
    """What a batch size that has reached the target takes, against the default, both at their best limits.

    Attributes:
        batch_size: The batch size.
        runs: How often it reached the target.
        saved_percent: Share of the default's cost that it saves; negative where it is dearer.
        uncertainty_percent: One standard error of that share; None where every batch size ran only once.
    """

    batch_size: int
    runs: int
    saved_percent: float
    uncertainty_percent: float | None

    @property
    def sentence(self) -> str:
        """The saving in words.

        >>> TriedBatchSize(64, 3, 12.0, 4.0).sentence
        'batch size 64 would have cost 12 ± 4 % less (3 runs)'
        """
        sure = f" ± {self.uncertainty_percent:.0f}" if self.uncertainty_percent is not None else ""
        than = "less" if self.saved_percent >= 0 else "more"
        runs = f"{self.runs} run{'s' if self.runs > 1 else ''}"
        return f"batch size {self.batch_size} would have cost {abs(self.saved_percent):.0f}{sure} % {than} ({runs})"


def would_have_saved(job: Job, observation: Observation) -> WouldHaveSaved | None:
    """Return what the best limit would have saved on an attempt; None where its profile does not tell."""
    profile = observation.profile
    if profile is None or not profile.complete or observation.setting is None:
        return None
    at = next((m for m in profile.measurements if m.setting == observation.setting), None)
    if at is None or len(profile.measurements) < 2:
        return None
    host_w = observation.host_energy_j / observation.time_s if observation.time_s else 0.0
    overheads = Overheads(host_w=host_w)
    if observation.parts is not None:
        overheads = overheads.add(observation.parts)
    samples, rates = observation.samples_per_epoch, price(job, profile.gpu.max_power_w)
    best = best_setting(job, profile, samples_per_epoch=samples, overheads=overheads)

    def run(measurement: SettingMeasurement) -> Amount:
        took = run_at(
            profile,
            measurement,
            epochs=observation.epochs,
            evaluations=observation.parts.evaluations.count if observation.parts is not None else 0.0,
            samples_per_epoch=samples,
            overheads=overheads,
        )
        energy_j = took.energy_j + host_w * took.time_s
        return Amount(energy_j, took.time_s, rates.of(energy_j, took.time_s))

    spent = run(at)
    return WouldHaveSaved(at.setting, best.setting, spent, spent - run(best), profile.gpu.knob)


def tried_batch_sizes(job: Job, state: State) -> tuple[TriedBatchSize, ...]:
    """Return what the batch sizes that were tried on the newest GPU save against the default, each with its doubt.

    Untried ones are not guessed at. The doubt comes from the run-to-run scatter of the epochs to the target.
    """
    if state.account is None or state.gpu is None:
        return ()
    log_epochs = {int(b): runs for b, runs in state.account.log_epochs().items()}
    costs = state.arm_costs(job, state.gpu.key, state.samples_per_epoch or 1)
    known = [b for b in sorted(log_epochs) if b in costs]
    b0 = job.default_batch_size
    if b0 not in known:
        return ()

    def run_cost(b: int) -> float:
        return costs[b].once + math.exp(log_epochs[b].mean) * (costs[b].training + costs[b].beside)

    free = sum(runs.count - 1 for runs in log_epochs.values())
    scatter = sum(runs.squares for runs in log_epochs.values()) / free if free else None
    tried = []
    for b in (arm for arm in known if arm != b0):
        ratio, doubt = run_cost(b) / run_cost(b0), None
        if scatter is not None:
            doubt = 100 * ratio * math.sqrt(scatter * (1 / log_epochs[b].count + 1 / log_epochs[b0].count))
        tried.append(TriedBatchSize(b, round(log_epochs[b].count), 100 * (1 - ratio), doubt))
    return tuple(tried)
