"""`zeus-flows doctor --measure`, on the emulated driver: a healthy GPU, and one planted error after the other."""

from __future__ import annotations

import json
import math
import socket
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from tests.gpu.nvml_emulator import Emulator, set_limit_elsewhere
from zeus_flows.cli import main
from zeus_flows.cli.gpu import doctor
from zeus_flows.experiments.acceptance.findings import Acceptance, Finding, Verdict, masked
from zeus_flows.experiments.acceptance.loads import GpuLoad, open_load
from zeus_flows.experiments.acceptance.measured_page import document, page
from zeus_flows.experiments.acceptance.measuring import AcceptancePlan, measure
from zeus_flows.experiments.acceptance.put_back import judge_put_back
from zeus_flows.experiments.acceptance.readings import SensorReading, judge_counter, judge_spans, scatter_of_spans
from zeus_flows.gpu.group import Gpus
from zeus_flows.gpu.guard import PowerGuard
from zeus_flows.gpu.journal import journal_folder
from zeus_flows.gpu.nvml import Nvml
from zeus_flows.gpu.open_gpus import group_of_real
from zeus_flows.gpu.simulated import Load

Emulate = Callable[..., Emulator]

LOAD = Load(0.05, 238.0, active=0.92, clock_bound=0.52)  # seconds_per_epoch is a step's
LIMITS = (250.0, 225.0, 200.0, 175.0, 150.0, 125.0, 100.0)


def measured(
    emulate: Emulate,
    tmp_path: Path,
    *,
    load: Callable[[Emulator], GpuLoad] | None = None,
    minutes: float = 3.0,
    say: Callable[[str], None] = lambda _: None,
    **switches: str,
) -> Acceptance:
    """Return what is found on an emulated GPU whose clock the load moves on; children are tried elsewhere."""
    switches = {"NVMLEMU_UPDATE_MS": "100", "NVMLEMU_NOISE_MW": "3000", **switches}
    emulator = emulate(NVMLEMU_CLOCK="virtual", **switches)

    def gpus() -> Gpus:
        devices = Nvml().devices()[:1]
        guard = PowerGuard(devices, journal_folder(tmp_path))
        why_not = guard.acquire()
        return group_of_real(
            devices,
            guard=guard,
            why_not=why_not,
            shared=False,
            clock=emulator.now,
            sleep=emulator.advance,
            watch_s=None,
        )

    def busy(_uuid: str) -> GpuLoad:
        if load is not None:
            return load(emulator)
        emulator.load(LOAD)
        return GpuLoad("emulated", lambda: emulator.advance(emulator.epoch_seconds()))

    return measure(AcceptancePlan(60 * minutes, gpus, busy, tmp_path, children=False, sleep=emulator.advance), say)


def verdicts(found: Acceptance) -> dict[str, Verdict]:
    return {finding.name: finding.verdict for finding in found.findings}


def finding(found: Acceptance, name: str) -> Finding:
    return next(f for f in found.findings if f.name == name)


def test_a_healthy_gpu_passes_every_check_and_is_as_it_was(emulate: Emulate, tmp_path: Path) -> None:
    said: list[str] = []
    found = measured(emulate, tmp_path, say=said.append)
    assert verdicts(found) == {
        "counter against sampled power": Verdict.PASS,
        "how long a span must be": Verdict.PASS,
        "what limits do": Verdict.PASS,
        "what we cost per step": Verdict.PASS,
        "the limit after all this": Verdict.PASS,
    }
    assert tuple(row.limit_w for row in found.limits) == LIMITS
    powers = [row.power_w for row in found.limits]
    speeds = [row.steps_per_s for row in found.limits]
    assert powers == sorted(powers, reverse=True)
    assert speeds == sorted(speeds, reverse=True)
    assert found.calls_ms.keys() == {"read the counter", "read power", "read the limit", "set the limit"}
    assert [line for line in said if line.startswith("[4/4]")]


