"""A job's models in MLflow: what attempts kept, which versions they are, the verdicts on them, and two aliases.

What must happen once is a write-once param of an attempt's run: which logged model is its own, which version that is,
each verdict, and each move of the alias `champion`. Aliases themselves are last-writer-wins, so they are only what the
params come to: `zeus_flows.core.promotion` folds them, and every pass puts right what came late.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from mlflow import MlflowClient
from mlflow.entities import Run
from mlflow.entities.logged_model_output import LoggedModelOutput

from zeus_flows.core.json import from_text, to_text
from zeus_flows.core.promotion import Candidate, ModelVerdict, Move, Version
from zeus_flows.core.records import Observation
from zeus_flows.core.text import shown
from zeus_flows.errors import ConfigError, StoreError, StoreUnavailable, UnknownAttempt
from zeus_flows.killpoints import reached
from zeus_flows.ledger.lease import Holder, is_gone, this_process
from zeus_flows.ledger.mlflow import names
from zeus_flows.ledger.mlflow import record_text as codec
from zeus_flows.ledger.mlflow.client import Store
from zeus_flows.masking import masked

log = logging.getLogger(__name__)

CHAMPION: Final = "champion"
CHALLENGER: Final = "challenger"
#: What becomes of a move of an alias.
_DONE: Final = "done"
_DEAD: Final = "dead"
#: Models that are read in one call.
_TOGETHER: Final = 50


@dataclass(frozen=True, slots=True)
class KeptMove:
    """A move of the alias `champion`, as a run's param has it: to which version, whose, and who moves it."""

    to: int
    recurrence: int
    attempt: int
    holder: Holder


@dataclass(frozen=True, slots=True)
class LoggedEntry:
    """A model that an attempt kept, with what its run says.

    Attributes:
        run_id: The attempt's run.
        model_id: The logged model.
        observation: The attempt's; None where it has none yet, or cannot be read.
        candidate: Its version and the verdicts on it; None where it is not registered yet.
        moves: Moves of the alias that were written while it was the newest, by number, and how each ended.
    """

    run_id: str
    model_id: str
    recurrence: int
    attempt: int
    fingerprint: str
    observation: Observation | None
    candidate: Candidate | None
    moves: Mapping[int, tuple[KeptMove, str]]

    @property
    def order(self) -> tuple[int, int]:
        """By which models are older and newer."""
        return self.recurrence, self.attempt


