"""The drift gate: a recurrence is skipped where the newest model still meets the target on the new slice.

Evaluating costs next to nothing beside training. The gate is off unless a contender says `gate: true`, and every
evaluation is a run of its own kind (`zf.kind` = `gate`) in the contender's experiment, whether it skips or not.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from mlflow.entities import Metric

from zeus_flows.core.records import Job, Observation, decision_seed
from zeus_flows.experiments.capriccio import Slice
from zeus_flows.experiments.capriccio_curves import Cell, Curves
from zeus_flows.experiments.capriccio_models import Scores
from zeus_flows.ledger.store import Store


@dataclass(frozen=True, slots=True)
class Evaluation:
    """How the newest model does on a slice it was not trained on.

    Attributes:
        trained_on: The slice it was trained on.
        scores: On the new slice's held-out rows.
        passes: Whether they meet the target.
    """

    trained_on: int
    scores: Scores
    passes: bool


def evaluate(curves: Curves, job: Job, observations: tuple[Observation, ...], part: Slice) -> Evaluation | None:
    """Evaluate the newest model on a slice; None where there is none yet.

    The model is made again from its slice, batch size and seed: on one machine it is the same model.
    """
    converged = [o for o in observations if o.converged and o.recurrence < part.number]
    if not converged:
        return None
    newest = converged[-1]
    trainer = curves.trainer
    seed = curves.draw(decision_seed(job.seed, newest.recurrence, newest.attempt) % 2**31)
    cell = Cell(trainer.slices[newest.recurrence - 1].key, newest.batch_size, seed)
    scores = trainer.trained(cell, newest.epochs).scores_on(trainer.data(part.key))
    target = trainer.job.target
    return Evaluation(newest.recurrence, scores, target.reached(getattr(scores, target.metric)))


def log_evaluation(store: Store, experiment_id: str, part: Slice, evaluation: Evaluation) -> None:
    """Write an evaluation's run, once."""
    number = str(part.number)
    standing = f"tags.`zf.kind` = 'gate' and tags.`zf.recurrence` = '{number}'"
    if store.client.search_runs([experiment_id], standing, max_results=1):
        return
    verdict = "skip" if evaluation.passes else "retrain"
    tags = {
        "zf.kind": "gate",
        "zf.recurrence": number,
        "zf.slice_day": part.day.isoformat(),
        "zf.gate": verdict,
        "zf.trained_on": str(evaluation.trained_on),
    }
    run_id = store.create_run(experiment_id, name=f"gate {number} · {verdict}", tags=tags)
    now_ms = int(time.time() * 1000)
    values = evaluation.scores._asdict().items()
    store.log(run_id, metrics=[Metric(f"zf.{name}", value, now_ms, part.number) for name, value in values])
    store.end(run_id)
