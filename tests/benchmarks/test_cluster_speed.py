"""What the benchmark of cluster simulations compares, and what it leaves out."""

from __future__ import annotations

from itertools import count
from typing import Any

import cluster
import pytest

from tests.experiments.by_hand import trace_by_hand
from zeus_flows.experiments.cluster.groups import ReadGroup


class Broken:
    """A published simulator that raises on one group and gets through another."""

    def simulate_group(self, _trace: object, group: ReadGroup, _seed: int) -> int:
        if group.name == "raises":
            raise RuntimeError("call order")
        return sum(range(200_000)) and group.jobs


def test_only_groups_that_the_published_simulator_gets_through_are_compared() -> None:
    groups = [ReadGroup(name, "by-hand", [0.0, 1e6], [1.0, 1.0]) for name in ("raises", "ends")]
    published: Any = Broken()
    found = cluster.measure_groups(published, {"by-hand": trace_by_hand()}, groups)
    assert found["groups"] == {"raised RuntimeError: call order": 1, "ended": 1}
    assert found["jobs"] == 2
    assert set(found["times"]) == set(cluster.POLICIES)
    rates = found["jobs_per_cpu_second"]
    assert found["times"]["default"] == pytest.approx(rates["default"] / rates["published"])


def test_what_does_not_end_is_stopped() -> None:
    with pytest.raises(cluster.Hangs), cluster.at_most(1):
        sum(i for i in count())
