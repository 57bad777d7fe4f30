"""The loop of one recurrence, with a trainer that does as it is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.builders import GPU, JOB, observation
from zeus_flows.core.attempt import AttemptFailed, EpochReport
from zeus_flows.core.gate import Question
from zeus_flows.core.job import Job, Mode
from zeus_flows.core.overheads import NOTHING, Overheads
from zeus_flows.core.power_profile import Gpu, PowerProfile
from zeus_flows.core.records import Decision, EnergySource, Observation, Outcome
from zeus_flows.errors import StoreError
from zeus_flows.job_file import Target
from zeus_flows.ledger.memory import MemoryLedger
from zeus_flows.recurrence.loop import Recurrence, run_recurrence
from zeus_flows.recurrence.steps import LocalSteps
from zeus_flows.training.gate import Gate


class ScriptedTrainer:
    """Ends attempts as scripted, one outcome after the other; then converges for ever."""

    gpu: Gpu = GPU
    power_limits_w: tuple[float, ...] = (250.0, 150.0)

    def __init__(self, *outcomes: Outcome, energy_source: EnergySource = EnergySource.SIMULATED) -> None:
        self.energy_source = energy_source
        self.outcomes = list(outcomes)
        self.seen: list[tuple[Job, Decision, PowerProfile | None]] = []

    def train(
        self,
        job: Job,
        decision: Decision,
        profile: PowerProfile | None,
        report: Callable[[EpochReport], None],
        *,
        overheads: Overheads = NOTHING,
        attempt_id: str = "",
    ) -> Observation:
        self.seen.append((job, decision, profile))
        outcome = self.outcomes.pop(0) if self.outcomes else Outcome.CONVERGED
        observed = observation(
            decision.recurrence,
            decision.attempt,
            decision.batch_size,
            outcome=outcome,
            energy_source=self.energy_source,
            explores=decision.explores,
        )
        if outcome is Outcome.FAILED:
            raise AttemptFailed(observed) from RuntimeError("the user's bug")
        return observed


def run(
    trainer: ScriptedTrainer, job: Job = JOB, ledger: MemoryLedger | None = None, gate: Gate | None = None
) -> Recurrence:
    steps = LocalSteps(job, ledger or MemoryLedger(job, trainer.energy_source), trainer, gate=gate)
    return run_recurrence(steps.job, steps)


def test_the_first_recurrence_runs_the_default_batch_size() -> None:
    done = run(ScriptedTrainer())
    assert done.converged
    assert [attempt.decision.batch_size for attempt, _ in done.attempts] == [64]


def test_an_attempt_that_did_not_converge_is_followed_by_another() -> None:
    done = run(ScriptedTrainer(Outcome.EXHAUSTED, Outcome.STOPPED))
    assert [observed.outcome for _, observed in done.attempts] == ["exhausted", "stopped", "converged"]
    assert [attempt.decision.attempt for attempt, _ in done.attempts] == [1, 2, 3]
    assert done.energy_j == pytest.approx(3 * 5000.0)


def test_a_recurrence_gives_up_after_max_attempts_and_says_so() -> None:
    done = run(ScriptedTrainer(*[Outcome.EXHAUSTED] * 10), replace(JOB, max_attempts=3))
    assert not done.converged
    assert len(done.attempts) == 3


@pytest.mark.parametrize("mode", [Mode.OFF, Mode.OBSERVE, Mode.POWER])
def test_where_the_batch_size_may_not_change_there_is_one_attempt_at_the_default(mode: Mode) -> None:
    done = run(ScriptedTrainer(Outcome.EXHAUSTED), replace(JOB, mode=mode))
    assert [attempt.decision.batch_size for attempt, _ in done.attempts] == [64]


def test_a_crash_is_observed_as_failed_and_then_raised() -> None:
    ledger = MemoryLedger(JOB, EnergySource.SIMULATED)
    with pytest.raises(RuntimeError, match="the user's bug"):
        run(ScriptedTrainer(Outcome.FAILED), ledger=ledger)
    assert [o.outcome for o in ledger.observations()] == [Outcome.FAILED]
    assert ledger.history().in_flight == ()


def test_after_a_crash_the_next_recurrence_explores_on() -> None:
    ledger = MemoryLedger(JOB, EnergySource.SIMULATED)
    trainer = ScriptedTrainer(Outcome.CONVERGED, Outcome.FAILED)
    run(trainer, ledger=ledger)
    with pytest.raises(RuntimeError):
        run(trainer, ledger=ledger)
    for _ in range(8):
        run(trainer, ledger=ledger)
    assert {decision.batch_size for _, decision, _ in trainer.seen} != {64}


def test_a_known_profile_reaches_the_trainer() -> None:
    ledger = MemoryLedger(JOB, EnergySource.SIMULATED)
    trainer = ScriptedTrainer()
    job = replace(JOB, policy="power")
    run(trainer, job, ledger)
    run(trainer, job, ledger)
    assert [profile is not None for _, _, profile in trainer.seen] == [False, True]


def test_memory_that_runs_out_leads_to_smaller_batch_sizes_each_tried_once() -> None:
    trainer = ScriptedTrainer(Outcome.OUT_OF_MEMORY, Outcome.OUT_OF_MEMORY)
    done = run(trainer)
    assert [decision.batch_size for _, decision, _ in trainer.seen] == [64, 32]
    assert not done.converged, "nothing smaller is left, so the recurrence has ended"


class Asked:
    """A gate's evaluation that finds what it is told, and remembers what it was asked."""

    def __init__(self, *findings: object) -> None:
        self.findings, self.questions = list(findings), list[Question]()

    def __call__(self, question: Question) -> object:
        self.questions.append(question)
        found = self.findings.pop(0)
        if isinstance(found, BaseException):
            raise found
        return found

    @property
    def gate(self) -> Gate:
        return Gate(self, Target(metric="accuracy", value=0.9, better="higher"))


