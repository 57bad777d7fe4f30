"""What looks cost where epochs follow a law, and what they find where they do not: one line for each setting.

The settings are constants of `core.policy.trials`, from no look at all to one at every batch size. Each is measured on
every source, so that what is gained on one is seen beside what another pays: the default is a point on this front.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from regret_sources import FLOOR, PEER, PUBLISHED, REGRET_AT, Result, measure, ratios, told
from sources import Cell

from zeus_flows.core.policy import trials
from zeus_flows.experiments.replay.shifts import mean

POLICY = "thompson"
AT = REGRET_AT[1:]
DEFAULT = "default"
SETTINGS: Mapping[str, Mapping[str, float]] = {
    "no looks": {"ALLOWANCE": 0.0},
    DEFAULT: {},
    "earlier": {"LOOK_HORIZON": 30.0, "ALLOWANCE": 0.6},
    "later too": {"LOOK_HORIZON": 30.0, "LOOK_HORIZON_GROWTH": 0.3, "ALLOWANCE": 0.6},
    "at every batch size": {"JUMPS": 1.0, "LOOK_HORIZON": 100.0, "LOOK_HORIZON_GROWTH": 1.0, "ALLOWANCE": 10.0},
}


@contextmanager
def setting(constants: Mapping[str, float]) -> Iterator[None]:
    """Put other constants in the place of those of looks."""
    with ExitStack() as stack:
        for name, value in constants.items():
            stack.enter_context(patch.object(trials, name, value))
        yield


def measure_each(found: Mapping[str, Sequence[Cell]], *, seeds: int, processes: int) -> dict[str, list[Result]]:
    """Replay every cell with every setting, and once with the peer."""
    peer = measure(found, seeds=seeds, processes=processes, policies=(PEER,))
    results = {}
    for name, constants in SETTINGS.items():
        with setting(constants):
            results[name] = peer + measure(found, seeds=seeds, processes=processes, policies=(POLICY,))
    return results


def summary(results: Mapping[str, Sequence[Result]]) -> dict[str, Any]:
    """Return setting -> recurrences -> source -> what is told of its ratios, and its mean regret in best runs."""
    found: dict[str, Any] = {}
    for name, some in results.items():
        found[name] = {"constants": dict(SETTINGS[name]), "at": {}}
        for at in AT:
            by_source = {source: told(values) for source, values in ratios(some, POLICY, at).items()}
            for source, figures in by_source.items():
                ours = [mean(r.regret[at]) for r in some if r.policy == POLICY and r.source == source]
                figures["regret"] = mean(max(regret, FLOOR) for regret in ours)
            found[name]["at"][at] = by_source
    return found


def show(found: Mapping[str, Any], seeds: int) -> None:
    """Print the front as a table of Markdown."""
    sources = list(next(iter(found.values()))["at"][AT[0]])
    figures = "geometric mean; worst cell; cells above 1.1; mean regret in best runs"
    print(f"\n{POLICY}, regret / {PEER}, {seeds} seeds: {figures}")
    heads = [f"{source}, at {at}" for source in sources for at in AT]
    print(f"| looks | {' | '.join(heads)} |\n| --- |{' --- |' * len(heads)}")
    for name, front in found.items():
        cells = [_cell(source, front["at"][at][source]) for source in sources for at in AT]
        print(f"| {name} | {' | '.join(cells)} |")
    for name, front in found.items():
        said = ", ".join(f"{constant} {value:g}" for constant, value in front["constants"].items())
        print(f"{name}: {said or 'as they are'}")


def _cell(source: str, figures: Mapping[str, float]) -> str:
    told_of = [f"{figures['mean']:.2f}", f"{figures['worst']:.2f}"]
    if source != PUBLISHED:
        told_of.append(f"{100 * figures['above_1.1']:.0f} %")
    return "; ".join([*told_of, f"{figures['regret']:.1f}"])
