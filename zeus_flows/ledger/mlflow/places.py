"""Finds a job's two experiments, whatever they are called by now.

Names can be changed in MLflow, ids cannot. The job's experiment names the ledger's by id, and the ledger's names the
root, a run in the job's experiment. So either is found from the other, and a renamed one is never begun anew beside it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from mlflow.entities import Experiment, ViewType

from zeus_flows.errors import LedgerDamaged, StoreDenied, StoreError, UnknownAttempt
from zeus_flows.ledger.mlflow import names
from zeus_flows.ledger.mlflow.client import Store
from zeus_flows.ledger.mlflow.names import RunKind
from zeus_flows.ledger.mlflow.query import having

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Places:
    """A job's experiments.

    Attributes:
        job: The one that holds its attempts and drift windows; None where there is none yet.
        ledger: The one that holds the pages; None where there is none yet.
    """

    job: Experiment | None = None
    ledger: Experiment | None = None

    @property
    def root(self) -> tuple[str, str] | None:
        """The ledger's experiment and the run that is its root."""
        if self.ledger is None:
            return None
        return str(self.ledger.experiment_id), str(self.ledger.tags[names.ROOT])


def ledger_name(job: str) -> str:
    """Return what the experiment of a job's pages is called when it is made."""
    return f"{job}.ledger"


def ledger_note(job: str) -> str:
    """Return the description of that experiment: what it is, and that it must stay."""
    return (
        f"The books of the job **{job}**: which recurrence numbers are taken, and which runs hold their attempts. "
        f"zeus_flows reads them before each decision. **Do not delete this experiment or its runs**: without them the "
        f"history of {job} cannot be told. There is nothing to compare here; the runs to look at are in the "
        f"experiment {job}. Where something was deleted, `zeus-flows ledger repair` with the job's file brings it back."
    )


def find_places(store: Store, name: str) -> Places:
    """Return the experiments of the job of a name. Makes nothing.

    Raises:
        LedgerDamaged: one of them was deleted, or the ledger's is gone for good.
        StoreError: the ledger's was made by somebody else.
    """
    job, ledger = named(store, name), named(store, ledger_name(name))
    if ledger is not None:
        refuse_foreign(ledger, name)
    if job is None:
        job = _of_root(store, ledger) if ledger is not None else tagged(store, names.JOB, name)
    if (
        job is not None
        and (linked := job.tags.get(names.LEDGER))
        and (ledger is None or ledger.experiment_id != linked)
    ):
        ledger = linked_ledger(store, job, linked) or ledger
        if ledger is None:
            raise _gone(name)
    if job is not None and ledger is None:
        ledger = _of_lost_root(store, job, name)
    for experiment, was in ((job, name), (ledger, ledger_name(name))):
        if experiment is not None:
            _active(experiment, name)
            if experiment.name != was:
                log.warning("the experiment %s is called %s now, and goes on", was, experiment.name)
    return Places(job, ledger)


def link_places(store: Store, name: str, job: Experiment | None, job_id: str, ledger_id: str) -> None:
    """Have the job's experiment name the ledger's by id, where it does not yet."""
    said = {names.JOB: name} if job is None else job.tags
    for tag, value in ((names.LEDGER, ledger_id), (names.JOB, name)):
        if tag not in said:
            store.ask(lambda client, tag=tag, value=value: client.set_experiment_tag(job_id, tag, value))  # type: ignore[misc]


def named(store: Store, name: str) -> Experiment | None:
    """Return the experiment of a name, deleted or not; None where there is none.

    Raises:
        StoreDenied: MLflow lets nobody like us look at it: it may be another team's.
    """
    try:
        return store.ask(lambda client: client.get_experiment_by_name(name))
    except StoreDenied as error:
        raise StoreDenied(
            f"{error}\n  where these are right, the experiment {name} is another team's: name the job otherwise, or "
            f"have its owner grant you EDIT on it and on its ledger (docs/guides/teams.md)"
        ) from None


def by_id(store: Store, experiment_id: str) -> Experiment | None:
    """Return an experiment, deleted or not; None where it is gone for good."""
    try:
        return store.ask(lambda client: client.get_experiment(experiment_id))
    except UnknownAttempt:
        return None


def tagged(store: Store, tag: str, value: str) -> Experiment | None:
    """Return the experiment that has a tag, where one has; an active one before those that were deleted."""
    query = having({tag: value})
    found = store.ask(lambda client: client.search_experiments(ViewType.ALL, filter_string=query))
    return next(iter(sorted(found, key=lambda e: e.lifecycle_stage != "active")), None)


def _of_root(store: Store, ledger: Experiment) -> Experiment | None:
    """Return the experiment that a ledger's root is in; None where the root is gone."""
    try:
        root = store.ask(lambda client: client.get_run(ledger.tags[names.ROOT]))
    except UnknownAttempt:
        return None
    return store.ask(lambda client: client.get_experiment(root.info.experiment_id))


def _of_lost_root(store: Store, job: Experiment, name: str) -> Experiment | None:
    """Return the ledger that a root in the job's experiment belongs to, where nothing else leads there.

    A first drift window with a page is a root. One that an earlier version made is not named in the job's experiment.
    """
    query = f"{having({names.KIND: RunKind.DRIFT_WINDOW})} and params.`{names.WINDOW}` = '1'"
    for run in store.search([str(job.experiment_id)], query, most=100):
        if names.page(0) in run.data.params:
            found = tagged(store, names.ROOT, str(run.info.run_id))
            if found is None:
                raise _gone(name)
            return found
    return None


def linked_ledger(store: Store, job: Experiment, experiment_id: str) -> Experiment | None:
    """Return the ledger that a job's experiment names; None where that is gone, or another's.

    Where a history was copied to another server, the id is one of that server's own.
    """
    found = by_id(store, experiment_id)
    home = _of_root(store, found) if found is not None and names.ROOT in found.tags else None
    return found if home is not None and home.experiment_id == job.experiment_id else None


def refuse_foreign(ledger: Experiment, job: str) -> None:
    """Check that a ledger's experiment is one.

    Raises:
        StoreError: somebody else made it.
    """
    if names.ROOT not in ledger.tags:
        raise StoreError(f"the experiment {ledger.name} was not made by zeus_flows; rename it, or {job}")


def _active(experiment: Experiment, job: str) -> None:
    if experiment.lifecycle_stage != "active":
        raise LedgerDamaged(
            f"the experiment {experiment.name} was deleted\n"
            f"  bring it back with `mlflow experiments restore --experiment-id {experiment.experiment_id}`, or with "
            f"`zeus-flows ledger repair` and the file of {job}; or rename the job"
        )


def _gone(job: str) -> LedgerDamaged:
    return LedgerDamaged(
        f"the experiment {ledger_name(job)}, which says which runs of {job} count, is gone for good\n"
        f"  type `zeus-flows ledger repair` with the job's file: it is rebuilt from the runs"
    )