def test_a_counter_that_is_off_by_five_percent_is_named(emulate: Emulate, tmp_path: Path) -> None:
    found = measured(emulate, tmp_path, NVMLEMU_COUNTER_OFF="0.05")
    assert [f.name for f in found.failed] == ["counter against sampled power"]
    assert "shows 5.0% more" in found.failed[0].found
    assert found.failed[0].todo


def test_limits_that_are_ignored_are_named(emulate: Emulate, tmp_path: Path) -> None:
    found = measured(emulate, tmp_path, NVMLEMU_LIMIT="ignored")
    assert [f.name for f in found.failed] == ["what limits do"]
    assert "ignored" in found.failed[0].means
    assert "at 100 W it drew 2" in found.failed[0].found


def test_a_limit_that_does_not_come_back_is_named(emulate: Emulate, tmp_path: Path) -> None:
    found = measured(emulate, tmp_path, NVMLEMU_LIMIT="stuck")
    assert [f.name for f in found.failed] == ["the limit after all this"]
    assert found.failed[0].found == "100 W, before 250 W"
    assert "nvidia-smi -i 0 -pl 250" in found.failed[0].todo


def test_a_limit_that_is_not_taken_is_named(emulate: Emulate, tmp_path: Path) -> None:
    def lowered(emulator: Emulator) -> GpuLoad:
        set_limit_elsewhere(emulator, 200.0)  # and it cannot be raised again
        emulator.load(LOAD)
        return GpuLoad("emulated", lambda: emulator.advance(emulator.epoch_seconds()))

    found = measured(emulate, tmp_path, load=lowered, NVMLEMU_LIMIT="stuck")
    assert "250 W was set and 200 W is read" in finding(found, "what limits do").found
    assert verdicts(found)["what limits do"] is Verdict.FAIL
    assert "| 250 W | 200 W |  |" in page(found).markdown()


class FakeCuda:
    """What torch says of two CUDA devices, and in which order work is queued and waited for."""

    float16 = "half"

    def __init__(self) -> None:
        self.cuda = self
        self.told: list[str] = []
        self._events = 0
        self._at = 0

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 2

    def get_device_properties(self, index: int) -> SimpleNamespace:
        return SimpleNamespace(uuid=f"5eed000{index}")

    def device(self, index: int) -> AbstractContextManager[None]:
        self._at = index
        return nullcontext()

    def randn(self, *_: object, **__: object) -> str:
        return f"matrix on {self._at}"

    def matmul(self, a: str, _b: str, *, out: str) -> None:
        assert a == out == "matrix on 1"

    def Event(self) -> SimpleNamespace:
        self._events += 1
        name = str(self._events)
        return SimpleNamespace(
            record=lambda: self.told.append(f"queued {name}"), synchronize=lambda: self.told.append(f"waited {name}")
        )


def test_torchs_load_runs_on_the_gpu_that_is_measured_and_never_lets_it_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = FakeCuda()
    monkeypatch.setitem(sys.modules, "torch", torch)
    load = open_load(None, "GPU-5eed0001")
    assert not load.idle
    assert "CUDA 1" in load.name
    torch.told.clear()
    load.step()
    load.step()
    assert torch.told == ["queued 4", "waited 3", "queued 5", "waited 4"]


def test_a_cuda_that_cannot_be_used_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = FakeCuda()
    monkeypatch.setitem(sys.modules, "torch", torch)

    def full(*_: object, **__: object) -> str:
        raise RuntimeError("CUDA out of memory\nand much more")

    monkeypatch.setattr(torch, "randn", full)
    load = open_load(None, "GPU-5eed0001")
    assert load.idle
    assert load.name == "none: torch cannot use the GPU: CUDA out of memory"


