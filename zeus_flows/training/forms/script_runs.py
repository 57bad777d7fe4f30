"""The attempt's MLflow run, as a command sees it: its own tracking goes there, or is linked with it."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from mlflow import MlflowClient

from zeus_flows.ledger.attempt_ref import ByRun, read_ref
from zeus_flows.ledger.mlflow import names
from zeus_flows.ledger.mlflow.client import Store
from zeus_flows.ledger.mlflow.query import having

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class AttemptRun:
    """The run of an attempt whose training is a command.

    What cannot be read or written here is said and harms nothing: the attempt's records have a way of their own.

    Attributes:
        run_id: Which.
        tracking_uri: Where, absolute: the command may run in another folder.
    """

    run_id: str
    tracking_uri: str = field(repr=False)

    @cached_property
    def _client(self) -> MlflowClient:
        return Store(self.tracking_uri).client

    def environment(self) -> dict[str, str]:
        """Return what lets a command's own MLflow calls go to this run, and its other runs be found."""
        return {
            "MLFLOW_TRACKING_URI": self.tracking_uri,
            "MLFLOW_RUN_ID": self.run_id,
            "MLFLOW_RUN_CONTEXT": json.dumps({names.MADE_BY: self.run_id}),
        }

    def points(self, metric: str) -> Sequence[float]:
        """Return a metric's values, by step and time: of this run, or of the newest that the command made."""
        try:
            for run_id in (self.run_id, *self._made()):
                if points := self._client.get_metric_history(run_id, metric):
                    return [point.value for point in sorted(points, key=lambda point: (point.step, point.timestamp))]
        except Exception as error:  # MLflow, its database and the network raise what they like
            log.warning("the metric %s could not be looked up: %s", metric, type(error).__name__)
        return ()

    def keep(self, file: Path) -> None:
        """Keep a file as an artifact."""
        try:
            self._client.log_artifact(self.run_id, str(file))
        except Exception as error:  # artifact stores raise what they like
            log.warning("%s could not be kept with the run: %s", file.name, type(error).__name__)

    def link(self) -> None:
        """Name the runs that the command made for itself, and end those that it left open when it was stopped."""
        try:
            if made := self._made():
                self._client.set_tag(self.run_id, names.MADE, ",".join(made))
            for run_id in made:
                if self._client.get_run(run_id).info.status == "RUNNING":
                    self._client.set_terminated(run_id, "KILLED")
        except Exception as error:
            log.warning("runs of the command could not be linked: %s", type(error).__name__)

    def _made(self) -> list[str]:
        """Return the runs that the command made for itself, in whatever experiment, newest first; at most 50."""
        everywhere = [str(experiment.experiment_id) for experiment in self._client.search_experiments()]
        found = self._client.search_runs(everywhere, having({names.MADE_BY: self.run_id}), max_results=50)
        return [str(run.info.run_id) for run in found if run.info.run_id != self.run_id]


def attempt_run(attempt_id: str, tracking_uri: str) -> AttemptRun | None:
    """Return the run of an attempt; None where it has none, because MLflow was away when it was decided."""
    ref = read_ref(attempt_id)
    return AttemptRun(ref.run_id, absolute(tracking_uri)) if isinstance(ref, ByRun) else None


def absolute(tracking_uri: str) -> str:
    """Return a tracking URI that means the same in another folder.

    >>> absolute("http://host:5000"), absolute("sqlite:////data/mlflow.db")
    ('http://host:5000', 'sqlite:////data/mlflow.db')
    """
    scheme, sep, path = tracking_uri.partition("///")
    if not sep or not scheme.startswith("sqlite") or path.startswith(("/", ":memory:")):
        return tracking_uri
    return f"{scheme}///{Path(path).absolute()}"
