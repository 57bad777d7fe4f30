"""The saved views of a job's experiment: what people open to compare recurrences.

A view is a tag of the experiment, which MLflow lists under *Views* (`page_state` has the format). The tag `zf.views`
says which were written and how, as digests. So one that somebody changed or deleted is told from ours, and is left
alone; and a recurrence that finds the digests it would write has nothing to do.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from zeus_flows.core.json import from_text, to_text
from zeus_flows.core.records import Outcome
from zeus_flows.core.settle import BATCH_SIZE, BY_KNOB, LEARNING, LUCK
from zeus_flows.ledger.mlflow import names
from zeus_flows.ledger.mlflow.names import RunKind
from zeus_flows.ledger.mlflow.page_state import (
    NEWEST_TEN,
    JsonObject,
    charts,
    line,
    metric,
    packed,
    parallel,
    param,
    scatter,
    table,
    tag,
)

#: What MLflow calls the tags that hold views; the view's id follows.
SHARED_VIEW: Final = "mlflow.sharedViewState."


class ViewId(StrEnum):
    """The views there are: what their addresses name them."""

    RECURRENCES = "zf-recurrences"
    OVER_RECURRENCES = "zf-over-recurrences"
    ENERGY_TIME = "zf-energy-time"
    WINDOWS = "zf-windows"
    EPOCHS = "zf-epochs"


#: The view that a job's link opens.
FIRST: Final = ViewId.RECURRENCES


class ViewFate(StrEnum):
    """What became of a view."""

    MADE = "made"
    CURRENT = "as it should be"
    RENEWED = "renewed"
    CHANGED = "changed by hand, left alone"
    DELETED = "deleted by hand, left alone"


@dataclass(frozen=True, slots=True)
class SavedView:
    """A saved view.

    Attributes:
        id: What its address names it.
        name: What the menu calls it.
        about: What it shows, for the experiment's description.
        state: MLflow's page.
    """

    id: ViewId
    name: str
    about: str
    state: JsonObject

    @property
    def key(self) -> str:
        """The experiment's tag that holds it."""
        return f"{SHARED_VIEW}{self.id}"

    @property
    def is_charts(self) -> bool:
        """Whether it opens on charts, not on the table: which of the two is in a view's address, not in the view."""
        return "compareRunCharts" in self.state

    @property
    def digest(self) -> str:
        """Names what would be written, whenever that is."""
        return _digest(self.name, packed(self.state))

    def text(self, now_s: float) -> str:
        """Return the tag's value."""
        now_ms = int(now_s * 1000)
        envelope = {"name": self.name, "createdAt": now_ms, "updatedAt": now_ms, "state": packed(self.state)}
        return json.dumps(envelope)

    def address(self, experiment_id: str) -> str:
        """Return where it is on MLflow's pages.

        >>> all_views(joules=False)[1].address("7")
        '#/experiments/7/runs?viewStateShareKey=zf-over-recurrences&compareRunsMode=CHART'
        """
        mode = "&compareRunsMode=CHART" if self.is_charts else ""
        return f"#/experiments/{experiment_id}/runs?viewStateShareKey={self.id}{mode}"


#: Every metric that runs have from us: MLflow would draw a chart of each.
_OURS: Final = (
    *(
        names.BATCH_SIZE,
        *names.SETTING.values(),
        names.ENERGY_TO_ACCURACY_J,
        names.TIME_TO_ACCURACY_S,
        names.HOST_ENERGY_J,
    ),
    *(names.COST_J, names.COST_S, names.SAVED_J, names.SAVED_S, names.EPOCHS, names.CONVERGED, names.ATTEMPTS),
    *(names.EPOCH_METRIC, names.EPOCH_ENERGY_J, names.EPOCH_TIME_S, *names.EPOCH_SETTING.values()),
    *(names.part(part, unit) for part in ("once", "evaluation", "rest", "training") for unit in "js"),
    *(names.SAVED_ENERGY_J, names.SAVED_ENERGY_LOW_J, names.SAVED_ENERGY_HIGH_J, names.SAVED_TIME_S),
    *(names.SAVED_COST_PERCENT, names.SAVED_RECURRENCES),
    *(names.SAVED_LOST_RECURRENCES, names.SAVED_SKIPPED_RECURRENCES),
    *(of(unit) for of in (names.saved_cost, names.saved_cost_low, names.saved_cost_high) for unit in "js"),
    *(
        names.saved_by(line.replace(" ", "_"), unit)
        for line in (*BY_KNOB.values(), BATCH_SIZE, LEARNING, LUCK)
        for unit in "js"
    ),
    *(names.GATE_VALUE, names.GATE_SKIPPED, names.GATE_AGE, names.GATE_TIME_S, names.GATE_ENERGY_J),
)


