from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from tests.gpu.nvml_emulator import Emulator
from zeus_flows.errors import ConfigError, NoDevice
from zeus_flows.gpu.nvml import Nvml
from zeus_flows.gpu.open_gpus import pick_gpus
from zeus_flows.gpu.visible import visible_gpus

UUIDS = ["GPU-aaaa1111", "GPU-aabb2222", "GPU-cccc3333"]


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, (0, 1, 2)),
        ("0", (0,)),
        ("2,0", (2, 0)),
        (" 1 , 2 ", (1, 2)),
        ("GPU-cccc3333,GPU-aaaa1111", (2, 0)),
        ("GPU-c", (2,)),
        ("gpu-aab", (1,)),
        ("1,GPU-c", (1, 2)),
        ("1,7,2", (1,)),  # CUDA stops at the first index that does not exist
        ("0,-1,2", (0,)),
    ],
)
def test_visible_devices_are_read_as_cuda_reads_them(visible: str | None, expected: tuple[int, ...]) -> None:
    assert visible_gpus(visible, UUIDS) == expected


@pytest.mark.parametrize("visible", ["", "-1", "9", " "])
def test_a_list_that_hides_every_gpu_says_so(visible: str) -> None:
    with pytest.raises(NoDevice, match="hides every GPU"):
        visible_gpus(visible, UUIDS)


@pytest.mark.parametrize(
    ("visible", "why"),
    [("GPU-a", "several"), ("GPU-dddd", "not a GPU"), ("banana", "not a GPU"), ("0,GPU-aaaa", "twice")],
)
def test_a_list_that_cannot_be_meant_is_refused(visible: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        visible_gpus(visible, UUIDS)


def test_an_unset_list_gives_a_job_the_first_gpu_and_a_world_size_gives_it_more(
    emulate: Callable[..., Emulator],
) -> None:
    emulate(NVMLEMU_GPUS="v100,v100,v100")
    nvml = Nvml()
    assert [gpu.index for gpu in pick_gpus(nvml, None, None)[0]] == [0]
    assert [gpu.index for gpu in pick_gpus(nvml, None, 2)[0]] == [0, 1]
    assert [gpu.index for gpu in pick_gpus(nvml, "2,1", None)[0]] == [2, 1]
    with pytest.raises(ConfigError, match="wants 2 GPUs and has 1"):
        pick_gpus(nvml, "2", 2)


@pytest.mark.parametrize(
    "visible", ["MIG-5eed0001-0000-4000-8000-000000000001", "MIG-GPU-5eed0001-0000-4000-8000-000000000001/1/0"]
)
def test_a_slice_of_mig_stands_for_its_gpu_and_is_shared(emulate: Callable[..., Emulator], visible: str) -> None:
    emulate(NVMLEMU_GPUS="a40,a40", NVMLEMU_MIG="1")
    gpus, shared = pick_gpus(Nvml(), visible, None)
    assert [gpu.index for gpu in gpus] == [1]
    assert shared


def test_a_gpu_in_mig_mode_is_shared_however_it_is_named(emulate: Callable[..., Emulator]) -> None:
    emulate(NVMLEMU_GPUS="a40,a40", NVMLEMU_MIG="1")
    assert pick_gpus(Nvml(), "1", None)[1]
    assert not pick_gpus(Nvml(), "0", None)[1]


class Cuda:
    """CUDA as torch shows it, with the second GPU first."""

    class cuda:  # noqa: N801
        @staticmethod
        def is_available() -> bool:
            return True

        @staticmethod
        def is_initialized() -> bool:
            return False

        @staticmethod
        def device_count() -> int:
            return 2

        @staticmethod
        def get_device_properties(i: int) -> SimpleNamespace:
            number = 1 - i
            return SimpleNamespace(uuid=f"5eed{number:04x}-0000-4000-8000-{number:012x}")


def test_gpus_that_differ_are_taken_in_the_order_of_cuda(
    emulate: Callable[..., Emulator], monkeypatch: pytest.MonkeyPatch
) -> None:
    emulate(NVMLEMU_GPUS="p100,v100")
    monkeypatch.setitem(sys.modules, "torch", Cuda)
    assert [gpu.model for gpu in pick_gpus(Nvml(), None, None)[0]] == ["Tesla V100-PCIE-32GB"]
    assert [gpu.index for gpu in pick_gpus(Nvml(), "0,1", None)[0]] == [1, 0]
    assert [gpu.index for gpu in pick_gpus(Nvml(), "GPU-5eed0000", None)[0]] == [0]
