"""Mends a ledger that people or `mlflow gc` were at: brings back what was deleted, rebuilds what is gone for good.

An attempt's run says by itself which attempt it is, in which drift window and with what outcome. So pages and windows,
which only hold the attempts together, can be told from them. What was deleted among the attempts stays so: whoever did
that meant it. Snapshots are dropped, so the history is folded anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from mlflow.entities import Experiment, Run, ViewType

from zeus_flows.core.drift_windows import Cause
from zeus_flows.errors import LedgerDamaged, UnknownAttempt
from zeus_flows.ledger.mlflow import names, pages, snapshot
from zeus_flows.ledger.mlflow.client import Store
from zeus_flows.ledger.mlflow.links import is_link
from zeus_flows.ledger.mlflow.names import RunKind
from zeus_flows.ledger.mlflow.pages import Page
from zeus_flows.ledger.mlflow.places import (
    by_id,
    ledger_name,
    ledger_note,
    link_places,
    linked_ledger,
    named,
    refuse_foreign,
    tagged,
)
from zeus_flows.ledger.mlflow.query import having
from zeus_flows.ledger.mlflow.run_words import ENDED

#: Params that MLflow takes in one call.
_TOGETHER: Final = 100


@dataclass(slots=True)
class Repaired:
    """What a repair did, and what it could not do, as sentences."""

    done: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)


def repair(store: Store, name: str) -> Repaired:
    """Mend the ledger of the job of a name. No recurrence of it may be under way.

    Raises:
        LedgerDamaged: there is nothing of the job in this store.
    """
    return _Repair(store, name).run()


class _Repair:
    """One repair: what it has found so far, and what it has to say.

    Args:
        store: MLflow, as bounded calls.
        name: The job's.
    """

    def __init__(self, store: Store, name: str) -> None:
        self._store, self._name, self._said = store, name, Repaired()
        self._job_id = self._ledger_id = ""
        self._attempts: list[Run] | None = None

    def run(self) -> Repaired:
        """Mend experiments, root, windows and pages, in this order: each is found from the one before."""
        job, ledger = self._experiments()
        self._job_id = str(job.experiment_id)
        root_id = str(ledger.tags[names.ROOT]) if ledger is not None else self._paged_root(self._job_id)
        root = self._brought_back(root_id) if root_id else None
        if root is None:
            root = self._rebuild_window(None, root_id)
        ledger = ledger or self._make_ledger(root)
        self._ledger_id = str(ledger.experiment_id)
        if ledger.tags.get(names.ROOT) != root.info.run_id:
            self._tag_experiment(ledger, names.ROOT, str(root.info.run_id))
        link_places(self._store, self._name, job, self._job_id, self._ledger_id)
        if job.tags.get(names.LEDGER, self._ledger_id) != self._ledger_id:
            self._tag_experiment(job, names.LEDGER, self._ledger_id)
        windows = self._mend_windows(root)
        self._mend_pages(windows[0])
        for window in windows:
            cleared = snapshot.cleared({k: v for k, v in window.data.tags.items() if v}, snapshot.HEAD)
            if cleared:
                self._store.log(str(window.info.run_id), tags=cleared)
        return self._said

    # -- experiments -------------------------------------------------------------------------------------------------

    def _experiments(self) -> tuple[Experiment, Experiment | None]:
        """Return the job's experiment and the ledger's, brought back; None for one that is gone for good."""
        job, ledger = named(self._store, self._name), named(self._store, ledger_name(self._name))
        job = job or tagged(self._store, names.JOB, self._name)
        if job is None and ledger is not None and (root := self._run(ledger.tags.get(names.ROOT, ""))) is not None:
            job = self._store.ask(lambda client: client.get_experiment(root.info.experiment_id))
        if job is None:
            raise LedgerDamaged(f"there is no experiment of the job {self._name} in {self._store.location}")
        if (linked := job.tags.get(names.LEDGER)) and (ledger is None or ledger.experiment_id != linked):
            ledger = linked_ledger(self._store, job, linked) or ledger
        if ledger is None and (root_id := self._paged_root(str(job.experiment_id))):
            ledger = tagged(self._store, names.ROOT, root_id)
        if ledger is not None:
            refuse_foreign(ledger, self._name)
        for experiment in filter(None, (job, ledger)):
            if experiment.lifecycle_stage != "active":
                self._store.ask(lambda client, e=experiment: client.restore_experiment(e.experiment_id))  # type: ignore[misc]
                self._said.done.append(f"the experiment {experiment.name} had been deleted and is back")
        return job, ledger

    def _tag_experiment(self, experiment: Experiment, tag: str, value: str) -> None:
        self._store.ask(lambda client: client.set_experiment_tag(experiment.experiment_id, tag, value))

    def _make_ledger(self, root: Run) -> Experiment:
        name = ledger_name(self._name)
        experiment_id, _ = self._store.name_root(name, str(root.info.run_id), note=ledger_note(self._name))
        self._said.done.append(f"the experiment {name} was gone for good and is made anew")
        made = by_id(self._store, experiment_id)
        assert made is not None
        return made

    # -- runs --------------------------------------------------------------------------------------------------------

    def _run(self, run_id: str) -> Run | None:
        """Return a run whatever happened to it; None where it is gone for good."""
        try:
            return self._store.ask(lambda client: client.get_run(run_id)) if run_id else None
        except UnknownAttempt:
            return None

    def _brought_back(self, run_id: str) -> Run | None:
        """Return a run after restoring it where it was deleted; None where it is gone for good."""
        run = self._run(run_id)
        if run is not None and run.info.lifecycle_stage != "active":
            self._store.ask(lambda client: client.restore_run(run_id))
            self._said.done.append(f"{run.info.run_name} had been deleted and is back (run {run_id})")
            run = self._run(run_id)
        return run

    def _every(self, experiment_id: str, kind: RunKind) -> list[Run]:
        """Return all runs of a kind in an experiment, deleted ones too, oldest first."""
        query, found, token = having({names.KIND: kind}), list[Run](), None
        while True:
            some = self._store.ask(
                lambda client, token=token: client.search_runs(  # type: ignore[misc]
                    [experiment_id], query, ViewType.ALL, order_by=["attributes.start_time ASC"], page_token=token
                )
            )
            found += some
            if not (token := some.token):
                return found

    def _recurrence_runs(self) -> list[Run]:
        """Return the runs of all attempts and gates."""
        if self._attempts is None:
            kinds = (RunKind.ATTEMPT, RunKind.GATE)
            self._attempts = [run for kind in kinds for run in self._every(self._job_id, kind)]
        return self._attempts

    # -- drift windows -----------------------------------------------------------------------------------------------

    def _paged_root(self, experiment_id: str) -> str:
        """Return the first drift window that names a page: the root; empty where it is gone."""
        windows = self._every(experiment_id, RunKind.DRIFT_WINDOW)
        paged = (run for run in windows if names.page(0) in run.data.params)
        return next((str(run.info.run_id) for run in paged if run.data.params.get(names.WINDOW) == "1"), "")

    def _mend_windows(self, root: Run) -> list[Run]:
        """Return the chain of drift windows, each brought back or rebuilt."""
        chain = [root]
        while following := _links(chain[-1]).get(names.NEXT_WINDOW):
            run = self._brought_back(following)
            if run is None:
                standing = self._window_after(int(chain[-1].data.params[names.WINDOW]))
                run = self._brought_back(standing) if standing else self._rebuild_window(chain[-1], following)
                assert run is not None
                self._link(chain[-1], names.NEXT_WINDOW, str(run.info.run_id))
            chain.append(run)
        for before, after in pairwise(chain):
            if after.data.tags.get(names.PREVIOUS_WINDOW) != before.info.run_id:
                self._store.log(str(after.info.run_id), tags={names.PREVIOUS_WINDOW: str(before.info.run_id)})
        newest = str(chain[-1].info.run_id)
        if chain[0].data.tags.get(names.CURRENT_WINDOW, newest) != newest:
            self._store.log(str(chain[0].info.run_id), tags={names.CURRENT_WINDOW: newest})
        return chain

    def _rebuild_window(self, before: Run | None, gone: str) -> Run:
        """Make a drift window that is gone for good anew, from its attempts and the windows around it."""
        mine = [run for run in self._recurrence_runs() if gone and run.data.tags.get(names.DRIFT_WINDOW) == gone]
        numbers = [int(run.data.tags[names.RECURRENCE]) for run in mine]
        model = next(iter((*mine, *filter(None, [before]), *self._recurrence_runs())), None)
        if model is None:
            raise LedgerDamaged(
                f"no run of {self._name} is left that its ledger could be rebuilt from\n"
                f"  delete the experiment {ledger_name(self._name)} and `mlflow gc` it to begin anew, or rename the job"
            )
        number, cause, first, counts_from = 1, Cause.FIRST, 1, 1
        if before is not None:
            number = int(before.data.params[names.WINDOW]) + 1
            cause = Cause(before.data.tags.get(names.ENDED_BY, Cause.DRIFT.value))
            first = min(numbers, default=self._last_recurrence() + 1)
            counts_from = first if cause is Cause.RESET else int(before.data.params[names.COUNTS_FROM])
        about: tuple[str, ...] = (names.FINGERPRINT, names.ENERGY_SOURCE)
        tags = {name: value for name, value in model.data.tags.items() if name in about}
        run_id = self._store.create_run(
            self._job_id, name=f"drift window {number}", tags={names.KIND: RunKind.DRIFT_WINDOW, **tags}
        )
        params = {names.WINDOW: number, names.FIRST_RECURRENCE: first, names.COUNTS_FROM: counts_from}
        after = self._window_after(number)
        links = {names.OPENED_BY: cause.value} | ({names.NEXT_WINDOW: after} if after else {})
        self._store.log(run_id, params=links | {name: str(value) for name, value in params.items()})
        self._said.done.append(f"drift window {number} was gone for good and is rebuilt (run {run_id})")
        self._said.lost.append(f"the series of drift window {number}, which only its run had")
        run = self._run(run_id)
        assert run is not None
        return run

    def _window_after(self, number: int) -> str:
        """Return the window after one by its number, where it is there; of several, the one that lost no race."""
        windows = self._every(self._job_id, RunKind.DRIFT_WINDOW)
        later = [run for run in windows if run.data.params.get(names.WINDOW) == str(number + 1)]
        later.sort(key=lambda run: run.info.lifecycle_stage != "active")  # those that lost a race were deleted
        return str(later[0].info.run_id) if later else ""

    def _link(self, run: Run, name: str, run_id: str) -> None:
        """Let a run name another one, in place of one that is gone where it named one."""
        if name in run.data.params:
            self._store.log(str(run.info.run_id), tags={name: run_id})
        else:
            self._store.set_once(str(run.info.run_id), name, run_id)

    # -- pages -------------------------------------------------------------------------------------------------------

    def _last_recurrence(self) -> int:
        return max((int(run.data.tags[names.RECURRENCE]) for run in self._recurrence_runs()), default=0)

    def _mend_pages(self, root: Run) -> None:
        """Bring back or rebuild every page; find those that a root which was rebuilt does not name."""
        links = {names.page_number(name): run_id for name, run_id in _links(root).items()}
        known = {number: run_id for number, run_id in links.items() if number is not None}
        found = {} if known else self._standing_pages()
        last = max(known) if known else max((*found, pages.number_of(max(self._last_recurrence(), 1))))
        for number in range(last + 1):
            run = self._brought_back(known.get(number, found.get(number, "")))
            if run is None:
                self._link(root, names.page(number), self._rebuild_page(number))
            elif number not in known:
                self._link(root, names.page(number), str(run.info.run_id))

    def _standing_pages(self) -> dict[int, str]:
        """Return the pages there are by number, by what they say; the fullest one of several.

        Those that name other runs than there are were copied here from another server.
        """
        found: dict[int, tuple[int, str]] = {}
        here = {str(run.info.run_id) for run in self._recurrence_runs()}
        for run in self._every(self._ledger_id, RunKind.PAGE):
            page = Page().read(run.data.params)
            if page.claims and (not page.attempts or here.intersection(page.attempts.values())):
                number = pages.number_of(min(page.claims))
                found[number] = max(found.get(number, (0, "")), (len(page.claims), str(run.info.run_id)))
        return {number: run_id for number, (_, run_id) in found.items()}

    def _rebuild_page(self, number: int) -> str:
        """Make a page anew from the runs of its recurrences; return its run."""
        of_page: dict[int, list[Run]] = {}
        for run in self._recurrence_runs():
            recurrence = int(run.data.tags[names.RECURRENCE])
            if pages.number_of(recurrence) == number:
                of_page.setdefault(recurrence, []).append(run)
        first, last = number * pages.SIZE + 1, min((number + 1) * pages.SIZE, self._last_recurrence())
        params: dict[str, str] = {}
        for recurrence in range(first, last + 1):
            params |= _page_params(recurrence, of_page.get(recurrence, ()))
        run_id = self._store.create_run(self._ledger_id, name=f"page {number}", tags={names.KIND: RunKind.PAGE})
        for some in _batches(params):
            self._store.log(run_id, params=some)
        runless = sum(recurrence not in of_page for recurrence in range(first, last + 1))
        self._said.done.append(
            f"page {number} was gone for good and is rebuilt from the runs of {len(of_page)} recurrences (run {run_id})"
        )
        if runless:
            self._said.lost.append(f"how {runless} recurrences without a run ended (page {number}): they count as dead")
        return run_id


def _links(run: Run) -> dict[str, str]:
    """Return a window's params, with what took the place of runs that are gone."""
    return {**run.data.params, **{name: value for name, value in run.data.tags.items() if is_link(name)}}


