"""The report of an experiment: what was run, what came out, and what the data can and cannot show."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from zeus_flows.core.drift_windows import Cause, fold_windows
from zeus_flows.core.job import Drift
from zeus_flows.experiments.capriccio.bert import describe
from zeus_flows.experiments.capriccio.contenders import ContenderRun, Experiment
from zeus_flows.experiments.capriccio.results import SliceOutcome
from zeus_flows.experiments.capriccio.science import (
    NOTICED_WITHIN,
    Detection,
    Findings,
    Interval,
    recorded_regret,
)
from zeus_flows.ledger.mlflow import names
from zeus_flows.reporting import figures
from zeus_flows.reporting.page import ReportPage
from zeus_flows.reporting.text import joules, seconds

LOOKS_FOR_DRIFT = ("thompson", "lookahead")  # policies with a detector
REFERENCE = "no-window"  # what others are compared with, where it takes part


@dataclass(frozen=True, slots=True)
class Science:
    """What was found in the slices as they were, in the placebo, and about the detector."""

    real: Findings
    placebo: Findings | None = None
    detector: str | None = None
    detections: tuple[Detection, ...] = ()


@dataclass(frozen=True, slots=True)
class Report:
    """A report that has been written.

    Attributes:
        page: Its text.
        files: Everything that was written, the page first.
        values: Results, by the names MLflow shows.
    """

    page: ReportPage
    files: tuple[Path, ...]
    values: Mapping[str, float]


def write_report(experiment: Experiment, science: Science | None, folder: Path) -> Report:
    """Write figures and page into a folder."""
    page = ReportPage(f"{experiment.file.name}: policies on {len(experiment.slices)} slices that drift")
    outcomes = experiment.outcomes()
    files: list[Path] = []
    values: dict[str, float] = {}
    _summary(page, experiment, outcomes, science, values)
    page.heading("Energy, time and batch size per slice")
    page.text("As figure 10 of the paper has it: one point per slice, all attempts of its recurrence together.")
    for contender in experiment.contenders:
        if contender.job.policy in ("default", "power"):
            continue
        windows = fold_windows(contender.job, contender.observations())
        figure = figures.figure_10(
            figures.points(contender.observations()),
            windows,
            title=f"{contender.name} ({contender.job.policy}) on {contender.trainer.gpu.key}",
            unit="slice",
            simulated=experiment.file.simulated,
            skipped=[part.number for part in experiment.slices if part.number not in outcomes[contender.name]],
        )
        drawn = figures.write(figure, folder, f"figure-10-{contender.name}")
        files += drawn
        page.figure(drawn[0], f"{contender.name}: energy to accuracy, time to accuracy and batch size per slice.")
        page.points(
            [f"slice {w.last}: {w.ended_by.text}" for w in windows if w.ended_by and w.ended_by.kind is Cause.DRIFT]
            or [_no_drift(contender)]
        )
    if science is not None:
        files += _science(page, experiment, outcomes, science, folder, values)
    _limits(page, experiment, science)
    _data(page, experiment, outcomes)
    html, markdown = folder / "report.html", folder / "report.md"
    html.write_text(page.html(), encoding="utf-8")
    markdown.write_text(page.markdown(), encoding="utf-8")
    return Report(page, (html, markdown, *files), values)


def _no_drift(contender: ContenderRun) -> str:
    if contender.job.policy in LOOKS_FOR_DRIFT and contender.job.drift is Drift.RESET:
        return f"{contender.name} noticed no drift in this run."
    return f"{contender.name} does not look for drift; a window forgets by age, if there is one."


def _summary(
    page: ReportPage,
    experiment: Experiment,
    outcomes: Mapping[str, Mapping[int, SliceOutcome]],
    science: Science | None,
    values: dict[str, float],
) -> None:
    trainer, file = experiment.curves.trainer, experiment.file
    dataset, first, last = trainer.dataset, experiment.slices[0], experiment.slices[-1]
    job = trainer.job
    page.text(
        f"{dataset.name}: {len(dataset):,} rows from {dataset.times[0]} to {dataset.times[-1]} (digest "
        f"`{dataset.digest}`), cut into {len(experiment.slices)} slices that begin on {first.day} to {last.day}. "
        f"On each, every policy retrains a model ({file.model.kind}, {trainer.train_rows:,} rows) until "
        f"`{job.target.metric}` is "
        f"{'at most' if job.target.better == 'lower' else 'at least'} {job.target.value:g}, choosing among batch sizes "
        f"{', '.join(map(str, job.batch_sizes))}; {job.default_batch_size} is the default."
    )
    if file.simulated:
        page.note(
            "Simulated energy: the training is real, joules and seconds come from a model of the GPU "
            f"({experiment.contenders[0].trainer.gpu.key}). They compare policies; they are not measurements."
        )
    replayed = list(science.real.replays) if science is not None else list(file.contenders)
    reference = REFERENCE if REFERENCE in replayed else replayed[0]
    base = sum(o.cost_j for o in outcomes["default"].values()) if "default" in outcomes else None
    rows, regrets = [], []
    for contender in experiment.contenders:
        name, mine = contender.name, outcomes[contender.name]
        cost = sum(o.cost_j for o in mine.values())
        values[names.total_cost_j(name)] = cost
        rows.append(
            [
                name,
                joules(sum(o.energy_j for o in mine.values())),
                seconds(sum(o.time_s for o in mine.values())),
                joules(cost),
                "" if not base or name == "default" else f"{100 * (cost / base - 1):+.1f} %",
                str(sum(not o.converged for o in mine.values())),
                str(len(experiment.slices) - len(mine)),
            ]
        )
        if science is not None and name in science.real.replays:
            regret = recorded_regret((mine[s.number].cost_j for s in experiment.slices), science.real.oracle).sum()
            values[names.regret(name)] = float(regret)
            values[names.regret_expected(name)] = science.real.regret(name).mean
            apart = "" if name == reference else str(science.real.difference(name, reference))
            compared = "default" in science.real.replays and name != "default"
            saved = f"{science.real.cost_against(name, 'default')} %" if compared else ""
            regrets.append([name, f"{regret:.2f}", str(science.real.regret(name)), apart, saved])
    page.table(["policy", "energy", "time", "cost", "against default", "targets missed", "slices skipped"], rows)
    if regrets:
        page.table(
            [
                "policy",
                "regret of this run",
                "mean regret of replays",
                f"more than {reference}",
                "cost of replays against default",
            ],
            regrets,
        )
    if science is not None:
        replays = next(iter(science.real.replays.values())).regret.shape[0]
        page.text(
            "Regret is dynamic and exact: cost above that of the slice's best batch size, whose expected cost is known "
            f"because every batch size was trained on every slice with {file.science.seeds} seeds, from which the "
            "recurrences draw. It is in runs of the best batch size. Brackets: 95 % intervals, by bootstrap over "
            f"{replays} replays of the whole experiment with other seeds; differences are taken replay by replay."
        )


def _science(
    page: ReportPage,
    experiment: Experiment,
    outcomes: Mapping[str, Mapping[int, SliceOutcome]],
    science: Science,
    folder: Path,
    values: dict[str, float],
) -> list[Path]:
    oracle, slices = science.real.oracle, experiment.slices
    files: list[Path] = []

    def draw(name: str, figure: object, caption: str) -> None:
        drawn = figures.write(figure, folder, name)  # type: ignore[arg-type]
        files.extend(drawn)
        page.figure(drawn[0], caption)

    page.heading("Regret")
    regret = {name: replays.regret for name, replays in science.real.replays.items()}
    draw(
        "regret",
        figures.regret_figure(regret, title="Cumulative dynamic regret, all replays"),
        "Lines are means over the replays, bands the middle 90 % of them.",
    )
    learners = [c.name for c in experiment.contenders if c.job.policy not in ("default", "power")]
    learners = [name for name in learners if name in science.real.replays]
    shown = [n for n in ("window-10", "drift-reset") if n in learners] or learners[:2]
    paths = {name: [outcomes[name][s.number].batch_size for s in slices] for name in shown}
    page.heading("The best batch size of each slice")
    draw(
        "arms",
        figures.arms_figure(
            oracle.costs_j, oracle.batch_sizes, paths, title="What every batch size costs on each slice"
        ),
        "Expected cost above the best batch size of the slice; grey: some seed misses the target.",
    )
    changes = sum(a != b for a, b in zip(oracle.best_arms, oracle.best_arms[1:], strict=False))
    page.text(
        f"The best batch size changes {changes} times; best throughout would have been {oracle.best_fixed_arm}, which "
        f"costs {100 * oracle.worth_of_adapting:.1f} % more than the best of each slice. "
        f"**No policy can gain more than these {100 * oracle.worth_of_adapting:.1f} % over a fixed batch size by "
        "following the drift.**"
        + (
            ""
            if science.placebo is None
            else f" With time shuffled the same figure is {100 * science.placebo.oracle.worth_of_adapting:.1f} %: so "
            "much comes without any drift."
        )
    )
    values[names.WORTH_OF_ADAPTING] = oracle.worth_of_adapting
    hopeless = int((~oracle.always_reaches).all(axis=1).sum())
    if hopeless:
        page.note(
            f"On {hopeless} slices no batch size reaches the target with every seed: the target is too hard for them."
        )
    page.heading("What drifts")
    arm = oracle.batch_sizes.index(oracle.best_fixed_arm)
    placebo = science.placebo
    draw(
        "data",
        figures.data_figure(
            [s.positive for s in slices],
            [s.overlap for s in slices],
            np.exp(oracle.log_epochs[:, arm]),
            None if placebo is None else np.exp(placebo.oracle.log_epochs[:, arm]),
            title="Labels, overlap, and epochs to the target",
            arm=oracle.best_fixed_arm,
        ),
        "Dots are training runs with different seeds, lines their means.",
    )
    page.text(
        f"Epochs to the target vary by {100 * oracle.between_slices:.0f} % between slices and by "
        f"{100 * oracle.between_runs:.0f} % between seeds on one slice"
        + (
            "."
            if placebo is None
            else f"; with time shuffled, by {100 * placebo.oracle.between_slices:.0f} % and "
            f"{100 * placebo.oracle.between_runs:.0f} %. Shuffled slices overlap just as much, so what remains between "
            "them is which rows a slice happens to hold, not drift."
        )
    )
    if placebo is not None:
        _placebo(page, science, placebo, values)
    return files


def _placebo(page: ReportPage, science: Science, placebo: Findings, values: dict[str, float]) -> None:
    page.heading("Placebo: the same rows with time shuffled")
    page.table(
        [
            "policy",
            "regret as it was",
            "regret, shuffled",
            "resets per 100 as it was",
            "false alarms per 100, shuffled",
        ],
        [
            [
                name,
                str(science.real.regret(name)),
                str(placebo.regret(name)),
                str(science.real.alarm_rate(name)),
                str(placebo.alarm_rate(name)),
            ]
            for name in science.real.replays
        ],
    )
    if science.detector is None:
        return
    rate = placebo.alarm_rate(science.detector)
    values[names.FALSE_ALARMS_PER_100] = rate.mean
    page.heading("The detector on trial")
    page.text(
        f"`{science.detector}` forgets what it knows of epochs when runs surprise it. In the placebo nothing drifts, "
        f"so every reset there is a false alarm: {rate} per 100 recurrences. With a change planted in the middle of "
        "the "
        f"placebo (every batch size takes a factor more epochs), it was noticed within {NOTICED_WITHIN} recurrences "
        "(intervals of shares are Clopper and Pearson's):"
    )
    page.table(
        ["epochs times", "noticed in", "after, on average"],
        [
            [f"{d.factor:g}", f"{_percent(d.noticed)} of replays", f"{d.delay} recurrences" if d.delay else ""]
            for d in science.detections
        ],
    )
    for d in science.detections:
        values[names.noticed(f"{d.factor:g}")] = d.noticed.mean


def _percent(share: Interval) -> str:
    return f"{100 * share.mean:.0f} % [{100 * share.low:.0f}, {100 * share.high:.0f}]"


def _limits(page: ReportPage, experiment: Experiment, science: Science | None) -> None:
    slices = experiment.slices
    overlaps = [s.overlap for s in slices[1:]]
    balance = np.array([s.positive for s in slices])
    page.heading("What this can and cannot show")
    items = []
    if overlaps:
        items.append(
            f"Neighbouring slices share {100 * min(overlaps):.0f} to {100 * max(overlaps):.0f} % of their rows (median "
            f"{100 * float(np.median(overlaps)):.0f} %); {sum(o == 1.0 for o in overlaps)} repeat the one before. "
            f"{len(slices)} slices are far fewer than {len(slices)} independent trials."
        )
    half = len(slices) // 2
    early, late = np.ptp(balance[: half or 1]), np.ptp(balance)
    items.append(
        f"Positive labels go from {100 * balance[0]:.0f} to {100 * balance[-1]:.0f} % of a slice; "
        f"within the first half of the slices they move by {100 * early:.0f} points of the {100 * late:.0f} in all. "
        "Accuracy alone would take a shift of the labels for learning: look at balanced accuracy."
    )
    if science is not None:
        items.append(
            "Regret is exact for this model, target and simulated GPU. The intervals are about the luck of training "
            "and deciding on these slices, not about other data sets, models or GPUs."
        )
        if len({c.job.policy for c in experiment.contenders}) > 1:
            items.append(
                "Contenders of different policies differ in more than how they meet drift: compare those of one policy "
                "to see what a window or a reset adds."
            )
        if science.real.oracle.worth_of_adapting < 0.05:
            items.append(
                f"Following the drift is worth at most {100 * science.real.oracle.worth_of_adapting:.1f} % here: this "
                "data can show that a policy does no harm under drift, hardly that it gains by it."
            )
    elif experiment.file.simulated:
        items.append(
            "No replays were asked for (`science.replays`), or every contender has a gate: there is no regret here, "
            "and one run of each contender says little."
        )
    else:
        items.append("Energy was measured, so runs cannot be repeated at will: there is no oracle and no regret here.")
    model = experiment.file.model
    what = describe(model.directory) if model.kind == "bert" and model.directory else "a small model"
    items.append(f"The paper trains BERT; this is {what}. Epochs, and what drifts of them, may differ.")
    page.points(items)


def _data(page: ReportPage, experiment: Experiment, outcomes: Mapping[str, Mapping[int, SliceOutcome]]) -> None:
    page.heading("Slices")
    name = "drift-reset" if "drift-reset" in outcomes else next(iter(outcomes))
    bad = experiment.curves.trainer.dataset.malformed
    if bad.bad:
        lines = ", ".join(f"{line} ({why})" for line, why in bad.first)
        more = " ..." if bad.bad > len(bad.first) else ""
        page.text(f"{bad.bad:,} of {bad.lines:,} lines were malformed and left out: {lines}{more}.")
    page.text(f"Scores are those of {name} at the end of its recurrence, on rows held out.")
    rows = []
    for part in experiment.slices:
        outcome = outcomes[name].get(part.number)
        scores = outcome.scores if outcome else None
        rows.append(
            [
                f"{part.number} · {part.day}",
                f"{part.rows:,}",
                f"{100 * part.overlap:.0f} %" if part.number > 1 else "",
                f"{100 * part.positive:.1f} %",
                f"{100 * part.majority:.1f} %",
                f"{100 * scores.accuracy:.1f} %" if scores else "",
                f"{100 * scores.balanced_accuracy:.1f} %" if scores else "",
                str(outcome.epochs) if outcome else "",
                "→".join(map(str, outcome.batch_sizes)) if outcome else "",
            ]
        )
    columns = ["slice", "rows", "shared", "positive", "majority", "accuracy", "balanced", "epochs", "batch size"]
    page.table(columns, rows)
