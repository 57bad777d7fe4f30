"""A script that knows nothing of us, taken through recurrences as Prefect flow runs."""

from __future__ import annotations

import logging
import textwrap
from pathlib import Path

import pytest
from mlflow import MlflowClient

from zeus_flows.core.records import Outcome
from zeus_flows.orchestration.recurrence_flow import recurrence

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect_server"), pytest.mark.xdist_group("prefect")]

SCRIPT = """
import sys, torch
batch_size = int(sys.argv[1])
epochs = {32: 4, 64: 5, 128: 8}[batch_size]
optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
for epoch in range(1, 100):
    for _ in range(1280 // batch_size):
        optimizer.step()
    print(f"epoch {epoch} acc={0.9 * epoch / epochs:.3f}")
"""
JOB = """
name: scripted
device: simulated-v100
train:
  command: [python, script.py, "{{batch_size}}"]
  folder: {folder}
  metric: {{pattern: 'acc=([0-9.]+)'}}
target: {{metric: accuracy, value: 0.9, better: higher}}
batch_sizes: [32, 64, 128]
default_batch_size: 128
max_epochs: 20
"""


def test_recurrences_of_a_script_are_flow_runs_that_show_what_it_says(
    tmp_path: Path, sqlite_uri: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "prefect.task_runs")
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))
    job = tmp_path / "job.yaml"
    job.write_text(JOB.format(folder=tmp_path))
    done = [recurrence(str(job), tracking_uri=sqlite_uri) for _ in range(2)]
    observations = [observation for each in done for _, observation in each.attempts]
    assert all(each.converged for each in done)
    assert {o.samples_per_epoch for o in observations if o.outcome is Outcome.CONVERGED} == {1280}
    assert [o.epochs for o in observations if o.converged] == [8, 5]

    client = MlflowClient(tracking_uri=sqlite_uri)
    run_id = done[0].attempts[0][0].id
    assert "output.txt" in [file.path for file in client.list_artifacts(run_id)]
    assert ("prefect.task_runs", logging.INFO, "epoch 8 acc=0.900") in caplog.record_tuples