def _batches(params: Mapping[str, str]) -> Iterable[dict[str, str]]:
    items: Sequence[tuple[str, str]] = tuple(params.items())
    return (dict(items[start : start + _TOGETHER]) for start in range(0, len(items), _TOGETHER))


def _page_params(recurrence: int, runs: Iterable[Run]) -> dict[str, str]:
    """Return the params that a page has for a recurrence, told from the runs of its attempts and of its gate.

    Whoever lost a race was deleted before it was observed; whatever else was deleted was so by hand, and stays named.
    Without a run it counts as dead. With an attempt that has no observation it goes on, or is the janitor's.
    """
    found = [run for run in runs if run.info.lifecycle_stage == "active" or names.OBSERVATION in run.data.params]
    found.sort(key=lambda run: (names.OBSERVATION not in run.data.params, run.info.lifecycle_stage != "active"))
    attempts: dict[int, Run] = {}
    gate: Run | None = None
    for run in found:
        if run.data.tags.get(names.KIND) == RunKind.GATE:
            gate = gate or run
        else:
            attempts.setdefault(int(run.data.tags[names.ATTEMPT]), run)
    leases = [run.data.tags.get(names.LEASE) for run in (*attempts.values(), *filter(None, [gate]))]
    params = {names.claim(recurrence): next((lease for lease in leases if lease and lease != ENDED), "rebuilt")}
    params |= {names.attempt_run(recurrence, n): str(run.info.run_id) for n, run in sorted(attempts.items())}
    params |= {names.gate_run(recurrence): str(gate.info.run_id)} if gate is not None else {}
    if any(names.OBSERVATION not in run.data.params for run in attempts.values()):
        return params
    how = pages.ENDED if attempts else pages.DEAD
    if any(run.data.tags.get(names.DETAIL, "").startswith("declared dead") for run in attempts.values()):
        how = pages.DEAD
    if gate is not None and not attempts and gate.data.metrics.get(names.GATE_SKIPPED):
        took = gate.data.metrics
        how = pages.skipped(time_s=took.get(names.GATE_TIME_S, 0.0), energy_j=took.get(names.GATE_ENERGY_J, 0.0))
    return params | {names.end(recurrence): how}
