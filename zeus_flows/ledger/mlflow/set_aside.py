"""What a drift window's tags say about what its recurrences share, and about what stopped counting when it began."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from zeus_flows.core.json import from_text, to_text
from zeus_flows.ledger.mlflow import names
from zeus_flows.ledger.mlflow.record_text import fits_tag
from zeus_flows.ledger.protocol import SetAside


class Change(NamedTuple):
    """Something that makes observations incomparable: its name, what it was and what it is."""

    name: str
    was: str
    now: str


def write_words(words: Mapping[str, str]) -> dict[str, str]:
    """Return the tag that says what a window's recurrences share; none where nobody said."""
    return {names.COMPARABLE: fits_tag(to_text(words))} if words else {}


def read_words(tags: Mapping[str, str]) -> dict[str, str]:
    """Return what a window says that its recurrences share; nothing where it does not say."""
    try:
        return shortened(from_text(dict[str, str], tags[names.COMPARABLE]))
    except (AttributeError, KeyError, ValueError):
        return {}


def shortened(words: Mapping[str, str]) -> dict[str, str]:
    """Return words of at most 300 characters each, visibly."""
    return {name: value if len(value) <= 300 else value[:299] + "…" for name, value in words.items()}


def write_set_aside(found: SetAside | None) -> dict[str, str]:
    """Return the tag that says what stopped counting when a window began; none where nothing did."""
    return {} if found is None else {names.SET_ASIDE: to_text(found)}


def read_set_aside(tags: Mapping[str, str]) -> SetAside | None:
    """Return what stopped counting when a window began; None where nothing did, or that is not why it began."""
    try:
        return from_text(SetAside, tags[names.SET_ASIDE])
    except (KeyError, TypeError, ValueError):
        return None


def changes(was: Mapping[str, str], now: Mapping[str, str], *, words: Mapping[str, str]) -> tuple[Change, ...]:
    """Return what is not as a window's recurrences had it: the fingerprint's parts where both say what they are.

    Args:
        was: The window's tags.
        now: The tags of those that are compared with it.
        words: What their fingerprint is made of.

    >>> was = {"zf.fingerprint": "1a2b", "zf.energy_source": "none", "zf.comparable": '{"target": "accuracy >= 0.9"}'}
    >>> now = {"zf.fingerprint": "3c4d", "zf.energy_source": "none"}
    >>> changes(was, now, words={"target": "accuracy >= 0.92"})
    (Change(name='target', was='accuracy >= 0.9', now='accuracy >= 0.92'),)
    """
    found = list[Change]()
    before, fingerprint = was.get(names.FINGERPRINT, ""), now[names.FINGERPRINT]
    if before != fingerprint:
        theirs = read_words(was) if words else {}
        either = sorted(theirs.keys() | words.keys()) if theirs else []
        parts = [Change(n.replace("_", " "), theirs.get(n, "nothing"), words.get(n, "nothing")) for n in either]
        found = [part for part in parts if part.was != part.now] or [Change("fingerprint", before[:8], fingerprint[:8])]
    before, source = was.get(names.ENERGY_SOURCE, ""), now[names.ENERGY_SOURCE]
    if before != source:
        found.append(Change("energy source", before, source))
    return tuple(found)


def why(found: Iterable[Change]) -> str:
    """Return changes as the end of a sentence.

    >>> why([Change("energy source", "simulated", "measured")])
    'the energy source changed from simulated to measured'
    """
    said = []
    for change in found:
        hint = " (target, metric, optimizer, learning-rate rule or version)" if change.name == "fingerprint" else ""
        said.append(f"the {change.name} changed from {change.was} to {change.now}{hint}")
    return " and ".join(said)[:1000]
