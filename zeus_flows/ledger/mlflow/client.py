"""MLflow, one bounded call at a time, with errors that say whether to try again.

`MlflowClient` raises one kind of exception for everything. Here an answer that is definite (no such run, a param that
has another value) is told from a store that is away or too slow: the latter is `StoreUnavailable`. Each call is made in
a thread of its own and given up when its time is over: a database that hangs, or MLflow's own minutes of retries while
it opens one, must not hold up training.
"""

from __future__ import annotations

import contextvars
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Final, TypeVar

from mlflow import MlflowClient
from mlflow.entities import DatasetInput, Experiment, Metric, Param, Run, RunTag, ViewType
from mlflow.exceptions import MlflowException
from sqlalchemy.exc import SQLAlchemyError

from zeus_flows.errors import ConfigError, StoreDenied, StoreError, StoreUnavailable, UnknownAttempt
from zeus_flows.ledger.mlflow import names
from zeus_flows.ledger.mlflow.address import location
from zeus_flows.ledger.mlflow.client_errors import is_about_a_deleted_run, named_error
from zeus_flows.ledger.mlflow.links import intact
from zeus_flows.ledger.mlflow.query import having
from zeus_flows.ledger.mlflow.tables import read_params
from zeus_flows.masking import mask_logs
from zeus_flows.settings import bound_mlflow, workspace

T = TypeVar("T")

_PAUSE_S: Final = 0.5
#: How often a write is tried that others make at the same time, and what databases call it.
_RACES: Final = 8
_COLLIDED: Final = re.compile(r"IntegrityError|UniqueViolation|UNIQUE constraint")
#: Seconds after which a call is given up. A server's answers are bounded more tightly (`settings.bound_mlflow`).
_CALL_S: Final = 30.0
#: Runs read in one call; twice as many take five times as long.
_TOGETHER: Final = 100
#: Runs whose params are read from a database in one query.
_ROWS_TOGETHER: Final = 500
#: Tags that MLflow takes in one call.
_TAGS_TOGETHER: Final = 100
#: Packages of drivers that are not called as their module is.
_PACKAGES: Final = {"psycopg2": "psycopg2-binary", "MySQLdb": "mysqlclient"}
#: What MLflow calls the tag that holds an experiment's or a run's description.
MLFLOW_NOTE: Final = "mlflow.note.content"
_RUN_ID: Final = re.compile(r"[0-9a-f]{32}")


