"""The state of MLflow's page of runs, as a saved view of it stores it: columns, charts and which runs are drawn.

The format is MLflow's own and may change with it; `tests/browser` opens every view. Chart titles are metric names,
whatever a view says, so the words for people are the titles of sections.
"""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

from zeus_flows.ledger.mlflow import names
from zeus_flows.ledger.mlflow.query import having

JsonObject = dict[str, Any]

#: Draws every run that the filter leaves; without it charts have the newest ten only.
ALL_RUNS: Final = "SHOW_ALL"
NEWEST_TEN: Final = "FIRST_10_RUNS"
#: Where MLflow puts metrics without a slash that no chart of ours shows.
_THE_REST: Final = "Model metrics"


def metric(name: str) -> str:
    """Return the column of a metric.

    >>> metric("zf.cost_j")
    'metrics.`zf.cost_j`'
    """
    return f"metrics.`{name}`"


def param(name: str) -> str:
    """Return the column of a param."""
    return f"params.`{name}`"


def tag(name: str) -> str:
    """Return the column of a tag."""
    return f"tags.`{name}`"


def line(*metrics: str, log: bool = False) -> JsonObject:
    """Return a chart of metrics over steps, a line for each run.

    Args:
        metrics: Which; the first one is the chart's own.
        log: Whether the axis is logarithmic.
    """
    return {
        "type": "LINE",
        "metricKey": metrics[0],
        "selectedMetricKeys": list(metrics),
        "lineSmoothness": 0,
        "xAxisKey": "step",
        "xAxisScaleType": "linear",
        "scaleType": "log" if log else "linear",
        "range": {},
        "selectedXAxisMetricKey": "",
        "displayPoints": True,
        "yAxisKey": "metric",
        "yAxisExpressions": [],
        "ignoreOutliers": False,
        "useGlobalXaxisKey": True,
        "useGlobalLineSmoothing": True,
        "runsCountToCompare": 100,
    }


def scatter(x: str, y: str) -> JsonObject:
    """Return a chart with a point for each run: one metric against another."""
    return {
        "type": "SCATTER",
        "xaxis": {"key": x, "type": "METRIC"},
        "yaxis": {"key": y, "type": "METRIC"},
        "runsCountToCompare": 100,
    }


def parallel(*metrics: str) -> JsonObject:
    """Return a chart with an axis for each metric and a line for each run across them."""
    return {
        "type": "PARALLEL",
        "selectedParams": [],
        "selectedMetrics": list(metrics),
        "showAllRuns": False,
        "runsCountToCompare": 100,
    }


def table(kind: str, columns: Mapping[str, int]) -> JsonObject:
    """Return the page with a table of the runs of a kind, newest first.

    Args:
        kind: The value of their tag `zf.kind`.
        columns: Beside the run's name, in order, each with its width in pixels.
    """
    return _page(kind) | {
        "selectedColumns": list(columns),
        "columnOrder": list(columns),
        "columnWidths": dict(columns),
    }


def charts(
    kind: str,
    sections: Mapping[str, Sequence[JsonObject]],
    *,
    hidden: Sequence[str] = (),
    also: dict[str, str] | None = None,
    runs: str = ALL_RUNS,
    list_runs: bool = False,
) -> JsonObject:
    """Return the page with charts of the runs of a kind.

    Args:
        kind: The value of their tag `zf.kind`.
        sections: Charts by the title above them; one that stands alone has the whole width.
        hidden: Metrics that have no chart unless one is above; MLflow draws one for each that is not named.
        also: Further tags that the runs have.
        runs: Which are drawn at first: `ALL_RUNS` or `NEWEST_TEN`.
        list_runs: Whether the list of runs stands beside the charts.
    """
    shown, placed = list[JsonObject](), list[JsonObject]()
    for title, inside in sections.items():
        section_id = _id(kind, title)
        wide = {"columns": 1, "cardHeight": 420} if len(inside) == 1 else {}
        shown.append(_section(section_id, title, display=True) | wide)
        for chart in inside:
            placed.append(
                chart
                | {
                    "uuid": _id(section_id, json.dumps(chart, sort_keys=True)),
                    "metricSectionId": section_id,
                    "deleted": False,
                    "isGenerated": False,
                }
            )
    rest = _section(_id(kind, _THE_REST), _THE_REST, display=False)  # the user's own metrics: closed, below ours
    own = {chart.get("metricKey") for chart in placed}
    placed += [
        {"type": "LINE", "metricKey": name, "uuid": _id(kind, name), "metricSectionId": rest["uuid"]}
        | {"deleted": True, "isGenerated": True}
        for name in hidden
        if name not in own
    ]
    return _page(kind, also) | {
        "compareRunSections": [*shown, rest],
        "compareRunCharts": placed,
        "isAccordionReordered": True,
        "runsHiddenMode": runs,
        "runListHidden": not list_runs,
    }


def packed(state: JsonObject) -> str:
    """Return a page's state as MLflow stores it: the same state always gives the same text."""
    text = json.dumps(state, sort_keys=True, separators=(",", ":"))
    return "deflate;" + base64.b64encode(zlib.compress(text.encode(), 9)).decode()


def unpacked(text: str) -> JsonObject:
    """Return the state that a text holds.

    >>> unpacked(packed({"searchFilter": ""}))
    {'searchFilter': ''}
    """
    state: JsonObject = json.loads(zlib.decompress(base64.b64decode(text.removeprefix("deflate;"))))
    return state


def _page(kind: str, also: dict[str, str] | None = None) -> JsonObject:
    return {
        "searchFilter": having({names.KIND: kind} | (also or {})),
        "orderByKey": "attributes.start_time",
        "orderByAsc": False,
        "startTime": "ALL",
        "lifecycleFilter": "Active",
        "datasetsFilter": [],
        "modelVersionFilter": "All Runs",
        "selectedColumns": [],
        "columnOrder": [],
        "columnWidths": {},
        "runsHiddenMode": ALL_RUNS,
        "runListHidden": False,
        "hideEmptyCharts": True,
        "groupBy": None,
        "groupsExpanded": {},
        "useGroupedValuesInCharts": True,
        "globalLineChartConfig": {"xAxisKey": "step", "lineSmoothness": 0, "selectedXAxisMetricKey": ""},
    }


def _section(section_id: str, title: str, *, display: bool) -> JsonObject:
    return {
        "uuid": section_id,
        "name": title,
        "display": display,
        "isReordered": True,
        "deleted": False,
        "isGenerated": False,
    }


def _id(*parts: str) -> str:
    """Return an id that is the same for the same parts."""
    return hashlib.sha256("/".join(parts).encode()).hexdigest()[:20]
