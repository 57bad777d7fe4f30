"""What a recurrence adds to Prefect and MLflow: one without training against bare tasks and the same writes.

    python benchmarks/recurrence_overhead.py [--recurrences 15] [--json]

Both sides run in one process, turn by turn, on the same Prefect server and two fresh sqlite stores. The bare side
leaves the same records: a flow run that is renamed, as many tasks and artifacts, one event, and the very MLflow writes
that our side has just made, one call for each, with the same payloads: they are recorded where they reach the store.
Both sides are recorded. What our side reads of MLflow and Prefect, decides and keeps on its disk is what it adds.

CPU seconds are those of this process; the Prefect server is another one. With the rounds' noise: the medians, and how
far apart the middle half of the rounds lies. Without it: the least of each side, which nothing else on the machine held
up.
Goal: at most 1.3 in CPU, at most 16 calls.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("PREFECT_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")

from mlflow import MlflowClient
from prefect import flow, task
from prefect.artifacts import create_link_artifact, create_table_artifact
from prefect.cache_policies import NO_CACHE
from prefect.events import emit_event
from prefect.testing.utilities import prefect_test_harness
from store_calls import StoreCall, recorded

from zeus_flows.orchestration.prefect_runs import rename_flow_run
from zeus_flows.orchestration.recurrence_flow import recurrence

CPU_GOAL = 1.3
CALLS_GOAL = 16
JOB = """\
name: overhead
train: {function: "recurrence_overhead:no_training"}
target: {metric: m, value: 1.0, better: higher}
batch_sizes: [32]
default_batch_size: 32
max_epochs: 1
figures: false
device: simulated-v100
"""


def no_training(session: Any) -> None:
    for _ in session.epochs():
        list(session.steps([0]))
        session.report_metric(1.0)


class Replay:
    """Makes recorded writes again, on another store, one call for each. Prefect sees no more of it than its name."""

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self.experiment = MlflowClient(tracking_uri=uri).create_experiment("bare")
        self.runs: dict[str, str] = {}
        self.writes: list[StoreCall] = []

    def prepare(self, writes: list[StoreCall]) -> None:
        """Take the next writes; have a run for each of theirs that is written to and was there before."""
        self.writes = writes
        made = {str(call.answer.info.run_id) for call in writes if call.name == "create_run"}
        for call in writes:
            if call.name != "create_run" and (run_id := call.run_id) and run_id not in made | self.runs.keys():
                run = MlflowClient(tracking_uri=self.uri).create_run(self.experiment)
                self.runs[run_id] = str(run.info.run_id)

    def make(self, first: int, last: int | None = None) -> None:
        """Make some of the writes."""
        client = MlflowClient(tracking_uri=self.uri)
        for call in self.writes[first:last]:
            said = call.by_name
            match call.name:
                case "create_run":
                    tags = {tag.key: tag.value for tag in said["tags"]}
                    run = client.create_run(self.experiment, said["start_time"], tags, said["run_name"])
                    self.runs[str(call.answer.info.run_id)] = str(run.info.run_id)
                case "log_batch":
                    client.log_batch(self.runs[call.run_id], said["metrics"], said["params"], said["tags"])
                case "log_param":
                    client.log_param(self.runs[call.run_id], said["param"].key, said["param"].value)
                case "update_run_info":
                    client.set_terminated(self.runs[call.run_id], "FINISHED", said["end_time"])
                case "set_experiment_tag":
                    client.set_experiment_tag(self.experiment, said["tag"].key, said["tag"].value)
                case other:
                    raise NotImplementedError(other)


@task(name="decide", cache_policy=NO_CACHE)
def decide(replay: Replay) -> None:
    replay.make(0, 4)


@task(name="train", cache_policy=NO_CACHE)
def train(replay: Replay) -> None:
    replay.make(4, 5)


@task(name="observe", cache_policy=NO_CACHE)
def observe(replay: Replay) -> None:
    replay.make(5)


REPLAYS: dict[str, Replay] = {}


@flow(name="bare")
def bare(uri: str) -> None:
    replay = REPLAYS[uri]
    rename_flow_run("bare #1")
    decide(replay)
    emit_event(event="bare.decided", resource={"prefect.resource.id": "bare"}, payload={"job": "bare", "recurrence": 1})
    create_table_artifact(key="bare-decision", table=[{"batch size": "32"}], description="bare")
    create_link_artifact(key="bare-run", link="http://127.0.0.1:5000", link_text="bare")
    train(replay)
    observe(replay)


def timed(call: Callable[[], object]) -> dict[str, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    return {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}


def measure(folder: Path, recurrences: int) -> dict[str, Any]:
    job = folder / "job.yaml"
    job.write_text(JOB)
    ours_uri, bare_uri = f"sqlite:///{folder}/ours.db", f"sqlite:///{folder}/bare.db"
    replay = REPLAYS[bare_uri] = Replay(bare_uri)
    rounds: dict[str, list[dict[str, float]]] = {"ours": [], "bare": []}
    made: list[list[StoreCall]] = []
    for number in range(recurrences + 2):
        with recorded() as calls:
            ours = timed(lambda: recurrence(str(job), tracking_uri=ours_uri))
        writes = [call for call in calls if call.writes]
        if number == 0:  # the first makes the experiments
            continue
        replay.prepare(writes)
        with recorded() as again:
            theirs = timed(lambda: bare(bare_uri))
        if [call.name for call in again] != [call.name for call in writes]:
            raise RuntimeError("the bare side did not make the same writes")
        if number > 1:  # the one before that warms up
            rounds["ours"].append(ours)
            rounds["bare"].append(theirs)
            made.append(calls)
    result: dict[str, Any] = {
        "calls": [len(calls) for calls in made],
        "writes": [sum(call.writes for call in calls) for calls in made],
    }
    for kind in ("cpu", "wall"):
        figures = {side: [one[kind] for one in each] for side, each in rounds.items()}
        result[kind] = {
            "ours_s": statistics.median(figures["ours"]),
            "bare_s": statistics.median(figures["bare"]),
            "ratio": statistics.median(figures["ours"]) / statistics.median(figures["bare"]),
            "spread": _spread([a / b for a, b in zip(figures["ours"], figures["bare"], strict=True)]),
            "ratio_without_noise": min(figures["ours"]) / min(figures["bare"]),
        }
    result["met"] = result["cpu"]["ratio_without_noise"] <= CPU_GOAL and max(result["calls"]) <= CALLS_GOAL
    return result


def _spread(ratios: list[float]) -> list[float]:
    quarters = statistics.quantiles(ratios, n=4)
    return [quarters[0], quarters[2]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--recurrences", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    os.environ["ZEUS_FLOWS_STATE_DIR"] = str(folder / "state")
    with prefect_test_harness(server_startup_timeout=180):
        result = measure(folder, max(2, arguments.recurrences))
    if arguments.json:
        print(json.dumps(result))
        return
    print(f"MLflow calls of a recurrence: {statistics.median(result['calls']):g}, at most {max(result['calls'])}")
    print(f"  of them writes, which the bare side makes too: {statistics.median(result['writes']):g}")
    for kind, name in (("cpu", "CPU"), ("wall", "wall")):
        figures = result[kind]
        low, high = figures["spread"]
        print(f"{name}: a recurrence without training {figures['ours_s']:.3f} s, bare {figures['bare_s']:.3f} s")
        print(f"  ratio {figures['ratio']:.2f} (half of the rounds within {low:.2f} to {high:.2f})")
        print(f"  ratio of the least rounds, without noise: {figures['ratio_without_noise']:.2f}")
    said = "met" if result["met"] else "missed"
    print(f"goal: at most {CPU_GOAL} of the CPU without noise, at most {CALLS_GOAL} calls: {said}")


if __name__ == "__main__":
    main()
