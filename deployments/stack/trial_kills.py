"""Kills workers and runs of the stack at chosen states or random points, and watches when slots are free again."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

#: What is killed together: the worker's process, the run's, or both.
WHOM = ("worker and run", "run alone", "worker alone")
#: When: before the run has begun, while it trains, while it tells MLflow how that went.
STATES = ("pending", "training", "observing")
HELD = ("PENDING", "RUNNING", "CANCELLING")


@dataclass
class Kill:
    """A kill, and what came of it.

    Attributes:
        job: Whose run it was.
        run_id: The flow run.
        state: At which state, or how far the run had come.
        whom: What was killed.
        at: When, by this process's clock.
        free_s: Seconds until the run's slot was free, or somebody else's; None while it is not.
        next_s: Seconds until the job's next run began, where one was asked for at once; None where none has.
        ended: The state in which the killed run stood in the end.
    """

    job: str
    run_id: str
    state: str
    whom: str
    at: float
    free_s: float | None = None
    next_s: float | None = None
    ended: str = ""


class Stack:
    """The stack as a client of Prefect's API and as processes of this machine."""

    def __init__(self, api: str, folder: Path) -> None:
        self._http = httpx.Client(base_url=api, timeout=30)
        self.folder = folder

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """Return what the API answers.

        Raises:
            httpx.HTTPStatusError: it refuses.
        """
        answer = self._http.request(method, f"/{path}", json=body)
        answer.raise_for_status()
        return answer.json() if answer.content else None

    def deployment(self, job: str) -> dict[str, Any]:
        """Return a job's deployment."""
        found: dict[str, Any] = self.ask("GET", f"deployments/name/recurrence/{job}")
        return found

    def start(self, job: str, **request: Any) -> str:
        """Ask for a run of a job; return its id."""
        return str(self.ask("POST", f"deployments/{self.deployment(job)['id']}/create_flow_run", request)["id"])

    def run(self, run_id: str) -> dict[str, Any]:
        """Return a flow run."""
        found: dict[str, Any] = self.ask("GET", f"flow_runs/{run_id}")
        return found

    def runs(self, job: str | None = None, *, states: Sequence[str] = ()) -> list[dict[str, Any]]:
        """Return the recurrences of a job, or of all, the newest first."""
        body: dict[str, Any] = {"flows": {"name": {"any_": ["recurrence"]}}, "sort": "START_TIME_DESC"}
        if job is not None:
            body["deployments"] = {"name": {"any_": [job]}}
        if states:
            body["flow_runs"] = {"state": {"type": {"any_": list(states)}}}
        found: list[dict[str, Any]] = []
        while page := self.ask("POST", "flow_runs/filter", body | {"limit": 200, "offset": len(found)}):
            found += page
        return found

    def slots(self, job: str) -> int:
        """Return how many slots of a job's deployment are taken."""
        return int((self.deployment(job).get("global_concurrency_limit") or {}).get("active_slots") or 0)

    def worker_of(self, run: dict[str, Any]) -> int | None:
        """Return the process of the worker that a run belongs to; None where that has died or has not begun it."""
        path = self.folder / f"{run['labels'].get('prefect.worker.name', '')}.pid"
        worker = int(path.read_text() or 0) if path.exists() else 0
        processes = below(worker) if worker else []
        pid = holder(run)
        return worker if processes and (pid is None or pid in processes) else None


def _parents() -> dict[int, int]:
    listed = subprocess.run(["ps", "-e", "-o", "pid=,ppid="], capture_output=True, text=True, check=True)  # noqa: S607
    return {int(pid): int(parent) for pid, parent in (line.split() for line in listed.stdout.splitlines())}


def below(pid: int) -> list[int]:
    """Return the processes that one has started, and those that they have."""
    parents, found = _parents(), [pid]
    while more := [child for child, parent in parents.items() if parent in found and child not in found]:
        found += more
    return found[1:]


def holder(run: dict[str, Any]) -> int | None:
    """Return the process id that a run says it is; None before it has begun."""
    try:
        return int(json.loads(run["labels"]["zeus-flows.holder"])["pid"])
    except (LookupError, TypeError, ValueError):
        return None


def stages(folder: Path, job: str) -> dict[str, str]:
    """Return how far each run of a job says that it has come, by flow run."""
    path = folder / "witnesses" / f"{job}.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {line["flow_run"]: line["stage"] for line in map(json.loads, lines)}


