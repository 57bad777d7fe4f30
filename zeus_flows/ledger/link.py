"""Whether MLflow answers, as far as this process knows."""

from __future__ import annotations

from enum import Enum, auto


class LinkState(Enum):
    """What was last seen of MLflow."""

    ANSWERS = auto()
    AWAY = auto()


class Link:
    """The link to MLflow, shared by the thread that decides and the one that delivers.

    Either may find MLflow away. Only a delivery, or a heartbeat, that arrived says that it is back.
    """

    def __init__(self) -> None:
        self._state = LinkState.ANSWERS

    @property
    def is_away(self) -> bool:
        """Whether MLflow did not answer when it was last asked."""
        return self._state is LinkState.AWAY

    def lost(self) -> bool:
        """Note that MLflow did not answer; return whether that is news."""
        before, self._state = self._state, LinkState.AWAY
        return before is LinkState.ANSWERS

    def heard(self) -> None:
        """Note that MLflow took what was delivered."""
        self._state = LinkState.ANSWERS
