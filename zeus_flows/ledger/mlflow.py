"""The ledger in MLflow tracking runs. `docs/reference/mlflow-schema.md` is its contract.

MLflow has no transactions across runs. What must happen once is a write-once param (claims, decisions, observations,
ends, the chain of drift windows) or the creation of an experiment (the root); both are compare-and-set on every
backend. Tags and metrics are for people and caches; writing them twice does no harm.

What this promises, on sqlite, PostgreSQL and an MLflow server on either:

* Recurrence numbers are unique, whoever asks at the same time.
* An attempt has one decision and one observation. The first stands; the same again is accepted, another is refused.
* An attempt that was declared dead has its observation, so its own late report is refused.
* The fold's order is (recurrence, attempt). A snapshot covers only recurrences that have ended, and after a recurrence
  has ended no attempt is added to it: so no observation can come to lie inside a snapshot.
* A decision reads runs by id only: the root, the current drift window, one or two pages, and the attempts since the
  snapshot. None of that grows with the history.

It does not promise that an observation is there the moment training ends: see `zeus_flows.ledger.durable`.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mlflow.entities import Metric, Run

from zeus_flows.core import policy
from zeus_flows.core.cost import observed_cost
from zeus_flows.core.records import Decision, EnergySource, Gpu, InFlight, Job, Observation, Outcome
from zeus_flows.errors import AlreadyObserved, DeclaredDead, StoreError
from zeus_flows.ledger import codec, pages, snapshot
from zeus_flows.ledger.lease import Holder, this_process
from zeus_flows.ledger.pages import Page
from zeus_flows.ledger.points import reached
from zeus_flows.ledger.protocol import EpochReport, History, Ledger
from zeus_flows.ledger.store import Store


@dataclass(frozen=True, slots=True)
class OpenAttempt:
    """An attempt that has a decision and no observation, and what its holder last said."""

    run_id: str
    decision: Decision
    lease: str


@dataclass(frozen=True, slots=True)
class _Window:
    """The drift window that recurrences belong to now."""

    run_id: str
    number: int
    counts_from: int
    tags: Mapping[str, str]


class MlflowLedger:
    """One job's ledger on an MLflow tracking store.

    Args:
        job: Whose ledger this is; its name is the experiment's.
        store: MLflow, as bounded calls.
        energy_source: Only observations of this source are folded.
        holder: Who this is to other processes; this process by default.
    """

    def __init__(self, job: Job, store: Store, energy_source: EnergySource, *, holder: Holder | None = None) -> None:
        self._job, self._store, self._energy_source = job, store, energy_source
        self._holder = holder or this_process()
        self._experiment_id: str | None = None
        self._root: tuple[str, str] | None = None
        self._window: _Window | None = None
        self._pages: dict[int, str] = {}
        self._closed: dict[str, Observation] = {}

    @property
    def name(self) -> str:
        """The job's name."""
        return self._job.name

    @property
    def experiment_id(self) -> str:
        """The experiment that holds the attempts and drift windows; made if need be."""
        if self._experiment_id is None:
            found = self._store.experiment(self._job.name)
            made = None if found else self._store.create_experiment(self._job.name)
            found = found or (self._store.experiment(self._job.name) if made is None else None)
            self._experiment_id = made or str(found.experiment_id if found else "")
        return self._experiment_id

    # -- recurrences and decisions -----------------------------------------------------------------------------------

    def begin(self, token: str | None = None) -> int:
        """Take the next recurrence number.

        Args:
            token: Names the recurrence before it has a number: asked again with it, the same number is returned.
        """
        token = token or uuid.uuid4().hex
        mine = replace(self._holder, token=token).dump()
        number = max(self._page_ids(), default=0)
        while True:
            claims = self._read_page(number).claims
            for taken, holder in claims.items():
                if token in holder:
                    return taken
            recurrence = max(claims, default=number * pages.SIZE) + 1
            number = pages.number_of(recurrence)
            reached("before-claim")
            if self._store.set_once(self._page(number), pages.claim(recurrence), mine) == mine:
                reached("after-claim")
                return recurrence

    def decided(self, decision: Decision, context: Mapping[str, str]) -> str:
        """Write a decision; return the id of the attempt's run.

        The same decision again returns the run it has.

        Raises:
            StoreError: the attempt has another decision.
            DeclaredDead: its recurrence has ended.
        """
        text = codec.dump_decision(decision)
        page = self._page(pages.number_of(decision.recurrence))
        run_id = self._store.create_run(
            self.experiment_id,
            name=f"{decision.recurrence}.{decision.attempt} · batch size {decision.batch_size}{self._mark}",
            tags={name: codec.fits_tag(value) for name, value in self._decision_tags(decision, context).items()},
        )
        reached("after-create-run")
        params = {"zf.batch_size": str(decision.batch_size), "zf.seed": str(decision.seed), "zf.decision": text}
        self._store.log(run_id, params=params)
        reached("after-log-decision")
        standing = self._store.set_once(page, pages.attempt(decision.recurrence, decision.attempt), run_id)
        reached("after-link-decision")
        if standing != run_id:
            self._store.delete(run_id)
            if self._store.params(standing).get("zf.decision") != text:
                raise StoreError(f"{self._name(decision)} has a decision already")
            run_id = standing
        if decision.recurrence in Page().read(self._store.params(page)).ended:
            self.declare_dead(OpenAttempt(run_id, decision, ""), "its recurrence had ended")
            raise DeclaredDead(f"recurrence {decision.recurrence} of {self._job.name} has ended without this attempt")
        return run_id

    def declare_dead(self, attempt: OpenAttempt, why: str) -> bool:
        """Give an attempt the observation that its holder is dead; return whether that was news."""
        decision = attempt.decision
        observation = Observation(
            recurrence=decision.recurrence,
            attempt=decision.attempt,
            batch_size=decision.batch_size,
            outcome=Outcome.FAILED,
            epochs=0,
            energy_j=0.0,
            time_s=0.0,
            gpu=Gpu(model="unknown", count=1, max_power_w=0.0),
            energy_source=self._energy_source,
            samples_per_epoch=0,
            energy_complete=False,
            explores=decision.explores,
            fingerprint=self._job.fingerprint,
            detail=f"declared dead: {why}",
        )
        try:
            self.observed(attempt.run_id, observation)
        except AlreadyObserved:
            return False
        return True

    def heartbeat(self, attempt_id: str, holder: Holder) -> None:
        """Say that an attempt's holder is still there."""
        self._store.log(attempt_id, tags={"zf.lease": holder.dump()})

    def recurrence_of(self, attempt_id: str) -> int:
        """Return the recurrence that an attempt belongs to."""
        return int(self._store.run(attempt_id).data.tags["zf.recurrence"])

    # -- outcomes ----------------------------------------------------------------------------------------------------

    def epoch(self, attempt_id: str, report: EpochReport) -> None:
        """Write what one epoch brought, at step = epoch."""
        values = {
            "zf.epoch/energy_j": report.energy_j,
            "zf.epoch/time_s": report.time_s,
            "zf.epoch/power_limit_w": report.power_limit_w,
            "zf.epoch/metric": report.metric,
        }
        self._store.log(attempt_id, metrics=_metrics(values, step=report.epoch, at_s=report.wall_s))

    def observed(self, attempt_id: str, observation: Observation, *, at_s: float | None = None) -> None:
        """Write an attempt's outcome; the first one stands."""
        text = codec.dump_observation(observation)
        reached("before-observation")
        if self._store.set_once(attempt_id, "zf.observation", text) != text:
            raise AlreadyObserved(f"{self._name(observation)} has its observation")
        reached("after-observation")
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
        self._store.log(
            attempt_id,
            metrics=_metrics(values, step=observation.recurrence, at_s=at_s),
            tags={"zf.outcome": observation.outcome.value, "zf.detail": codec.fits_tag(observation.detail)},
        )
        reached("after-outcome")
        self._store.end(attempt_id, "FAILED" if observation.outcome is Outcome.FAILED else "FINISHED")
        reached("after-terminate")

    def ended(self, recurrence: int, observations: Sequence[Observation], *, at_s: float | None = None) -> None:
        """Close a recurrence and write its point of the drift window's series."""
        if observations:
            last = observations[-1]
            values = {
                "zf.cost_j": sum(observed_cost(self._job, o) for o in observations),
                "zf.energy_to_accuracy_j": sum(o.energy_j for o in observations),
                "zf.time_to_accuracy_s": sum(o.time_s for o in observations),
                "zf.batch_size": float(last.batch_size),
                "zf.power_limit_w": last.power_limit_w,
                "zf.attempts": float(len(observations)),
            }
            self._store.log(self.window().run_id, metrics=_metrics(values, step=recurrence, at_s=at_s))
            reached("after-series")
        self.close(recurrence)
        reached("after-end")

    def close(self, recurrence: int, how: str = "ended") -> None:
        """Say that nothing will be added to a recurrence."""
        self._store.set_once(self._page(pages.number_of(recurrence)), pages.end(recurrence), how)

    # -- history -----------------------------------------------------------------------------------------------------

    def history(self) -> History:
        """Return the fold of all closed attempts, and what is in flight."""
        state, still_open, _ = self._fold()
        decisions = (attempt.decision for attempt in still_open)
        return History(state, tuple(InFlight(d.recurrence, d.attempt, d.batch_size, d.explores) for d in decisions))

    def open_attempts(self) -> tuple[OpenAttempt, ...]:
        """Return the attempts without an observation."""
        return self._fold()[1]

    def open_claims(self) -> Mapping[int, str]:
        """Return recurrences that were taken and have not ended, with who took them."""
        page = self._fold()[2]
        return {number: holder for number, holder in page.claims.items() if number not in page.ended}

    def observations(self) -> tuple[Observation, ...]:
        """Return every observation that counts, in the fold's order, read from the runs one by one."""
        if self._find_root(make=False) is None:
            return ()
        page = self._read_pages(0)
        self._read_attempts(page, after=0)
        return self._counting(page, after=0)

    def last_recurrence(self) -> int:
        """Return the newest recurrence number that was taken; 0 where none was."""
        if self._find_root(make=False) is None:
            return 0
        newest = max(self._page_ids(), default=0)
        return max(self._read_pages(newest * pages.SIZE).claims, default=0)

    def verify(self) -> tuple[bool, int]:
        """Return whether the state by snapshot is the fold of all runs, and how many observations that has."""
        state, _, _ = self._fold()
        folded = policy.fold(self._job, self.observations())
        return policy.to_json(state) == policy.to_json(folded), folded.observations

    def _fold(self) -> tuple[policy.State, tuple[OpenAttempt, ...], Page]:
        window = self.window()
        known = snapshot.load(self._job, window.tags)
        start = known.upto if known else 0
        page = self._read_pages(start)
        still_open = self._read_attempts(page, after=start)
        state = known.state if known else policy.initial(self._job)
        upto = page.closed_upto(start)
        prefix = [o for o in self._counting(page, after=start) if o.recurrence <= upto]
        for observation in prefix:
            state = policy.advance(self._job, state, observation)
        if upto - start >= snapshot.EVERY:
            tags = snapshot.dump(snapshot.Snapshot(upto, state))
            self._store.log(window.run_id, tags=tags)
            self._window = replace(window, tags={**window.tags, **tags})
            reached("after-snapshot")
        for observation in self._counting(page, after=upto):
            state = policy.advance(self._job, state, observation)
        return state, still_open, page

    def _counting(self, page: Page, *, after: int) -> tuple[Observation, ...]:
        """Return the observations after a recurrence that are comparable with this job's, in the fold's order."""
        first = max(after + 1, self._current_window().counts_from)
        mine = (self._job.fingerprint, self._energy_source)
        read = (self._closed.get(run_id) for (r, _), run_id in page.attempts.items() if r >= first)
        counting = (o for o in read if o is not None and (o.fingerprint, o.energy_source) == mine)
        return tuple(sorted(counting, key=lambda o: o.order))

    def _read_attempts(self, page: Page, *, after: int) -> tuple[OpenAttempt, ...]:
        """Read the attempts after a recurrence that are not known to be closed; return those that are open."""
        still_open = []
        for (recurrence, _), run_id in sorted(page.attempts.items()):
            if recurrence <= after or run_id in self._closed:
                continue
            run = self._store.run(run_id)
            if "zf.observation" in run.data.params:
                self._closed[run_id] = codec.load_observation(run.data.params["zf.observation"])
            else:
                decision = codec.load_decision(run.data.params["zf.decision"])
                still_open.append(OpenAttempt(run_id, decision, run.data.tags.get("zf.lease", "")))
        return tuple(still_open)

    # -- root, windows, pages ----------------------------------------------------------------------------------------

    def window(self) -> _Window:
        """Return the drift window that recurrences belong to now, opening one where comparability ended."""
        window = self._current_window()
        mine = {"zf.fingerprint": self._job.fingerprint, "zf.energy_source": self._energy_source.value}
        if any(window.tags.get(name) != value for name, value in mine.items()):
            return self.open_window("fingerprint", counts_from=window.counts_from)
        return window

    def _current_window(self) -> _Window:
        """Return the newest drift window, whatever it is about."""
        if self._window is None:
            run = self._store.run(self._require_root()[1])
            if hint := run.data.tags.get("zf.current_window"):
                run = self._store.run(hint)
            while following := run.data.params.get("zf.next_window"):
                run = self._store.run(following)
            self._window = _read_window(run)
        return self._window

    def open_window(self, opened_by: str, *, counts_from: int) -> _Window:
        """End the current drift window and open the next; of several processes racing one window stands."""
        current = self._current_window()
        candidate = self._create_window(number=current.number + 1, opened_by=opened_by, counts_from=counts_from)
        reached("after-create-window")
        winner = self._store.set_once(current.run_id, "zf.next_window", candidate)
        if winner != candidate:
            self._store.delete(candidate)
        self._store.end(current.run_id)
        self._store.log(self._require_root()[1], tags={"zf.current_window": winner})
        self._window = _read_window(self._store.run(winner))
        return self._window

    def reset(self) -> int:
        """Start a new drift window in which nothing that was observed before counts; return its number."""
        return self.open_window("reset", counts_from=self.last_recurrence() + 1).number

    def _create_window(self, *, number: int, opened_by: str, counts_from: int) -> str:
        run_id = self._store.create_run(
            self.experiment_id,
            name=f"drift window {number}{self._mark}",
            tags={
                "zf.kind": "drift-window",
                "zf.fingerprint": self._job.fingerprint,
                "zf.energy_source": self._energy_source.value,
            },
        )
        params = {"zf.window": str(number), "zf.opened_by": opened_by, "zf.counts_from": str(counts_from)}
        self._store.log(run_id, params=params)
        return run_id

    def _find_root(self, *, make: bool) -> tuple[str, str] | None:
        """Return the ledger's experiment and the run that is its root; None where there is none and none is made."""
        if self._root is None:
            name = f"{self._job.name}.ledger"
            experiment = self._store.experiment(name)
            if experiment is None:
                if not make:
                    return None
                candidate = self._create_window(number=1, opened_by="first", counts_from=1)
                reached("after-create-root")
                made = self._store.create_experiment(name, tags={"zf.root": candidate})
                if made is not None:
                    self._root = made, candidate
                    return self._root
                self._store.delete(candidate)
                experiment = self._store.experiment(name)
            if experiment is None or "zf.root" not in experiment.tags:
                raise StoreError(f"the experiment {name} was not made by zeus_flows; rename the job or that experiment")
            self._root = str(experiment.experiment_id), str(experiment.tags["zf.root"])
        return self._root

    def _require_root(self) -> tuple[str, str]:
        root = self._find_root(make=True)
        assert root is not None
        return root

    def _page_ids(self) -> dict[int, str]:
        """Return the pages there are, by number."""
        for name, value in self._store.params(self._require_root()[1]).items():
            if name.startswith("zf.page."):
                self._pages[int(name.removeprefix("zf.page."))] = value
        return self._pages

    def _page(self, number: int) -> str:
        """Return the run that is page `number`, making it if need be."""
        if number not in self._pages and number not in self._page_ids():
            experiment_id, root_id = self._require_root()
            candidate = self._store.create_run(experiment_id, name=f"page {number}", tags={"zf.kind": "page"})
            reached("after-create-page")
            self._pages[number] = self._store.set_once(root_id, f"zf.page.{number}", candidate)
            if self._pages[number] != candidate:
                self._store.delete(candidate)
        return self._pages[number]

    def _read_page(self, number: int) -> Page:
        return Page().read(self._store.params(self._page(number)))

    def _read_pages(self, after: int) -> Page:
        """Return all pages from the one with the recurrence after `after`, as one."""
        page = Page()
        for number in sorted(self._page_ids()):
            if number >= pages.number_of(after + 1):
                page.read(self._store.params(self._pages[number]))
        return page

    # -- names -------------------------------------------------------------------------------------------------------

    @property
    def _mark(self) -> str:
        """What a run's name says of its joules, where they were not measured."""
        return "" if self._energy_source is EnergySource.MEASURED else f" · {self._energy_source.value} energy"

    def _name(self, record: Decision | Observation) -> str:
        return f"attempt {record.recurrence}.{record.attempt} of {self._job.name}"

    def _decision_tags(self, decision: Decision, context: Mapping[str, str]) -> dict[str, str]:
        return {
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
            "zf.drift_window": self.window().run_id,
            "zf.lease": self._holder.dump(),
            **context,
        }


def _read_window(run: Run) -> _Window:
    params = run.data.params
    return _Window(
        str(run.info.run_id), int(params["zf.window"]), int(params.get("zf.counts_from", "1")), dict(run.data.tags)
    )


def _metrics(values: Mapping[str, float | None], *, step: int, at_s: float | None) -> list[Metric]:
    at_ms = int((time.time() if at_s is None else at_s) * 1000)
    return [Metric(name, value, at_ms, step) for name, value in values.items() if value is not None]


def _conforms(ledger: MlflowLedger) -> Ledger:
    return ledger
