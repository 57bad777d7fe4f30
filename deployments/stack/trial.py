"""Tries the stack as a bad week would: jobs on a schedule, workers killed, a roll-back, strangers at the API.

    python deployments/stack/trial.py [--jobs 20] [--kills 20] [--seed 0] [--json FILE] [--no-states] [--quick]

It starts the stack (up.py) with two workers in a folder of its own, deploys jobs that train nothing for some seconds on
a simulated GPU, and then:

* deploys them again, after which nothing has changed;
* kills a run, its worker, or both while the run is pending, trains or tells MLflow, and measures how long its slot is
  taken (at most the grace period of 60 s and 30 s more) and when the job's next run begins;
* lets the schedule run and kills workers at random points of runs;
* sets the variable that rolls a fleet back, and looks at the mode of every job's next run;
* states everything that a caller of the API can state;
* counts: every run that Prefect calls completed is in MLflow once, no recurrence is missing or twice, nothing is under
  way, no slot is taken, every ledger is the fold of its runs, and `zeus-flows fleet` says what MLflow holds.

It prints each check with what it saw, and ends with 1 where one failed. Twenty jobs and kills take about 20 minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import chdir, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import yaml
from trial_kills import HELD, STATES, WHOM, Kill, SlotWatch, Stack, kill_at, kill_somewhere, stages, wait_for

if TYPE_CHECKING:
    from mlflow.entities import Run

HERE = Path(__file__).parent
#: Seconds that a dead run's slot may be taken: the deployments' grace period, and the slack beyond it.
BOUND_S = 60.0 + 30.0
#: When jobs are due: with twenty of them, more than two workers can train. More often where it is to be quick.
CRON = {False: "*/4 * * * *", True: "* * * * *"}

#: What a caller of the API might like to state: everything that a deployment pins, and more.
THEIRS: dict[str, Any] = {
    "job_file": "theirs.yaml",
    "folder": "/etc",
    "digest": "0" * 64,
    "tracking_uri": "http://127.0.0.1:9/stranger",
    "simulate": "a40",
    "function": "os:system",
    "command": ["touch", "theirs.txt"],
    "train": {"function": "os:system"},
}
#: And what they might like a worker to start.
VARIABLES: dict[str, Any] = {
    "command": "touch theirs.txt",
    "env": {"PYTHONPATH": "/theirs", "MLFLOW_TRACKING_URI": "http://stranger"},
    "working_dir": "/etc",
    "stream_output": False,
    "anything": 1,
}


@dataclass
class Trial:
    """What is tried, and what was found.

    Attributes:
        stack: Where.
        folder: Job files and witnesses.
        jobs: Their names.
        checks: What was checked, whether it held, and what was seen.
    """

    stack: Stack
    folder: Path
    jobs: list[str]
    checks: list[tuple[str, bool, str]] = field(default_factory=list)

    def check(self, what: str, held: bool, seen: str = "") -> None:
        """Note a check, and print it."""
        self.checks.append((what, held, seen))
        say(f"  {'yes' if held else 'NO '} {what}{': ' if seen else ''}{seen}")


def say(line: str) -> None:
    """Print a line at once."""
    print(line, flush=True)  # noqa: T201


@contextmanager
def standing(folder: Path) -> Iterator[dict[str, str]]:
    """Run the stack in a folder; yield the environment that it tells its user to set."""
    log = folder / "up.log"
    ports = [str(free_port()), str(free_port())]
    words = ["--folder", str(folder), "--prefect-port", ports[0], "--mlflow-port", ports[1]]
    env = os.environ | {
        "PREFECT_HOME": str(folder / "home"),
        "PREFECT_WORKER_QUERY_SECONDS": "3",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
    with log.open("wb") as output:
        up = subprocess.Popen([sys.executable, str(HERE / "up.py"), *words], env=env, stdout=output, stderr=output)  # noqa: S603
    try:
        wait_for(lambda: "are up" in log.read_text() or up.poll() is not None, 300, 0.5)
        said = [line.split()[1] for line in log.read_text().splitlines() if line.startswith("  export ")]
        if len(said) != 2:
            raise SystemExit(f"the stack did not start:\n{log.read_text()}")
        yield dict(word.split("=", 1) for word in said)
    finally:
        up.send_signal(signal.SIGTERM)
        up.wait(90)


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def write_jobs(folder: Path, number: int) -> list[str]:
    """Write job files, and beside them the training; return the jobs' names."""
    (folder / "jobs").mkdir()
    shutil.copy(HERE / "trial_training.py", folder)
    names = [f"job-{n:02d}" for n in range(1, number + 1)]
    for n, name in enumerate(names):
        held = {"hold_s": 20.0} if n < len(STATES) * len(WHOM) and STATES[n // len(WHOM)] == "observing" else {}
        job = {
            "name": name,
            "train": {"function": "trial_training:train", "parameters": {"job": name, **held}},
            "target": {"metric": "progress", "value": 1.0, "better": "higher"},
            "batch_sizes": [32, 64, 128],
            "default_batch_size": 128,
            "max_epochs": 30,
            "device": "simulated-v100",
        }
        (folder / "jobs" / f"{name}.yaml").write_text(yaml.safe_dump(job))
    theirs = {"command": ["touch", "theirs.txt", "{batch_size}"], "metric": {"pattern": "x=(.)"}}
    (folder / "theirs.yaml").write_text(yaml.safe_dump(job | {"name": "theirs", "train": theirs}))
    return names


def zeus_flows(*words: str) -> str:
    """Run a command in this process; return what it prints.

    Raises:
        SystemExit: it failed.
    """
    from click.testing import CliRunner

    from zeus_flows.cli import main

    done = CliRunner().invoke(main, list(words))
    if done.exit_code:
        raise SystemExit(f"zeus-flows {' '.join(words)} ended with {done.exit_code}:\n{done.output}")
    return done.output


def deployed(*words: str) -> Counter[str]:
    """Deploy the folder; return how many deployments were created, updated, unchanged."""
    document = json.loads(zeus_flows("deploy", "jobs", "--pool", "gpu", "--json", *words))
    return Counter(deployment["change"] for deployment in document["deployments"])


def deploy_twice(trial: Trial) -> None:
    """Deploy a folder twice."""
    number = len(trial.jobs)
    first, second = deployed(), deployed()
    trial.check(f"{number} jobs are deployed from a folder", first == Counter(create=number), str(dict(first)))
    trial.check("deployed again, nothing changes", second == Counter(unchanged=number), str(dict(second)))


def kill_at_each_state(trial: Trial, watch: SlotWatch) -> None:
    """Kill at each state whoever can be killed."""
    cells = [(state, whom) for state in STATES for whom in WHOM]
    for job, (state, whom) in zip(trial.jobs, cells, strict=False):
        done = kill_at(trial.stack, watch, job, state, whom, trial.folder)
        say(f"  {job}: {whom} killed while {state}" if done else f"  {job}: {state} was not met")
    watch.wait(240)
    wait_for(lambda: quiet(trial), 240, 1.0)
    for kill in watch.kills:
        kill.ended = str(trial.stack.run(kill.run_id)["state_name"])
        free, follows = (f"{s:.0f} s" if s is not None else "never" for s in (kill.free_s, kill.next_s))
        seen = f"slot free after {free:>6}, next began after {follows:>6}"
        say(f"    {kill.state:<10} {kill.whom:<15} {seen}; it is {kill.ended}")
    trial.check("every state was met", len(watch.kills) == min(len(cells), len(trial.jobs)), str(len(watch.kills)))
    spared = [kill for kill in watch.kills if kill.whom == "worker alone" and kill.state != "pending"]
    ends = Counter(kill.ended for kill in spared)
    trial.check("a run that has begun outlives its worker", set(ends) == {"Completed"}, str(dict(ends)))
    slots_in_time(trial, watch)


def slots_in_time(trial: Trial, watch: SlotWatch) -> None:
    """Check that no slot was taken for longer than it may be by a run that had died."""
    taken = [kill.free_s for kill in watch.kills if kill.ended != "Completed"]
    longest = max((s if s is not None else float("inf") for s in taken), default=0.0)
    what = f"no slot of a dead run was taken for longer than {BOUND_S:.0f} s"
    trial.check(what, longest <= BOUND_S, f"{longest:.0f} s at most, of {len(taken)}")


def storm(trial: Trial, watch: SlotWatch, kills: int, chance: random.Random, cron: str) -> None:
    """Let the schedule run and kill workers at random points."""
    updated = deployed("--cron", cron)
    trial.check("a schedule is given to all", updated == Counter(update=len(trial.jobs)), str(dict(updated)))
    give_up = time.monotonic() + 120 + 90 * kills
    while len(watch.kills) < kills and time.monotonic() < give_up:
        done = kill_somewhere(trial.stack, watch, chance, trial.folder)
        if done is not None:
            say(f"  {len(watch.kills)}. {done.whom} killed, {done.job}: {done.state}")
            time.sleep(chance.uniform(2, 10))  # until another worker is there and at work
        time.sleep(0.5)
    wait_for(lambda: any(run["auto_scheduled"] for run in trial.stack.runs(states=["COMPLETED"])), 300, 2.0)
    deployed("--paused")
    watch.wait(150)
    spared = [kill for kill in watch.kills if kill.whom == "worker alone"]
    wait_for(lambda: all(trial.stack.run(kill.run_id)["state_type"] not in HELD for kill in spared), 120, 1.0)
    trial.check("so many workers were killed in mid-run", len(watch.kills) == kills, str(len(watch.kills)))
    by_schedule = [run for run in trial.stack.runs(states=["COMPLETED"]) if run["auto_scheduled"]]
    trial.check("the schedule fires", bool(by_schedule), f"{len(by_schedule)} completed by it")
    for kill in watch.kills:
        kill.ended = str(trial.stack.run(kill.run_id)["state_name"])
    slots_in_time(trial, watch)
    replaced = (trial.stack.folder / "up.log").read_text().count("and is started again")
    trial.check("killed workers are replaced", replaced >= kills, f"{replaced} in all")
    ends = Counter(kill.ended for kill in spared)
    trial.check("runs whose worker alone was killed go on", set(ends) <= {"Completed"}, str(dict(ends)))
    say(f"    how far runs had come: {dict(Counter(kill.state for kill in watch.kills))}")


def quiet(trial: Trial) -> bool:
    """Whether nothing runs, is about to, or is late."""
    late = [run for run in trial.stack.runs(states=["SCHEDULED"]) if not run["auto_scheduled"]]
    return not late and not trial.stack.runs(states=HELD)


def roll_back(trial: Trial) -> None:
    """Set the fleet's variable, and look at every job's next run."""
    trial.stack.ask("POST", "variables/", {"name": "zeus_flows_mode", "value": "observe"})
    asked = {job: trial.stack.start(job) for job in trial.jobs}
    wait_for(lambda: quiet(trial), 120 + 40 * len(asked), 1.0)
    ended = Counter(str(trial.stack.run(run_id)["state_name"]) for run_id in asked.values())
    trial.check("after all of it every job runs", ended == Counter(Completed=len(asked)), str(dict(ended)))
    modes: Counter[str] = Counter()
    for job, run_id in asked.items():
        modes.update(run.data.tags["zf.mode"] for run in attempts(job) if _flow_run(run) == run_id)
    trial.check("the roll-back variable is obeyed by the next runs", set(modes) == {"observe"}, str(dict(modes)))
    trial.stack.ask("DELETE", "variables/name/zeus_flows_mode")


def strangers(trial: Trial) -> None:
    """State all that can be stated; nothing of it may reach a worker."""
    job, refused, let_in = trial.jobs[0], 0, []
    for name, value in THEIRS.items():
        refused += _refused(trial, job, parameters={name: value})
        let_in.append(trial.stack.start(job, parameters={name: value}, enforce_parameter_schema=False))
    for name, value in VARIABLES.items():
        refused += _refused(trial, job, job_variables={name: value})
    number = len(THEIRS) + len(VARIABLES)
    trial.check("what a caller states is refused by the server", refused == number, f"{refused} of {number}")
    deployment = trial.stack.deployment(job)
    copied = {key: deployment[key] for key in ("flow_id", "work_pool_name", "parameters")}
    body = copied | {"deployment_id": deployment["id"], "state": {"type": "SCHEDULED"}, "job_variables": VARIABLES}
    unchecked = str(trial.stack.ask("POST", "flow_runs/", body)["id"])
    wait_for(lambda: quiet(trial), 60 + 30 * len(let_in), 1.0)
    ends = Counter(str(trial.stack.run(run_id)["state_name"]) for run_id in let_in)
    seen = f"{dict(ends)} with parameters, {trial.stack.run(unchecked)['state_name']} with job variables"
    trial.check("and by the run, where the server is told not to check", set(ends) <= {"Failed", "Crashed"}, seen)
    found = [path.name for path in trial.folder.rglob("theirs.txt")]
    trial.check("nothing of theirs has run", not found and not attempts("theirs"))


def at_once(trial: Trial, kills: Sequence[Kill]) -> None:
    """Check that jobs trained side by side, one for each worker."""
    orphans = {kill.run_id for kill in kills}  # another run of their worker may have begun
    runs = [run for run in trial.stack.runs(states=["COMPLETED"]) if run["id"] not in orphans]
    pairs = [
        (one, other)
        for one in runs
        for other in runs
        if one["id"] < other["id"] and one["start_time"] < other["end_time"] and other["start_time"] < one["end_time"]
    ]
    mates = [a["labels"].get("prefect.worker.name") == b["labels"].get("prefect.worker.name") for a, b in pairs]
    trial.check("several jobs run at once", bool(pairs), f"{len(pairs)} pairs of runs")
    trial.check("no worker trains two at once", not any(mates))


def _refused(trial: Trial, job: str, **request: Any) -> bool:
    try:
        trial.stack.start(job, **request)
    except httpx.HTTPStatusError as error:
        return error.response.status_code in (409, 422)
    return False


def attempts(job: str) -> list[Run]:
    """Return the runs of a job's attempts in MLflow, found without what zeus_flows knows of them."""
    from mlflow import MlflowClient

    client = MlflowClient()
    experiment = client.get_experiment_by_name(job)
    if experiment is None:
        return []
    found = client.search_runs([experiment.experiment_id], "tags.`zf.kind` = 'attempt'", max_results=5000)
    return sorted(found, key=_order)


def _order(run: Run) -> tuple[int, int]:
    return int(run.data.tags["zf.recurrence"]), int(run.data.tags["zf.attempt"])


def _flow_run(run: Run) -> str:
    return str(run.data.tags.get("zf.prefect.flow_run_id", ""))


def account(trial: Trial, kills: Sequence[Kill]) -> None:
    """Check that nothing was lost, doubled or left under way."""
    by_job = {job: attempts(job) for job in trial.jobs}
    runs = [run for found in by_job.values() for run in found]
    completed = {str(run["id"]) for run in trial.stack.runs(states=["COMPLETED"])}
    observed = {_flow_run(run) for run in runs if run.data.tags.get("zf.outcome") == "converged"}
    lost = completed - observed
    trial.check("every completed run is in MLflow", not lost, f"{len(completed)} runs, {len(lost)} lost")
    told = [_order(run) for found in by_job.values() for run in found]
    twice = sum(len(found) - len({_order(run) for run in found}) for found in by_job.values())
    missing = sum(
        max(_order(run)[0] for run in found) - len({_order(run)[0] for run in found}) for found in by_job.values()
    )
    closed = [run for run in runs if "zf.observation" in run.data.params and run.info.status != "RUNNING"]
    trial.check("every attempt has one outcome", len(closed) == len(runs), f"{len(closed)} of {len(runs)}")
    trial.check("no recurrence is twice, or without a trace", not twice, f"{len(told)} attempts, {missing} without one")
    kept = {_flow_run(run) for run in runs if run.data.tags.get("zf.outcome") == "converged"}
    died = {kill.run_id for kill in kills if kill.whom != "worker alone" and kill.state != "observing"}
    trained = {
        run_id for job in trial.jobs for run_id, stage in stages(trial.folder, job).items() if stage != "training"
    }
    seen = f"{len(trained - died)} trainings, {len(trained - died - kept)} lost"
    trial.check("what was trained and not killed before it was told is there", not trained - died - kept, seen)
    taken = {job: slots for job in trial.jobs if (slots := trial.stack.slots(job))}
    trial.check("no slot is taken, nothing is under way", not taken and quiet(trial), str(taken or ""))
    wrong = [
        job for job in trial.jobs if "is the fold of all" not in zeus_flows("ledger", "verify", f"jobs/{job}.yaml")
    ]
    trial.check("every ledger is the fold of its runs", not wrong, f"{len(trial.jobs)} of them")


def fleet_is_what_mlflow_holds(trial: Trial) -> None:
    """Compare the fleet's page with the runs."""
    page = {job["name"]: job for job in json.loads(zeus_flows("fleet", "--json"))["jobs"]}
    wrong = []
    for job in trial.jobs:
        told, runs = page[job], attempts(job)
        newest = runs[-1]
        by_fleet = [told["recurrences"], told["newest"]["recurrence"], told["newest"]["mode"], told["under_way"]]
        by_fleet += [told["newest"]["batch_size"], told["newest"]["outcome"], told["energy_source"]]
        by_runs = [_order(newest)[0], _order(newest)[0], newest.data.tags["zf.mode"], []]
        by_runs += [int(newest.data.params["zf.batch_size"]), newest.data.tags["zf.outcome"], "simulated"]
        if by_fleet != by_runs:
            wrong.append(f"{job}: {by_fleet}, MLflow {by_runs}")
    trial.check("fleet says what MLflow holds", not wrong, "; ".join(wrong) or f"{len(page)} jobs")


def main() -> None:
    """Run the trial."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=20)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-states", dest="states", action="store_false", help="leave out kills at each state")
    parser.add_argument("--quick", action="store_true", help="three jobs, two kills, none at each state")
    parser.add_argument("--json", type=Path, help="write what was found to this file")
    asked = parser.parse_args()
    number, kills = (3, 2) if asked.quick else (asked.jobs, asked.kills)
    place = Path(tempfile.mkdtemp(prefix="zeus-trial-"))
    place.chmod(0o755)  # a PostgreSQL that root starts runs as another user, who must find it
    folder = place / "work"
    folder.mkdir()
    began = time.monotonic()
    states: list[Kill] = []
    with standing(place) as environment, chdir(folder):
        os.environ.update(environment, PREFECT_HOME=str(place / "home"), ZEUS_FLOWS_STATE_DIR=str(place / "state"))
        stack = Stack(environment["PREFECT_API_URL"], place)
        trial = Trial(stack, folder, write_jobs(folder, number))
        say(f"the stack is up after {time.monotonic() - began:.0f} s, in {place}")
        on_postgres = not (place / "prefect-server/prefect.db").exists()
        trial.check("both servers are on PostgreSQL", on_postgres)
        deploy_twice(trial)
        if asked.states and not asked.quick:
            with watching(stack) as watch:
                kill_at_each_state(trial, watch)
                states = watch.kills
        with watching(stack) as watch:
            storm(trial, watch, kills, random.Random(asked.seed), CRON[asked.quick])  # noqa: S311
            random_ones = watch.kills
        roll_back(trial)
        strangers(trial)
        at_once(trial, [*states, *random_ones])
        account(trial, [*states, *random_ones])
        fleet_is_what_mlflow_holds(trial)
        ends = Counter(str(run["state_name"]) for run in stack.runs())
    failed = [what for what, held, _ in trial.checks if not held]
    told = f"{len(trial.checks) - len(failed)} of {len(trial.checks)} held"
    say(f"{told} in {time.monotonic() - began:.0f} s; runs of jobs: {dict(ends)}")
    if asked.json is not None:
        found = {
            "checks": trial.checks,
            "states": [asdict(k) for k in states],
            "kills": [asdict(k) for k in random_ones],
        }
        asked.json.write_text(json.dumps(found | {"runs": ends}, indent=2))
    if failed:
        raise SystemExit(f"did not hold: {'; '.join(failed)}\nlogs are in {place}")
    shutil.rmtree(place)


@contextmanager
def watching(stack: Stack) -> Iterator[SlotWatch]:
    """Watch slots for a while."""
    watch = SlotWatch(stack)
    watch.start()
    try:
        yield watch
    finally:
        watch.end()


if __name__ == "__main__":
    main()