class SlotWatch(threading.Thread):
    """Notes when the slots of killed runs are free, and when the next runs of their jobs begin."""

    def __init__(self, stack: Stack) -> None:
        super().__init__(daemon=True)
        self._stack, self._over = stack, threading.Event()
        self.kills: list[Kill] = []
        self.following: dict[str, str] = {}

    def run(self) -> None:
        """Look once a second until told to stop."""
        while not self._over.wait(1.0):
            with suppress(httpx.HTTPError):
                self.look()

    def end(self) -> None:
        """Stop looking."""
        self._over.set()
        self.join()

    def look(self) -> None:
        """Look at every kill of which something is still open."""
        for kill in [kill for kill in self.kills if kill.free_s is None]:
            others = [run for run in self._stack.runs(kill.job, states=HELD) if run["id"] != kill.run_id]
            if others or not self._stack.slots(kill.job):
                kill.free_s = time.monotonic() - kill.at
        for kill in [kill for kill in self.kills if kill.next_s is None and kill.run_id in self.following]:
            if self._stack.run(self.following[kill.run_id])["start_time"] is not None:
                kill.next_s = time.monotonic() - kill.at

    def wait(self, seconds: float) -> None:
        """Wait until nothing is open, or for so long."""
        give_up = time.monotonic() + seconds
        while time.monotonic() < give_up and any(
            kill.free_s is None or (kill.run_id in self.following and kill.next_s is None) for kill in self.kills
        ):
            time.sleep(0.5)


def kill(stack: Stack, run: dict[str, Any], job: str, state: str, whom: str) -> Kill | None:
    """Kill a run's process, its worker, or both; None where they have gone by themselves."""
    worker = stack.worker_of(run)
    if worker is None:
        return None
    children = below(worker)
    dies = [] if whom == "worker alone" else children
    if whom != "run alone":
        dies = [worker, *dies]
    done = Kill(job, str(run["id"]), state, whom, time.monotonic())
    for each in dies:
        with suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)
    return done


def wait_for(seen: Callable[[], Any], seconds: float, every: float = 0.05) -> Any:
    """Return what a function returns once that is something; None where it takes too long."""
    give_up = time.monotonic() + seconds
    while time.monotonic() < give_up:
        if found := seen():
            return found
        time.sleep(every)
    return None


def kill_at(stack: Stack, watch: SlotWatch, job: str, state: str, whom: str, folder: Path) -> Kill | None:
    """Start a run of a job, kill it or its worker at a state, and ask for the next run at once.

    Args:
        stack: Where.
        watch: Notes what comes of it.
        job: Whose run.
        state: One of `STATES`.
        whom: One of `WHOM`.
        folder: Where witnesses are left.
    """
    run_id = stack.start(job)

    def come() -> dict[str, Any] | None:
        run = stack.run(run_id)
        if state == "pending":
            return run if run["state_type"] == "PENDING" and stack.worker_of(run) is not None else None
        return run if stages(folder, job).get(run_id) == state and stack.worker_of(run) is not None else None

    run = wait_for(come, 180)
    done = None if run is None else kill(stack, run, job, state, whom)
    if done is not None:
        watch.following[run_id] = stack.start(job)
        watch.kills.append(done)
    return done


def kill_somewhere(stack: Stack, watch: SlotWatch, chance: random.Random, folder: Path) -> Kill | None:
    """Kill the worker of a run that is under way, at a random point, of its training mostly; None where none is."""
    found = [run for run in stack.runs(states=["RUNNING"]) if holder(run) is not None]
    under_way = [run for run in found if stack.worker_of(run) is not None]  # those of the dead are closed later
    if not under_way:
        return None
    run = chance.choice(under_way)
    run_id, job = str(run["id"]), Path(run["parameters"]["job_file"]).stem
    if chance.random() < 0.75:
        wait_for(lambda: stages(folder, job).get(run_id), 60)
    time.sleep(chance.uniform(0, 8))
    run = stack.run(run_id)
    if run["state_type"] != "RUNNING":
        return None
    point = stages(folder, job).get(run_id, "before training")
    done = kill(stack, run, job, point, chance.choice(("worker and run", "worker and run", "worker alone")))
    if done is not None:
        watch.kills.append(done)
    return done
