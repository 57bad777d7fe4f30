"""Who took which recurrence: numbers are unique, whoever asks at the same time."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from dataclasses import replace
from itertools import count

from zeus_flows.killpoints import reached
from zeus_flows.ledger.lease import Holder, read_holder
from zeus_flows.ledger.mlflow import names, pages
from zeus_flows.ledger.mlflow.client import Store
from zeus_flows.ledger.mlflow.layout import Layout
from zeus_flows.ledger.mlflow.pages import Page


class Claims:
    """Takes recurrence numbers. A claim is a write-once param of a page.

    Args:
        store: MLflow, as bounded calls.
        layout: The pages.
    """

    def __init__(self, store: Store, layout: Layout) -> None:
        self._store, self._layout = store, layout

    def take(
        self,
        holder: Holder,
        token: str | None = None,
        *,
        asked_before: bool = False,
        claims: Mapping[int, str] | None = None,
    ) -> tuple[int, str | None]:
        """Take the next recurrence number; return it and what claims it, or None for that where others were faster.

        Args:
            holder: Who takes it.
            token: Names the recurrence before it has a number.
            asked_before: The token may have a number already, or others may ask for it now: all get the same one. Reads
                every page.
            claims: Those that were read just now; the newest page is read where there are none.
        """
        token = token or uuid.uuid4().hex
        if asked_before and (taken := self._numbers_of(token)):
            return taken[0], None
        number, claim = self._take(holder, token, claims)
        if not asked_before:
            return number, claim
        first = self._numbers_of(token)[0]  # numbers are taken in order: whoever took a later one sees the first
        if first != number:
            self._store.set_once(self._layout.page_of(number), names.end(number), pages.DEAD)
        return first, None

    def _numbers_of(self, token: str) -> list[int]:
        """Return the numbers that a token has taken, ascending."""
        claims = self._layout.read_pages(0).claims
        return sorted(n for n, claim in claims.items() if (taker := read_holder(claim)) and taker.token == token)

    def _take(self, holder: Holder, token: str, claims: Mapping[int, str] | None) -> tuple[int, str | None]:
        mine, number = replace(holder, token=token, beat=0).dump(), 0
        if not claims:
            number = max(self._layout.page_ids(), default=0)
            claims = self._layout.read_page(number).claims
        for tries in count():
            recurrence = max(claims, default=number * pages.SIZE) + 1
            number = pages.number_of(recurrence)
            reached("before-claim")
            lost_to = self._store.lost_to(self._layout.page(number), names.claim(recurrence), mine)
            if lost_to is None:
                reached("after-claim")
                return recurrence, mine if tries == 0 else None
            claims = Page().read(lost_to).claims
            time.sleep(_pause_s(tries))
        raise AssertionError("unreachable")


def open_claims(page: Page) -> Mapping[int, str]:
    """Return recurrences that were taken and have not ended, with who took them."""
    return {number: holder for number, holder in page.claims.items() if number not in page.ended}


def _pause_s(tries: int) -> float:
    """Return how long to wait after a lost race: at random, so that those who lost together part."""
    return uuid.uuid4().int % 1000 / 1000 * min(0.5, 0.02 * 2.0 ** min(tries, 9))
