"""MLflow, one bounded call at a time, with errors that say whether to try again.

`MlflowClient` raises one kind of exception for everything. Here an answer that is definite (no such run, a param that
has another value) is told from a store that is away or too slow: the latter is `StoreUnavailable`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final, TypeVar

from mlflow import MlflowClient
from mlflow.entities import Experiment, Metric, Param, Run, RunTag
from mlflow.exceptions import MlflowException

from zeus_flows.errors import StoreError, StoreUnavailable, UnknownAttempt
from zeus_flows.settings import bound_mlflow

T = TypeVar("T")

#: Error codes that are an answer: trying again would bring the same.
_ANSWERS: Final = frozenset(
    {
        "INVALID_PARAMETER_VALUE",
        "RESOURCE_DOES_NOT_EXIST",
        "RESOURCE_ALREADY_EXISTS",
        "BAD_REQUEST",
        "INVALID_STATE",
        "PERMISSION_DENIED",
        "UNAUTHENTICATED",
        "CUSTOMER_UNAUTHORIZED",
        "ENDPOINT_NOT_FOUND",
    }
)
_PAUSE_S: Final = 0.5


class Store:
    """The calls the ledger needs. Thread-safe as far as MLflow's client is.

    Args:
        tracking_uri: Where.
        patience_s: How long a call that is safe to repeat is repeated while the store is away.
    """

    def __init__(self, tracking_uri: str, *, patience_s: float = 0.0) -> None:
        bound_mlflow()
        self.client = MlflowClient(tracking_uri=tracking_uri)
        self._deadline: float | None = None
        self._patience_s = patience_s

    @contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """Let the calls of the block take so long together; the call that finds it passed is refused."""
        before, self._deadline = self._deadline, time.monotonic() + seconds
        try:
            yield
        finally:
            self._deadline = before

    # -- reading -----------------------------------------------------------------------------------------------------

    def run(self, run_id: str) -> Run:
        """Return a run by its id: as fast with a million runs as with one."""
        return self._repeat(lambda: self.client.get_run(run_id))

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

    # -- writing once ------------------------------------------------------------------------------------------------

    def create_experiment(self, name: str, tags: Mapping[str, str] | None = None) -> str | None:
        """Create an experiment; return its id, or None where another process was first."""
        try:
            return str(self._call(lambda: self.client.create_experiment(name, tags=dict(tags or {}))))
        except StoreError:
            if self.experiment(name) is None:
                raise
            return None

    def set_once(self, run_id: str, name: str, value: str) -> str:
        """Write a param unless it has a value; return the value that stands: a compare-and-set.

        Raises:
            UnknownAttempt: there is no such run.
        """
        try:
            self._repeat(lambda: self.client.log_param(run_id, name, value, synchronous=True))
        except StoreUnavailable:
            raise
        except UnknownAttempt:
            raise
        except StoreError:
            standing = self.params(run_id).get(name)
            if standing is None:
                raise
            return standing
        return value

    # -- writing -----------------------------------------------------------------------------------------------------

    def create_run(self, experiment_id: str, *, name: str, tags: Mapping[str, str]) -> str:
        """Create a run. Not repeated: a lost answer would leave two."""
        run = self._call(lambda: self.client.create_run(experiment_id, run_name=name, tags=dict(tags)))
        return str(run.info.run_id)

    def log(
        self,
        run_id: str,
        *,
        metrics: Sequence[Metric] = (),
        params: Mapping[str, str] | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        """Write metrics, params and tags in one call; the same write again changes nothing."""
        written = [Param(k, v) for k, v in (params or {}).items()]
        tagged = [RunTag(k, v) for k, v in (tags or {}).items()]
        self._repeat(lambda: self.client.log_batch(run_id, metrics=metrics, params=written, tags=tagged))

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
        if self._deadline is not None and time.monotonic() > self._deadline:
            raise StoreUnavailable("MLflow took too long")
        try:
            return call()
        except MlflowException as error:
            text = f"MLflow: {_first_line(error)}"
            if error.error_code in ("UNAUTHENTICATED", "CUSTOMER_UNAUTHORIZED") or " 401" in str(error)[:200]:
                raise StoreError(
                    f"{text}\n  set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
                ) from None
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                raise UnknownAttempt(text) from None
            kind = StoreError if error.error_code in _ANSWERS else StoreUnavailable
            raise kind(text) from None
        except (OSError, TimeoutError) as error:
            raise StoreUnavailable(f"MLflow: {type(error).__name__}") from None


def _first_line(error: MlflowException) -> str:
    """Return the start of MLflow's message: the rest may be SQL with its parameters."""
    return str(error).splitlines()[0][:300] if str(error) else error.error_code
