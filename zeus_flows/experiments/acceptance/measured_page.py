"""The acceptance test as one page to attach to an issue: it needs nothing else and names no host and no user."""

from __future__ import annotations

import json

from zeus_flows.core.json import jsonable
from zeus_flows.experiments.acceptance.findings import Acceptance, AtLimit, summary
from zeus_flows.reporting.page import ReportPage


def document(measured: Acceptance) -> dict[str, object]:
    """Return everything as plain JSON values."""
    plain: dict[str, object] = jsonable(measured)
    return {"summary": summary(measured.findings), **plain}


def page(measured: Acceptance) -> ReportPage:
    """Return the page."""
    shown = ReportPage(f"zeus-flows on {measured.about.get('GPU', 'a GPU')}")
    shown.text(f"**{summary(measured.findings)}.** Made by `zeus-flows doctor --measure`.")
    rows = [
        (f.verdict, f.name, f.found, "; ".join(text for text in (f.means, f.todo) if text)) for f in measured.findings
    ]
    shown.table(("verdict", "check", "found", "means, and what to do"), [tuple(map(_cell, row)) for row in rows])
    shown.heading("The machine")
    shown.table(("what", "is"), [(name, _cell(text)) for name, text in measured.about.items()])
    if measured.limits:
        shown.heading("What each limit does")
        shown.table(
            ("limit", "read back", "power", "steps a second", "speed", "energy a step", "clocks lowered by"),
            [_limit_cells(row, measured.limits[0]) for row in measured.limits],
        )
    if measured.spans:
        shown.heading("How far spans scatter")
        shown.table(
            ("length", "spans", "standard deviation of their power"),
            [(f"{span.seconds:g} s", str(span.spans), f"{span.scatter:.2%}") for span in measured.spans],
        )
    if measured.calls_ms:
        shown.heading("What the driver takes for a call")
        shown.table(("call", "median"), [(name, f"{took:g} ms") for name, took in measured.calls_ms.items()])
    shown.heading("The same for programs")
    shown.text(f"`{json.dumps(document(measured), ensure_ascii=False)}`")
    return shown


def _limit_cells(row: AtLimit, top: AtLimit) -> tuple[str, ...]:
    if not row.steps_per_s:  # it was not taken, and nothing was run at it
        return f"{row.limit_w:g} W", f"{row.read_w:g} W", "", "", "", "", ""
    return (
        *(f"{row.limit_w:g} W", f"{row.read_w:g} W", f"{row.power_w:.1f} W", f"{row.steps_per_s:.2f}"),
        *(f"{row.steps_per_s / top.steps_per_s:.1%}", f"{row.power_w / row.steps_per_s:.2f} J"),
        ", ".join(row.slowed_by),
    )


def _cell(text: str) -> str:
    return str(text).replace("|", "/").replace("\n", " ")
