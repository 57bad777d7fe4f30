"""Every name under `zf.` that MLflow holds: tags, params and metrics. `docs/reference/mlflow-schema.md` lists the same.

A name with a variable part is a function; its parameters are called as the page calls them.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Final

from zeus_flows.core.power_profile import Knob

PREFIX: Final = "zf."


class RunKind(StrEnum):
    """What a run is: the value of its tag `KIND`."""

    ATTEMPT = "attempt"
    GATE = "gate"
    DRIFT_WINDOW = "drift-window"
    PAGE = "page"
    EXPERIMENT = "experiment"
    SLICE = "slice"
    FIGURE = "figure"
    SIMULATION = "simulation"


# Runs of several kinds.
KIND: Final = "zf.kind"
FINGERPRINT: Final = "zf.fingerprint"
ENERGY_SOURCE: Final = "zf.energy_source"
RECURRENCE: Final = "zf.recurrence"
DRIFT_WINDOW: Final = "zf.drift_window"
GPU: Final = "zf.gpu"
LEASE: Final = "zf.lease"
DETAIL: Final = "zf.detail"
PREFECT_FLOW_RUN_ID: Final = "zf.prefect.flow_run_id"
PREFECT_FLOW_RUN_NAME: Final = "zf.prefect.flow_run_name"
PREFECT_URL: Final = "zf.prefect.url"

# An attempt.
ATTEMPT: Final = "zf.attempt"
POLICY: Final = "zf.policy"
MODE: Final = "zf.mode"
REASON: Final = "zf.reason"
EXPLORES: Final = "zf.explores"
DEGRADED: Final = "zf.degraded"
LATE: Final = "zf.late"
UNTUNABLE: Final = "zf.untunable"
IMPORTED_FROM: Final = "zf.imported_from"
MADE = "zf.made"
MADE_BY = "zf.made_by"
CODE_REVISION: Final = "zf.code_revision"
OUTCOME: Final = "zf.outcome"
FOREIGN_LIMIT_W: Final = "zf.foreign_limit_w"
BATCH_SIZE: Final = "zf.batch_size"
MICRO_BATCH_SIZE: Final = "zf.micro_batch_size"
LEARNING_RATE: Final = "zf.learning_rate"
SEED: Final = "zf.seed"
DECISION: Final = "zf.decision"
OBSERVATION: Final = "zf.observation"
POWER_LIMIT_W: Final = "zf.power_limit_w"
ENERGY_TO_ACCURACY_J: Final = "zf.energy_to_accuracy_j"
TIME_TO_ACCURACY_S: Final = "zf.time_to_accuracy_s"
HOST_ENERGY_J: Final = "zf.host_energy_j"
COST_J: Final = "zf.cost_j"
COST_S: Final = "zf.cost_s"
SAVED_J: Final = "zf.saved_j"
SAVED_S: Final = "zf.saved_s"
EPOCHS: Final = "zf.epochs"
CONVERGED: Final = "zf.converged"
EPOCH_METRIC: Final = "zf.epoch/metric"
EPOCH_ENERGY_J: Final = "zf.epoch/energy_j"
EPOCH_TIME_S: Final = "zf.epoch/time_s"
EPOCH_POWER_LIMIT_W: Final = "zf.epoch/power_limit_w"
CLOCK_MHZ: Final = "zf.clock_mhz"
EPOCH_CLOCK_MHZ: Final = "zf.epoch/clock_mhz"

#: The setting of each knob, of an attempt and of an epoch.
SETTING: Final = {Knob.POWER_LIMIT: POWER_LIMIT_W, Knob.CLOCKS: CLOCK_MHZ}
EPOCH_SETTING: Final = {Knob.POWER_LIMIT: EPOCH_POWER_LIMIT_W, Knob.CLOCKS: EPOCH_CLOCK_MHZ}


# The model that an attempt kept.
MODEL: Final = "zf.model"
MODEL_VERSION: Final = "zf.model_version"
VERDICT: Final = "zf.verdict"


def verdict(k: int) -> str:
    """Return the param that holds the k-th verdict on an attempt's model."""
    return f"zf.verdict.{k}"


