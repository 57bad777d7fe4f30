"""Figures of clocks are drawn from plain values, the same bytes each time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from clock_traces import aimless, periodic

from zeus_flows.core.clock_model import ClockReading, closed_form
from zeus_flows.core.period import Period, detect_period
from zeus_flows.reporting.clock_figures import clock_figure, period_figure
from zeus_flows.reporting.figures import write


def test_the_trace_is_drawn_with_its_period_or_with_why_it_has_none(tmp_path: Path) -> None:
    trace, _ = periodic(1.3, 40.0, np.random.default_rng(3))
    found = detect_period(trace)
    assert isinstance(found, Period)
    svg, png = write(period_figure(trace, found, title="a job", simulated=True), tmp_path, "period")
    text = svg.read_text(encoding="utf-8")
    assert "period 1.3 s" in text
    assert "simulated" in text
    again, _ = write(period_figure(trace, found, title="a job", simulated=True), tmp_path, "again")
    assert again.read_bytes() == svg.read_bytes()
    assert png.stat().st_size > 10_000
    walk = aimless("walk", 300, np.random.default_rng(0), alike=True)
    svg, _ = write(period_figure(walk, detect_period(walk), title="a job"), tmp_path, "none")
    assert "no period" in svg.read_text(encoding="utf-8")


def test_every_measured_clock_is_on_the_curve_and_the_kept_one_is_marked(tmp_path: Path) -> None:
    measured = [ClockReading(1400, 200, 1.0), ClockReading(1120, 170, 1.06), ClockReading(1200, 178, 1.04)]
    predicted = closed_form(measured[0], measured[1], [800.0, 1000.0, 1200.0, 1400.0], 1400.0)
    figure = clock_figure(
        measured, predicted, default_mhz=1400, chosen_mhz=1200, title="a job", slowdown=1.05, simulated=True
    )
    svg, _ = write(figure, tmp_path, "clocks")
    text = svg.read_text(encoding="utf-8")
    for said in ("1400", "1120", "1200", "kept", "predicted", "at most +5 % time", "simulated"):
        assert said in text
