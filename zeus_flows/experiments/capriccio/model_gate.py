"""The drift gate of a contender: its newest model is made again and evaluated on the new slice.

Off unless a contender says `gate: true`. A job of one's own names a function instead: `gate` in the job file.
"""

from __future__ import annotations

from zeus_flows.core.gate import Question
from zeus_flows.core.job import Job
from zeus_flows.core.records import Observation, decision_seed
from zeus_flows.experiments.capriccio.curves import Cell, Curves


def evaluate(
    curves: Curves, job: Job, observations: tuple[Observation, ...], question: Question
) -> dict[str, float] | None:
    """Return the newest model's scores on the held-out rows of the slice it is asked about.

    The model is made again from its slice, batch size and seed: on one machine it is the same model.
    """
    order = (question.trained_in, question.attempt)
    trained = next((o for o in observations if o.order == order), None)
    if trained is None:
        return None
    trainer = curves.trainer
    seed = curves.draw(decision_seed(job.seed, trained.recurrence, trained.attempt) % 2**31)
    cell = Cell(trainer.slices[trained.recurrence - 1].key, trained.batch_size, seed)
    scores = trainer.trained(cell, trained.epochs).scores_on(trainer.data(trainer.slices[question.recurrence - 1].key))
    return dict(scores._asdict())
