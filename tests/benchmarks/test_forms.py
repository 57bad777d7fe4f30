"""What `benchmarks/forms.py` makes of made-up steps."""

from __future__ import annotations

import resource
import time
from types import SimpleNamespace

import forms
import pytest


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that stands still but for the 10 ms of a step, and what a test adds."""
    now = SimpleNamespace(s=0.0)
    monkeypatch.setattr(time, "perf_counter", lambda: now.s)
    monkeypatch.setattr(time, "monotonic", lambda: now.s)
    monkeypatch.setattr(time, "process_time", lambda: now.s / 2)
    usage = SimpleNamespace(ru_nivcsw=0)
    monkeypatch.setattr(resource, "getrusage", lambda _: usage)
    monkeypatch.setattr(forms, "spin", lambda seconds: setattr(now, "s", now.s + seconds))
    return now


def test_a_callback_is_compared_with_none_in_turns_and_by_what_is_outside_of_a_step(clock: SimpleNamespace) -> None:
    watched = forms.Watched(rounds=3)
    watched.callbacks, watched.ours = ["theirs", "ours"], "ours"
    turns: list[bool] = []

    def train() -> None:
        for step in range(10_000):
            watched.profiled = lambda step=step: step > 3 * forms.BLOCK  # type: ignore[misc]
            turns.append("ours" in watched.callbacks)
            watched.step()
            clock.s += (0.004 if step <= 4 * forms.BLOCK else 0.002) if "ours" in watched.callbacks else 0.001

    with pytest.raises(forms.Enough):
        train()
    profiling, after, cpu_profiling, cpu_after = forms.figures("made up", watched.rounds)
    assert (profiling.rounds, after.rounds) == (2, 3)
    assert (profiling.value, after.value, after.worst) == pytest.approx((14 / 11, 12 / 11, 12 / 11), rel=1e-2)
    assert (cpu_profiling.value, cpu_after.value) == pytest.approx((12 / 10.5, 11 / 10.5), rel=1e-2)
    assert not after.good
    assert turns.count(True) == pytest.approx(turns.count(False), abs=10)
    assert watched.clock() < clock.s / 2 + 0.5


def test_by_the_clock_steps_in_which_another_program_had_the_core_are_left_out() -> None:
    quiet, disturbed = forms.Spent(0.001, 0.001), forms.Spent(0.050, 0.002, disturbed=True)
    pair = {True: [quiet, disturbed], False: [quiet, quiet]}
    by_clock, by_cpu = forms.figures("made up", {False: [pair], True: []})
    assert (by_clock.value, by_clock.good) == (1.0, True)
    assert by_cpu.value == pytest.approx(11.5 / 11)
    nobody_left = {True: [disturbed], False: [quiet]}
    assert [f.what[-14:] for f in forms.figures("x", {False: [nobody_left], True: []})] == ["CPU, profiling"]
