"""The janitor of a work pool: a deployment without a limit, and the automation that starts it where a run has to wait.

A run that waits for a slot never reaches our code, so somebody else has to look whether the holder is alive. Where
nobody waits, the janitor does not run.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Final
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.events.actions import RunDeployment
from prefect.events.schemas.automations import Automation, AutomationCore, EventTrigger, Posture
from prefect.events.schemas.events import ResourceSpecification

from zeus_flows.orchestration.deployable import Deployable
from zeus_flows.orchestration.deployments import DeploymentChange, DeploymentWishes, apply, plan
from zeus_flows.orchestration.slots import TAG

#: What Prefect tells when a run finds no slot; told again every 30 s while it waits.
WAITS: Final = "prefect.flow-run.AwaitingConcurrencySlot"
#: It runs at most once in so many seconds.
EVERY_S: Final = 60


@dataclass(frozen=True, slots=True)
class JanitorChange:
    """What is to be done about a pool's janitor."""

    pool: str
    deployment: DeploymentChange
    automation: Automation | None

    @property
    def runs_in(self) -> str:
        """The pool that it runs in."""
        return str(self.deployment.wanted["work pool"])

    @property
    def kind(self) -> str:
        """`create`, `update` or `unchanged`."""
        if self.deployment.there is None or self.automation is None:
            return "create"
        as_it_should_be = wanted_automation(self.pool, self.deployment.there)
        same = _told(self.automation) == _told(as_it_should_be) and self.deployment.kind == "unchanged"
        return "unchanged" if same else "update"


def plan_janitor(client: SyncPrefectClient, pool: str, *, runs_in: str | None = None) -> JanitorChange:
    """Return what is to be done so that a pool has its janitor.

    Args:
        client: Of Prefect's API.
        pool: Whose runs it looks after.
        runs_in: The pool that it runs in, where runs of the other would ask for a GPU; None: as it is, or the same.
    """
    about = (
        "Closes runs of zeus_flows that have died, so that others get their slots, and ends those that wait behind a "
        "newer one. An automation starts it where a run has to wait. Made by `zeus-flows deploy`."
    )
    janitor = Deployable(Path(), "janitor", pool, {}, (), None, (TAG,), about)
    found_there = plan(client, janitor, DeploymentWishes()).found or {}
    there = plan(client, janitor, DeploymentWishes(pool=runs_in or found_there.get("work pool") or pool))
    found = client.read_automations_by_name(_name(pool))
    return JanitorChange(pool, there, found[0] if found else None)


def apply_janitor(client: SyncPrefectClient, change: JanitorChange) -> None:
    """Make a pool's janitor what it should be."""
    if change.kind == "unchanged":
        return
    deployment_id = apply(client, change.deployment)
    if change.automation is not None:
        client.delete_automation(change.automation.id)
    client.create_automation(wanted_automation(change.pool, deployment_id))


def wanted_automation(pool: str, deployment_id: UUID) -> AutomationCore:
    """Return the automation that starts the janitor."""
    return AutomationCore(
        name=_name(pool),
        description=f"Starts janitor/{pool} where a run in the pool {pool} has to wait for a slot.",
        trigger=EventTrigger(
            expect={WAITS},
            match=ResourceSpecification({"prefect.resource.id": "prefect.flow-run.*"}),
            match_related=ResourceSpecification({"prefect.resource.role": "work-pool", "prefect.resource.name": pool}),
            posture=Posture.Reactive,
            threshold=1,
            within=timedelta(seconds=EVERY_S),
        ),
        actions=[RunDeployment(deployment_id=deployment_id)],
        owner_resource=f"prefect.deployment.{deployment_id}",
    )


def _name(pool: str) -> str:
    return f"zeus-flows janitor of {pool}"


def _told(automation: AutomationCore) -> object:
    """Return what an automation does, to be compared: servers fill in fields of their own."""
    trigger, actions = automation.trigger, automation.actions
    assert isinstance(trigger, EventTrigger)
    started = [str(action.deployment_id) for action in actions if isinstance(action, RunDeployment)]
    return automation.enabled, trigger.expect, trigger.match_related, trigger.within, started
