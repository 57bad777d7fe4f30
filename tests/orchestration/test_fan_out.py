"""Comparisons shared out on Prefect task runners: the same rows for the same seeds, whatever the runner."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.experiments.capriccio_builders import write_experiment
from tests.experiments.conftest import own_cache  # noqa: F401
from zeus_flows.errors import ConfigError
from zeus_flows.experiments.capriccio.curves import Curves
from zeus_flows.experiments.capriccio.file import load_experiment
from zeus_flows.experiments.capriccio.science import measure
from zeus_flows.experiments.fan_out import in_turn
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


@pytest.mark.slow
@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("runner", ["threads", "dask"])
def test_a_drift_experiment_learns_the_same_whatever_the_runner(runner: str, tmp_path: Path) -> None:
    experiment = load_experiment(write_experiment(tmp_path))
    jobs = {name: experiment.job_file(name) for name in experiment.contenders}
    dataset, told = experiment.data.read(keep_text=False), list[tuple[int, int]]()
    alone, shared = (Curves(experiment, dataset, tmp_path / folder) for folder in ("alone", "shared"))
    alone.fill(fan_out=in_turn)
    fan_out = shared_out(runner)
    shared.fill(lambda done, of: told.append((done, of)), fan_out)
    cells = alone.trainer.cells()
    assert [shared.get(cell) for cell in cells] == [alone.get(cell) for cell in cells]
    assert told == [(done, len(cells)) for done in range(0, len(cells) + 1, experiment.science.seeds)]
    assert shared.path.read_bytes() == alone.path.read_bytes()
    found = [measure(shared, jobs, replays=12, fan_out=who) for who in (in_turn, fan_out)]
    for name in jobs:
        assert (found[0].replays[name].regret == found[1].replays[name].regret).all()
        assert found[0].replays[name].alarms == found[1].replays[name].alarms


def test_a_runner_that_does_not_exist_is_refused_before_anything_runs() -> None:
    with pytest.raises(ConfigError, match="there are threads, processes, dask"):
        shared_out("ray")
