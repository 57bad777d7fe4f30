"""The launcher: steps of torch are counted whatever the loop looks like, and MLflow calls of a script are let be."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from zeus_flows.training.forms import launcher

pytestmark = pytest.mark.slow

BEGIN = """
import torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""


def launch(tmp_path: Path, script: str, *words: str) -> bytes:
    (tmp_path / "script.py").write_text(textwrap.dedent(script))
    argv = [sys.executable, launcher.__file__, *(words or ("script.py",))]
    done = subprocess.run(
        argv, cwd=tmp_path, capture_output=True, check=True, env=os.environ | {"PYTHONUNBUFFERED": "1"}
    )
    return done.stdout


def test_steps_and_lines_keep_their_order(tmp_path: Path) -> None:
    script = (
        BEGIN + "for epoch in range(2):\n    for _ in range(3):\n        optimizer.step()\n    print('epoch', epoch)\n"
    )
    assert launch(tmp_path, script) == b"\x1e\x1e\x1eepoch 0\n\x1e\x1e\x1eepoch 1\n"


def test_an_accumulated_batch_is_one_step(tmp_path: Path) -> None:
    script = BEGIN + (
        "for micro in range(8):\n    model(torch.ones(2, 4)).sum().backward()\n"
        "    if micro % 4 == 3:\n        optimizer.step()\n        optimizer.zero_grad()\n"
    )
    assert launch(tmp_path, script).count(b"\x1e") == 2


def test_a_step_that_a_gradient_scaler_leaves_out_is_one(tmp_path: Path) -> None:
    script = BEGIN + (
        "scaler = torch.amp.GradScaler('cpu')\n"
        "for value in (1.0, float('inf'), 1.0):\n"
        "    optimizer.zero_grad()\n    scaler.scale((model(torch.ones(1, 4)) * value).sum()).backward()\n"
        "    scaler.step(optimizer)\n    scaler.update()\n"
    )
    assert launch(tmp_path, script).count(b"\x1e") == 3


def test_of_several_optimizers_the_first_counts_and_that_is_said(tmp_path: Path) -> None:
    script = BEGIN + (
        "other = torch.optim.Adam(torch.nn.Linear(4, 1).parameters())\n"
        "for _ in range(3):\n    optimizer.step()\n    other.step()\n    other.step()\n"
    )
    output = launch(tmp_path, script)
    assert output.count(b"\x1e") == 3
    assert output.count(b"several optimizers step here; the steps of the first are counted") == 1


def test_an_optimizer_that_takes_the_place_of_one_that_is_gone_is_counted(tmp_path: Path) -> None:
    script = BEGIN + (
        "for epoch in range(3):\n    optimizer = torch.optim.Adam(model.parameters())\n"
        "    for _ in range(4):\n        optimizer.step()\n"
    )
    output = launch(tmp_path, script)
    assert output == b"\x1e" * 12


def test_an_optimizer_that_leaves_off_for_good_makes_room_for_the_next(tmp_path: Path) -> None:
    script = BEGIN + (
        "optimizer.step()\nnext_one = torch.optim.Adam(model.parameters())\nfor _ in range(300):\n    next_one.step()\n"
    )
    assert launch(tmp_path, script).count(b"\x1e") == 1 + 300 - launcher._LEFT_OFF


def test_a_training_loader_that_begins_anew_is_told_and_an_evaluations_is_not(tmp_path: Path) -> None:
    script = BEGIN + (
        "from torch.utils.data import DataLoader\ntrain, valid = DataLoader(range(2)), DataLoader(range(3))\n"
        "for epoch in range(3):\n    for _ in train:\n        optimizer.step()\n    for _ in valid:\n        pass\n"
    )
    assert launch(tmp_path, script) == b"\x1e\x1e\x1f\x1e\x1e\x1f\x1e\x1e"


def test_workers_that_a_script_forks_count_nothing(tmp_path: Path) -> None:
    script = (
        BEGIN + "import os\nif os.fork() == 0:\n    optimizer.step()\n    os._exit(0)\nos.wait()\noptimizer.step()\n"
    )
    assert launch(tmp_path, script).count(b"\x1e") == 1


def test_a_script_sees_its_own_name_words_and_folder(tmp_path: Path) -> None:
    script = "import sys, helper\nprint(__name__, sys.argv, helper.VALUE)\n"
    (tmp_path / "helper.py").write_text("VALUE = 7\n")
    seen = launch(tmp_path, script, "script.py", "--lr", "0.1").decode()
    assert seen == "__main__ ['script.py', '--lr', '0.1'] 7\n"
    as_module = launch(tmp_path, script, "-m", "script", "--lr", "0.1").decode()
    assert as_module.endswith("script.py', '--lr', '0.1'] 7\n")


def test_a_program_that_is_not_python_is_started_as_it_is(tmp_path: Path) -> None:
    assert launch(tmp_path, "", "--exec", "echo", "hello") == b"hello\n"
