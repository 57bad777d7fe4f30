"""What a policy is: a belief that learns from lessons, and a choice made from it.

The front door (`zeus_flows.core.policy`) turns observations into lessons and choices into decisions, so that no
policy has to know about modes, failures, GPUs, concurrency or budgets.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import numpy as np

from zeus_flows.core.early_stop import Cut, NoCut
from zeus_flows.core.job import Job
from zeus_flows.core.lazy import lazy
from zeus_flows.core.learning_curve import Curve
from zeus_flows.core.reasons import Reason
from zeus_flows.core.records import Ask

LARGEST_LOG = 300.0


@dataclass(frozen=True, slots=True)
class Lesson:
    """What one observation teaches. Only observations that may teach become one.

    Attributes:
        epochs: Epochs trained; max_epochs where the attempt diverged.
        converged: Whether it reached the target; otherwise it would have taken more than `epochs`.
        cost_j: What it cost in all, profiling included.
        beside_j: What of that was for evaluation, start-up and the rest, where it profiled to the end.
        profiled: Whether the attempt profiled.
        epoch_cost_j: What the steps of an epoch cost, for its data, where it profiled to the end.
        refused: The cut did not allow a single epoch.
        setting: What it trained at; None where none was applied.
        curve: Its learning curve.
    """

    recurrence: int
    batch_size: int
    epochs: int
    converged: bool
    cost_j: float
    epoch_cost_j: float | None = None
    beside_j: float = 0.0
    profiled: bool = False
    refused: bool = False
    setting: float | None = None
    curve: Curve = ()


@dataclass(frozen=True, slots=True)
class Costs:
    """What a run of each arm costs on the GPU that was asked for: once + epochs x (training + beside).

    Attributes:
        training: The steps of an epoch, of arms measured on this GPU.
        elsewhere: The same as measured on other GPUs, one mapping for each; empty where the job forbids to use them.
        translated: Of arms not measured on this GPU, a single estimate from `elsewhere`.
        new_gpu: Whether nothing was measured on this GPU yet, though on others.
        beside: Evaluation and the rest of an epoch, of every arm; empty where there is none of it.
        doubt: Standard deviation of the log of `beside`, of arms whose own was not seen.
        once: What an attempt costs before its first step, of every arm; empty where there is none of it.
    """

    training: dict[int, float] = field(default_factory=dict)
    elsewhere: tuple[dict[int, float], ...] = ()
    translated: dict[int, float] = field(default_factory=dict)
    new_gpu: bool = False
    beside: dict[int, float] = field(default_factory=dict)
    doubt: dict[int, float] = field(default_factory=dict)
    once: dict[int, float] = field(default_factory=dict)

    def epoch(self, arm: int) -> float | None:
        """Return EpochCost of an arm, measured or translated; None where it is neither."""
        training = self.training.get(arm, self.translated.get(arm))
        return None if training is None else training + self.beside.get(arm, 0.0)


@dataclass(frozen=True)
class View:
    """What a policy may look at when it chooses, beside its belief.

    Attributes:
        ask: What is asked.
        arms: Batch sizes that may run on this GPU, ascending; never empty.
        default: b0, or the feasible arm nearest to it.
        may_explore: False: only the best known arm will do.
        look_up_costs: Finds `costs`; not every policy wants them.
    """

    ask: Ask
    arms: tuple[int, ...]
    default: int
    may_explore: bool
    look_up_costs: Callable[[], Costs]

    @lazy
    def rng(self) -> np.random.Generator:
        """All the randomness there is."""
        return np.random.Generator(np.random.PCG64(self.ask.seed))  # `default_rng`, in three fifths of its time

    @lazy
    def costs(self) -> Costs:
        """What a run of each arm costs, as far as that is known."""
        return self.look_up_costs()


@dataclass(frozen=True, slots=True)
class RunCost:
    """What a run of an arm is believed to cost.

    Attributes:
        expected_j: Its mean, in joules.
        spread: Standard deviation of the log of that mean.
        noise: Standard deviation of the log of one run's cost around it.
    """

    expected_j: float
    spread: float
    noise: float

    def likely_j(self, deviations: float) -> float:
        """Return what a run may cost, so many standard deviations above what is expected.

        >>> RunCost(100.0, 0.3, 0.4).likely_j(0.0)
        100.0
        """
        return self.expected_j * math.exp(min(deviations * math.hypot(self.spread, self.noise), 50.0))


def not_believed() -> RunCost | None:
    """Return what is believed of an arm that nothing is known of."""
    return None


@dataclass(frozen=True, slots=True)
class Choice:
    """A batch size, when to stop it, and why.

    Attributes:
        batch_size: The arm.
        reason: Why, for people.
        cut: When to stop it.
        explores: Whether it is there to learn.
        alone: Whether an exploration waits while another recurrence explores; the best known arm runs meanwhile. One
            that was drawn need not: another recurrence draws another arm (section 4.4).
        tune_power: Whether the power limit may be changed.
        setting: What it is fixed to; None: the profile decides.
        control: Whether the default runs to be compared with.
        run_cost: Returns what a run of it is believed to cost. A function, as most decisions do not ask.
    """

    batch_size: int
    reason: Reason
    cut: Cut = field(default_factory=NoCut)
    explores: bool = False
    tune_power: bool = True
    setting: float | None = None
    control: bool = False
    run_cost: Callable[[], RunCost | None] = field(default=not_believed, compare=False)
    alone: bool = True


B = TypeVar("B")


class Policy(Protocol[B]):
    """Learns and chooses. `B` is an immutable dataclass of plain values, so that it can be stored."""

    belief_type: type[B]

    def initial(self, job: Job) -> B:
        """Return the belief before any observation."""
        ...

    def learn(self, job: Job, belief: B, lesson: Lesson) -> B:
        """Return the belief after one more lesson; lessons come in the order (recurrence, attempt)."""
        ...

    def choose(self, job: Job, belief: B, view: View) -> Choice:
        """Return what to run. Never raises, whatever was learnt."""
        ...


def from_log(log_cost: float) -> float:
    """Return a cost in joules from its logarithm, finite however wild the belief.

    >>> from_log(0.0)
    1.0
    """
    return math.exp(min(log_cost, LARGEST_LOG))
