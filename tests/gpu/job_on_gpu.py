"""A job for tests of faults: `python job_on_gpu.py <state dir> <what to do>`. It says what happens, line by line."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

from zeus_flows.core.power_profile import Knob
from zeus_flows.errors import ZeusFlowsError
from zeus_flows.gpu.group import Gpus
from zeus_flows.gpu.open_gpus import open_gpus


def train(gpus: Gpus, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        gpus.ran(64)
        time.sleep(0.01)


def main(state_dir: Path, what: str) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it would be ignored, and rightly so
    gpus = open_gpus(
        "auto",
        workload=None,
        batch_size=64,
        samples_per_epoch=None,
        state_dir=state_dir,
        visible=None,
        knob=Knob.CLOCKS if what == "clocks" else Knob.POWER_LIMIT,
        locked_before_mhz=int(os.environ["LOCKED_BEFORE"]) if "LOCKED_BEFORE" in os.environ else None,
    )  # no `with`, so that leaving without closing is tested too
    start = gpus.mark()
    if what == "clocks":
        gpus.control.set(900.0)
    elif gpus.power.can_set:
        gpus.power.set_limit_w(100.0)
    if what == "prefect":  # whose handler raises

        def terminated(*_: object) -> None:
            raise SystemExit("terminated")

        gpus.power.restore()
        signal.signal(signal.SIGTERM, terminated)
        gpus.power.set_limit_w(100.0)
    if what == "workers":
        multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,)).start()
    print("ready", f"{gpus.power.limit_w():g}", gpus.power.can_set, flush=True)
    if what in ("wait", "prefect", "workers", "clocks"):
        train(gpus, 60.0)
    elif what == "busy":  # sets limits all the time
        while True:
            for limit_w in gpus.power.limits_w:
                gpus.power.set_limit_w(limit_w)
    elif what == "raise":
        raise RuntimeError("a crash in user code")
    elif what == "with":
        with gpus:
            raise RuntimeError("a crash in user code")
    elif what == "exit":
        sys.exit(3)
    else:
        train(gpus, float(what))
    span = gpus.since(start)
    print("span", span.complete, span.energy_j > 0, flush=True)
    gpus.close()


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    try:
        main(Path(sys.argv[1]), sys.argv[2])
    except ZeusFlowsError as error:
        print(type(error).__name__, error, flush=True)
        sys.exit(error.exit_code)
