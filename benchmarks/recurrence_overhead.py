"""What a recurrence adds to Prefect and MLflow: one without training against bare tasks and the same writes.

    python benchmarks/recurrence_overhead.py [--recurrences 15] [--json]

Both sides run in one process, turn by turn, on the same Prefect server and two fresh sqlite stores. The bare side
runs a flow with the same number of tasks and artifacts and makes the same MLflow calls with the same payloads,
which it takes from the runs that our side wrote. Goal: at most 1.3.
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
from mlflow.entities import Metric, Param, Run, RunTag
from prefect import flow, task
from prefect.artifacts import create_link_artifact, create_table_artifact
from prefect.cache_policies import NO_CACHE
from prefect.testing.utilities import prefect_test_harness

from zeus_flows.orchestration.recurrence_flow import recurrence

GOAL = 1.3
JOB = """\
name: overhead
train: {function: "recurrence_overhead:no_training"}
target: {metric: m, value: 1.0, better: higher}
batch_sizes: [32]
default_batch_size: 32
max_epochs: 1
device: simulated-v100
"""


def no_training(session: Any) -> None:
    for _ in session.epochs():
        list(session.steps([0]))
        session.report_metric(1.0)


@task(name="decide", cache_policy=NO_CACHE)
def decide(client: MlflowClient, ids: dict[str, str], like: Run) -> str:
    tags = {k: v for k, v in like.data.tags.items() if k.startswith("zf.") and k not in ("zf.outcome", "zf.detail")}
    client.get_run(ids["page"])
    client.log_param(ids["page"], f"zf.r.{ids['number']}", "token")
    run_id = str(client.create_run(ids["experiment"], tags=tags, run_name="bare").info.run_id)
    params = [Param(k, v) for k, v in like.data.params.items() if k != "zf.observation"]
    client.log_batch(run_id, params=params)
    client.log_param(ids["page"], f"zf.a.{ids['number']}", run_id)
    return run_id


@task(name="train", cache_policy=NO_CACHE)
def train(client: MlflowClient, run_id: str, like: Run) -> None:
    epoch = {k: v for k, v in like.data.metrics.items() if k.startswith("zf.epoch/")}
    client.log_batch(run_id, metrics=[Metric(k, v, int(time.time() * 1000), 1) for k, v in epoch.items()])


@task(name="observe", cache_policy=NO_CACHE)
def observe(client: MlflowClient, run_id: str, like: Run) -> None:
    client.log_param(run_id, "zf.observation", like.data.params["zf.observation"])
    outcome = {k: v for k, v in like.data.metrics.items() if not k.startswith("zf.epoch/")}
    client.log_batch(
        run_id,
        metrics=[Metric(k, v, int(time.time() * 1000), 1) for k, v in outcome.items()],
        tags=[RunTag(k, like.data.tags[k]) for k in ("zf.outcome", "zf.detail")],
    )
    client.set_terminated(run_id)


@flow(name="bare")
def bare(uri: str, ids: dict[str, str], like_id: str, like_uri: str) -> None:
    like = MlflowClient(tracking_uri=like_uri).get_run(like_id)
    client = MlflowClient(tracking_uri=uri)
    run_id = decide(client, ids, like)
    create_table_artifact(key="bare-decision", table=[{"batch size": "32"}], description="bare")
    create_link_artifact(key="bare-run", link="http://127.0.0.1:5000", link_text="bare")
    train(client, run_id, like)
    observe(client, run_id, like)
    series = ("zf.cost_j", "zf.energy_to_accuracy_j", "zf.time_to_accuracy_s", "zf.batch_size")
    now_ms = int(time.time() * 1000)
    client.log_batch(ids["window"], metrics=[Metric(k, like.data.metrics[k], now_ms, 1) for k in series])


def timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--recurrences", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    job = folder / "job.yaml"
    job.write_text(JOB)
    ours_uri, bare_uri = f"sqlite:///{folder}/ours.db", f"sqlite:///{folder}/bare.db"
    client = MlflowClient(tracking_uri=bare_uri)
    ids = {"experiment": client.create_experiment("bare")}
    ids |= {name: str(client.create_run(ids["experiment"]).info.run_id) for name in ("page", "window")}
    ours: list[float] = []
    theirs: list[float] = []
    with prefect_test_harness(server_startup_timeout=180):
        like_id = recurrence(str(job), tracking_uri=ours_uri).attempts[0][0].id
        bare(bare_uri, ids | {"number": "0"}, like_id, ours_uri)
        for number in range(1, arguments.recurrences + 1):
            ours.append(timed(lambda: recurrence(str(job), tracking_uri=ours_uri)))
            numbered = ids | {"number": str(number)}
            theirs.append(timed(lambda n=numbered: bare(bare_uri, n, like_id, ours_uri)))  # type: ignore[misc]
    ratio = statistics.median(ours) / statistics.median(theirs)
    result = {
        "recurrence_s": statistics.median(ours),
        "bare_s": statistics.median(theirs),
        "ratio": ratio,
        "goal": GOAL,
        "met": ratio <= GOAL,
    }
    if arguments.json:
        print(json.dumps(result))
    else:
        print(
            f"recurrence without training {result['recurrence_s']:.3f} s, "
            f"bare tasks and writes {result['bare_s']:.3f} s"
        )
        print(f"ratio {ratio:.2f} (goal: at most {GOAL}): {'met' if result['met'] else 'missed'}")


if __name__ == "__main__":
    main()
