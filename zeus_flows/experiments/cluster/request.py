"""What a cluster simulation is asked, and its way from there to rows and files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from zeus_flows.core.policy import POLICIES
from zeus_flows.errors import ConfigError
from zeus_flows.experiments.cluster.comparing import ClusterRow, as_result, compare_groups
from zeus_flows.experiments.cluster.groups import Arrivals, draw_groups, read_groups
from zeus_flows.experiments.fan_out import FanOut
from zeus_flows.experiments.paper.drawing import draw
from zeus_flows.experiments.paper.result import write_csv
from zeus_flows.experiments.replay.comparison import find_traces
from zeus_flows.reporting.figures import write

SIDE_BY_SIDE = ("zeus-paper", "thompson", "lookahead", "default", "grid")
DRAWN_JOBS = 5_000  # where nobody says how many


@dataclass(frozen=True, slots=True)
class ClusterRequest:
    """What is to be simulated.

    Attributes:
        groups: File with the groups; None: they are drawn.
        drawn_jobs: How many jobs are drawn.
        traces: Folder of the traces; None: built-in models.
        gpu: Which power trace, or which built-in GPU.
        workloads: Only these; all where it is empty.
        policies: What is compared.
        seeds: Simulations of each group.
        seed: The first of their seeds, and the recipe's.
        eta: Energy (1) against time (0).
        beta: Early stop of the paper's policies.
    """

    groups: Path | None = None
    drawn_jobs: int = DRAWN_JOBS
    traces: Path | None = None
    gpu: str = "v100"
    workloads: tuple[str, ...] = ()
    policies: tuple[str, ...] = SIDE_BY_SIDE
    seeds: int = 1
    seed: int = 1
    eta: float = 0.5
    beta: float = 2.0

    def __post_init__(self) -> None:
        unknown = [name for name in self.policies if name not in POLICIES]
        if unknown or not self.policies:
            names = ", ".join(unknown) or "policy"
            raise ConfigError(f"--policies: there is no {names}; there are {', '.join(POLICIES)}")

    @property
    def training(self) -> str:
        """Where energy and time come from, for people."""
        return "built-in models (simulated GPU)" if self.traces is None else f"traces in {self.traces.name}"


@dataclass(frozen=True, slots=True)
class ClusterResult:
    """What came out, and what may be said of where the groups come from."""

    rows: tuple[ClusterRow, ...]
    source: str
    matched: bool


def answer(request: ClusterRequest, fan_out: FanOut) -> ClusterResult:
    """Simulate what is asked.

    Raises:
        ConfigError: a file is missing or broken, or there is no such workload or GPU.
    """
    traces = find_traces(folder=request.traces, gpu=request.gpu, workloads=request.workloads)
    arrivals: Arrivals
    if request.groups is None:
        arrivals = draw_groups(traces, jobs=request.drawn_jobs, seed=request.seed)
    else:
        arrivals = read_groups(request.groups, traces)
    rows = compare_groups(
        arrivals,
        traces,
        request.policies,
        seeds=range(request.seed, request.seed + request.seeds),
        fan_out=fan_out,
        eta=request.eta,
        beta=request.beta,
    )
    return ClusterResult(tuple(rows), arrivals.source, arrivals.matched)


def write_files(request: ClusterRequest, result: ClusterResult, folder: Path) -> Sequence[Path]:
    """Write table and figure; return the files.

    Raises:
        ConfigError: the folder cannot be written.
    """
    table = as_result(result.rows)
    arrivals = "drawn" if request.groups is None else f"of {request.groups.name}"
    arrivals += " (synthetic)" if result.matched else ""
    title = f"Cluster on {request.gpu}, {request.training}\nSimulated; arrivals {arrivals}"
    try:
        figures = write(draw(table, title=title), folder, "cluster")
        return (write_csv(table, folder / "cluster.csv"), *figures)
    except OSError as error:
        raise ConfigError(f"--out: {folder} cannot be written: {error.strerror}") from None
