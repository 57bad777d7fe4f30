"""A job's models as people read them: what each took, who is champion, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from zeus_flows.core.cost import observed_cost
from zeus_flows.core.json import jsonable
from zeus_flows.core.promotion import Candidate, fold, is_by_hand
from zeus_flows.core.records import EnergySource, Observation
from zeus_flows.errors import ConfigError
from zeus_flows.job_file import JobFile
from zeus_flows.ledger.mlflow.model_registry import CHALLENGER, CHAMPION, LoggedEntry, ModelRegistry, moves_of
from zeus_flows.ledger.open_ledger import open_direct
from zeus_flows.reporting.text import cost_text, joules, seconds

_WORD: Final = {True: "accepted", False: "refused", None: "not judged"}
_REFUSED: Final = 5  # versions that were refused and of which it is said why, the newest


@dataclass(frozen=True, slots=True)
class ModelsOf:
    """A job's registered model.

    Attributes:
        job_file: The job.
        entries: Its newest kept models, oldest first.
        champion: The version that the alias names; None where there is none.
        challenger: Likewise.
        by_hand: Whether somebody moved the alias by hand.
    """

    job_file: JobFile
    entries: tuple[LoggedEntry, ...] = ()
    champion: int | None = None
    challenger: int | None = None
    by_hand: bool = False

    @property
    def why(self) -> str:
        """Why the champion is champion, as a sentence."""
        name = self.job_file.model.name if self.job_file.model else ""
        newest = _candidates(self.entries)[-1:]
        refused = [
            f"; version {c.version.number} was refused: {c.verdict.reason}"
            for c in newest
            if c.verdict is not None and not c.verdict.accepted and c.version.number != self.champion
        ]
        return self._champion_of(name) + "".join(refused)

    def _champion_of(self, name: str) -> str:
        if self.champion is None:
            return f"{name} has no champion: no model of {self.job_file.name} is accepted"
        if self.by_hand:
            return f"Version {self.champion} of {name} is champion by hand, until a newer one is accepted"
        mine = [c for c in _candidates(self.entries) if c.version.number == self.champion]
        verdict = mine[0].verdict if mine else None
        return f"Version {self.champion} of {name} is champion: {verdict.reason if verdict else 'nothing says why'}"


def read_models(job_file: JobFile, tracking_uri: str) -> ModelsOf:
    """Return a job's models. Writes nothing.

    Raises:
        ConfigError: the job file names no model.
    """
    if job_file.model is None:
        raise ConfigError(
            f"{job_file.name} keeps no models: its job file has no `model`, such as model: {{name: ranker}}"
        )
    if tracking_uri.startswith("sqlite:///") and not Path(tracking_uri.removeprefix("sqlite:///")).exists():
        return ModelsOf(job_file)
    ledger = open_direct(job_file.core(), tracking_uri=tracking_uri, energy_source=job_file.energy_source)
    if not ledger.layout.exists():
        return ModelsOf(job_file)
    registry = ModelRegistry(ledger.store, job_file.name, job_file.model.name)
    registry.check_owner()
    entries, aliases = registry.entries(ledger.experiment_id), registry.aliases()
    champion, folded = aliases.get(CHAMPION), fold(_candidates(entries)).champion
    differs = champion is not None and (folded is None or folded.version.number != champion)
    by_hand = differs and is_by_hand(champion, moves_of(entries))
    return ModelsOf(job_file, entries, champion, aliases.get(CHALLENGER), by_hand)


def models_document(models: ModelsOf) -> dict[str, Any]:
    """Return a job's models for `--json`."""
    return {
        "job": models.job_file.name,
        "model": models.job_file.model.name if models.job_file.model else None,
        "champion": models.champion,
        "challenger": models.challenger,
        "by_hand": models.by_hand,
        "why": models.why,
        "versions": [_row(models, entry) for entry in models.entries],
    }


def show_models(console: Console, models: ModelsOf) -> None:
    """Show a job's models as a table, and why the champion is champion."""
    if models.entries:
        table, refused = Table(box=None, padding=(0, 2, 0, 0)), list[str]()
        for name in ("version", "recurrence", "batch size", "energy", "time", "cost", "verdict"):
            table.add_column(name, justify="left" if name in ("version", "verdict") else "right")
        for row, entry in zip(models_document(models)["versions"], models.entries, strict=True):
            observed = entry.observation
            in_seconds = observed is None or observed.energy_source is EnergySource.NONE
            table.add_row(
                "not registered" if row["version"] is None else _marked(models, row["version"]),
                f"{entry.recurrence}.{entry.attempt}",
                "" if observed is None else str(observed.batch_size),
                "" if observed is None or in_seconds else joules(observed.energy_j + observed.host_energy_j),
                "" if observed is None else seconds(observed.time_s),
                "" if observed is None else _cost_text(models.job_file, observed),
                _WORD[row["accepted"]],
                style="bold" if row["version"] is not None and row["version"] == models.champion else "",
            )
            refused += [f"Version {row['version']} was refused: {row['reason']}."] if row["accepted"] is False else []
        console.print(table)
        console.print()
        for line in refused[-_REFUSED:]:
            console.print(line, highlight=False, markup=False)
    console.print(f"{models.why}.", highlight=False, markup=False)
    if any(entry.observation and entry.observation.energy_source is EnergySource.SIMULATED for entry in models.entries):
        console.print("[yellow]Simulated energy:[/] the joules come from a model of the GPU.")


def _row(models: ModelsOf, entry: LoggedEntry) -> dict[str, Any]:
    candidate, observed = entry.candidate, entry.observation
    verdict = candidate.verdict if candidate is not None else None
    row: dict[str, Any] = {
        "version": candidate.version.number if candidate is not None else None,
        "recurrence": entry.recurrence,
        "attempt": entry.attempt,
        "run_id": entry.run_id,
        "model_uri": f"models:/{entry.model_id}",
        "accepted": verdict.accepted if verdict is not None else None,
        "reason": verdict.reason if verdict is not None else "it was not judged yet",
        "scores": dict(verdict.scores) if verdict is not None else {},
        "against": jsonable(verdict.against) if verdict is not None else [],
    }
    if observed is not None:
        in_seconds = observed.energy_source is EnergySource.NONE
        cost = observed_cost(models.job_file.core(observed.energy_source), observed)
        row |= {
            "batch_size": observed.batch_size,
            "time_s": observed.time_s,
            "energy_source": observed.energy_source.value,
        }
        row |= {"cost_s": cost} if in_seconds else {"energy_j": observed.energy_j, "cost_j": cost}
    return row


def _cost_text(job_file: JobFile, observed: Observation) -> str:
    job = job_file.core(observed.energy_source)
    return cost_text(job, observed_cost(job, observed))


def _marked(models: ModelsOf, number: int) -> str:
    marks = [n for n, v in ((CHAMPION, models.champion), (CHALLENGER, models.challenger)) if v == number]
    return " ".join((str(number), *marks))


def _candidates(entries: Sequence[LoggedEntry]) -> list[Candidate]:
    return [entry.candidate for entry in entries if entry.candidate is not None]
