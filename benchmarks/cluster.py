"""Jobs per CPU second of the cluster simulation and of replay in bulk, over the published package's simulator.

    pip install zeus==0.16.0 --no-deps
    nice python benchmarks/cluster.py --traces FOLDER [--groups FILE] [--jobs 2000] [--seeds 100] [--quick] [--json]

1. Groups of overlapping jobs: `zeus._legacy.simulate.Simulator.simulate_one_alibaba_group` against our `simulate` on
   the same groups, in turns, group by group. The published function needs an optimizer with `concurrency=True` (without
   it, it raises as soon as two jobs overlap) and end times: what overlaps follows from those, where ours simulates
   durations. Groups on which it raises, or has not ended after `HANGS_S` CPU seconds, are counted and compared with
   nothing. Goal: zeus-paper at least 100 times as many jobs per CPU second.
2. Recurrences one after the other: `simulate_one_job` against `replay_many` with `--seeds` seeds, in turns, workload by
   workload. Goals: zeus-paper at least 100 times, thompson and lookahead at least 25.

Without --groups they are drawn by the recipe of `zeus-flows cluster`. A job of either ends, for the published function,
when a default run of it would. Times are CPU seconds of this process.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from regret_published import BETA, ETA, RECURRENCES, Published
from scores import Goals

from zeus_flows.experiments.cluster.groups import Group, draw_groups, read_groups
from zeus_flows.experiments.cluster.simulating import simulate
from zeus_flows.experiments.replay.comparison import default_run, find_traces
from zeus_flows.experiments.replay.replaying import replay_job, replay_many
from zeus_flows.experiments.replay.traces import Trace
from zeus_flows.experiments.replay.workloads import JOBS

POLICIES = ("zeus-paper", "thompson", "lookahead", "grid", "default")
IN_BULK = ("zeus-paper", "thompson", "lookahead")
HANGS_S = 30
GOES = 3


class Hangs(Exception):
    """The published simulator did not end."""


@contextlib.contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """Raise `Hangs` where what is inside takes longer, in CPU seconds: a busy machine is no reason."""

    def hangs(_signal: int, _frame: FrameType | None) -> None:
        raise Hangs

    before = signal.signal(signal.SIGPROF, hangs)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def cpu_seconds(work: Callable[[], object], goes: int = 1) -> float:
    least = math.inf
    for _ in range(goes):
        began = time.process_time()
        work()
        least = min(least, time.process_time() - began)
    return max(least, 1e-9)  # the clock of CPU time may stand still for what is very short


class PublishedGroups(Published):
    """The published simulator, on groups."""

    def simulate_group(self, trace: Trace, group: Group, seed: int) -> int:
        """Simulate a group; return how many runs it made."""
        import pandas

        spec, run_s = JOBS[trace.workload], default_run(trace, replay_job(trace, "default")).time_s
        job = self._job(
            *(spec.dataset, spec.network, spec.optimizer, spec.target, spec.max_epochs), trace.default_batch_size
        )
        submissions = list(group.submissions())
        rows = pandas.DataFrame(
            {
                "group": group.name,
                "dataset": spec.dataset,
                "start_time": [s.start_s for s in submissions],
                "end_time": [s.start_s + s.ratio * run_s for s in submissions],
                "runtime_ratio": [s.ratio for s in submissions],
            }
        )
        optimizer = self._optimizer(seed=seed, verbose=False, concurrency=True)
        simulator = self._simulator(
            self._train, self._power, optimizer, self._limits(verbose=False), seed=seed, verbose=False
        )
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings(action="ignore"):
            return len(simulator.simulate_one_alibaba_group(job, rows, BETA, ETA))


def measure_groups(published: PublishedGroups, traces: dict[str, Trace], groups: Sequence[Group]) -> dict[str, Any]:
    """Return CPU seconds on the groups that the published simulator gets through, and what became of the others."""
    seconds, became, jobs = dict.fromkeys(("published", *POLICIES), 0.0), Counter[str](), 0
    for group in groups:
        trace = traces[group.workload]
        try:
            with at_most(HANGS_S):
                took = cpu_seconds(lambda: published.simulate_group(trace, group, 1))  # noqa: B023
        except Hangs:
            became[f"did not end within {HANGS_S} CPU seconds"] += 1
            continue
        except Exception as error:
            became[f"raised {type(error).__name__}: {error}"[:90]] += 1
            continue
        became["ended"] += 1
        jobs += group.jobs
        seconds["published"] += took
        for policy in POLICIES:
            job = replay_job(trace, policy, eta=ETA, beta=BETA)
            seconds[policy] += cpu_seconds(lambda: simulate(trace, job, group.submissions(), seed=1), GOES)  # noqa: B023
    return {
        "groups": dict(became),
        "jobs": jobs,
        "jobs_per_cpu_second": {name: jobs / s for name, s in seconds.items() if s},
        "times": {p: seconds["published"] / seconds[p] for p in POLICIES if seconds[p]},
    }


def measure_bulk(published: Published, traces: Sequence[Trace], seeds: int) -> dict[str, Any]:
    """Return recurrences per CPU second in bulk, over those of the published simulator."""
    rate = dict.fromkeys(("published", *IN_BULK), 0.0)
    for trace in traces:
        rate["published"] += cpu_seconds(lambda: published.simulate(trace, 1), GOES) / RECURRENCES  # noqa: B023
        for policy in IN_BULK:
            job = replay_job(trace, policy, eta=ETA, beta=BETA)
            work = lambda: replay_many(trace, job, recurrences=RECURRENCES, seeds=range(seeds))  # noqa: B023, E731
            rate[policy] += cpu_seconds(work) / (RECURRENCES * seeds)
    return {
        "seeds": seeds,
        "recurrences_per_cpu_second": {name: len(traces) / s for name, s in rate.items()},
        "times": {p: rate["published"] / rate[p] for p in IN_BULK},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True, help="folder of the published traces")
    parser.add_argument("--groups", type=Path, help="file of groups; without it they are drawn")
    parser.add_argument("--jobs", type=int, default=2_000, help="jobs to draw")
    parser.add_argument("--gpu", default="v100")
    parser.add_argument("--seeds", type=int, default=100, help="of the replays in bulk")
    parser.add_argument("--quick", action="store_true", help="1,000 jobs, 10 seeds")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args()
    jobs, seeds = (1_000, 10) if options.quick else (options.jobs, options.seeds)
    traces = find_traces(folder=options.traces, gpu=options.gpu, workloads=())
    published = PublishedGroups(options.traces, options.gpu)
    arrivals = read_groups(options.groups, traces) if options.groups else draw_groups(traces, jobs=jobs, seed=1)
    groups = measure_groups(published, {t.workload: t for t in traces}, arrivals.groups)
    bulk = measure_bulk(published, traces, seeds)
    goal = Goals()
    goal.at_least("jobs of overlapping groups, zeus-paper", groups["times"].get("zeus-paper", math.nan), 100)
    for policy, least in (("zeus-paper", 100), ("thompson", 25), ("lookahead", 25)):
        goal.at_least(f"recurrences in bulk of {seeds} seeds, {policy}", bulk["times"][policy], least)
    if options.json:
        print(json.dumps({"arrivals": arrivals.source, "groups": groups, "bulk": bulk, "goals": goal.lines}, indent=2))
        return 0
    print(f"{arrivals.source}\npublished simulator: {groups['groups']}; {groups['jobs']} jobs compared")
    for name, per_second in groups["jobs_per_cpu_second"].items():
        print(f"  {name:12} {per_second:9.0f} jobs per CPU second {groups['times'].get(name, 1.0):8.1f} times")
    print(f"one after the other, {seeds} seeds in bulk")
    for name, per_second in bulk["recurrences_per_cpu_second"].items():
        print(f"  {name:12} {per_second:9.0f} recurrences per CPU second {bulk['times'].get(name, 1.0):8.1f} times")
    goal.show()
    return 0


if __name__ == "__main__":
    sys.exit(main())