def test_a_gate_is_asked_first_and_what_it_skips_is_not_trained() -> None:
    ledger, trainer, asked = MemoryLedger(JOB, EnergySource.SIMULATED), ScriptedTrainer(), Asked(0.95, 0.85, 0.95)
    done = [run(trainer, ledger=ledger, gate=asked.gate) for _ in range(4)]
    assert [recurrence.skipped for recurrence in done] == [False, True, False, True]
    assert [recurrence.number for recurrence in done] == [1, 2, 3, 4]
    assert [recurrence.converged for recurrence in done] == [True] * 4
    assert [len(recurrence.attempts) for recurrence in done] == [1, 0, 1, 0]
    assert [(q.recurrence, q.trained_in, q.age) for q in asked.questions] == [(2, 1, 1), (3, 1, 2), (4, 3, 1)]
    assert done[1].energy_j == done[1].time_s == done[1].cost_j(JOB) == 0.0
    assert {check.verdict for check in ledger.store.checks.values()} == {"skip", "retrain"}


def test_before_any_model_has_reached_the_target_there_is_nothing_to_ask() -> None:
    ledger, trainer, asked = (
        MemoryLedger(JOB, EnergySource.SIMULATED),
        ScriptedTrainer(*[Outcome.EXHAUSTED] * 4),
        Asked(),
    )
    assert not run(trainer, ledger=ledger, gate=asked.gate).converged
    assert run(trainer, ledger=ledger, gate=asked.gate).converged
    assert asked.questions == []


def test_a_model_of_another_fingerprint_is_not_asked_about() -> None:
    ledger, asked = MemoryLedger(JOB, EnergySource.SIMULATED), Asked()
    run(ScriptedTrainer(), ledger=ledger, gate=asked.gate)
    changed = replace(JOB, fingerprint="another target")
    run(ScriptedTrainer(), changed, MemoryLedger(changed, EnergySource.SIMULATED, ledger.store), gate=asked.gate)
    assert asked.questions == []


@pytest.mark.parametrize("mode", [Mode.OBSERVE, Mode.POWER])
def test_a_mode_that_may_not_change_the_job_asks_the_gate_and_trains(mode: Mode) -> None:
    job = replace(JOB, mode=mode)
    ledger, trainer, asked = MemoryLedger(job, EnergySource.SIMULATED), ScriptedTrainer(), Asked(0.95)
    run(trainer, job, ledger)
    done = run(trainer, job, ledger, asked.gate)
    assert (done.skipped, len(done.attempts)) == (False, 1)
    assert done.check is not None
    assert done.check.passes
    assert f"the mode is {mode}: nothing is skipped" in done.check.text


def test_a_job_that_is_off_asks_no_gate() -> None:
    job = replace(JOB, mode=Mode.OFF)
    ledger, trainer, asked = MemoryLedger(job, EnergySource.SIMULATED), ScriptedTrainer(), Asked(0.95)
    for _ in range(2):
        assert run(trainer, job, ledger, asked.gate).check is None
    assert asked.questions == []


def test_a_gate_that_breaks_costs_no_model() -> None:
    ledger, trainer, asked = MemoryLedger(JOB, EnergySource.SIMULATED), ScriptedTrainer(), Asked(OSError("no model.pt"))
    run(trainer, ledger=ledger)
    done = run(trainer, ledger=ledger, gate=asked.gate)
    assert (done.skipped, len(done.attempts)) == (False, 1)
    assert done.check is not None
    assert "OSError: no model.pt" in done.check.text


def test_an_order_to_stop_ends_the_gate_and_goes_on_as_it_is() -> None:
    ledger, trainer, asked = MemoryLedger(JOB, EnergySource.SIMULATED), ScriptedTrainer(), Asked(KeyboardInterrupt())
    run(trainer, ledger=ledger)
    with pytest.raises(KeyboardInterrupt):
        run(trainer, ledger=ledger, gate=asked.gate)
    assert "cancelled" in ledger.store.checks[2].text
    assert len(ledger.observations()) == 1


@pytest.mark.parametrize("method", ["asked", "gated"])
def test_a_store_that_refuses_the_gate_costs_no_model(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger, trainer, asked = MemoryLedger(JOB, EnergySource.SIMULATED), ScriptedTrainer(), Asked(0.95)
    run(trainer, ledger=ledger)

    def refuse(*_: object) -> str:
        raise StoreError("refused")

    monkeypatch.setattr(ledger, method, refuse)
    done = run(trainer, ledger=ledger, gate=asked.gate)
    assert (done.skipped, done.check, len(done.attempts)) == (False, None, 1)
