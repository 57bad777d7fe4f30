"""Running an experiment: one recurrence per slice and contender, through the same loop and ledger as any job.

A contender `window-10` of the experiment `capriccio` is the job `capriccio.window-10`, with MLflow experiments of its
own. Slices and results are runs of the MLflow experiment `capriccio` (see `tracking`).

Everything a recurrence does is fixed by history, slice and seeds. A run that was killed is therefore taken up where it
stopped, by doing again what was not written: the same numbers, decisions and observations come out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from zeus_flows.core.gate import GateCheck
from zeus_flows.core.job import Job
from zeus_flows.core.reasons import Reason, ReasonKind
from zeus_flows.core.records import Decision, Observation, decision_seed
from zeus_flows.errors import StoreError
from zeus_flows.experiments.capriccio.curves import Curves, open_curves
from zeus_flows.experiments.capriccio.file import ExperimentFile
from zeus_flows.experiments.capriccio.model_gate import evaluate
from zeus_flows.experiments.capriccio.results import SliceOutcome, outcomes
from zeus_flows.experiments.capriccio.slices import Slice
from zeus_flows.experiments.capriccio.tracking import Tracking
from zeus_flows.job_file import JobFile
from zeus_flows.ledger.mlflow import names
from zeus_flows.ledger.mlflow import record_text as codec
from zeus_flows.ledger.mlflow.client import Store
from zeus_flows.ledger.mlflow.ledger import MlflowLedger
from zeus_flows.ledger.mlflow.names import RunKind
from zeus_flows.ledger.mlflow.query import having
from zeus_flows.ledger.open_ledger import open_direct
from zeus_flows.recurrence.loop import Attempt, run_recurrence
from zeus_flows.recurrence.steps import LocalSteps
from zeus_flows.settings import Settings
from zeus_flows.training.gate import Gate
from zeus_flows.training.trainer import LocalTrainer


class SliceSteps(LocalSteps):
    """The steps of a slice's recurrence: attempts that an earlier process has written are not made again.

    Args:
        job: The contender's job.
        ledger: Its ledger.
        trainer: What trains.
        number: The slice, which is the recurrence.
        written: Observations of this recurrence's attempts that are written, in order.
        context: Tags for the attempts' runs.
        gate: The contender's drift gate, if it has one.
    """

    def __init__(
        self,
        job: Job,
        ledger: MlflowLedger,
        trainer: LocalTrainer,
        *,
        number: int,
        written: tuple[Observation, ...],
        context: Mapping[str, str],
        gate: Gate | None = None,
    ) -> None:
        super().__init__(job, ledger, trainer, context, gate)
        self._numbers, self._slice = ledger, number
        self._written = {f"written {o.attempt}": o for o in written}

    def begin(self) -> int:
        """Take the slice's number; a process that was killed may have taken it already."""
        number = self._numbers.begin(token=f"slice-{self._slice:06d}", asked_before=True)
        if number != self._slice:
            raise StoreError(
                f"recurrence {number} of {self.job.name} is not slice {self._slice}: somebody else ran this job; "
                "give the experiment another name"
            )
        return number

    def gate(self, recurrence: int) -> GateCheck | None:
        """Ask the gate, unless an earlier process was told to train."""
        return None if self._written else super().gate(recurrence)

    def decide(self, recurrence: int, earlier: tuple[Observation, ...]) -> Attempt:
        """Decide, unless the attempt is written. One with a decision alone gets the same decision again."""
        number = len(earlier) + 1
        written = self._written.get(f"written {number}")
        if written is None:
            return super().decide(recurrence, earlier)
        decision = Decision(
            recurrence=recurrence,
            attempt=number,
            batch_size=written.batch_size,
            reason=Reason(ReasonKind.WRITTEN, "an earlier process made this attempt"),
            seed=decision_seed(self.job.seed, recurrence, number),
            policy=self.job.policy,
        )
        return Attempt(f"written {number}", decision)

    def train(self, attempt: Attempt) -> Observation:
        """Train, unless the attempt is written."""
        written = self._written.get(attempt.id)
        return super().train(attempt) if written is None else written

    def observe(self, attempt: Attempt, observation: Observation) -> None:
        """Write how it went, unless it is written."""
        if attempt.id not in self._written:
            super().observe(attempt, observation)

    def end(self, recurrence: int, observations: tuple[Observation, ...]) -> None:
        """Write the recurrence's end; one that broke off stays open, to be taken up."""
        if observations:
            super().end(recurrence, observations)