@pytest.mark.slow
def test_limits_come_back_after_children_end(
    emulate: Emulate, emulator_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(emulator_library.parent))
    emulator = emulate()
    uuid = Nvml().devices()[0].uuid
    found = judge_put_back(uuid, LIMITS, tmp_path)
    assert [f.verdict for f in found] == [Verdict.PASS] * 3, found
    assert [f.name.rpartition("after ")[2] for f in found] == ["an exception", "SIGTERM", "SIGKILL"]
    assert emulator.limit_w() == 250.0

    monkeypatch.setenv("NVMLEMU_LIMIT", "stuck")
    first, second, third = judge_put_back(uuid, LIMITS, tmp_path)
    assert first.verdict is Verdict.FAIL
    assert "still 100 W" in first.found
    assert second.verdict is third.verdict is Verdict.CANNOT_TELL  # it does not take another limit any more
    assert emulator.limit_w() == 100.0


def test_without_permission_only_what_needs_none_is_told(emulate: Emulate, tmp_path: Path) -> None:
    found = measured(emulate, tmp_path, NVMLEMU_PERMISSION="deny")
    assert verdicts(found)["what limits do"] is Verdict.CANNOT_TELL
    assert "root" in finding(found, "what limits do").found
    assert verdicts(found)["counter against sampled power"] is Verdict.PASS
    assert not found.failed


def test_without_a_load_nothing_is_said_about_limits(emulate: Emulate, tmp_path: Path) -> None:
    found = measured(
        emulate,
        tmp_path,
        load=lambda emulator: GpuLoad("none: no torch", lambda: emulator.advance(0.05), idle=True),
    )
    assert verdicts(found)["what limits do"] is Verdict.CANNOT_TELL
    assert "no torch" in finding(found, "what limits do").found
    assert not found.failed


def test_a_load_that_is_too_light_says_nothing_about_limits(emulate: Emulate, tmp_path: Path) -> None:
    def light(emulator: Emulator) -> GpuLoad:
        emulator.load(Load(0.05, 90.0, active=0.3, clock_bound=0.2))
        return GpuLoad("light", lambda: emulator.advance(emulator.epoch_seconds()))

    found = measured(emulate, tmp_path, load=light)
    assert verdicts(found)["what limits do"] is Verdict.CANNOT_TELL
    assert "no limit could bind" in finding(found, "what limits do").means


def test_somebody_who_changes_the_limit_meanwhile_is_not_taken_for_the_driver(emulate: Emulate, tmp_path: Path) -> None:
    def disturbed(emulator: Emulator) -> GpuLoad:
        emulator.load(LOAD)

        def step() -> None:
            emulator.advance(emulator.epoch_seconds())
            if emulator.limit_w() == 200.0:
                set_limit_elsewhere(emulator, 240.0)

        return GpuLoad("disturbed", step)

    found = measured(emulate, tmp_path, load=disturbed)
    assert verdicts(found)["what limits do"] is Verdict.CANNOT_TELL
    assert "somebody else" in finding(found, "what limits do").found


def test_a_gpu_without_a_counter_is_told_so(emulate: Emulate, tmp_path: Path) -> None:
    found = measured(emulate, tmp_path, NVMLEMU_GPUS="p100")
    assert verdicts(found)["counter against sampled power"] is Verdict.CANNOT_TELL
    assert verdicts(found)["what limits do"] in (Verdict.PASS, Verdict.CANNOT_TELL)


def test_readings_that_scatter_say_nothing() -> None:
    wild = [SensorReading(0.1 * i, 0.1 * i * 200.0, 200.0 + 150.0 * math.sin(i)) for i in range(60)]
    assert judge_counter(wild, loaded=True).verdict is Verdict.CANNOT_TELL
    assert judge_counter(wild[:5], loaded=True).verdict is Verdict.CANNOT_TELL
    silent = [SensorReading(0.1 * i, 20.0 * i, 0.0) for i in range(60)]
    assert "0 W" in judge_counter(silent, loaded=True).found


