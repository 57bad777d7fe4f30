"""`zeus-flows capriccio`: the experiment as a flow run of this process, shown as it goes."""

from __future__ import annotations

from pathlib import Path

from prefect import flow
from rich.console import Console

from zeus_flows.orchestration.capriccio_flow import Summary, run
from zeus_flows.orchestration.capriccio_view import ConsoleView
from zeus_flows.orchestration.ephemeral_server import end_server_with_us
from zeus_flows.orchestration.fan_out import shared_out
from zeus_flows.orchestration.prefect_runs import named_outages, print_no_errors


def run_locally(
    experiment: Path,
    data: Path | None,
    tracking_uri: str | None,
    out: Path | None,
    runner: str | None,
    console: Console,
) -> Summary:
    """Run the experiment in this process and show it; `runner`: as `zeus_flows.orchestration.fan_out` has it."""
    fan_out = None if runner is None else shared_out(runner)
    print_no_errors()
    end_server_with_us()
    with named_outages(), ConsoleView(console) as view:

        @flow(name="capriccio")
        def capriccio(experiment_file: str) -> Summary:
            return run(
                experiment_file,
                None if data is None else str(data),
                tracking_uri,
                None if out is None else str(out),
                view,
                fan_out,
            )

        return capriccio(str(experiment))
