"""The description of an attempt's run, in Markdown: why this batch size, this setting, this stop; where to go on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from zeus_flows.core.job import Job
from zeus_flows.core.reasons import ArmBelief
from zeus_flows.core.records import Decision, Observation, in_parts
from zeus_flows.core.text import cost_text, joules, one_line, seconds, setting_text
from zeus_flows.ledger.mlflow import names

#: Batch sizes that the table has; MLflow cuts a tag at 8,000 characters.
_MOST_ARMS = 30


@dataclass(frozen=True, slots=True)
class DecisionNote:
    """What a run's description says of its decision, kept until there is an outcome to say it with.

    Attributes:
        decision: What was decided.
        links: Where to go on, as Markdown.
    """

    decision: Decision
    links: tuple[str, ...] = ()


def linked(decision: Decision, context: Mapping[str, str], *, experiment_id: str, window_id: str) -> DecisionNote:
    """Return what a decision's description says, with links to the flow run, the drift window and the slice.

    Args:
        decision: What was decided.
        context: What else is known of the attempt, by tag.
        experiment_id: Where its run is.
        window_id: The run of its drift window.
    """
    links = [f"[drift window](#/experiments/{experiment_id}/runs/{window_id})"]
    if url := context.get(names.PREFECT_URL):
        name = context.get(names.PREFECT_FLOW_RUN_NAME) or "flow run"
        links.insert(0, f"[Prefect: {one_line(name, most=80)}]({url})")
    if day := context.get(names.SLICE_DAY):
        links.append(f"slice of {day}")
    return DecisionNote(decision, tuple(links))


def run_note(job: Job, note: DecisionNote, observation: Observation | None = None) -> str:
    """Return the description of an attempt's run.

    Args:
        job: Whose attempt.
        note: What was decided.
        observation: How it went; None while it trains.
    """
    decision = note.decision
    lines = [f"**Batch size {in_parts(decision)}**: {decision.reason.text}."]
    if observation is None:
        lines += ["", "It has not ended yet."]
    else:
        if (setting := _setting(job, decision, observation)) is not None:
            lines += ["", setting]
        lines += ["", _outcome(job, observation)]
    explain = f"`zeus-flows explain JOB.yaml {decision.recurrence}` says what would have changed it"
    lines += ["", " · ".join((*note.links, explain))]
    if arms := decision.reason.arms:
        shown = arms[:_MOST_ARMS]
        lines += ["", "What was believed of each batch size:", ""]
        lines += ["| batch size | what is known | runs | expected cost | drawn |", "| --: | --- | --: | --: | --: |"]
        lines += [_row(job, arm, chosen=arm.batch_size == decision.batch_size) for arm in shown]
        if len(shown) < len(arms):
            lines += ["", f"And {len(arms) - len(shown)} more."]
    return "\n".join(lines)


def _row(job: Job, arm: ArmBelief, *, chosen: bool) -> str:
    size = f"**{arm.batch_size}**" if chosen else str(arm.batch_size)
    doubt = "" if arm.spread is None else f" ± {100 * arm.spread:.0f} %"
    expected = "" if arm.expected_cost_j is None else f"{cost_text(job, arm.expected_cost_j)}{doubt}"
    drawn = "" if arm.sampled_cost_j is None else cost_text(job, arm.sampled_cost_j)
    return f"| {size} | {arm.status} | {arm.runs} | {expected} | {drawn} |"


def _setting(job: Job, decision: Decision, observation: Observation) -> str | None:
    """Return why it trained at its power limit or clocks; None where nothing was set."""
    setting, knob = setting_text(observation.setting, observation.knob), observation.knob.words
    if not setting:
        return None
    if observation.setting == decision.setting:
        why = "as decided"
    elif not decision.tune_power:
        why = "left as it was"
    else:
        profiled = "profiled in this run" if observation.profiling_time_s > 0 else "known from earlier runs"
        why = f"the least cost by the profile of this batch size, {profiled}"
    return f"**{knob.capitalize()} {setting}**: {why}."


def _outcome(job: Job, observation: Observation) -> str:
    how = observation.outcome.value.replace("_", " ").capitalize()
    epochs = f"{observation.epochs} epoch{'' if observation.epochs == 1 else 's'}"
    energy = "" if job.in_seconds or not observation.energy_j else f"{joules(observation.energy_j)} and "
    mark = f" ({observation.energy_source.value})" if energy and observation.energy_source.value != "measured" else ""
    detail = f": {one_line(observation.detail, most=600)}" if observation.detail else ""
    return f"**{how}** after {epochs}, {energy}{seconds(observation.time_s)}{mark}{detail}."
