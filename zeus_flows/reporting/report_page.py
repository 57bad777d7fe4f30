"""A job's report as one HTML file that needs nothing else: figures, tables and how sure each number is."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final

from zeus_flows.core.job_report import Estimate, SavedAgainst
from zeus_flows.core.pareto import SettingPoint
from zeus_flows.core.prices import KWH_J
from zeus_flows.core.reasons import ArmBelief
from zeus_flows.core.records import EnergySource, Outcome
from zeus_flows.core.savings import Line
from zeus_flows.core.text import setting_text
from zeus_flows.reporting import svg_charts as charts
from zeus_flows.reporting.job_report import JobReport
from zeus_flows.reporting.models_report import models_document
from zeus_flows.reporting.page import Card, ReportPage
from zeus_flows.reporting.report_text import (
    arm_rows,
    cells,
    columns,
    entry_columns,
    entry_row,
    preamble,
    rows_saved,
    sentences,
    window_rows,
)
from zeus_flows.reporting.savings import count, percent
from zeus_flows.reporting.text import cost_text, describe_arm, seconds
from zeus_flows.reporting.units import carbon_text, hours_text, kwh_text, money_text

_NINE_IN_TEN: Final = 1.645
_TABLE: Final = 50  # recurrences in the table; the chart has all that were read
_SOURCES: Final = {
    EnergySource.MEASURED: "Energy is measured: what the GPUs' own counters, or their sampled power, say.",
    EnergySource.SIMULATED: "Energy is SIMULATED: a model of the GPU, off by 1 to 2 % on the jobs it was fitted on. "
    "Simulated and measured runs are never mixed in one history.",
    EnergySource.NONE: "There are no joules here: no sensor, or a shared GPU. Everything is compared by time.",
}


def report_page(report: JobReport) -> str:
    """Return the report as HTML."""
    page = ReportPage(f"{report.job.name}: energy, money and carbon")
    for sentence in preamble(report):
        (page.note if sentence.startswith("The training was real") else page.text)(sentence)
    _headline(page, report)
    _waterfall(page, report)
    _scatter(page, report)
    _arms(page, report)
    _timeline(page, report)
    _windows(page, report)
    _models(page, report)
    _method(page, report)
    return page.html()


def _headline(page: ReportPage, report: JobReport) -> None:
    """Add the few numbers that a hurried reader takes away, and the table behind them."""
    rows = list(rows_saved(report))
    page.heading("Saved" if report.acts else "What could be saved")
    if rows:
        page.cards(list(_cards(report, rows[0][1])))
        page.table(["against", *columns(report)], [[label, *cells(report, saved)] for label, saved in rows])
    for sentence in sentences(report):
        page.text(sentence)


def _cards(report: JobReport, saved: SavedAgainst) -> Iterator[Card]:
    mark = " · SIMULATED" if report.source is EnergySource.SIMULATED else ""
    against = "against the default" if report.acts else "each recurrence could save"
    share = percent(saved.percent.amount, saved.percent.low, saved.percent.high)
    if saved.energy_kwh is not None:
        yield Card(f"energy{mark}", *_split(kwh_text(saved.energy_kwh)), f"{against}: {share}")
    if saved.money is not None:
        yield Card(f"money{mark}", *_split(money_text(saved.money, report.tariff.currency)), against)
    if saved.carbon_kg is not None:
        yield Card(f"CO2{mark}", *_split(carbon_text(saved.carbon_kg)), against)
    detail = against if saved.energy_kwh is not None else f"{against}: {share}"
    yield Card(f"training time{mark}", *_split(hours_text(saved.time_h)), detail)


def _split(text: str) -> tuple[str, str]:
    """Return a quantity and its doubt apart."""
    amount, _, doubt = text.partition(" ± ")
    return amount, f"± {doubt}" if doubt else ""


def _waterfall(page: ReportPage, report: JobReport) -> None:
    compared = report.saved.so_far
    if compared is None or not report.acts:
        return
    joules = not report.job.in_seconds
    scale, unit = _unit(compared.baseline.energy_j / KWH_J) if joules else (1 / 3600, "h")
    whole_of = (compared.baseline.energy_j / KWH_J if joules else compared.baseline.time_s) * scale
    digits = 0 if whole_of >= 100 else 1 if whole_of >= 10 else 2

    def of(line: Line, name: str) -> charts.WaterfallStep:
        low, amount, high = (
            (a.energy_j / KWH_J if joules else a.time_s) * scale for a in (line.low, line.amount, line.high)
        )
        return charts.WaterfallStep(name, amount, low, high, _signed(Estimate(amount, low, high), digits))

    def whole(value: float, name: str) -> charts.WaterfallStep:
        told = f"{value * scale:.3g} {unit}"
        return charts.WaterfallStep(name, value * scale, value * scale, value * scale, told, whole=True)

    before, after = ((a.energy_j / KWH_J if joules else a.time_s) for a in (compared.baseline, compared.spent))
    steps = [whole(before, "the default"), *(of(line, line.name) for line in compared.lines)]
    page.chart(
        charts.waterfall([*steps, whole(after, "what ran")], y_name=f"{'energy' if joules else 'time'} ({unit})"),
        f"What the default would have taken in {count(compared.recurrences, 'recurrence')}, what was saved by which "
        "means, and what ran. "
        "Whiskers hold the truth nine times in ten; learning is what trying other batch sizes and profiling cost.",
    )


def _signed(estimate: Estimate, digits: int) -> str:
    """Return a step as it changes the whole: a saving takes away."""
    text = f"{-estimate.amount:+.{digits}f}"
    doubt = f"{estimate.half:.{digits}f}"
    return ("0" if not float(text) else text) + (f" ± {doubt}" if float(doubt) else "")


def _unit(kwh: float) -> tuple[float, str]:
    """Return the unit that fits an energy: its factor from kilowatt hours, and its name."""
    return (1e-3, "MWh") if kwh >= 1000 else (1.0, "kWh") if kwh >= 1 else (1e3, "Wh")


def _scatter(page: ReportPage, report: JobReport) -> None:
    settings = report.settings
    if not settings or report.job.in_seconds:
        return
    page.heading("Energy against time")
    scale, unit = _unit(max(s.energy_j for s in settings) / KWH_J)
    longest = max(s.time_s for s in settings)
    per_s, time_unit = (1 / 3600, "h") if longest >= 7200 else (1 / 60, "min") if longest >= 120 else (1.0, "s")
    dots = [
        charts.Dot(
            s.time_s * per_s,
            s.energy_j / KWH_J * scale,
            str(s.batch_size),
            f"batch size {s.batch_size}{_at(report, s.setting)}: {kwh_text(s.energy_j / KWH_J)} in {seconds(s.time_s)}",
            mark=_mark(report, s),
            on_front=s.on_front,
        )
        for s in settings
    ]
    page.chart(
        charts.scatter(
            dots,
            [str(b) for b in sorted({s.batch_size for s in settings})],
            x_name=f"time to the target ({time_unit})",
            y_name=f"energy to the target ({unit})",
        ),
        "What a run to the target is expected to take at each batch size that reached it and each power limit that was "
        "measured: mean epochs of this drift window, at what an epoch takes by its profile. On the dashed line nothing "
        f"saves energy without taking more time. Best is the cheapest by the job's objective (eta {report.job.eta:g}).",
    )


def _at(report: JobReport, setting: float | None) -> str:
    return "" if setting is None else f" at {setting_text(setting, report.saved.default.knob)}"


def _mark(report: JobReport, point: SettingPoint) -> str:
    words = [*(["default"] if point.is_default else []), *(["best"] if point.is_best else [])]
    return f"{' and '.join(words)}: {point.batch_size}{_at(report, point.setting)}" if words else ""


def _arms(page: ReportPage, report: JobReport) -> None:
    if not report.arms:
        return
    page.heading("Batch sizes")
    known = [arm for arm in report.arms if arm.expected_cost_j]
    if known:
        scale, unit = (1.0, "s") if report.job.in_seconds else (1e-3, "kJ")
        best = report.saved.default.best_batch_size
        lines = [_range(arm, scale, strong=arm.batch_size == best) for arm in known]
        most = 30 * min(line.value for line in lines)
        shown = [
            charts.Range(a.name, a.value, a.low, min(a.high, most), a.told, a.strong) for a in lines if a.value < most
        ]
        page.chart(
            charts.ranges(shown, x_name=f"expected cost of a run ({unit}, logarithmic)"),
            "What is believed of each batch size: the expected cost of a run, and where it lies nine times in ten.",
        )
    page.table(["batch size", "best limit", "cost of a run", "known", ""], list(arm_rows(report)), words=("known", ""))


def _range(arm: ArmBelief, scale: float, *, strong: bool) -> charts.Range:
    cost, doubt = (arm.expected_cost_j or 0.0) * scale, math.exp(min(_NINE_IN_TEN * (arm.spread or 0.0), 5.0))
    return charts.Range(str(arm.batch_size), cost, cost / doubt, cost * doubt, describe_arm(arm), strong)


def _timeline(page: ReportPage, report: JobReport) -> None:
    entries = report.entries
    if not entries:
        return
    page.heading("Recurrences")
    joules, ahead = not report.job.in_seconds, report.saved.from_now_on
    values = [e.energy_j / KWH_J if joules else e.time_s / 3600 for e in entries]
    scale, unit = _unit(max(values)) if joules else (1.0, "h")
    baseline = None
    if ahead is not None:
        baseline = (ahead.baseline.energy_j / KWH_J if joules else ahead.baseline.time_s / 3600) * scale
    found = [
        charts.TimelineBar(
            entry.recurrence,
            value * scale,
            str(entry.batch_sizes[-1]),
            ", ".join(filter(None, entry_row(report, entry))),
            note="" if entry.outcome == Outcome.CONVERGED.value else "missed",
        )
        for entry, value in zip(entries, values, strict=True)
    ]
    boundaries = [
        run.first - 0.5 for run in report.drift.runs if entries[0].recurrence < run.first <= entries[-1].recurrence
    ]
    page.chart(
        charts.bars(
            found,
            [str(b) for b in sorted({e.batch_sizes[-1] for e in entries})],
            y_name=f"{'energy' if joules else 'time'} ({unit})",
            line=baseline,
            line_name="the default, as expected now" if baseline is not None else "",
            boundaries=boundaries,
        ),
        f"What each of {'all' if report.complete else 'the newest'} {count(len(entries), 'recurrence')} took, all "
        "attempts of it; by the batch size that ran last. "
        + ("A cross: the target was not reached. " if any(b.note for b in found) else "")
        + ("Dashed lines: a new drift window." if boundaries else ""),
    )
    rows = [entry_row(report, entry) for entry in reversed(entries[-_TABLE:])]
    page.table(entry_columns(report), rows, words=("outcome",))
    if len(entries) > _TABLE:
        page.text(f"The newest {_TABLE} of {len(entries)}; `zeus-flows report --json` has all that were read.")


def _windows(page: ReportPage, report: JobReport) -> None:
    if not report.drift.runs:
        return
    page.heading("Drift windows")
    names = ["window", "recurrences", "opened by", "best at its end"]
    page.table(names, list(window_rows(report)), words=("opened by",))
    evidence = [f"**Window {run.number}** ended: {run.evidence}" for run in report.drift.runs if run.evidence]
    if evidence:
        page.points(evidence)
    if report.drift.earlier:
        page.text(f"{count(report.drift.earlier, 'earlier window')} not shown.")


def _models(page: ReportPage, report: JobReport) -> None:
    models = report.models
    if models is None:
        return
    page.heading("Models")
    page.text(f"{models.why}.")
    rows = [_model_row(report, row) for row in reversed(models_document(models)["versions"][-10:])]
    if rows:
        page.table(["version", "recurrence", "batch size", "cost", "verdict"], rows, words=("verdict",))


def _model_row(report: JobReport, row: dict[str, object]) -> Sequence[str]:
    cost = row.get("cost_s" if report.job.in_seconds else "cost_j")
    verdict = {True: "accepted", False: "refused", None: "not judged"}[row["accepted"]]  # type: ignore[index]
    version = "not registered" if row["version"] is None else str(row["version"])
    if report.models is not None and row["version"] is not None:
        version += {report.models.champion: " champion", report.models.challenger: " challenger"}.get(
            int(str(row["version"])), ""
        )
    shown = cost_text(report.job, cost) if isinstance(cost, float) else ""
    return version, f"{row['recurrence']}.{row['attempt']}", str(row.get("batch_size", "")), shown, verdict


def _method(page: ReportPage, report: JobReport) -> None:
    page.heading("How this is known")
    points = [
        _SOURCES[report.source],
        "The default is what would have run without zeus_flows: its batch size at the power limit that was set before. "
        "Power-only is the same batch size at its best limit.",
        "What they would have taken is estimated from runs of the default batch size and its profile, unless control "
        "runs measured it. Intervals hold the truth nine times in ten; on 500 simulated jobs they did in 88 to 93 %.",
        "Failures, kills, observed runs and recurrences that cannot be compared are in no saving.",
    ]
    if report.tariff.prices or report.tariff.carbon:
        points.append(
            "Money and carbon follow from energy, and so does their doubt. Energy is charged at the hours in which "
            "attempts ran."
        )
    page.points(points)