def test_a_span_must_be_long_where_power_wanders() -> None:
    total, readings = 0.0, []
    for i in range(4_000):
        power_w = 200.0 + 60.0 * math.sin(i / 20.0)  # a wave of 12.6 s
        total += 0.1 * power_w
        readings.append(SensorReading(0.1 * i, total, power_w))
    wandering = scatter_of_spans(readings)
    assert judge_spans(wandering, default_s=5.0).verdict is Verdict.FAIL
    steady = [SensorReading(0.1 * i, 20.0 * i, 200.0) for i in range(400)]
    assert judge_spans(scatter_of_spans(steady), default_s=5.0).verdict is Verdict.PASS


def test_the_page_and_the_document_name_no_host_no_user_and_no_whole_uuid(
    emulate: Emulate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "node17")
    monkeypatch.setattr(socket, "getfqdn", lambda: "node17.corp.example")
    monkeypatch.setenv("LOGNAME", "alice")
    monkeypatch.setenv("HOME", "/home/alice")
    text = "node17.corp.example, node17: /home/alice/x of alice on GPU-5eed0000-0000-4000-8000-000000000000"
    assert masked(text) == "<host>, <host>: ~/x of <user> on GPU-5eed…"

    def named(emulator: Emulator) -> GpuLoad:
        emulator.load(LOAD)
        return GpuLoad(text, lambda: emulator.advance(emulator.epoch_seconds()))

    found = measured(emulate, tmp_path, load=named, minutes=1.0)
    for shown in (page(found).markdown(), page(found).html(), json.dumps(document(found))):
        assert "node17" not in shown
        assert "alice" not in shown
        assert "GPU-5eed0" not in shown


def test_torch_without_cuda_says_what_it_cannot_load() -> None:
    load = open_load(None, "GPU-1")
    assert load.idle
    assert "CUDA" in load.name


@pytest.mark.slow
def test_the_command_measures_writes_a_page_and_exits_with_its_verdict(
    emulate: Emulate, emulator_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(emulator_library.parent))
    monkeypatch.setenv("ZEUS_FLOWS_STATE_DIR", str(tmp_path))
    emulator = emulate()
    words = ["--measure", "0.1", "--load", "tests.gpu.emulated_load:make", "--page"]
    result = CliRunner().invoke(doctor, [*words, str(tmp_path / "page.md")])
    shown = (tmp_path / "page.md").read_text()
    assert "[3/4] what each limit does" in result.stderr
    assert "checks passed" in result.stdout
    for name in ("what limits do", "counter against sampled power", "the limit comes back after SIGKILL"):
        assert f"| pass | {name} |" in shown
    assert result.exit_code == ("| fail |" in shown)  # a machine that is busy may fail what we cost per step
    assert emulator.limit_w() == 250.0

    monkeypatch.setenv("NVMLEMU_COUNTER_OFF", "0.05")
    result = CliRunner().invoke(doctor, [*words, str(tmp_path / "page.html"), "--json"])
    assert result.exit_code == 1, result.output
    told = json.loads(result.stdout)
    assert "counter against sampled power" in [f["name"] for f in told["findings"] if f["verdict"] == "fail"]
    assert "<!doctype html>" in (tmp_path / "page.html").read_text()


def test_a_machine_without_a_gpu_exits_with_4_and_leaves_no_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    result = CliRunner().invoke(main, ["doctor", "--measure", "--page", str(tmp_path / "page.md")])
    assert result.exit_code == 4, result.output
    assert "--simulate v100" in result.output
    assert not (tmp_path / "page.md").exists()


def test_a_page_that_cannot_be_written_is_said_before_anything_is_measured(
    emulate: Emulate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZEUS_FLOWS_STATE_DIR", str(tmp_path))
    emulate()
    result = CliRunner().invoke(doctor, ["--measure", "--page", str(tmp_path / "no" / "page.md")])
    assert result.exit_code != 0
    assert "cannot be written" in str(result.exception)
