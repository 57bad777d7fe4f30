"""Experiments shared out on Prefect task runners: threads, processes, or a Dask cluster (the extra `dask`).

Each piece carries its own seeds, so that the results are the same whatever the runner and the order.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from prefect.task_runners import ProcessPoolTaskRunner, TaskRunner, ThreadPoolTaskRunner

from zeus_flows.errors import ConfigError
from zeus_flows.experiments.fan_out import FanOut, R, T


def shared_out(runner: str) -> FanOut:
    """Return a function that does a piece of work for each item, each in a task, and returns results in their order.

    Args:
        runner: `threads`, `processes`, `dask` for a cluster on this machine, or the address of a Dask scheduler.

    Raises:
        ConfigError: there is no such runner here.
    """
    chosen = _task_runner(runner)

    def fan_out(work: Callable[[T], R], items: Sequence[T], told: Callable[[T, R], None] | None = None) -> list[R]:
        @flow(name="fan-out", task_runner=chosen)
        def sweep() -> list[R]:
            pieces = [_piece.submit(_Work(work, item)) for item in items]
            results = list[R]()
            for item, piece in zip(items, pieces, strict=True):
                results.append(piece.result())
                if told is not None:
                    told(item, results[-1])
            return results

        return sweep()

    return fan_out


@task(name="piece", cache_policy=NO_CACHE, retries=1)
def _piece(work: _Work) -> Any:
    return work()


class _Work:
    """A piece of work. No dataclass: Prefect would walk through it, field by field, and may hand on copies."""

    def __init__(self, work: Callable[[Any], Any], item: Any) -> None:
        self._work, self._item = work, item

    def __call__(self) -> Any:
        return self._work(self._item)


def _task_runner(runner: str) -> TaskRunner[Any]:
    if runner == "threads":
        return ThreadPoolTaskRunner()
    if runner == "processes":
        return ProcessPoolTaskRunner()
    address = runner if runner.startswith(("tcp://", "tls://")) else None
    if runner != "dask" and address is None:
        raise ConfigError(
            f"there is no runner {runner!r}; there are threads, processes, dask, and the address of a Dask scheduler "
            f"such as tcp://10.0.0.1:8786"
        )
    try:
        from prefect_dask.task_runners import DaskTaskRunner
    except ImportError:
        raise ConfigError("the runner dask needs an extra: pip install 'zeus-flows[dask]'") from None
    logging.getLogger("distributed").setLevel(logging.ERROR)  # it tells of every worker that comes and goes
    here = {"dashboard_address": None, "threads_per_worker": 1}
    made: TaskRunner[Any] = DaskTaskRunner(address=address, cluster_kwargs=None if address else here)
    return made
