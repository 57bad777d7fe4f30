"""`zeus-flows statement`: the energy of one registered model version, as Markdown for a model card and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from zeus_flows.core.job_report import Estimate
from zeus_flows.core.json import jsonable
from zeus_flows.core.policy import State
from zeus_flows.core.prices import KWH_J, Tariff
from zeus_flows.core.records import EnergySource, in_parts
from zeus_flows.core.statement import Statement, state_energy
from zeus_flows.core.text import setting_text
from zeus_flows.errors import ConfigError
from zeus_flows.job_file import JobFile
from zeus_flows.ledger.mlflow.ledger import MlflowLedger
from zeus_flows.ledger.mlflow.model_registry import ModelRegistry
from zeus_flows.reporting.savings import count
from zeus_flows.reporting.text import seconds
from zeus_flows.reporting.units import carbon_text, hour_text, kwh_text, money_text


@dataclass(frozen=True, slots=True)
class VersionStatement:
    """A registered version and what may be said of its energy."""

    model: str
    version: int
    told: Statement
    tariff: Tariff
    location: str | None


def read_statement(
    job_file: JobFile, ledger: MlflowLedger, version: str, tariff: Tariff, *, with_history: bool = False
) -> VersionStatement:
    """Return the statement of a version. Writes nothing.

    Args:
        job_file: The job.
        ledger: Its ledger.
        version: A number, or an alias such as `champion`.
        tariff: What energy costs and emits.
        with_history: Add what the recurrences before it took.

    Raises:
        ConfigError: the job keeps no models, there is no such version, or its attempts were deleted.
    """
    if job_file.model is None:
        raise ConfigError(
            f"{job_file.name} keeps no models: its job file has no `model`, such as model: {{name: ranker}}"
        )
    registry = ModelRegistry(ledger.store, job_file.name, job_file.model.name)
    number, run_id = registry.version(version)
    recurrence = ledger.recurrence_of(run_id)
    attempts = ledger.attempts_of(recurrence)
    mine = next((i for i, a in enumerate(attempts) if a.run_id == run_id), None)
    if mine is None or attempts[mine].observation is None:
        raise ConfigError(
            f"version {number} of {job_file.model.name}: its attempt was deleted, or has no observation\n"
            f"  type `zeus-flows models JOB` to see which versions there are"
        )
    observed = [(a.began_s, a.observation) for a in attempts[: mine + 1] if a.observation is not None]
    before = None
    if with_history:
        _, states = ledger.folded_before(attempts[0])
        state: State | None = next(iter(states), None)
        before = None if state is None else state.account
    told = state_energy(job_file.name, observed, tariff, before=before)
    return VersionStatement(job_file.model.name, number, told, tariff, job_file.prices.location)


def statement_document(statement: VersionStatement) -> dict[str, Any]:
    """Return it as JSON values; without joules where there are none."""
    told = statement.told
    joules = told.energy_j is not None
    charged, last = told.charged, told.attempts[-1]
    carbon_kg = charged.carbon_g / 1000 if charged.carbon_j else None
    return {
        "model": statement.model,
        "version": statement.version,
        "job": told.job,
        "recurrence": told.recurrence,
        "energy_source": told.energy_source.value,
        "method": told.method,
        "off_by": told.off_by,
        "complete": told.complete,
        "energy_kwh": told.energy_j / KWH_J if told.energy_j is not None else None,
        "machine_kwh": told.host_j / KWH_J if joules else None,
        "time_s": told.time_s,
        "money": charged.money if charged.priced_j else None,
        "currency": statement.tariff.currency or None,
        "carbon_kg": carbon_kg,
        "hours_without_price": [hour_text(h) for h in sorted(charged.unpriced)] if statement.tariff.prices else [],
        "hours_without_carbon": [hour_text(h) for h in sorted(charged.uncharted)] if statement.tariff.carbon else [],
        "hardware": jsonable(last.gpu),
        "location": statement.location,
        "before": None
        if told.before is None
        else {
            "recurrences": told.before.count,
            "energy_kwh": told.before.energy_j / KWH_J if joules else None,
            "time_s": told.before.time_s,
        },
        "attempts": [
            {
                "attempt": o.attempt,
                "batch_size": o.batch_size,
                "knob": o.knob.value,
                "setting": o.setting,
                "outcome": o.outcome.value,
                "epochs": o.epochs,
                "energy_kwh": (o.energy_j + o.host_energy_j) / KWH_J if joules else None,
                "time_s": o.time_s,
            }
            for o in told.attempts
        ],
        "co2_eq_emissions": _model_card(statement),
    }


def statement_markdown(statement: VersionStatement) -> str:
    """Return it as Markdown, for a model card."""
    told = statement.told
    lines = [f"## Training energy of {statement.model}, version {statement.version}", "", "| | |", "| --- | --- |"]
    lines += [f"| {name} | {value} |" for name, value in _rows(statement)]
    lines += ["", "| attempt | batch size | limit | outcome | epochs | energy | time |", "|" + " --- |" * 7]
    for o in told.attempts:
        energy = "" if told.energy_j is None else kwh_text((o.energy_j + o.host_energy_j) / KWH_J)
        outcome = o.outcome.value.replace("_", " ")
        limit = setting_text(o.setting, o.knob) or "as it was"
        lines.append(
            f"| {o.attempt} | {in_parts(o)} | {limit} | {outcome} | {o.epochs} | {energy} | {seconds(o.time_s)} |"
        )
    lines += ["", *_notes(statement)]
    if (card := _model_card(statement)) is not None:
        lines += ["", "For the metadata of a Hugging Face model card:", "", "```yaml", "co2_eq_emissions:"]
        lines += [f"  {name}: {value}" for name, value in card.items()]
        lines += ["```"]
    return "\n".join(lines)


def _rows(statement: VersionStatement) -> Iterator[tuple[str, str]]:
    told, charged, tariff = statement.told, statement.told.charged, statement.tariff
    last = told.attempts[-1]
    if told.energy_j is not None:
        yield "energy", f"**{kwh_text(_believed(told.energy_j / KWH_J, told.off_by))}**{_mark(told)}"
    yield "method", told.method
    yield "training time", seconds(told.time_s)
    if charged.carbon_j:
        yield "CO2", f"{carbon_text(_believed(charged.carbon_g / 1000, told.off_by))}{_mark(told)}"
    if charged.priced_j:
        yield "price", money_text(_believed(charged.money, told.off_by), tariff.currency) + _mark(told)
    yield "hardware", f"{last.gpu.count} x {last.gpu.model}"
    if statement.location:
        yield "location", statement.location
    yield "made by", f"recurrence {told.recurrence} of {told.job}, {count(len(told.attempts), 'attempt')}"
    if told.before is not None and told.energy_j is not None:
        amount = kwh_text(told.before.energy_j / KWH_J)
        yield "before it", f"{amount} in {count(told.before.count, 'recurrence')} of the same job{_mark(told)}"


def _mark(told: Statement) -> str:
    return " (simulated)" if told.energy_source is EnergySource.SIMULATED else ""


def _believed(amount: float, off_by: float | None) -> Estimate:
    half = amount * (off_by or 0.0)
    return Estimate(amount, amount - half, amount + half)


def _notes(statement: VersionStatement) -> Iterator[str]:
    told, charged, tariff = statement.told, statement.told.charged, statement.tariff
    scope = "GPUs and the machine beside them" if told.host_j else "GPUs alone; the machine beside them is not counted"
    yield f"Energy is that of the {scope}: all attempts of the recurrence, those that were stopped included."
    if told.energy_source is EnergySource.MEASURED:
        yield f"NVIDIA states ± {100 * (told.off_by or 0):.0f} % for its power readings; that is the doubt shown."
    elif told.energy_source is EnergySource.SIMULATED:
        yield "These joules are SIMULATED: no GPU drew them. The model is off by 1 to 2 % on the runs it was fitted on."
    if not told.complete:
        yield "Some readings failed, so that it took more than is stated."
    for name, known, hours in (
        ("price", tariff.prices, charged.unpriced),
        ("carbon intensity", tariff.carbon, charged.uncharted),
    ):
        if known and hours:
            named = ", ".join(hour_text(h) for h in sorted(hours)[:5])
            yield f"Hours without a {name}, in which it is left out: {named} UTC."


def _model_card(statement: VersionStatement) -> dict[str, Any] | None:
    """Return the metadata that Hugging Face model cards have for emissions; None where nothing was measured."""
    told, charged = statement.told, statement.told.charged
    if told.energy_source is not EnergySource.MEASURED or not charged.carbon_j or charged.uncharted:
        return None
    last = told.attempts[-1]
    card: dict[str, Any] = {
        "emissions": float(f"{charged.carbon_g:.3g}"),
        "source": "zeus_flows",
        "training_type": "pre-training",
        "hardware_used": f"{last.gpu.count} x {last.gpu.model}",
    }
    return card | ({"geographical_location": statement.location} if statement.location else {})
