"""One group of recurring, overlapping jobs under one policy (sections 4.4 and 6.3).

Production's engine decides, asked as production asks it: with the attempts that are in flight. A trace stands for
training. What runs at the same time follows from how long the simulated attempts take: whoever is submitted before an
earlier one has ended decides without having seen it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from zeus_flows.core import policy
from zeus_flows.core.attempt import EpochReport
from zeus_flows.core.cost import observed_cost
from zeus_flows.core.job import Job
from zeus_flows.core.records import InFlight, Observation
from zeus_flows.experiments.cluster.ordered_fold import OrderedFold
from zeus_flows.experiments.replay.replaying import TraceTrainer
from zeus_flows.experiments.replay.traces import Trace
from zeus_flows.ledger.protocol import History
from zeus_flows.recurrence.loop import another_follows
from zeus_flows.recurrence.steps import asking


class Submission(NamedTuple):
    """A job of a group: when it is submitted, and how its run compares with a run of the trace.

    Attributes:
        start_s: When, in seconds from any point in time.
        ratio: What its energy and time are multiplied with.
    """

    start_s: float
    ratio: float = 1.0


@dataclass(slots=True)
class GroupSums:
    """Running sums over a group's jobs; nothing here grows with their number.

    Attributes:
        jobs: Recurrences that ended.
        attempts: What they took.
        energy_j: Energy of all attempts, each multiplied with its job's ratio.
        time_s: Their training time, likewise.
        cost_j: Their cost by the job's objective, likewise.
        missed: Recurrences that did not reach the target.
        overlapping: Recurrences that were submitted while an earlier one was under way.
        end_s: When the last attempt ended.
        most_in_flight: The most attempts that were under way at once.
        most_kept: The most observations that were kept at once.
    """

    jobs: int = 0
    attempts: int = 0
    energy_j: float = 0.0
    time_s: float = 0.0
    cost_j: float = 0.0
    missed: int = 0
    overlapping: int = 0
    end_s: float = 0.0
    most_in_flight: int = 0
    most_kept: int = 0


@dataclass(slots=True)
class _Running:
    """A recurrence under way: what it has observed, and what its attempt will bring when it ends."""

    number: int
    ratio: float
    earlier: tuple[Observation, ...] = ()
    bringing: Observation | None = None


@dataclass(slots=True)
class GroupSimulation:
    """A group in the middle of its simulation.

    Attributes:
        job: What recurs, with its seed.
        trainer: Looks training up in a trace.
        sums: The sums so far.
        fold: What has been observed.
        in_flight: Attempts under way, by recurrence.
        under_way: Recurrences that have begun and not ended, oldest first.
        queue: Attempts by when they end, then by recurrence.
    """

    job: Job
    trainer: TraceTrainer
    sums: GroupSums
    fold: OrderedFold
    in_flight: dict[int, InFlight] = field(default_factory=dict)
    under_way: dict[int, _Running] = field(default_factory=dict)
    queue: list[tuple[float, int]] = field(default_factory=list)
    begun: int = 0

    def submit(self, submission: Submission) -> None:
        """Begin a recurrence, once everything that ends before or at that time has."""
        while self.queue and self.queue[0][0] <= submission.start_s:
            self.end_next()
        self.begun += 1
        self.sums.overlapping += bool(self.under_way)
        running = self.under_way[self.begun] = _Running(self.begun, submission.ratio)
        self._launch(running, submission.start_s)
        self.sums.most_in_flight = max(self.sums.most_in_flight, len(self.queue))

    def end_next(self) -> None:
        """End the attempt that ends next: it is observed, and its recurrence ends or makes another attempt at once."""
        now_s, number = heappop(self.queue)
        running, sums = self.under_way[number], self.sums
        observation = running.bringing
        assert observation is not None
        del self.in_flight[number]
        self.fold.add(observation)
        sums.most_kept = max(sums.most_kept, len(self.fold))
        running.earlier = (*running.earlier, observation)
        sums.attempts += 1
        sums.energy_j += running.ratio * observation.energy_j
        sums.time_s += running.ratio * observation.time_s
        sums.cost_j += running.ratio * observed_cost(self.job, observation)
        sums.end_s = max(sums.end_s, now_s)
        if another_follows(self.job, running.earlier):
            self._launch(running, now_s)
            return
        sums.jobs += 1
        sums.missed += not observation.converged
        del self.under_way[number]
        self.fold.settle(next(iter(self.under_way), self.begun + 1))

    def _launch(self, running: _Running, now_s: float) -> None:
        """Decide on an attempt as production would now, and find out when it will end."""
        state = self.fold.state()
        history = History(state, tuple(self.in_flight.values()), under_way=tuple(self.under_way))
        decision = policy.decide(
            self.job, state, asking(self.job, history, running.number, running.earlier, self.trainer)
        )
        profile = state.profile(decision.batch_size, self.trainer.gpu, decision.micro)
        running.bringing = self.trainer.train(self.job, decision, profile, _nobody)
        self.in_flight[running.number] = InFlight(
            decision.recurrence, decision.attempt, decision.batch_size, decision.explores
        )
        heappush(self.queue, (now_s + running.ratio * running.bringing.time_s, running.number))


def simulate(trace: Trace, job: Job, submissions: Iterable[Submission], *, seed: int) -> GroupSums:
    """Simulate a group of jobs; return its sums.

    What a policy learns from is the run of the trace as it is: a ratio scales what a job takes, not what its batch size
    costs beside others (the published simulator does the same).

    Args:
        trace: What training does.
        job: What is decided, and by which policy; see `replay_job`.
        submissions: The group's jobs in the order of their time; read as they are needed.
        seed: Seeds the policy and the draws of training runs.
    """
    job = replace(job, seed=seed)
    free = job.policy == "zeus-paper"  # as the published simulator has it; see `TraceTrainer`
    trainer = TraceTrainer(trace, job, np.random.default_rng(seed), free_refusals=free)
    group = GroupSimulation(job, trainer, GroupSums(), OrderedFold(job))
    for submission in submissions:
        group.submit(submission)
    while group.queue:
        group.end_next()
    return group.sums


def _nobody(epoch: EpochReport) -> None:
    """Nobody wants to hear of epochs."""
