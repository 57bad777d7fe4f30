from __future__ import annotations

from pathlib import Path

import pytest

from zeus_flows.errors import NoDevice
from zeus_flows.gpu.open_gpus import open_gpus


def test_a_machine_without_a_gpu_says_what_to_type(tmp_path: Path) -> None:
    with pytest.raises(NoDevice, match=r"--simulate v100.*device: simulated-v100"):
        open_gpus("auto", workload=None, batch_size=8, samples_per_epoch=None, state_dir=tmp_path, visible="")