def verdict_number(name: str) -> int | None:
    """Return which verdict a param holds; None where it is another param."""
    return _number(verdict(0), name)


def move(k: int) -> str:
    """Return the param that says where the alias of the champion is to be moved, for the k-th time."""
    return f"zf.move.{k}"


def move_number(name: str) -> int | None:
    """Return which move a param holds; None where it is another param."""
    return _number(move(0), name)


def moved(k: int) -> str:
    """Return the param that says that the k-th move was made, and that no older one overtook it."""
    return f"zf.moved.{k}"


def part(part: str, unit: str) -> str:
    """Return the metric of what a part of an attempt took."""
    return f"zf.part/{part}_{unit}"


# An experiment.
LEDGER: Final = "zf.ledger"
JOB: Final = "zf.job"
VIEWS: Final = "zf.views"

# A drift window. The first one is the ledger's root.
ROOT: Final = "zf.root"
WINDOW: Final = "zf.window"
OPENED_BY: Final = "zf.opened_by"
FIRST_RECURRENCE: Final = "zf.first_recurrence"
COUNTS_FROM: Final = "zf.counts_from"
ENDED_BY: Final = "zf.ended_by"
EVIDENCE: Final = "zf.evidence"
BELIEFS: Final = "zf.beliefs"
BEST_BATCH_SIZE: Final = "zf.best_batch_size"
COMPARABLE: Final = "zf.comparable"
SET_ASIDE: Final = "zf.set_aside"
NEXT_WINDOW: Final = "zf.next_window"
PREVIOUS_WINDOW: Final = "zf.previous_window"
CURRENT_WINDOW: Final = "zf.current_window"
CURRENT_PAGE: Final = "zf.current_page"
SNAPSHOT: Final = "zf.snapshot"
SNAPSHOT_ANEW: Final = "zf.snapshot.anew"
SNAPSHOT_OF: Final = "zf.snapshot.of"
ATTEMPTS: Final = "zf.attempts"
SAVED_ENERGY_J: Final = "zf.saved/energy_j"
SAVED_ENERGY_LOW_J: Final = "zf.saved/energy_low_j"
SAVED_ENERGY_HIGH_J: Final = "zf.saved/energy_high_j"
SAVED_TIME_S: Final = "zf.saved/time_s"
SAVED_COST_PERCENT: Final = "zf.saved/cost_percent"
SAVED_RECURRENCES: Final = "zf.saved/recurrences"
SAVED_LOST_RECURRENCES: Final = "zf.saved/lost_recurrences"
SAVED_SKIPPED_RECURRENCES: Final = "zf.saved/skipped_recurrences"


def page(k: int) -> str:
    """Return the root's param that names a page."""
    return f"zf.page.{k}"


def page_number(name: str) -> int | None:
    """Return the page that a param of the root names; None where it is another param.

    >>> page_number(page(3)), page_number(ROOT)
    (3, None)
    """
    return _number(page(0), name)


def snapshot_piece(i: int) -> str:
    """Return the tag that holds a piece of a snapshot."""
    return f"zf.snapshot.{i}"


def snapshot_anew_piece(i: int) -> str:
    """Return the tag that holds a piece of a snapshot that is being folded anew."""
    return f"zf.snapshot.anew.{i}"


def saved_cost(unit: str) -> str:
    """Return the metric of the cost that was saved."""
    return f"zf.saved/cost_{unit}"


def saved_cost_low(unit: str) -> str:
    """Return the metric of the low end of its interval."""
    return f"zf.saved/cost_low_{unit}"


def saved_cost_high(unit: str) -> str:
    """Return the metric of the high end of its interval."""
    return f"zf.saved/cost_high_{unit}"


def saved_by(line: str, unit: str) -> str:
    """Return the metric of what one line of the account saved."""
    return f"zf.saved/by_{line}_{unit}"


# A drift gate's check.
TRAINED_IN: Final = "zf.trained_in"
GATE: Final = "zf.gate"
GATE_VALUE: Final = "zf.gate/value"
GATE_SKIPPED: Final = "zf.gate/skipped"
GATE_AGE: Final = "zf.gate/age"
GATE_TIME_S: Final = "zf.gate/time_s"
GATE_ENERGY_J: Final = "zf.gate/energy_j"


