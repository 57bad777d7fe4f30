"""What one look at a ledger found, and what a recurrence taught beyond it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from zeus_flows.core import policy
from zeus_flows.core.drift_windows import Boundary
from zeus_flows.ledger.mlflow.attempts import OpenAttempt
from zeus_flows.ledger.mlflow.pages import Page
from zeus_flows.ledger.mlflow.window_run import CurrentWindow


@dataclass(frozen=True, slots=True)
class Reading:
    """What one look at a ledger found.

    Attributes:
        window: The drift window that was the current one.
        page: The pages since the snapshot, as one.
        still_open: Attempts on them without an observation.
        state: The fold of all closed attempts.
        upto: How far nothing can be added to the history any more.
        closed: The fold up to there.
        saved: How far a snapshot covers it.
        outdated: Whether it grew from a snapshot that serves, but is to be folded anew.
        passed: The fold at the end of each page that was passed, where that page has no snapshot yet.
    """

    window: CurrentWindow
    page: Page
    still_open: tuple[OpenAttempt, ...]
    state: policy.State
    upto: int
    closed: policy.State
    saved: int
    outdated: bool
    passed: Mapping[int, policy.State] = field(default_factory=dict)

    @property
    def lag(self) -> int:
        """How many recurrences a new snapshot would cover that the last one does not."""
        return 0 if self.outdated else self.upto - self.saved


@dataclass(frozen=True, slots=True)
class Learnt:
    """The state after a recurrence, and the boundary that it makes, if any.

    Attributes:
        whole: Whether the state has all sums; not where an earlier version wrote the snapshot it grew from.
    """

    after: policy.State
    boundary: Boundary | None
    whole: bool = True
