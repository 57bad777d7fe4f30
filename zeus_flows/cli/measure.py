"""`zeus-flows doctor --measure`: the acceptance test, shown as it goes."""

from __future__ import annotations

import os
from pathlib import Path

import click

from zeus_flows.cli.documents import print_document
from zeus_flows.errors import ConfigError
from zeus_flows.experiments.acceptance.findings import Acceptance, Verdict, summary
from zeus_flows.experiments.acceptance.loads import open_load
from zeus_flows.experiments.acceptance.measured_page import document, page
from zeus_flows.experiments.acceptance.measuring import AcceptancePlan, measure
from zeus_flows.gpu.address import ZeusdAddress
from zeus_flows.gpu.open_gpus import open_gpus
from zeus_flows.settings import Settings

_MARKS = {Verdict.PASS: "pass       ", Verdict.FAIL: "FAIL       ", Verdict.CANNOT_TELL: "cannot tell"}


def measure_gpu(minutes: float, *, settings: Settings, load: str | None, file: Path, as_json: bool) -> int:
    """Measure the first GPU of a job, show what was found, write the page; return the exit code.

    Raises:
        ConfigError: the page cannot be written, or there is no such load; nothing was measured.
        DeviceError: no GPU can be used.
    """
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ConfigError(f"--page: {file} cannot be written; name another file")
    measured = measure(
        AcceptancePlan(
            60 * minutes,
            lambda: open_gpus(
                "auto",
                workload=None,
                batch_size=1,
                samples_per_epoch=None,
                state_dir=settings.state_dir,
                visible=settings.cuda_visible_devices,
                count=1,
                zeusd=ZeusdAddress(settings.zeusd_socket, settings.zeusd_host_port, settings.zeusd_token),
            ),
            lambda uuid: open_load(load, uuid),
            settings.state_dir,
        ),
        lambda line: click.echo(line, err=True),
    )
    shown = page(measured)
    file.write_text(shown.html() if file.suffix in (".html", ".htm") else shown.markdown(), encoding="utf-8")
    if as_json:
        print_document(document(measured))
    else:
        _show(measured, file)
    return 1 if measured.failed else 0


def _show(measured: Acceptance, file: Path) -> None:
    click.echo()
    for finding in measured.findings:
        click.echo(f"{_MARKS[finding.verdict]}  {finding.name}: {finding.found}")
        for line in (finding.means, finding.todo and f"-> {finding.todo}"):
            if line:
                click.echo(f"             {line}")
    click.echo(f"\n{summary(measured.findings)}\nThe page to attach to an issue: {file}")
