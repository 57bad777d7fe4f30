"""One pass over a job's models: send what was kept here, register it, judge it, and move the aliases.

Everything in a pass may be done again, by another process too, and may be broken off anywhere: the next pass goes on.
It runs after every recurrence that reached the target, before every recurrence, and with `zeus-flows janitor`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from zeus_flows.core.cost import observed_cost
from zeus_flows.core.job import Job
from zeus_flows.core.promotion import (
    Candidate,
    ModelVerdict,
    Promotions,
    Version,
    fold,
    is_by_hand,
    moves_to,
    rivals_of,
    too_late,
    unevaluated,
)
from zeus_flows.core.records import Observation
from zeus_flows.errors import StoreError, StoreUnavailable, UnknownAttempt
from zeus_flows.job_file import JobFile
from zeus_flows.killpoints import reached
from zeus_flows.ledger.durable import DurableLedger
from zeus_flows.ledger.mlflow import names
from zeus_flows.ledger.mlflow.client import Store
from zeus_flows.ledger.mlflow.model_registry import CHALLENGER, CHAMPION, LoggedEntry, ModelRegistry, moves_of
from zeus_flows.training.evaluation import Evaluation, load_evaluation
from zeus_flows.training.keeping import Staging
from zeus_flows.training.trainer import Measure, timed

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Promoted:
    """What a pass came to.

    Attributes:
        champion: The version that the alias names; None where it names none of this job's.
        by_hand: Whether somebody put it there by hand.
        lines: What happened, as sentences.
        moved: Whether this pass made it champion.
        refused: Those of the sentences that say which models were refused.
    """

    champion: Version | None = None
    by_hand: bool = False
    lines: tuple[str, ...] = ()
    moved: bool = False
    refused: tuple[str, ...] = ()


class Promoter:
    """Makes passes over one job's models.

    Args:
        job: Whose.
        registry: Its models in MLflow.
        staging: What was kept on this machine.
        ledger: Its attempts. Where MLflow did not answer it just now, nothing is tried.
        evaluation: What holds models against each other; None: nothing does.
    """

    def __init__(
        self,
        job: Job,
        registry: ModelRegistry,
        staging: Staging,
        ledger: DurableLedger,
        evaluation: Evaluation | None = None,
    ) -> None:
        self._job, self._registry, self._staging = job, registry, staging
        self._ledger, self._evaluation = ledger, evaluation

    def check_owner(self) -> None:
        """Refuse a registered model of another job; where MLflow does not answer, nothing is refused.

        Raises:
            ConfigError: it is another job's, or nobody's.
        """
        with suppress(StoreUnavailable):
            self._look()
            self._registry.check_owner()

    def make_pass(self) -> Promoted:
        """Send, register, judge and move what there is; what MLflow does not take now is left to the next pass."""
        lines = list[str]()
        try:
            self._look()
            self._send(lines)
            if self._registry.name is None:
                return Promoted(lines=tuple(lines))
            return self._promote(lines)
        except StoreUnavailable as error:
            lines.append(f"{error}; what was kept stays on this machine and is sent with the next recurrence")
            log.warning("models of %s: %s", self._job.name, lines[-1])
        except StoreError as error:
            lines.append(f"the pass over models broke off: {error}")
            log.warning("models of %s: %s", self._job.name, lines[-1])
        return Promoted(lines=tuple(lines))

    def champion(self) -> Version | None:
        """Return the version that the alias names; None where there is none, or MLflow does not answer."""
        if self._registry.name is None:
            return None
        try:
            self._look()
            return _named(self._registry.aliases().get(CHAMPION), self._entries())
        except StoreError as error:
            log.warning("the champion of %s could not be looked up: %s", self._job.name, error)
            return None

    def _look(self) -> None:
        if self._ledger.is_away:
            raise StoreUnavailable("MLflow does not answer")

    # -- sending and registering -------------------------------------------------------------------------------------

    def _send(self, lines: list[str]) -> None:
        for staged, folder, sending in self._staging.take(self._ledger.key):
            run_id = self._ledger.run_of(staged.attempt)
            if run_id is None:
                lines.append("a model waits for its attempt to be delivered")
                continue
            try:
                self._registry.log_model(run_id, folder, model_id=staged.model_id, begun=sending.begun)
            except StoreUnavailable:
                raise
            except StoreError as error:
                lines.append(f"a kept model was dropped: {error}")
                log.warning("models of %s: %s", self._job.name, lines[-1])
            sending.over()
            reached("after-sent")

    def _register(self, entries: Sequence[LoggedEntry]) -> bool:
        """Make versions of kept models that are none yet; return whether there were any."""
        news = False
        for entry in entries:
            observed = entry.observation
            if entry.candidate is None and observed is not None and observed.converged:
                self._registry.register(entry, self._tags(entry, observed), _description(entry, observed))
                news = True
        return news

    def _tags(self, entry: LoggedEntry, observed: Observation) -> dict[str, str]:
        cost = names.COST_S if self._job.in_seconds else names.COST_J
        shown = {
            names.JOB: self._job.name,
            names.RECURRENCE: str(entry.recurrence),
            names.ATTEMPT: str(entry.attempt),
            names.BATCH_SIZE: str(observed.batch_size),
            names.TIME_TO_ACCURACY_S: f"{observed.time_s:.6g}",
            cost: f"{observed_cost(self._job, observed):.6g}",
        }
        if not self._job.in_seconds:
            shown[names.ENERGY_TO_ACCURACY_J] = f"{observed.energy_j:.6g}"
        return shown

    # -- judging -----------------------------------------------------------------------------------------------------

    def _promote(self, lines: list[str]) -> Promoted:
        entries = self._entries()
        if self._register(entries):
            entries = self._entries()
        if not entries:
            return Promoted(lines=tuple(lines))
        alias = self._registry.aliases().get(CHAMPION)
        refused = list[str]()
        while (waiting := _next(fold(_candidates(entries)))) is not None:
            if not self._judge(waiting, entries, alias, lines):
                refused.append(lines[-1])
            entries = self._entries()
        return replace(self._move(entries, lines), refused=tuple(refused))

    def _judge(self, candidate: Candidate, entries: Sequence[LoggedEntry], alias: int | None, lines: list[str]) -> bool:
        """Give a candidate its verdict, and say so; return whether it is accepted."""
        standing = fold(_candidates(entries))
        by_number = {e.candidate.version.number: e for e in entries if e.candidate is not None}
        verdict = self._verdict(candidate, standing, _named(alias, entries))
        reached("after-judge")
        given = self._registry.give(by_number[candidate.version.number], verdict)
        word = "accepted" if given.accepted else "refused"
        lines.append(f"version {candidate.version.number} is {word}: {given.reason}")
        log.info("model %s: %s", self._registry.name, lines[-1])
        with suppress(UnknownAttempt):
            self._registry.show(candidate.version.number, {names.VERDICT: word, names.REASON: given.reason})
        return given.accepted

    def _verdict(self, candidate: Candidate, standing: Promotions, alias: Version | None) -> ModelVerdict:
        version, champion = candidate.version, standing.champion
        if champion is not None and champion.version.order > version.order:
            return too_late(champion.version)
        evaluation = self._evaluation
        if evaluation is None:
            return unevaluated()
        rivals = rivals_of(candidate, standing.accepted, evaluation.among)
        if alias is not None and alias.order < version.order and alias.order not in {r.order for r in rivals}:
            same = [c for c in standing.accepted if c.version == alias and c.fingerprint != candidate.fingerprint]
            rivals = rivals if same else (alias, *rivals)
        return evaluation.of(version, rivals, gone=lambda rival: not self._registry.exists(rival))

    # -- aliases -----------------------------------------------------------------------------------------------------

    def _move(self, entries: Sequence[LoggedEntry], lines: list[str]) -> Promoted:
        standing = fold(_candidates(entries))
        aliases, moves, newest = self._registry.aliases(), moves_of(entries), entries[-1]
        alias, by_hand, moved = aliases.get(CHAMPION), False, False
        champion = standing.champion.version if standing.champion is not None else None
        if champion is not None and moves_to(champion, alias, moves) and self._registry.exists(champion):
            self._registry.move(newest, champion, self._ledger.experiment_id)
            alias, moved = champion.number, True
            lines.append(f"version {alias} of {self._registry.name} is champion")
        elif alias is not None and (champion is None or alias != champion.number):
            by_hand = is_by_hand(alias, moves)
        self._registry.close_dead_moves(entries)
        challenger = _candidates(entries)[-1].version.number if _candidates(entries) else None
        if challenger is not None and challenger not in (alias, aliases.get(CHALLENGER)):
            with suppress(UnknownAttempt):  # its version may have been deleted by hand
                self._registry.set_alias(CHALLENGER, challenger)
        elif challenger == alias and CHALLENGER in aliases:
            self._registry.drop_alias(CHALLENGER)
        if by_hand:
            lines.append(f"version {alias} was made champion by hand, and stays so until a newer model is accepted")
        return Promoted(_named(alias, entries), by_hand, tuple(lines), moved=moved)

    def _entries(self) -> tuple[LoggedEntry, ...]:
        among = 1 if self._evaluation is None else self._evaluation.among
        return self._registry.entries(self._ledger.experiment_id, champions=among + 1)


def _candidates(entries: Sequence[LoggedEntry]) -> list[Candidate]:
    return [entry.candidate for entry in entries if entry.candidate is not None]


def _named(number: int | None, entries: Sequence[LoggedEntry]) -> Version | None:
    return next((c.version for c in _candidates(entries) if c.version.number == number), None)


def _next(standing: Promotions) -> Candidate | None:
    return standing.waiting[0] if standing.waiting else None


def _description(entry: LoggedEntry, observed: Observation) -> str:
    return (
        f"Recurrence {entry.recurrence}, attempt {entry.attempt}, batch size {observed.batch_size}: {observed.detail}"
    )


def open_promoter(
    job_file: JobFile,
    job: Job,
    ledger: DurableLedger,
    *,
    tracking_uri: str,
    state_dir: Path,
    measure: Measure = timed,
) -> Promoter | None:
    """Return what looks after a job's models; None where it has none and none wait here.

    Raises:
        ConfigError: the function that evaluates them cannot be imported.
    """
    staging = Staging(state_dir / "models")
    if job_file.model is None and not staging.any_of(ledger.key):
        return None
    name = job_file.model.name if job_file.model is not None else None
    registry = ModelRegistry(Store(tracking_uri, patience_s=3.0), job.name, name)
    evaluation = load_evaluation(job_file, measure=measure, tracking_uri=tracking_uri)
    return Promoter(job, registry, staging, ledger, evaluation)
