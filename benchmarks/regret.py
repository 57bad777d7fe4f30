"""Cumulative regret of our policies, over the published package's or over `zeus-paper`'s, which makes its decisions.

    nice python benchmarks/regret.py --traces FOLDER [--seeds 20] [--gpu v100] [--skip drift|elsewhere] [--json]
    nice python benchmarks/regret.py --traces FOLDER --speed    # only how fast a replay is
    nice python benchmarks/regret.py --traces FOLDER --sources DATA [--half design|kept] [--skip SOURCE]
    nice python benchmarks/regret.py --traces FOLDER --sources DATA --front [--half design|kept]
    nice python benchmarks/regret.py --traces FOLDER --sources DATA --learning
    nice python benchmarks/regret.py --traces FOLDER --transfers

The first two need the extra `bench` (zeus 0.16). Their ratios are to the published simulator
(`zeus._legacy.simulate`) with its own random draws, on the same traces and seeds; geometric means over workloads.
Intervals: 95 %, from a bootstrap over workloads and, within them, runs. Times are CPU seconds of this process, the
least of several goes.

`--sources` measures nothing but regret over `zeus-paper`'s on the published traces and on every source with a recipe in
`benchmarks/sources/`, whose data are below DATA: 20, 50 and 200 recurrences, 10 seeds. Constants were tuned on the
published traces and on every other workload of each recipe's source (`--half design`); the rest was kept aside to judge
(`--half kept`). With `--front` it shows instead what rarer and more frequent looks gain and cost on each source, with
`--learning` what a prior learnt from other workloads' jobs spares a new job.
`--transfers` measures what 30 recurrences on one GPU spare a job on another.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import regret_elsewhere
import regret_front
import regret_learning
import regret_published
import regret_sources
import regret_transfers
from scores import Goals
from sources import recipes


def finite(value: Any) -> Any:
    """Return what JSON can say: nothing in the place of what is not a number."""
    match value:
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {str(k): finite(v) for k, v in value.items()}
        case list() | tuple():
            return [finite(v) for v in value]
        case _:
            return value


def published(options: argparse.Namespace, goal: Goals) -> dict[str, Any]:
    """Measure, and show, what is compared with the published package."""
    seeds = options.seeds or 20
    result: dict[str, Any] = {"seeds": seeds, "gpus": {}}
    for gpu in options.gpus or regret_published.GPUS:
        result["gpus"][gpu] = regret_published.measure_gpu(options.traces, gpu, seeds)
    if "drift" not in options.skip:
        result["drift_gpu"] = next(iter(result["gpus"]))
        result["drift"] = regret_elsewhere.measure_drift(options.traces, result["drift_gpu"], options.drift_seeds)
    if "elsewhere" not in options.skip:
        print("  elsewhere", file=sys.stderr)
        result["elsewhere_seeds"] = options.elsewhere_seeds
        result["elsewhere"] = regret_elsewhere.measure_elsewhere(options.traces, options.elsewhere_seeds)
    regret_published.goals(result["gpus"], goal)
    if "drift" in result:
        regret_elsewhere.goals(result["drift"], goal)
    if not options.json:
        regret_published.show(result["gpus"], seeds)
        if "drift" in result:
            regret_elsewhere.show_drift(result["drift"], result["drift_gpu"])
        if "elsewhere" in result:
            regret_elsewhere.show_elsewhere(result["elsewhere"], options.elsewhere_seeds)
    return result


def others(options: argparse.Namespace, goal: Goals) -> dict[str, Any]:
    """Measure, and show, what is compared with `zeus-paper` on all sources, or with starting anew on a GPU."""
    seeds = options.seeds or 10
    result: dict[str, Any] = {"seeds": seeds}
    if options.sources:
        gathered = regret_sources.gather(options.traces, options.sources, skip=options.skip, half=options.half)
    if options.sources and options.learning:
        measured = regret_learning.measure(gathered, seeds=seeds, processes=options.processes)
        result["learning"] = found = regret_learning.summary(measured)
        regret_learning.goals(found, goal)
        if not options.json:
            regret_learning.show(found, seeds)
    elif options.sources and options.front:
        each = regret_front.measure_each(gathered, seeds=seeds, processes=options.processes)
        result |= {"half": options.half, "front": (found := regret_front.summary(each))}
        if not options.json:
            regret_front.show(found, seeds)
    elif options.sources:
        results = regret_sources.measure(gathered, seeds=seeds, processes=options.processes)
        result |= {"half": options.half, "by_source": (found := regret_sources.summary(results))}
        regret_sources.goals(found, goal)
        if not options.json:
            regret_sources.show(found, seeds)
    if options.transfers:
        every = regret_transfers.transfers(options.traces)
        outcomes = regret_transfers.measure(every, seeds=seeds, processes=options.processes)
        result["transfers"] = found = regret_transfers.summary(outcomes)
        regret_transfers.goals(found, goal)
        if not options.json:
            regret_transfers.show(found, seeds)
    return result


def main() -> None:
    sources = [regret_sources.PUBLISHED, *(r.name for r in recipes())]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True, help="folder of the published traces")
    parser.add_argument("--sources", type=Path, metavar="DATA", help="folder that the recipes' files are below")
    parser.add_argument("--learning", action="store_true", help="with --sources: only what other jobs would teach one")
    parser.add_argument("--front", action="store_true", help="with --sources: only what looks gain and cost")
    parser.add_argument("--transfers", action="store_true", help="measure what is learnt for other GPUs")
    parser.add_argument("--speed", action="store_true", help="measure nothing but replay speed")
    parser.add_argument("--gpu", action="append", dest="gpus")
    parser.add_argument("--seeds", type=int, help="20; with --sources or --transfers 10")
    parser.add_argument("--drift-seeds", type=int, default=10)
    parser.add_argument("--elsewhere-seeds", type=int, default=4)
    parser.add_argument("--half", choices=["design", "kept"], help="of the workloads of each source with a recipe")
    parser.add_argument("--skip", choices=["drift", "elsewhere", *sources], action="append", default=[])
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="for --sources and --transfers")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.learning and (not options.sources or options.half):
        parser.error("--learning needs --sources DATA and takes all its workloads: leave --half out")
    if options.front and (not options.sources or options.learning):
        parser.error("--front needs --sources DATA, and goes without --learning")
    if options.speed:
        regret_published.show_speed(options.traces, options.gpus or regret_published.GPUS)
        return
    goal = Goals()
    result = (others if options.sources or options.transfers else published)(options, goal)
    if options.json:
        print(json.dumps(finite(result | {"goals": goal.lines}), indent=2))
    elif goal.lines:
        goal.show()


if __name__ == "__main__":
    main()