class Store:
    """The calls the ledger needs. One thread at a time: `within` holds for whoever calls.

    Args:
        tracking_uri: Where.
        patience_s: How long a call that is safe to repeat is repeated while the store is away.

    Attributes:
        location: Where, without secrets; the same from every folder.
        workspace: Of the server, where it has any.
        answered_s: When it last answered, on the monotonic clock.
    """

    def __init__(self, tracking_uri: str, *, patience_s: float = 0.0) -> None:
        bound_mlflow(tracking_uri)
        mask_logs()
        if not tracking_uri.startswith("http"):  # seconds of importing are not MLflow's and do not count against it
            import mlflow.store.tracking.sqlalchemy_store  # noqa: F401
        self._tracking_uri = tracking_uri
        self._deadline: float | None = None
        self._patience_s = patience_s
        self.location = location(tracking_uri)
        self.workspace = workspace(tracking_uri)
        self.answered_s = time.monotonic()

    @cached_property
    def client(self) -> MlflowClient:
        """MLflow's client. Made when first needed: on a database that is away, making it takes minutes."""
        return MlflowClient(tracking_uri=self._tracking_uri)

    @contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """Let the calls of the block take so long together; the one under way then is given up."""
        before, self._deadline = self._deadline, time.monotonic() + seconds
        try:
            yield
        finally:
            self._deadline = before

    # -- reading -----------------------------------------------------------------------------------------------------

    def run(self, run_id: str) -> Run:
        """Return a run by its id: as fast with a million runs as with one.

        Raises:
            LedgerDamaged: it holds a ledger together, and was deleted.
        """
        return intact(self._repeat(lambda: self.client.get_run(run_id)))

    def ask(self, call: Callable[[MlflowClient], T]) -> T:
        """Return what MLflow's client answers to a question, or to a write that is safe to repeat."""
        return self._repeat(lambda: call(self.client))

    def runs(self, experiment_id: str, run_ids: Sequence[str]) -> dict[str, Run]:
        """Return an experiment's runs by their ids, deleted ones too, many to a call; those gone for good are left out.

        What is not a run id never reaches the filter.
        """
        return {run_id: intact(run) for run_id, run in self.whatever([experiment_id], run_ids).items()}

    def whatever(self, experiment_ids: Sequence[str], run_ids: Sequence[str]) -> dict[str, Run]:
        """Return runs of several experiments by their ids, as `runs` does, whatever happened to them."""
        found: dict[str, Run] = {}
        proper = [run_id for run_id in run_ids if _RUN_ID.fullmatch(run_id)]
        for start in range(0, len(proper), _TOGETHER):
            some = proper[start : start + _TOGETHER]
            query = f"attributes.run_id IN ({','.join(repr(run_id) for run_id in some)})"
            found |= {str(run.info.run_id): run for run in self.search(experiment_ids, query, most=len(some))}
        return found

    def params_of(self, run_ids: Sequence[str], *names: str) -> Iterator[dict[str, dict[str, str]]]:
        """Yield params of many runs, some runs at a time, as far as a database can be asked for them directly.

        Runs that were deleted or have none of the named params are left out, and all where MLflow is a server.
        """
        for start in range(0, len(run_ids), _ROWS_TOGETHER):
            some = run_ids[start : start + _ROWS_TOGETHER]
            yield self._repeat(lambda some=some: read_params(self.client, some, names))  # type: ignore[misc]

    def deleted(self, experiment_id: str, *, most: int) -> Sequence[Run]:
        """Return the newest runs of an experiment that were deleted and are not gone for good."""
        only = ViewType.DELETED_ONLY
        return self._repeat(lambda: self.client.search_runs([experiment_id], "", only, max_results=most))

    def search(self, experiment_ids: Sequence[str], query: str, *, most: int) -> Sequence[Run]:
        """Return the newest runs that a filter finds, deleted ones too."""
        every = ViewType.ALL
        return self._repeat(lambda: self.client.search_runs(list(experiment_ids), query, every, max_results=most))

    def params(self, run_id: str) -> Mapping[str, str]:
        """Return a run's params."""
        return self.run(run_id).data.params

    def experiment(self, name: str) -> Experiment | None:
        """Return an active experiment, or None where there is none.

        Raises:
            StoreError: it was deleted, and its name is still taken.
        """
        experiment = self._repeat(lambda: self.client.get_experiment_by_name(name))
        if experiment is not None and experiment.lifecycle_stage != "active":
            raise StoreError(
                f"the experiment {name} was deleted; bring it back with "
                f"`mlflow experiments restore --experiment-id {experiment.experiment_id}`, or rename the job"
            )
        return experiment

    def root(self, name: str) -> tuple[str, str] | None:
        """Return the id of an experiment and the run that it was created to name; None where there is none.

        Raises:
            StoreError: it names no run: somebody else made it.
        """
        experiment = self.experiment(name)
        if experiment is None:
            return None
        if names.ROOT not in experiment.tags:
            taken = name.rpartition(".")[0]
            raise StoreError(f"the experiment {name} was not made by zeus_flows; rename it, or {taken}")
        return str(experiment.experiment_id), str(experiment.tags[names.ROOT])

    def newest(self, experiment_id: str, tags: Mapping[str, str]) -> Run | None:
        """Return the newest run that has all these tags; their values must be plain words, as filters have no escape.

        Raises:
            StoreError: a name or value could change the query.
        """
        query = having(tags)
        order = ["attributes.start_time DESC"]
        found = self._repeat(lambda: self.client.search_runs([experiment_id], query, max_results=1, order_by=order))
        return found[0] if found else None

    # -- writing once ------------------------------------------------------------------------------------------------

    def create_experiment(
        self, name: str, tags: Mapping[str, str] | None = None, artifacts: str | None = None
    ) -> str | None:
        """Create an experiment; return its id, or None where another process was first.

        Args:
            name: What it is called.
            tags: What it says from its first moment on.
            artifacts: Where its artifacts go; None: where MLflow puts them.
        """
        try:
            return str(self._call(lambda: self.client.create_experiment(name, artifacts, dict(tags or {}))))
        except StoreError:
            if self.experiment(name) is None:
                raise
            return None

    def experiment_id(self, name: str) -> str:
        """Return the id of an experiment; made if need be.

        Of a SQLite database its artifacts lie beside that, not in whatever directory this process is in.
        """
        if (found := self.experiment(name)) is None:
            uri, place = str(self.client.tracking_uri), None
            if uri.startswith("sqlite:///"):
                place = (Path(uri.removeprefix("sqlite:///")).resolve().parent / "mlruns" / name).as_uri()
            if (made := self.create_experiment(name, artifacts=place)) is not None:
                return made
            found = self.experiment(name)
            assert found is not None
        return str(found.experiment_id)

    def name_root(self, name: str, run_id: str, *, note: str = "") -> tuple[str, str]:
        """Create an experiment that names a run, unless there is one; return its id and the run that it names.

        That is a compare-and-set: of many processes that come with runs of their own, all go with the same one. Who
        made another one deletes it.

        Args:
            name: What the experiment is called.
            run_id: The run.
            note: The experiment's description, in Markdown, for whoever opens it.

        Raises:
            StoreError: there is one that names no run.
        """
        described = {MLFLOW_NOTE: note} if note else {}
        made = self.create_experiment(name, tags={names.ROOT: run_id} | described)
        if made is not None:
            return made, run_id
        standing = self.root(name)  # names this run too, where only the answer was lost
        assert standing is not None
        return standing

    def set_once(self, run_id: str, name: str, value: str) -> str:
        """Write a param unless it has a value; return the value that stands: a compare-and-set.

        Raises:
            UnknownAttempt: there is no such run.
        """
        standing = self.lost_to(run_id, name, value)
        return value if standing is None else standing[name]

    def lost_to(self, run_id: str, name: str, value: str) -> Mapping[str, str] | None:
        """Write a param unless it has a value; return None, or the run's params where another value stands."""
        try:
            self._repeat(lambda: self.client.log_param(run_id, name, value, synchronous=True))
        except (StoreUnavailable, StoreDenied, UnknownAttempt):
            raise
        except StoreError as error:
            standing = self.params(run_id)
            if name not in standing:
                raise self._if_deleted(run_id, error) from None
            return None if standing[name] == value else standing
        return None

    # -- writing -----------------------------------------------------------------------------------------------------

    def create_run(self, experiment_id: str, *, name: str, tags: Mapping[str, str], start_ms: int | None = None) -> str:
        """Create a run. Not repeated: a lost answer would leave two."""
        run = self._call(lambda: self.client.create_run(experiment_id, start_ms, dict(tags), name))
        return str(run.info.run_id)

    def log(
        self,
        run_id: str,
        *,
        metrics: Sequence[Metric] = (),
        params: Mapping[str, str] | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        """Write metrics, params and tags in one call; the same write again changes nothing.

        Tags are written in further calls where they are more than MLflow takes in one.
        """
        written = [Param(k, v) for k, v in (params or {}).items()]
        tagged = [RunTag(k, v) for k, v in (tags or {}).items()]
        first, rest = tagged[:_TAGS_TOGETHER], tagged[_TAGS_TOGETHER:]
        try:
            self._race(lambda: self.client.log_batch(run_id, metrics=metrics, params=written, tags=first))
        except StoreError as error:
            raise self._if_deleted(run_id, error) from None
        if rest:
            self.log(run_id, tags={tag.key: tag.value for tag in rest})

    def log_input(self, run_id: str, dataset: DatasetInput) -> None:
        """Give a run a dataset; the same again changes nothing.

        MLflow keeps a dataset once per experiment, and once per run.
        """
        self._race(lambda: self.client.log_inputs(run_id, [dataset]))

    def _race(self, call: Callable[[], object]) -> None:
        """Make a write that several processes may make alike at the same time.

        Rows that MLflow keeps once are refused where another process adds them between its look and its write. Whoever
        was refused finds them there the next time; where many race, after a few times.
        """
        for tries in range(1, _RACES + 1):
            try:
                self._repeat(call)
                return
            except (StoreUnavailable, StoreDenied, UnknownAttempt):
                raise
            except StoreError as error:
                if tries == _RACES or not _COLLIDED.search(str(error)):
                    raise
                time.sleep(0.05 * tries)

    def _if_deleted(self, run_id: str, error: StoreError) -> StoreError:
        """Return what a refused write means where its run was deleted, else the error itself.

        Raises:
            LedgerDamaged: the run holds a ledger together.
        """
        if not is_about_a_deleted_run(error):
            return error
        self.run(run_id)
        return UnknownAttempt(f"run {run_id} was deleted; what is written about it no longer counts")

    def end(self, run_id: str, status: str = "FINISHED") -> None:
        """Terminate a run."""
        self._repeat(lambda: self.client.set_terminated(run_id, status=status))

    def delete(self, run_id: str) -> None:
        """Delete a run that lost a race."""
        self._repeat(lambda: self.client.delete_run(run_id))

    # -- calling -----------------------------------------------------------------------------------------------------

    def _repeat(self, call: Callable[[], T]) -> T:
        """Make a call that is safe to repeat, again while the store is away and patience lasts."""
        give_up = time.monotonic() + self._patience_s
        while True:
            try:
                return self._call(call)
            except StoreUnavailable:
                if time.monotonic() + _PAUSE_S >= min(give_up, self._deadline or give_up):
                    raise
                time.sleep(_PAUSE_S)

    def _call(self, call: Callable[[], T]) -> T:
        left_s = _CALL_S if self._deadline is None else min(_CALL_S, self._deadline - time.monotonic())
        if left_s <= 0:
            raise StoreUnavailable("MLflow took too long")
        try:
            answer = _bounded(call, left_s)
        except MlflowException as error:
            named = named_error(error)
            if not isinstance(named, StoreUnavailable):
                self.answered_s = time.monotonic()
            raise named from None
        except TimeoutError:
            raise StoreUnavailable("MLflow took too long") from None
        except (OSError, SQLAlchemyError) as error:
            raise StoreUnavailable(f"MLflow: {type(error).__name__}") from None
        except ModuleNotFoundError as error:
            package = _PACKAGES.get(error.name or "", error.name)
            raise ConfigError(
                f"{self.location} needs the module {error.name}, which is not installed: pip install {package}"
            ) from None
        self.answered_s = time.monotonic()
        return answer


def _bounded(call: Callable[[], T], seconds: float) -> T:
    """Return what a call returns, or raise TimeoutError and leave it to itself."""
    future: Future[T] = Future()
    context = contextvars.copy_context()

    def work() -> None:
        try:
            future.set_result(context.run(call))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, name="zeus-flows-mlflow", daemon=True).start()
    return future.result(timeout=seconds)
