"""The figures by number, what each needs, and what cannot be computed from public data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from zeus_flows.errors import ConfigError
from zeus_flows.experiments.paper import paths, replays, sweeps
from zeus_flows.experiments.paper.result import Result
from zeus_flows.experiments.replay.comparison import find_traces
from zeus_flows.experiments.replay.traces import Trace

Compute = Callable[[Sequence[Trace], int, replays.Say], Result]
MODELLED = ("v100", "p100", "a40", "rtx6000")


@dataclass(frozen=True, slots=True)
class PaperFigure:
    """A figure of the paper.

    Attributes:
        title: What it shows.
        compute: Traces, seeds and where to tell progress in; the result out.
        every_gpu: Whether it wants all GPUs there are; otherwise the V100 alone, or the one asked for.
        only: The workload it is about; empty: all.
    """

    title: str
    compute: Compute
    every_gpu: bool = False
    only: str = ""


def _search(*policies: str) -> Compute:
    return lambda traces, seeds, say: paths.search(traces, seeds, say, policies=policies)


def _plain(compute: Callable[[Sequence[Trace]], Result]) -> Compute:
    return lambda traces, _seeds, _say: compute(traces)


FIGURES: Mapping[str, PaperFigure] = MappingProxyType(
    {
        "1": PaperFigure("energy that batch size, power limit and both could save", _plain(sweeps.potential)),
        "2": PaperFigure("energy over time, DeepSpeech2", _plain(sweeps.pareto), only="librispeech"),
        "4": PaperFigure("batch sizes chosen by Zeus, DeepSpeech2", paths.chosen, only="librispeech"),
        "5": PaperFigure("energy over batch size, DeepSpeech2", _plain(sweeps.over_batch_size), only="librispeech"),
        "6": PaperFigure("energy and time of the last five recurrences", replays.last_five),
        "8": PaperFigure(
            "search paths of Zeus and Grid, DeepSpeech2", _search("zeus-paper", "grid", "thompson"), only="librispeech"
        ),
        "11": PaperFigure(
            "how eta moves along the Pareto front, DeepSpeech2", _plain(sweeps.eta_sweep), only="librispeech"
        ),
        "12": PaperFigure("cumulative energy by early-stopping threshold beta", replays.betas),
        "13": PaperFigure("Zeus without one of its parts", replays.ablations),
        "14": PaperFigure("energy by GPU model", replays.gpus, every_gpu=True),
        "15": PaperFigure("what could be saved, by GPU model", _plain(sweeps.potential), every_gpu=True),
        "16": PaperFigure("energy over time, every workload", _plain(sweeps.pareto)),
        "17": PaperFigure("energy over batch size, every workload", _plain(sweeps.over_batch_size)),
        "18": PaperFigure("energy over power limit at the default batch size", _plain(sweeps.over_limit)),
        "19": PaperFigure("cumulative regret of Zeus and Grid (7 shows two of its panels)", replays.regret),
        "20": PaperFigure("search paths of Zeus, every workload", _search("zeus-paper")),
        "21": PaperFigure("search paths of Grid, every workload", _search("grid")),
        "22": PaperFigure("energy and time by eta", replays.etas),
        "6.5": PaperFigure("what just-in-time profiling adds", _plain(sweeps.overhead)),
    }
)

#: What is not computed here, and why.
LEFT_OUT: Mapping[str, str] = MappingProxyType(
    {
        "3": "a drawing of the system",
        "9": "its trace of recurring groups is not public; docs/cluster.md simulates it for those who have it",
        "10": "BERT on Capriccio with measured energy needs a GPU; docs/drift.md has the experiment on small models",
        "23": "figure 6 on another GPU: --gpu p100",
        "6.6": "Pollux and four A40 were measured; no trace of either is public",
    }
)


def traces_for(figure: PaperFigure, folder: Path | None, gpu: str) -> list[Trace]:
    """Return the traces a figure wants.

    Raises:
        ConfigError: the folder has no such traces, or they are broken.
    """
    names = [gpu]
    if figure.every_gpu:
        files = sorted(folder.glob("summary_power_*.csv")) if folder is not None else []
        names = list(MODELLED) if folder is None else [f.stem.removeprefix("summary_power_") for f in files] or [gpu]
    found = [t for name in names for t in find_traces(folder=folder, gpu=name, workloads=())]
    wanted = [t for t in found if figure.only in ("", t.workload)]
    if not wanted:
        raise ConfigError(f"{folder} has no traces of {figure.only}, which this figure is about")
    return wanted
