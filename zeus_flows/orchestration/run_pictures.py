"""Figures of a recurrence, for whoever looks at its runs: files of the attempts' runs, and the profile in Prefect."""

from __future__ import annotations

import base64
import logging
import tempfile
from pathlib import Path

from prefect.artifacts import create_markdown_artifact

from zeus_flows.core import policy
from zeus_flows.core.job import Job
from zeus_flows.core.records import EnergySource
from zeus_flows.ledger.durable import DurableLedger
from zeus_flows.recurrence.loop import Recurrence
from zeus_flows.recurrence.steps import LocalSteps
from zeus_flows.reporting.run_figures import belief_figure, profile_figure, savings_figure

log = logging.getLogger(__name__)


def show_figures(job: Job, ledger: DurableLedger, steps: LocalSteps, done: Recurrence, *, key: str) -> None:
    """Add the figures of a recurrence that has ended. Whatever stands in the way, nothing depends on them.

    Args:
        job: Whose.
        ledger: Where its runs are.
        steps: What the recurrence was decided on.
        done: The recurrence.
        key: What Prefect's artifacts of the job begin with.
    """
    try:
        _show(job, ledger, steps, done, key)
    except Exception as error:  # an artifact store may raise anything
        log.warning("no figures of recurrence %d: %s", done.number, type(error).__name__)


def _show(job: Job, ledger: DurableLedger, steps: LocalSteps, done: Recurrence, key: str) -> None:
    profile = None
    means_something = job.in_seconds or steps.trainer.energy_source is not EnergySource.NONE
    for attempt, observation in done.attempts:
        profile = profile_figure(job, observation, attempt.profile) if means_something else None
        figures = {
            "power-profile.svg": profile,
            "batch-sizes.svg": belief_figure(job, attempt.decision, observation.energy_source),
        }
        if means_something and observation is done.attempts[-1][1]:
            state = steps.learnt(tuple(o for _, o in done.attempts))
            figures["saved-so-far.svg"] = savings_figure(job, policy.saved(job, state))
        with tempfile.TemporaryDirectory(prefix="zeus-flows-") as folder:
            drawn = {name: figure for name, figure in figures.items() if figure is not None}
            for name, figure in drawn.items():
                (Path(folder) / name).write_text(figure, encoding="utf-8")
            if drawn:
                ledger.attach(attempt.id, Path(folder), "figures")
    if profile is not None:
        data = base64.b64encode(profile.encode()).decode()
        markdown = f"![cost by setting](data:image/svg+xml;base64,{data})"
        create_markdown_artifact(key=f"{key}-profile", markdown=markdown, description="What the setting was chosen by")
