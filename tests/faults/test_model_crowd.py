"""Recurrences, passes at once, stalls, kills and bad data in a random order, on a real MLflow."""

from __future__ import annotations

import math
import random
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from tests.training.model_rig import BARS, ModelRig
from zeus_flows import killpoints
from zeus_flows.core.gate import Question
from zeus_flows.core.promotion import fold
from zeus_flows.ledger.mlflow.client import Store
from zeus_flows.ledger.mlflow.model_registry import ModelRegistry
from zeus_flows.training.keeping import open_model


class Killed(BaseException):
    """Ends a thread as a kill ends a process: nothing it had still to write is written."""


@pytest.mark.slow
def test_whatever_happens_at_once_a_pass_puts_right(sqlite_uri: str, tmp_path: Path) -> None:
    rng, stalls = random.Random(11), threading.Event()

    def hook(_point: str) -> None:
        if threading.current_thread().name != "careless":
            return
        chance = rng.random()
        if chance < 0.1:
            raise Killed
        if chance < 0.2:
            stalls.wait(1.0)

    def careless_pass() -> None:
        def evaluate(question: Question) -> object:
            scores = dict(open_model(question.model_uri).about)
            return math.nan if rng.random() < 0.1 else scores

        with suppress(Killed):
            ModelRig(sqlite_uri, tmp_path, evaluate=evaluate).make_pass()

    rig, best = ModelRig(sqlite_uri, tmp_path), -math.inf
    killpoints.listen(hook)
    try:
        for accuracy in [0.8 + rng.gauss(0.0, 0.008) for _ in range(8)]:
            passes = [threading.Thread(target=careless_pass, name="careless") for _ in range(2)]
            for thread in passes:
                thread.start()
            rig.recur(accuracy)
            for thread in passes:
                thread.join(120)
            promoted = rig.make_pass()
            entries = ModelRegistry(Store(sqlite_uri), rig.job.name, rig.name).entries("1", champions=99)
            candidates = [entry.candidate for entry in entries if entry.candidate is not None]
            assert len(candidates) == len(entries) == len(rig.versions()), "a version for each model"
            standing = fold(candidates)
            assert standing.waiting == ()
            if standing.champion is None:
                continue  # bad data refused every one so far
            assert promoted.champion == standing.champion.version
            assert rig.aliases()["champion"] == standing.champion.version.number
            assert not promoted.by_hand
            accepted = [dict(open_model_of(rig, c.version.uri))["accuracy"] for c in standing.accepted]
            best = max(best, *accepted)
            assert accepted[-1] >= best - BARS[0].margin - 1e-9
    finally:
        killpoints.listen(lambda _: None)
    assert len(rig.versions()) == 8


def open_model_of(rig: ModelRig, uri: str) -> dict[str, float]:
    model = rig.client.get_logged_model(uri.removeprefix("models:/"))
    return dict(open_model(model.artifact_location).about)
