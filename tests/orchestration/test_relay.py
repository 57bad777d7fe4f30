"""A run whose worker has died goes on, whatever it prints; one whose worker lives is heard."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

#: Prints before and after its reader has gone, as training does, and as Prefect's log lines do.
RUN = """
import os, sys
from contextlib import nullcontext
from pathlib import Path
from rich.console import Console
from zeus_flows.orchestration.relay import outliving_the_worker

with outliving_the_worker() if sys.argv[1] == "relayed" else nullcontext():
    print("before", flush=True)
    sys.stdin.readline()
    print("after", flush=True)
    Console(stderr=True).print("a log line")
    os.system("echo a child")
print("after all", flush=True)
Path(sys.argv[2]).touch()
"""


@pytest.mark.parametrize("how", ["relayed", "bare"])
def test_only_a_relayed_run_outlives_whoever_reads_what_it_prints(how: str, tmp_path: Path) -> None:
    run = subprocess.Popen(
        [sys.executable, "-c", RUN, how, str(tmp_path / "through")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert run.stdin is not None
    assert run.stdout is not None
    assert run.stdout.readline() == b"before\n"
    os.close(run.stdout.fileno())  # as when a worker is killed
    run.stdin.write(b"go on\n")
    run.stdin.flush()
    assert (run.wait(30) == 0) is (how == "relayed")
    assert (tmp_path / "through").exists() is (how == "relayed")


def test_what_a_run_prints_is_heard_in_order_and_to_the_end(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", RUN, "relayed", str(tmp_path / "through")], input=b"\n", capture_output=True, timeout=30
    )
    assert done.stdout.splitlines() == [b"before", b"after", b"a child", b"after all"]
    assert done.stderr == b"a log line\n"
