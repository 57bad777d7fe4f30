from __future__ import annotations

import logging
import time
from collections.abc import Callable

import pytest

from zeus_flows.errors import DeviceError, DeviceLost
from zeus_flows.gpu.watch import Watch


class Looked:
    """A GPU that answers what it is told to, the last answer for ever."""

    def __init__(self, *answers: tuple[str, ...] | Exception) -> None:
        self.answers = list(answers)

    def throttle_reasons(self) -> tuple[str, ...]:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


def watched(*answers: tuple[str, ...] | Exception, until: Callable[[Watch], bool] = lambda _: False) -> Watch:
    watch = Watch([Looked(*answers)], period_s=0.005)  # type: ignore[list-item]
    end = time.monotonic() + (5.0 if answers and isinstance(answers[-1], DeviceLost) else 0.1)
    while time.monotonic() < end and not until(watch):
        time.sleep(0.005)
    watch.close()
    watch.close()
    return watch


def test_a_lost_gpu_is_noticed_though_nobody_reads_it() -> None:
    watch = watched((), DeviceError("busy"), DeviceLost("gone"), until=lambda watch: watch.lost is not None)
    assert str(watch.lost) == "gone"


def test_what_slows_a_gpu_down_is_logged_once_and_power_caps_are_expected(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        watched(("power cap", "thermal slowdown"))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "thermal slowdown" in caplog.text