def gate_score(name: str) -> str:
    """Return the metric of a score that an evaluation returned."""
    return f"zf.gate/{name}"


# A page.
def claim(n: int) -> str:
    """Return the param that says who took a recurrence."""
    return f"zf.r.{n}"


def attempt_run(n: int, m: int) -> str:
    """Return the param that names the run of an attempt of a recurrence."""
    return f"zf.a.{n}.{m}"


def gate_run(n: int) -> str:
    """Return the param that names the run of a recurrence's drift gate."""
    return f"zf.g.{n}"


def end(n: int) -> str:
    """Return the param that says nothing will be added to a recurrence."""
    return f"zf.e.{n}"


#: Reads a page's params: `kind` is r, a, g or e.
PAGE_PARAM: Final = re.compile(r"zf\.(?P<kind>[rgae])\.(?P<recurrence>\d+)(?:\.(?P<attempt>\d+))?")

# A drift experiment, and its slices.
DIGEST: Final = "zf.digest"
SLICES: Final = "zf.slices"
ROWS: Final = "zf.rows"
MALFORMED_LINES: Final = "zf.malformed_lines"
REPORT: Final = "zf.report"
SLICE: Final = "zf.slice"
SLICE_DAY: Final = "zf.slice_day"
POSITIVE_SHARE: Final = "zf.positive_share"
MAJORITY_ACCURACY: Final = "zf.majority_accuracy"
OVERLAP: Final = "zf.overlap"
WORTH_OF_ADAPTING: Final = "zf.worth_of_adapting"
FALSE_ALARMS_PER_100: Final = "zf.false_alarms_per_100"


def contender(name: str) -> str:
    """Return the param that holds a contender's policy."""
    return f"zf.contender.{name}"


def slice_run(n: int) -> str:
    """Return the param that names a slice's run."""
    return f"zf.slice.{n}"


def experiment_holder(k: int) -> str:
    """Return the param that says which process was the k-th to work on an experiment."""
    return f"zf.holder.{k}"


def experiment_holder_number(name: str) -> int | None:
    """Return which holder a param names; None where it is another param."""
    return _number(experiment_holder(0), name)


def experiment_released(k: int) -> str:
    """Return the param that says that the k-th process let go."""
    return f"zf.released.{k}"


def of_contender(measure: str, contender: str) -> str:
    """Return the metric of what was measured of a contender, by the name that the measure has alone.

    >>> of_contender(COST_J, "zeus"), of_contender("log_loss", "zeus")
    ('zf.cost_j/zeus', 'zf.log_loss/zeus')
    """
    return f"zf.{measure.removeprefix(PREFIX)}/{contender}"


def total_cost_j(contender: str) -> str:
    """Return the metric of what all slices cost a contender."""
    return f"zf.total_cost_j/{contender}"


def regret(contender: str) -> str:
    """Return the metric of a contender's regret."""
    return f"zf.regret/{contender}"


def regret_expected(contender: str) -> str:
    """Return the metric of a contender's regret, on average over replays."""
    return f"zf.regret_expected/{contender}"


def noticed(factor: str) -> str:
    """Return the metric of how often a planted change was noticed."""
    return f"zf.noticed/times_{factor}"


# A cluster simulation.
ARRIVALS: Final = "zf.arrivals"
JOBS: Final = "zf.jobs"
TRAINING: Final = "zf.training"
SEEDS: Final = "zf.seeds"
ETA: Final = "zf.eta"
BETA: Final = "zf.beta"


def over_default(of: str, workload: str, policy: str) -> str:
    """Return the metric of a policy's energy, time or cost on a workload, over the default's."""
    return f"zf.over_default/{of}/{workload}/{policy}"


def _number(zeroth: str, name: str) -> int | None:
    """Return the number at the end of a name, where the rest of it is the same as the zeroth's."""
    stem = zeroth.removesuffix("0")
    digits = name.removeprefix(stem)
    return int(digits) if name.startswith(stem) and digits.isdecimal() else None


# A figure of the paper.
CLAIMS_MET: Final = "zf.claims_met"
CLAIMS_MISSED: Final = "zf.claims_missed"
