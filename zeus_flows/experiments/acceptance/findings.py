"""What was found on a GPU, with a verdict and what to do; plain values that can be shown to anybody."""

from __future__ import annotations

import getpass
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

REPORT_IT = "please open an issue and attach the page"


class Verdict(StrEnum):
    """What a check says."""

    PASS = "pass"  # noqa: S105  no password
    FAIL = "fail"
    CANNOT_TELL = "cannot tell"


@dataclass(frozen=True, slots=True)
class Finding:
    """One check.

    Attributes:
        name: What was asked.
        verdict: The answer.
        found: What was measured.
        means: What that means for a job.
        todo: What to do, where something can be done.
    """

    name: str
    verdict: Verdict
    found: str
    means: str
    todo: str = ""


@dataclass(frozen=True, slots=True)
class AtLimit:
    """The load at one power limit.

    Attributes:
        limit_w: What was set.
        read_w: What the driver said afterwards.
        power_w: What the load drew.
        steps_per_s: How fast it was.
        slowed_by: Why clocks were lowered, as the driver says.
    """

    limit_w: float
    read_w: float
    power_w: float
    steps_per_s: float
    slowed_by: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SpanScatter:
    """How far spans of one length are apart under a steady load.

    Attributes:
        seconds: Their length.
        spans: How many there were.
        scatter: Standard deviation of their average power, as a share of it.
    """

    seconds: float
    spans: int
    scatter: float


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Everything that was measured.

    Attributes:
        about: The machine, as far as it matters.
        findings: The checks.
        limits: What each limit did, greatest first.
        spans: How spans scatter, by length.
        calls_ms: What the driver takes for a call, in milliseconds.
    """

    about: Mapping[str, str]
    findings: tuple[Finding, ...]
    limits: tuple[AtLimit, ...] = ()
    spans: tuple[SpanScatter, ...] = ()
    calls_ms: Mapping[str, float] = field(default_factory=dict)

    @property
    def failed(self) -> tuple[Finding, ...]:
        """The checks that failed."""
        return tuple(finding for finding in self.findings if finding.verdict is Verdict.FAIL)


def summary(findings: Sequence[Finding]) -> str:
    """Return the verdicts as one line.

    >>> summary([Finding("a", Verdict.PASS, "", ""), Finding("b", Verdict.FAIL, "", "")])
    '1 of 2 checks passed, 1 failed: b'
    """
    named = {v: [f.name for f in findings if f.verdict is v] for v in Verdict}
    text = f"{len(named[Verdict.PASS])} of {len(findings)} checks passed"
    if named[Verdict.FAIL]:
        text += f", {len(named[Verdict.FAIL])} failed: {', '.join(named[Verdict.FAIL])}"
    if named[Verdict.CANNOT_TELL]:
        text += f"; cannot tell: {', '.join(named[Verdict.CANNOT_TELL])}"
    return text


def masked(text: str) -> str:
    """Return a text that can be shown to anybody: no name of host, user or home folder, no whole UUID."""
    home = str(Path.home())
    if home != "/":
        text = text.replace(home, "~")
    for name, instead in ((socket.getfqdn(), "<host>"), (socket.gethostname(), "<host>"), (_user(), "<user>")):
        if len(name) > 2 and name != "root":
            text = re.sub(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", instead, text)
    return re.sub(r"\b(GPU|MIG)-([0-9a-fA-F]{4})[0-9a-fA-F-]{6,}", r"\1-\2…", text)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return ""
