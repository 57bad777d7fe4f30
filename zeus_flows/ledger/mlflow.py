"""The ledger in MLflow tracking runs. `docs/reference/mlflow-schema.md` is its contract.

MLflow has no transactions across runs. What must happen once is a write-once param (claims, decisions,
observations, the chain of drift windows) or the creation of an experiment (the root); both are compare-and-set
on every backend. Tags and metrics are for people and may be written twice without harm.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Final

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, Run, RunTag
from mlflow.exceptions import MlflowException

from zeus_flows.core import policy
from zeus_flows.core.cost import observed_cost
from zeus_flows.core.records import Decision, EnergySource, InFlight, Job, Observation, Outcome
from zeus_flows.errors import AlreadyObserved, StoreError, UnknownAttempt
from zeus_flows.ledger import codec
from zeus_flows.ledger.protocol import EpochReport, History, Ledger

log = logging.getLogger(__name__)

PAGE_SIZE: Final = 500
_CLAIM: Final = re.compile(r"zf\.r\.(\d+)")
_ATTEMPT: Final = re.compile(r"zf\.a\.(\d+)\.(\d+)")


class MlflowLedger:
    """One job's ledger on an MLflow tracking store (sqlite, PostgreSQL or a server).

    Args:
        job: Whose ledger this is; its name is the experiment's.
        tracking_uri: Where.
        energy_source: Only observations of this source are folded.
    """

    def __init__(self, job: Job, *, tracking_uri: str, energy_source: EnergySource) -> None:
        self._job, self._energy_source = job, energy_source
        self._client = MlflowClient(tracking_uri=tracking_uri)
        self._experiment_id = self._get_or_create_experiment(job.name)
        self._ledger_id, self._root_id = self._find_root()
        self._window_id: str | None = None
        self._pages: dict[int, str] = {}
        self._closed: dict[str, Observation] = {}

    @property
    def experiment_id(self) -> str:
        """The experiment that holds the attempts and drift windows."""
        return self._experiment_id

    @property
    def _mark(self) -> str:
        """What a run's name says of its joules, where they were not measured."""
        return "" if self._energy_source is EnergySource.MEASURED else f" · {self._energy_source.value} energy"

    # -- recurrences and decisions -------------------------------------------------------------------------

    def begin(self) -> int:
        """Take the next recurrence number."""
        token = uuid.uuid4().hex
        page = max(self._page_ids(), default=0)
        while True:
            taken = [int(m[1]) for name in self._params(self._page(page)) if (m := _CLAIM.fullmatch(name))]
            number = max(taken, default=page * PAGE_SIZE) + 1
            page = (number - 1) // PAGE_SIZE
            if self._set_once(self._page(page), f"zf.r.{number}", token) == token:
                return number

    def decided(self, decision: Decision, context: Mapping[str, str]) -> str:
        """Write a decision; return the id of the attempt's run."""
        tags = {
            "zf.kind": "attempt",
            "zf.recurrence": str(decision.recurrence),
            "zf.attempt": str(decision.attempt),
            "zf.fingerprint": self._job.fingerprint,
            "zf.energy_source": self._energy_source.value,
            "zf.policy": decision.policy,
            "zf.mode": self._job.mode.value,
            "zf.reason": decision.reason.text,
            "zf.explores": str(decision.explores).lower(),
            "zf.degraded": str(decision.degraded).lower(),
            "zf.drift_window": self._window(),
            **context,
        }
        run = self._client.create_run(
            self._experiment_id,
            tags={name: codec.fits_tag(value) for name, value in tags.items()},
            run_name=f"{decision.recurrence}.{decision.attempt} · batch size {decision.batch_size}{self._mark}",
        )
        run_id = str(run.info.run_id)
        self._client.log_batch(
            run_id,
            params=[
                Param("zf.batch_size", str(decision.batch_size)),
                Param("zf.seed", str(decision.seed)),
                Param("zf.decision", codec.dump_decision(decision)),
            ],
        )
        page = self._page((decision.recurrence - 1) // PAGE_SIZE)
        if self._set_once(page, f"zf.a.{decision.recurrence}.{decision.attempt}", run_id) != run_id:
            self._client.delete_run(run_id)
            raise StoreError(
                f"attempt {decision.recurrence}.{decision.attempt} of {self._job.name} has a decision already"
            )
        return run_id

    # -- outcomes --------------------------------------------------------------------------------------------

    def epoch(self, attempt_id: str, report: EpochReport) -> None:
        """Write what one epoch brought, at step = epoch."""
        values = {"energy_j": report.energy_j, "time_s": report.time_s, "power_limit_w": report.power_limit_w}
        values["metric"] = report.metric
        self._client.log_batch(
            attempt_id, metrics=_metrics({f"zf.epoch/{k}": v for k, v in values.items()}, step=report.epoch)
        )

    def observed(self, attempt_id: str, observation: Observation) -> None:
        """Write an attempt's outcome; the first one wins."""
        text = codec.dump_observation(observation)
        if self._set_once(attempt_id, "zf.observation", text) != text:
            raise AlreadyObserved(
                f"attempt {observation.recurrence}.{observation.attempt} of {self._job.name} has its observation"
            )
        self._closed[attempt_id] = observation
        values = {
            "zf.batch_size": float(observation.batch_size),
            "zf.power_limit_w": observation.power_limit_w,
            "zf.energy_to_accuracy_j": observation.energy_j,
            "zf.time_to_accuracy_s": observation.time_s,
            "zf.cost_j": observed_cost(self._job, observation),
            "zf.epochs": float(observation.epochs),
            "zf.converged": float(observation.converged),
        }
        self._client.log_batch(
            attempt_id,
            metrics=_metrics(values, step=observation.recurrence),
            tags=[
                RunTag("zf.outcome", observation.outcome.value),
                RunTag("zf.detail", codec.fits_tag(observation.detail)),
            ],
        )
        status = "FAILED" if observation.outcome is Outcome.FAILED else "FINISHED"
        self._client.set_terminated(attempt_id, status=status)

    def ended(self, observations: Sequence[Observation]) -> None:
        """Write a recurrence's point of the drift window's series, at step = recurrence number."""
        last = observations[-1]
        values = {
            "zf.cost_j": sum(observed_cost(self._job, o) for o in observations),
            "zf.energy_to_accuracy_j": sum(o.energy_j for o in observations),
            "zf.time_to_accuracy_s": sum(o.time_s for o in observations),
            "zf.batch_size": float(last.batch_size),
            "zf.power_limit_w": last.power_limit_w,
            "zf.attempts": float(len(observations)),
        }
        self._client.log_batch(self._window(), metrics=_metrics(values, step=last.recurrence))

    # -- history ---------------------------------------------------------------------------------------------

    def history(self) -> History:
        """Return the fold of all closed attempts, and what is in flight."""
        open_attempts = self._read()
        in_flight = tuple(InFlight(d.recurrence, d.attempt, d.batch_size, d.explores) for d in open_attempts)
        return History(policy.fold(self._job, self._counting()), in_flight)

    def observations(self) -> tuple[Observation, ...]:
        """Return every observation that counts, in the fold's order."""
        self._read()
        return self._counting()

    def _counting(self) -> tuple[Observation, ...]:
        mine = (self._job.fingerprint, self._energy_source)
        counting = (o for o in self._closed.values() if (o.fingerprint, o.energy_source) == mine)
        return tuple(sorted(counting, key=lambda o: o.order))

    def _read(self) -> list[Decision]:
        """Bring `_closed` up to date from the runs; return the decisions that are still open."""
        still_open = []
        for run_id in self._attempt_ids():
            if run_id in self._closed:
                continue
            params = self._params(run_id)
            if "zf.observation" in params:
                self._closed[run_id] = codec.load_observation(params["zf.observation"])
            else:
                still_open.append(codec.load_decision(params["zf.decision"]))
        return still_open

    def _attempt_ids(self) -> list[str]:
        """Return the runs of all attempts that have a decision."""
        return [
            run_id
            for page in sorted(self._page_ids())
            for name, run_id in self._params(self._page(page)).items()
            if _ATTEMPT.fullmatch(name)
        ]

    # -- root, windows, pages --------------------------------------------------------------------------------

    def _find_root(self) -> tuple[str, str]:
        """Return the ledger's experiment and the run that is its root, making them if need be."""
        name = f"{self._job.name}.ledger"
        experiment = self._client.get_experiment_by_name(name)
        if experiment is None:
            candidate = self._create_window(number=1, opened_by="first")
            try:
                return str(self._client.create_experiment(name, tags={"zf.root": candidate})), candidate
            except MlflowException:
                self._client.delete_run(candidate)
                experiment = self._client.get_experiment_by_name(name)
        if experiment is None or "zf.root" not in experiment.tags:
            raise StoreError(f"the experiment {name} was not made by zeus_flows; rename the job or that experiment")
        _must_be_active(experiment)
        return str(experiment.experiment_id), str(experiment.tags["zf.root"])

    def _window(self) -> str:
        """Return the drift window that recurrences belong to now, opening one where comparability ended."""
        if self._window_id is None:
            window = self._client.get_run(self._tags(self._root_id).get("zf.current_window", self._root_id))
            while following := window.data.params.get("zf.next_window"):
                window = self._client.get_run(following)
            mine = {"zf.fingerprint": self._job.fingerprint, "zf.energy_source": self._energy_source.value}
            self._window_id = str(window.info.run_id)
            if any(window.data.tags.get(name) != value for name, value in mine.items()):
                number = int(window.data.params["zf.window"]) + 1
                self._window_id = self._follow(self._window_id, number=number, opened_by="fingerprint")
        return self._window_id

    def _follow(self, window_id: str, *, number: int, opened_by: str) -> str:
        """Open the window after `window_id`; of several processes racing one window stands."""
        candidate = self._create_window(number=number, opened_by=opened_by)
        winner = self._set_once(window_id, "zf.next_window", candidate)
        if winner != candidate:
            self._client.delete_run(candidate)
        self._client.set_terminated(window_id)
        self._client.set_tag(self._root_id, "zf.current_window", winner)
        return winner

    def _create_window(self, *, number: int, opened_by: str) -> str:
        run = self._client.create_run(
            self._experiment_id,
            run_name=f"drift window {number}{self._mark}",
            tags={
                "zf.kind": "drift-window",
                "zf.fingerprint": self._job.fingerprint,
                "zf.energy_source": self._energy_source.value,
            },
        )
        run_id = str(run.info.run_id)
        self._client.log_batch(run_id, params=[Param("zf.window", str(number)), Param("zf.opened_by", opened_by)])
        return run_id

    def _page_ids(self) -> dict[int, str]:
        for name, value in self._params(self._root_id).items():
            if name.startswith("zf.page."):
                self._pages[int(name.removeprefix("zf.page."))] = value
        return self._pages

    def _page(self, number: int) -> str:
        """Return the run that is page `number`, making it if need be."""
        if number not in self._pages and number not in self._page_ids():
            candidate = self._client.create_run(
                self._ledger_id, run_name=f"page {number}", tags={"zf.kind": "page"}
            ).info.run_id
            self._pages[number] = self._set_once(self._root_id, f"zf.page.{number}", candidate)
            if self._pages[number] != candidate:
                self._client.delete_run(candidate)
        return self._pages[number]

    # -- MLflow ----------------------------------------------------------------------------------------------

    def _get_or_create_experiment(self, name: str) -> str:
        experiment = self._client.get_experiment_by_name(name)
        if experiment is None:
            try:
                return str(self._client.create_experiment(name))
            except MlflowException:
                experiment = self._client.get_experiment_by_name(name)
                if experiment is None:
                    raise
        _must_be_active(experiment)
        return str(experiment.experiment_id)

    def _set_once(self, run_id: str, name: str, value: str) -> str:
        """Write a param unless it has a value; return the value it has now."""
        try:
            self._client.log_param(run_id, name, value, synchronous=True)
            return value
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                raise UnknownAttempt(f"there is no run {run_id}") from None
            standing = self._params(run_id).get(name)
            if standing is None:
                raise
            return standing

    def _params(self, run_id: str) -> Mapping[str, str]:
        return self._run(run_id).data.params

    def _tags(self, run_id: str) -> Mapping[str, str]:
        return self._run(run_id).data.tags

    def _run(self, run_id: str) -> Run:
        return self._client.get_run(run_id)


def _metrics(values: Mapping[str, float | None], *, step: int) -> list[Metric]:
    now_ms = int(time.time() * 1000)
    return [Metric(name, value, now_ms, step) for name, value in values.items() if value is not None]


def _must_be_active(experiment: Any) -> None:
    if experiment.lifecycle_stage != "active":
        raise StoreError(
            f"the experiment {experiment.name} was deleted; bring it back with "
            f"`mlflow experiments restore --experiment-id {experiment.experiment_id}`, or rename the job"
        )


def _conforms(ledger: MlflowLedger) -> Ledger:
    return ledger
