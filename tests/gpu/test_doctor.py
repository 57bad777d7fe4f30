from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.gpu.nvml_emulator import Emulator
from zeus_flows.cli.gpu import doctor, doctor_command, restore_power_command
from zeus_flows.gpu.address import ZeusdAddress
from zeus_flows.gpu.doctor import Check, Status, a_job_could_run, diagnose
from zeus_flows.gpu.journal import Entry, Journal, journal_folder
from zeus_flows.gpu.nvml import Nvml
from zeus_flows.gpu.simulated import Load


def checks(tmp_path: Path, visible: str | None = None) -> dict[str, Check]:
    found = diagnose(state_dir=tmp_path, visible=visible, zeusd=ZeusdAddress(tmp_path / "no.sock"))
    return {check.name: check for check in found}


def test_a_good_machine_passes_every_check(emulate: Callable[..., Emulator], tmp_path: Path) -> None:
    emulate(NVMLEMU_UPDATE_MS="20")
    found = checks(tmp_path)
    assert {check.status for check in found.values()} == {Status.OK}
    assert found["power limit of GPU 0"].found == "250 W set, 250 W enforced, range 100-250 W"
    assert "a counter with a new value every" in found["energy of GPU 0"].found
    assert a_job_could_run(tuple(found.values()))


def test_every_gpu_of_the_job_is_looked_at(emulate: Callable[..., Emulator], tmp_path: Path) -> None:
    emulate(NVMLEMU_GPUS="v100,v100,v100")
    found = checks(tmp_path, visible="2,1")
    assert "power limit of GPU 2" in found
    assert "power limit of GPU 1" in found
    assert "power limit of GPU 0" not in found


def test_what_is_missing_is_said_with_what_to_do(emulate: Callable[..., Emulator], tmp_path: Path) -> None:
    emulator = emulate(NVMLEMU_GPUS="p100", NVMLEMU_PERMISSION="deny")
    emulator.load(Load(1.0, 200.0, 0.9, 0.5))
    found = checks(tmp_path)
    assert "--cap-add=SYS_ADMIN" in found["permission on GPU 0"].todo
    assert "power sensor" in found["energy of GPU 0"].found
    assert "shared_gpu: true" in found["sharing of GPU 0"].todo
    assert a_job_could_run(tuple(found.values()))


def test_clocks_are_shown_with_what_they_can_be_locked_to(emulate: Callable[..., Emulator], tmp_path: Path) -> None:
    emulate(NVMLEMU_GPUS="v100,p100")
    found = checks(tmp_path, visible="0,1")
    assert found["clocks of GPU 0"].found == (
        "graphics 1380 MHz now, 84 from 135 to 1380 MHz; memory 877 MHz; not locked by us"
    )
    assert "from Volta on" in found["clocks of GPU 1"].found
    assert "measures only" in found["clocks of GPU 1"].means


def test_clocks_that_a_killed_job_left_locked_are_found_and_reset(
    emulate: Callable[..., Emulator], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulator = emulate()
    monkeypatch.setenv("ZEUS_FLOWS_STATE_DIR", str(tmp_path))
    device = Nvml().devices()[0]
    Journal(journal_folder(tmp_path)).write(Entry(device.uuid, None, clocks_locked=True, pid=4242))
    device.lock_clocks_mhz(900, 900)
    device.set_power_limit_w(180.0)
    found = checks(tmp_path)["clocks of GPU 0"]
    assert (found.status, "process 4242 ended with them locked" in found.means) == (Status.WARN, True)
    result = CliRunner().invoke(restore_power_command)
    assert result.output == f"{device.uuid}: the clocks are not locked any more\n"
    assert (emulator.locked_mhz(), emulator.limit_w()) == (0, 180.0), "nobody had changed the limit"
    assert checks(tmp_path)["clocks of GPU 0"].status is Status.OK


def test_a_sliced_gpu_is_run_on_time_alone(emulate: Callable[..., Emulator], tmp_path: Path) -> None:
    emulate(NVMLEMU_GPUS="a40", NVMLEMU_MIG="0")
    assert "time alone" in checks(tmp_path)["sharing of GPU 0"].means


def test_a_limit_that_a_killed_job_left_is_found_and_put_back(
    emulate: Callable[..., Emulator], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulator = emulate()
    monkeypatch.setenv("ZEUS_FLOWS_STATE_DIR", str(tmp_path))
    device = Nvml().devices()[0]
    device.set_power_limit_w(100.0)
    Journal(journal_folder(tmp_path)).write(Entry(device.uuid, 200.0, clocks_locked=False, pid=1))
    found = checks(tmp_path)["power limit of GPU 0"]
    assert found.status is Status.WARN
    assert "100 W set" in found.found
    assert "200 W before" in found.found
    assert "restore-power" in found.todo
    assert emulator.limit_w() == 100.0  # looking changes nothing

    result = CliRunner().invoke(restore_power_command)
    assert result.exit_code == 0, result.output
    assert "200 W again" in result.output
    assert emulator.limit_w() == 200.0
    again = CliRunner().invoke(restore_power_command)
    assert "no power limit and no clock was left behind" in again.output


def test_a_machine_without_a_gpu_exits_with_4_and_says_what_to_type(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ZEUS_FLOWS_STATE_DIR", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    result = CliRunner().invoke(doctor)
    assert result.exit_code == 4, result.output
    assert "--simulate v100" in result.output


def test_checks_of_other_rooms_are_shown_and_counted(
    emulate: Callable[..., Emulator], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    emulate()
    monkeypatch.setenv("ZEUS_FLOWS_STATE_DIR", str(tmp_path))
    command = doctor_command(lambda: [lambda: Check("MLflow", Status.FAIL, "no answer", "nothing is learnt")])
    result = CliRunner().invoke(command, ["--json"])
    document = json.loads(result.output)
    assert result.exit_code == 4
    assert document["a_job_could_run"] is False
    assert document["checks"][-1]["name"] == "MLflow"


def test_restoring_power_on_a_machine_without_a_gpu_says_what_is_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ZEUS_FLOWS_STATE_DIR", str(tmp_path))
    Journal(journal_folder(tmp_path)).write(Entry("GPU-elsewhere", 200.0, clocks_locked=False, pid=1))
    result = CliRunner().invoke(restore_power_command, ["--json"])
    assert result.exit_code == 4
    assert json.loads(result.output)[0]["done"] is False