class ContenderRun:
    """One contender: its job, its ledger and its trainer.

    Attributes:
        done: Recurrences that have ended.
    """

    def __init__(self, name: str, job_file: JobFile, *, tracking_uri: str, store: Store, settings: Settings) -> None:
        self.name, self.job_file = name, job_file
        self._store = store
        self.trainer = LocalTrainer(job_file, settings)
        self.job = job_file.core(self.trainer.energy_source)
        self._ledger = open_direct(self.job, tracking_uri=tracking_uri, energy_source=self.trainer.energy_source)
        last = self._ledger.last_recurrence()
        self._under_way = bool(last) and last in self._ledger.open_claims()
        self.done = last - self._under_way
        self._observations = list(self._ledger.observations()) if last else []

    def run(self, part: Slice, context: Mapping[str, str], gated: Curves | None = None) -> None:
        """Run the recurrence of a slice, or what an earlier process left of it; skip it where the gate says so.

        Args:
            part: The slice.
            context: Tags for the runs.
            gated: What the contender's drift gate makes models from; None: it has no gate.
        """
        number = part.number
        if number <= self.done:
            return
        written = tuple(o for o in self.observations() if o.recurrence == number)
        gate = None if gated is None else self._gate(gated)
        steps = SliceSteps(
            self.job, self._ledger, self.trainer, number=number, written=written, context=context, gate=gate
        )
        recurrence = run_recurrence(steps.job, steps)
        self._observations += [observation for _, observation in recurrence.attempts[len(written) :]]
        if self._under_way:
            self._tidy(number)
        self.done, self._under_way = number, False

    def observations(self) -> tuple[Observation, ...]:
        """Return every observation, in order."""
        return tuple(sorted(self._observations, key=lambda o: o.order))

    def _gate(self, curves: Curves) -> Gate:
        before = self.observations()
        return Gate(lambda question: evaluate(curves, self.job, before, question), self.job_file.target)

    def _tidy(self, number: int) -> None:
        """End the runs of a recurrence that a killed process left open: observed ones, and ones that lead nowhere."""
        its_attempts = having({names.KIND: RunKind.ATTEMPT, names.RECURRENCE: str(number)})
        asked = f"{its_attempts} and attributes.status = 'RUNNING'"
        for run in self._store.client.search_runs([self._ledger.experiment_id], asked):
            written = run.data.params.get(names.OBSERVATION)
            if written is None:
                self._store.delete(str(run.info.run_id))
            else:
                self._ledger.observed(str(run.info.run_id), codec.load_observation(written))


@dataclass(frozen=True)
class Experiment:
    """An experiment that is under way.

    Attributes:
        file: What was asked for.
        curves: Its learning curves; they know dataset and slices.
        contenders: Who takes part.
        tracking: Its runs in MLflow.
    """

    file: ExperimentFile
    curves: Curves
    contenders: tuple[ContenderRun, ...]
    tracking: Tracking

    @property
    def slices(self) -> tuple[Slice, ...]:
        """The slices, in order."""
        return self.curves.trainer.slices

    def run_slice(self, part: Slice, context: Mapping[str, str] | None = None) -> dict[str, SliceOutcome]:
        """Run every contender's recurrence of a slice, and write the slice's run; what is written stays."""
        results = {}
        for contender in self.contenders:
            gated = self.curves if self.file.contenders[contender.name].gate else None
            contender.run(part, {names.SLICE_DAY: part.day.isoformat(), **(context or {})}, gated)
            mine = tuple(o for o in contender.observations() if o.recurrence == part.number)
            if mine:
                results[contender.name] = outcomes(contender.job, mine, self.curves)[part.number]
        self.tracking.write(part, results)
        return results

    def outcomes(self) -> dict[str, dict[int, SliceOutcome]]:
        """Return what every contender made of every slice so far."""
        return {c.name: outcomes(c.job, c.observations(), self.curves) for c in self.contenders}


def open_experiment(path: Path, *, data: Path | None, tracking_uri: str, settings: Settings) -> Experiment:
    """Return an experiment, new or as it was left.

    Raises:
        ConfigError: the file or the data are wrong, or the name belongs to another experiment.
    """
    parameters = {"experiment": str(path.resolve())} | ({} if data is None else {"data": str(data.resolve())})
    curves = open_curves(**parameters)
    file, dataset = curves.trainer.experiment, curves.trainer.dataset
    store = Store(tracking_uri, patience_s=10.0)
    tracking = Tracking(store, file, dataset, curves.trainer.slices)
    contenders = tuple(
        ContenderRun(
            name,
            file.job_file(name, version=file.digest(dataset), parameters=parameters),
            tracking_uri=tracking_uri,
            store=store,
            settings=settings,
        )
        for name in file.contenders
    )
    return Experiment(file, curves, contenders, tracking)