class ModelRegistry:
    """One job's models.

    Args:
        store: MLflow, as bounded calls.
        job: The job's name.
        name: The registered model's; None: models are logged to their runs and not registered.
    """

    def __init__(self, store: Store, job: str, name: str | None) -> None:
        self.store, self._job, self.name = store, job, name

    # -- keeping -----------------------------------------------------------------------------------------------------

    def log_model(self, run_id: str, folder: Path, *, model_id: str = "", begun: Any = lambda _: None) -> str:
        """Log an attempt's files as its model, unless it has one; return the logged model's id.

        Args:
            run_id: The attempt's run.
            folder: The files.
            model_id: A logged model that an earlier try began.
            begun: Called with the logged model's id before files are sent.
        """
        run = self.store.run(run_id)
        if standing := run.data.params.get(names.MODEL):
            return standing
        if not model_id:
            order = {name: run.data.tags[name] for name in (names.RECURRENCE, names.ATTEMPT)}
            made = self.store.ask(
                lambda client: client.create_logged_model(
                    run.info.experiment_id,
                    name=self.name or self._job,
                    source_run_id=run_id,
                    tags={names.JOB: self._job, **order},
                )
            )
            model_id = str(made.model_id)
            reached("after-create-model")
            begun(model_id)
        _describe(folder, run_id, model_id)
        try:  # no bound: a model takes as long as it takes
            self.store.client.log_model_artifacts(model_id, str(folder))
        except Exception as error:  # artifact stores raise what they like
            raise StoreUnavailable(
                masked(f"the model could not be sent: {type(error).__name__}: {error}")[:300]
            ) from None
        reached("after-send-model")
        self.store.ask(lambda client: client.finalize_logged_model(model_id, "READY"))
        standing = self.store.set_once(run_id, names.MODEL, model_id)
        reached("after-name-model")
        if standing == model_id:
            output = LoggedModelOutput(model_id, step=0)
            self.store.ask(lambda client: client.log_outputs(run_id, [output]))
        else:
            self.store.ask(lambda client: client.delete_logged_model(model_id))
        return standing

    # -- reading -----------------------------------------------------------------------------------------------------

    def check_owner(self) -> None:
        """Refuse a registered model of another job.

        Raises:
            ConfigError: it is, or nobody knows whose it is.
        """
        if self.name is None:
            return
        found = self._registered()
        if found is not None and (owner := found.tags.get(names.JOB)) != self._job:
            whose = f"is the job {owner}'s" if owner else "was not made by a job"
            raise ConfigError(
                f"model.name: the registered model {self.name} {whose}; choose another name, "
                f"or give it the tag {names.JOB}={self._job} where this job is to go on with it"
            )

    def aliases(self) -> dict[str, int]:
        """Return the registered model's aliases, with their versions' numbers."""
        found = self._registered()
        return {} if found is None else {str(k): int(v) for k, v in found.aliases.items()}

    def version(self, named: str) -> tuple[int, str]:
        """Return a version's number and the run that made it.

        Args:
            named: A number, or an alias.

        Raises:
            ConfigError: there is no such version, or no run made it.
        """
        number = int(named) if named.isdecimal() and len(named) < 10 else self.aliases().get(named)
        found = None
        if number is not None:
            try:
                found = self.store.ask(lambda client: client.get_model_version(self._name, str(number)))
            except UnknownAttempt:
                found = None
        if found is None or not found.run_id:
            raise ConfigError(
                f"{self._name} has no version {shown(named)}\n  type `zeus-flows models JOB` to see which there are"
            )
        return int(found.version), str(found.run_id)

    def entries(self, experiment_id: str, *, champions: int = 1) -> tuple[LoggedEntry, ...]:
        """Return the newest models that attempts kept, oldest first.

        Args:
            experiment_id: Where the attempts are.
            champions: So many that were accepted are among them, where there are so many.
        """
        entries, token = list[LoggedEntry](), None
        while True:
            found: Any = self.store.ask(partial(self._page, experiment_id, token))
            models = [str(model.source_run_id) for model in found if model.source_run_id]
            runs = self.store.runs(experiment_id, list(dict.fromkeys(models)))
            entries += [entry for run in runs.values() if (entry := self._entry(run)) is not None]
            accepted = sum(e.candidate is not None and any(v.accepted for v in e.candidate.verdicts) for e in entries)
            token = found.token
            if not token or accepted >= champions:
                return tuple(sorted(entries, key=lambda entry: entry.order))

    def _page(self, experiment_id: str, token: str | None, client: MlflowClient) -> Any:
        return client.search_logged_models(
            [experiment_id],
            f"name = '{self.name or self._job}'",
            max_results=_TOGETHER,
            order_by=[{"field_name": "creation_timestamp", "ascending": False}],
            page_token=token,
        )

    def exists(self, version: Version) -> bool:
        """Return whether a version is still registered."""
        try:
            self.store.ask(lambda client: client.get_model_version(self._name, str(version.number)))
        except UnknownAttempt:
            return False
        return True

    def _entry(self, run: Run) -> LoggedEntry | None:
        params, tags = run.data.params, run.data.tags
        if run.info.lifecycle_stage != "active" or names.MODEL not in params:
            return None
        try:
            observation = codec.load_observation(params[names.OBSERVATION]) if names.OBSERVATION in params else None
            rounds = sorted((k, v) for name, v in params.items() if (k := names.verdict_number(name)))
            verdicts = tuple(codec.load_verdict(text) for _, text in rounds)
            moves = {
                k: (from_text(KeptMove, text), params.get(names.moved(k), ""))
                for name, text in params.items()
                if (k := names.move_number(name))
            }
            order = int(tags[names.RECURRENCE]), int(tags[names.ATTEMPT])
        except (StoreError, AttributeError, TypeError, ValueError, LookupError) as error:
            log.warning("the model of run %s does not count: %s", run.info.run_id, error)
            return None
        model_id, number = params[names.MODEL], params.get(names.MODEL_VERSION)
        fingerprint, candidate = tags.get(names.FINGERPRINT, ""), None
        if number is not None and number.isdecimal():
            batch_size = int(params.get(names.BATCH_SIZE, "0"))
            version = Version(*order, batch_size, int(number), f"models:/{model_id}")
            candidate = Candidate(version, verdicts, fingerprint)
        return LoggedEntry(str(run.info.run_id), model_id, *order, fingerprint, observation, candidate, moves)

    def _registered(self) -> Any:
        try:
            return self.store.ask(lambda client: client.get_registered_model(self._name))
        except UnknownAttempt:
            return None

    # -- writing once ------------------------------------------------------------------------------------------------

    def register(self, entry: LoggedEntry, tags: Mapping[str, str], description: str) -> int:
        """Make a kept model a version, unless it is one; return the version's number."""
        self._make_registered()
        mine = self._versions_of(entry.run_id)
        if not mine:
            model = self.store.ask(lambda client: client.get_logged_model(entry.model_id))
            made = self.store.ask(
                lambda client: client.create_model_version(
                    self._name,
                    source=model.artifact_location,
                    run_id=entry.run_id,
                    tags=dict(tags),
                    description=description,
                    await_creation_for=0,
                    model_id=entry.model_id,
                )
            )
            mine = [int(made.version)]
        reached("after-create-version")
        number = int(self.store.set_once(entry.run_id, names.MODEL_VERSION, str(min(mine))))
        reached("after-name-version")
        for other in self._versions_of(entry.run_id):  # made at the same time, or by one that was killed
            if other != number:
                self.store.ask(lambda client, n=other: client.delete_model_version(self._name, str(n)))  # type: ignore[misc]
        return number

    def give(self, entry: LoggedEntry, verdict: ModelVerdict) -> ModelVerdict:
        """Write the next verdict on a model; return the one that stands, which another process may have written."""
        assert entry.candidate is not None
        rounds = len(entry.candidate.verdicts) + 1
        standing = codec.load_verdict(
            self.store.set_once(entry.run_id, names.verdict(rounds), codec.dump_verdict(verdict))
        )
        reached("after-verdict")
        return standing

    def show(self, number: int, tags: Mapping[str, str]) -> None:
        """Write what people see of a version."""
        for name, value in tags.items():
            text = codec.fits_tag(value)
            self.store.ask(lambda client, n=name, v=text: client.set_model_version_tag(self._name, str(number), n, v))  # type: ignore[misc]

    # -- aliases -----------------------------------------------------------------------------------------------------

    def move(self, newest: LoggedEntry, to: Version, experiment_id: str) -> None:
        """Move the alias `champion`, in an order that no late writer can turn round.

        The move is written down before the alias is set, on the run of the newest model. Afterwards the moves are read
        again: where a later one was written meanwhile, its version is set instead. Only then the move is done.
        """
        k = max(newest.moves, default=0) + 1
        mine = to_text(KeptMove(to.number, to.recurrence, to.attempt, this_process()))
        while self.store.set_once(newest.run_id, names.move(k), mine) != mine:
            k += 1
        reached("after-move")
        number = to.number
        while True:
            self.set_alias(CHAMPION, number)
            reached("after-alias")
            last = moves_of(self.entries(experiment_id))[-1:]
            if not last or last[0].to == number:
                break
            number = last[0].to
        self.store.set_once(newest.run_id, names.moved(k), _DONE)
        reached("after-moved")

    def close_dead_moves(self, entries: Sequence[LoggedEntry]) -> None:
        """Say of moves whose process is gone that they are over: it cannot set the alias any more."""
        for entry in entries:
            for k, (kept, ended) in entry.moves.items():
                if not ended and is_gone(kept.holder):
                    self.store.set_once(entry.run_id, names.moved(k), _DEAD)

    def set_alias(self, alias: str, number: int) -> None:
        """Set an alias."""
        self.store.ask(lambda client: client.set_registered_model_alias(self._name, alias, str(number)))

    def drop_alias(self, alias: str) -> None:
        """Drop an alias."""
        self.store.ask(lambda client: client.delete_registered_model_alias(self._name, alias))

    # -- the registered model ----------------------------------------------------------------------------------------

    @property
    def _name(self) -> str:
        assert self.name is not None
        return self.name

    def _make_registered(self) -> None:
        """Make the registered model; of several jobs that want its name the first one gets it.

        Raises:
            ConfigError: another job has it.
        """
        if self._registered() is None:
            try:
                self.store.ask(lambda client: client.create_registered_model(self._name, {names.JOB: self._job}))
            except (StoreUnavailable, UnknownAttempt):
                raise
            except StoreError:
                pass  # another process was first
        self.check_owner()

    def _versions_of(self, run_id: str) -> list[int]:
        query = f"name = '{self._name}' and run_id = '{run_id}'"
        found = self.store.ask(lambda client: client.search_model_versions(query))
        return sorted(int(version.version) for version in found)


def moves_of(entries: Sequence[LoggedEntry]) -> list[Move]:
    """Return the moves of the alias, in the order in which they were written; dead ones count for nothing."""
    kept = {(entry.order, k): move for entry in entries for k, move in entry.moves.items()}
    return [
        Move(move.to, (move.recurrence, move.attempt), ended == _DONE)
        for _, (move, ended) in sorted(kept.items(), key=lambda item: item[0])
        if ended != _DEAD
    ]


def _describe(folder: Path, run_id: str, model_id: str) -> None:
    """Write MLflow's own description beside the files, unless they have one."""
    from mlflow.models import Model

    file = folder / "MLmodel"
    if not file.exists():
        weights = next((path.name for path in folder.glob("*.safetensors")), "")
        flavor = {"weights": weights} if weights else {"files": "."}
        Model(run_id=run_id, model_id=model_id, flavors={"zeus_flows": flavor}).save(str(file))
