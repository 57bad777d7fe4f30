"""`zeus-flows doctor` and `zeus-flows restore-power`: parsing and printing; the work is imported when asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from zeus_flows.cli.documents import json_option, print_document
from zeus_flows.settings import read_settings

if TYPE_CHECKING:
    from zeus_flows.gpu.address import ZeusdAddress
    from zeus_flows.gpu.doctor import CheckFunction
    from zeus_flows.settings import Settings

#: What `doctor --measure` takes, unless told.
MINUTES = 10.0

_MARKS = {"ok": "ok  ", "warn": "WARN", "fail": "FAIL"}


def doctor_command(extra: Callable[[], Sequence[CheckFunction]] = tuple) -> click.Command:
    """Return the command `doctor`.

    Args:
        extra: Returns checks of other rooms, such as whether MLflow answers; called when the command runs.
    """

    @click.command("doctor")
    @json_option()
    @click.option(
        "--measure",
        "minutes",
        is_flag=False,
        flag_value=MINUTES,
        type=click.FloatRange(min=0.1, max=240.0),
        metavar="[MINUTES]",
        help=f"Measure the first GPU instead: its counter, limits and spans, and what we cost ({MINUTES:g} minutes).",
    )
    @click.option(
        "--load", metavar="MODULE:FUNCTION", help="What --measure runs on the GPU; torch on CUDA, if not said."
    )
    @click.option(
        "--page",
        type=click.Path(dir_okay=False, path_type=Path),
        default=Path("gpu-measured.md"),
        show_default=True,
        help="Where --measure writes its page, to attach to an issue; HTML where the name says so.",
    )
    def doctor(as_json: bool, minutes: float | None, load: str | None, page: Path) -> None:
        """Look at driver, GPUs, power limits, clocks, energy sensors, permission, zeusd and sharing.

        Each line says what was found, what that means for a job, and what to type. Exit 0 if a job could run here,
        else 4.

        With --measure the GPU is put under load and measured; nobody else should use it meanwhile. Each check passes,
        fails or cannot tell. Exit 0 if none failed, 1 if one did, 4 if no GPU can be used.
        """
        from zeus_flows.core.json import jsonable
        from zeus_flows.gpu.doctor import a_job_could_run, diagnose

        settings = read_settings()
        if minutes is not None:
            from zeus_flows.cli.measure import measure_gpu

            code = measure_gpu(minutes, settings=settings, load=load, file=page, as_json=as_json)
            click.get_current_context().exit(code)
        checks = diagnose(
            state_dir=settings.state_dir,
            visible=settings.cuda_visible_devices,
            zeusd=_zeusd(settings),
            extra=extra(),
        )
        runs = a_job_could_run(checks)
        if as_json:
            print_document({"a_job_could_run": runs, "checks": jsonable(checks)})
        else:
            for check in checks:
                click.echo(f"{_MARKS[check.status]}  {check.name}: {check.found}\n      {check.means}")
                if check.todo:
                    click.echo(f"      -> {check.todo}")
            click.echo("\na job could run here" if runs else "\nno job can run here on a GPU")
        click.get_current_context().exit(0 if runs else 4)

    return doctor


@click.command("restore-power")
@json_option()
def restore_power_command(as_json: bool) -> None:
    """Put back power limits, and clocks that were locked, which killed jobs left behind.

    Jobs that still run are left alone. Exit 0 if nothing is left to put back, else 4.
    """
    from zeus_flows.core.json import jsonable
    from zeus_flows.errors import DeviceError, NoDevice
    from zeus_flows.gpu.device import Device
    from zeus_flows.gpu.nvml import Nvml
    from zeus_flows.gpu.putting_back import restore_power
    from zeus_flows.gpu.zeusd import Zeusd, ZeusdDevice

    settings = read_settings()
    devices: dict[str, Device] = {}
    with suppress(NoDevice):  # entries, if there are any, are then of GPUs that are not here
        devices |= {device.uuid: device for device in Nvml().devices()}
    restored = restore_power(settings.state_dir, devices.get)
    if any(item.denied for item in restored) and _zeusd(settings).likely():
        try:
            zeusd = Zeusd(_zeusd(settings))
            devices = {device.uuid: ZeusdDevice(device, zeusd) for device in Nvml().devices()}
            restored = restore_power(settings.state_dir, devices.get)
        except DeviceError as error:
            click.echo(f"zeus-flows: {error}", err=True)
    if as_json:
        print_document(jsonable(restored))
    elif not restored:
        click.echo("no power limit and no clock was left behind")
    else:
        for item in restored:
            click.echo(f"{item.uuid}: {item.text}")
    click.get_current_context().exit(0 if all(item.done for item in restored) else 4)


def _zeusd(settings: Settings) -> ZeusdAddress:
    from zeus_flows.gpu.address import ZeusdAddress

    return ZeusdAddress(settings.zeusd_socket, settings.zeusd_host_port, settings.zeusd_token)


doctor = doctor_command()
