"""Comparisons shared out on Prefect task runners: the same rows for the same seeds, whatever the runner."""

from __future__ import annotations

import pytest

from zeus_flows.errors import ConfigError
from zeus_flows.experiments.replay.comparison import compare, find_traces
from zeus_flows.orchestration.fan_out import shared_out

pytestmark = [pytest.mark.usefixtures("prefect_server"), pytest.mark.xdist_group("prefect")]


@pytest.mark.slow
@pytest.mark.parametrize("runner", ["threads", "processes", "dask"])
def test_the_same_seeds_give_the_same_rows_whatever_the_runner(runner: str) -> None:
    traces = find_traces(folder=None, gpu="v100", workloads=("movielens",))
    alone = compare(traces, ["zeus", "default"], seeds=2, recurrences=6)
    assert compare(traces, ["zeus", "default"], seeds=2, recurrences=6, fan_out=shared_out(runner)) == alone
    assert [row.policy for row in alone] == ["zeus", "default"]


def test_a_runner_that_does_not_exist_is_refused_before_anything_runs() -> None:
    with pytest.raises(ConfigError, match="there are threads, processes, dask"):
        shared_out("ray")