def all_views(*, joules: bool) -> tuple[SavedView, ...]:
    """Return the views of a job, in the order in which people need them.

    Args:
        joules: Whether the job has any; else cost is time.
    """
    cost, saved = (names.COST_J, names.SAVED_J) if joules else (names.COST_S, names.SAVED_S)
    energy = (names.ENERGY_TO_ACCURACY_J,) if joules else ()
    saved_energy = (names.SAVED_ENERGY_J,) if joules else ()
    took = (*energy, names.TIME_TO_ACCURACY_S)
    unit = "j" if joules else "s"
    traded = "Energy against time, and cost by batch size and power limit" if joules else "Time by batch size and limit"
    return (
        SavedView(
            ViewId.RECURRENCES,
            "Recurrences",
            "a row for each training: what was chosen, what it took and saved, and why",
            table(
                RunKind.ATTEMPT,
                {
                    metric(names.BATCH_SIZE): 105,
                    metric(names.POWER_LIMIT_W): 125,
                    **({metric(names.ENERGY_TO_ACCURACY_J): 170} if joules else {}),
                    metric(names.TIME_TO_ACCURACY_S): 160,
                    metric(cost): 85,
                    metric(names.EPOCHS): 85,
                    metric(saved): 90,
                    tag(names.OUTCOME): 100,
                    tag(names.REASON): 620,
                },
            ),
        ),
        SavedView(
            ViewId.OVER_RECURRENCES,
            "Over recurrences",
            "cost, energy, time, batch size and power limit over the job's life, and what was saved so far",
            charts(
                RunKind.DRIFT_WINDOW,
                {
                    "What each recurrence took": [line(cost), *map(line, took)],
                    "What was chosen": [line(names.BATCH_SIZE, log=True), *map(line, names.SETTING.values())],
                    "Saved so far, against the default": [
                        line(names.SAVED_COST_PERCENT),
                        line(names.saved_cost(unit), names.saved_cost_low(unit), names.saved_cost_high(unit)),
                        *map(line, (*saved_energy, names.SAVED_TIME_S)),
                    ],
                },
                hidden=_OURS,
            ),
        ),
        SavedView(
            ViewId.ENERGY_TIME,
            "Energy against time" if joules else "Time by batch size",
            "a point for each training that reached the target: what batch size and power limit trade",
            charts(
                RunKind.ATTEMPT,
                {
                    traded: [
                        *([scatter(names.TIME_TO_ACCURACY_S, names.ENERGY_TO_ACCURACY_J)] if joules else []),
                        scatter(names.BATCH_SIZE, cost),
                        scatter(names.POWER_LIMIT_W, cost),
                    ],
                    "Every choice and what it led to": [
                        parallel(names.BATCH_SIZE, names.POWER_LIMIT_W, names.EPOCHS, *took, cost)
                    ],
                },
                hidden=_OURS,
                also={names.OUTCOME: Outcome.CONVERGED},
            ),
        ),
        SavedView(
            ViewId.WINDOWS,
            "Drift windows",
            "a row for each stretch of recurrences between two drifts: what began and ended it",
            table(
                RunKind.DRIFT_WINDOW,
                {
                    **dict.fromkeys(
                        map(metric, (names.SAVED_RECURRENCES, names.SAVED_COST_PERCENT, *saved_energy)), 180
                    ),
                    param(names.WINDOW): 100,
                    param(names.FIRST_RECURRENCE): 150,
                    param(names.OPENED_BY): 120,
                    tag(names.BEST_BATCH_SIZE): 150,
                    tag(names.ENDED_BY): 110,
                    tag(names.EVIDENCE): 620,
                },
            ),
        ),
        SavedView(
            ViewId.EPOCHS,
            "Epochs of one recurrence",
            "how trainings went, epoch by epoch: choose them with the eye beside their names",
            charts(
                RunKind.ATTEMPT,
                {
                    "What was reached, epoch by epoch": [line(names.EPOCH_METRIC)],
                    "What epochs took, added up, and at which power limit": [
                        *([line(names.EPOCH_ENERGY_J)] if joules else []),
                        line(names.EPOCH_TIME_S),
                        *map(line, names.EPOCH_SETTING.values()),
                    ],
                },
                hidden=_OURS,
                runs=NEWEST_TEN,
                list_runs=True,
            ),
        ),
    )


def standing(view: SavedView, tags: Mapping[str, str], *, anew: bool = False) -> ViewFate:
    """Return what is to become of a view.

    Args:
        view: As it should be.
        tags: Of the experiment.
        anew: Whether to write it whatever somebody did to it.
    """
    ours, there = written(tags).get(view.id), tags.get(view.key)
    if there is None:
        return ViewFate.MADE if ours is None or anew else ViewFate.DELETED
    found = _digest_of(there)
    if found == view.digest:
        return ViewFate.CURRENT
    return ViewFate.RENEWED if anew or found == ours else ViewFate.CHANGED


def due(
    views: tuple[SavedView, ...], tags: Mapping[str, str], *, anew: bool = False, now_s: float | None = None
) -> dict[str, str]:
    """Return the tags that an experiment lacks to have its views; none where it has all that it should.

    Args:
        views: What it should have.
        tags: What it has.
        anew: Whether those count, too, that somebody changed or deleted.
        now_s: The time that views say they are of.
    """
    if not anew and all(written(tags).get(view.id) == view.digest for view in views):
        return {}
    at_s = time.time() if now_s is None else now_s
    wanted = {v.key: v.text(at_s) for v in views if standing(v, tags, anew=anew) in (ViewFate.MADE, ViewFate.RENEWED)}
    said = to_text({str(view.id): view.digest for view in views})
    return wanted | ({names.VIEWS: said} if tags.get(names.VIEWS) != said else {})


def written(tags: Mapping[str, str]) -> dict[str, str]:
    """Return the digests of the views that an experiment was given, by id."""
    try:
        return from_text(dict[str, str], tags[names.VIEWS])
    except (AttributeError, KeyError, TypeError, ValueError):
        return {}


def _digest_of(text: str) -> str:
    """Return the digest of a view as it is stored; empty where it cannot be read."""
    try:
        envelope = json.loads(text)
        return _digest(str(envelope["name"]), str(envelope["state"]))
    except (KeyError, TypeError, ValueError):
        return ""


def _digest(name: str, state: str) -> str:
    return hashlib.sha256(f"{name}\n{state}".encode()).hexdigest()[:16]
