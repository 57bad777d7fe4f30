"""Passes over models on a real MLflow: sending, registering, judging, aliases, and who may move them."""

from __future__ import annotations

import math
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.builders import JOB, decision
from tests.ledger.brief import impatient, opened
from tests.training.model_rig import KeepingTrainer, ModelRig
from tests.training.rig import job_file
from zeus_flows import killpoints
from zeus_flows.core.gate import Question
from zeus_flows.core.records import EnergySource, Outcome
from zeus_flows.errors import ConfigError, StoreUnavailable
from zeus_flows.job_file import Target
from zeus_flows.ledger.mlflow.client import Store
from zeus_flows.ledger.open_ledger import open_direct
from zeus_flows.recurrence.loop import Recurrence, run_recurrence
from zeus_flows.recurrence.steps import LocalSteps
from zeus_flows.training.gate import Gate
from zeus_flows.training.keeping import Keeper
from zeus_flows.training.promotion import open_promoter


@pytest.fixture
def rig(sqlite_uri: str, tmp_path: Path) -> ModelRig:
    return ModelRig(sqlite_uri, tmp_path)


def test_the_first_model_that_reaches_the_target_is_champion(rig: ModelRig) -> None:
    rig.recur(0.80)
    promoted = rig.make_pass()
    assert rig.aliases() == {"champion": 1}
    assert promoted.champion is not None
    assert promoted.champion.recurrence == 1
    tags = rig.versions()[1]
    assert (tags["zf.job"], tags["zf.verdict"], tags["zf.energy_to_accuracy_j"]) == ("nightly", "accepted", "5001")


def test_what_did_not_reach_the_target_is_not_kept(rig: ModelRig) -> None:
    one_arm = replace(JOB, max_attempts=1)
    replace(rig, job=one_arm).recur(0.80, Outcome.EXHAUSTED)
    assert rig.make_pass().champion is None
    assert rig.client.search_registered_models() == []
    assert rig.client.search_logged_models(["1"]) == []


def test_a_worse_model_stays_challenger_and_the_refusal_says_why(rig: ModelRig) -> None:
    for accuracy in (0.80, 0.78):
        rig.recur(accuracy)
        promoted = rig.make_pass()
    assert rig.aliases() == {"champion": 1, "challenger": 2}
    assert "accuracy 0.78 is worse than 0.8 of version 1" in rig.versions()[2]["zf.reason"]
    assert any("version 2 is refused" in line for line in promoted.lines)


def test_a_guard_refuses_too(rig: ModelRig) -> None:
    rig.recur(0.80, recall=0.9)
    rig.make_pass()
    rig.recur(0.85, recall=0.7)
    rig.make_pass()
    assert rig.aliases() == {"champion": 1, "challenger": 2}
    assert "recall 0.7 is worse" in rig.versions()[2]["zf.reason"]


def test_all_are_evaluated_on_the_slice_of_the_new_one(rig: ModelRig) -> None:
    for accuracy in (0.80, 0.81, 0.82):
        rig.recur(accuracy)
        rig.make_pass()
    assert [(q.recurrence, q.trained_in) for q in rig.asked] == [(1, 1), (2, 2), (2, 1), (3, 3), (3, 2), (3, 1)]
    assert all(q.model_uri.startswith("models:/m-") for q in rig.asked)


def test_small_losses_do_not_add_up(rig: ModelRig) -> None:
    rig.among = 1
    for accuracy in (0.80, 0.794, 0.788, 0.795):
        rig.recur(accuracy)
        rig.make_pass()
    words = [tags["zf.verdict"] for _, tags in sorted(rig.versions().items())]
    assert words == ["accepted", "accepted", "refused", "accepted"]
    assert "0.8 of version 1" in rig.versions()[3]["zf.reason"]  # which is no longer among the last one


def test_without_an_evaluation_the_newest_is_champion_and_that_is_said(rig: ModelRig) -> None:
    for accuracy in (0.80, 0.70):
        rig.recur(accuracy)
        rig.make_pass(evaluates=False)
    assert rig.aliases() == {"champion": 2}
    assert "nothing was compared" in rig.versions()[2]["zf.reason"]


@pytest.mark.parametrize("returned", [math.nan, "good", {"recall": 0.9}, None])
def test_bad_data_refuse_a_model_and_break_nothing(rig: ModelRig, returned: object) -> None:
    rig.recur(0.80)
    rig.make_pass()
    rig.recur(0.85)
    rig.evaluate = lambda _: returned
    rig.make_pass()
    assert rig.aliases() == {"champion": 1, "challenger": 2}
    assert "could not be evaluated" in rig.versions()[2]["zf.reason"]
    rig.evaluate = None
    rig.recur(0.86)
    rig.make_pass()
    assert rig.aliases() == {"champion": 3}


def test_passes_may_be_made_again_and_change_nothing(rig: ModelRig) -> None:
    rig.recur(0.80)
    first = rig.make_pass()
    asked = len(rig.asked)
    again = rig.make_pass()
    assert (again.champion, again.by_hand, again.moved, again.lines) == (first.champion, False, False, ())
    assert len(rig.versions()) == 1
    assert len(rig.asked) == asked


def test_several_models_that_wait_are_judged_in_the_order_of_recurrences(rig: ModelRig) -> None:
    for accuracy in (0.80, 0.82, 0.815):
        rig.recur(accuracy)
    rig.make_pass()
    assert {tags["zf.recurrence"]: tags["zf.verdict"] for tags in rig.versions().values()} == {
        "1": "accepted",
        "2": "accepted",
        "3": "accepted",
    }
    (champion,) = {tags["zf.recurrence"] for n, tags in rig.versions().items() if n == rig.aliases()["champion"]}
    assert champion == "3"


def test_an_older_recurrence_that_comes_late_does_not_displace_a_newer_one(rig: ModelRig, tmp_path: Path) -> None:
    elsewhere = replace(rig, folder=tmp_path / "elsewhere")
    elsewhere.folder.mkdir()
    elsewhere.recur(0.80)  # its machine is slow to send it
    rig.recur(0.79)
    rig.make_pass()
    elsewhere.make_pass()
    champion = rig.versions()[rig.aliases()["champion"]]
    assert champion["zf.recurrence"] == "2"
    late = next(tags for tags in rig.versions().values() if tags["zf.recurrence"] == "1")
    assert "came too late" in late["zf.reason"]


def test_a_champion_that_was_moved_by_hand_stays_until_a_newer_model_is_accepted(rig: ModelRig) -> None:
    for accuracy in (0.80, 0.82):
        rig.recur(accuracy)
        rig.make_pass()
    rig.client.set_registered_model_alias(rig.name, "champion", "1")
    promoted = rig.make_pass()
    assert promoted.by_hand
    assert rig.aliases()["champion"] == 1
    rig.recur(0.83)
    assert not rig.make_pass().by_hand
    assert rig.aliases()["champion"] == 3


def test_a_champion_that_was_moved_by_hand_is_a_rival(rig: ModelRig) -> None:
    for accuracy, recall in ((0.80, 0.9), (0.85, 0.5)):  # refused for its recall
        rig.recur(accuracy, recall=recall)
        rig.make_pass()
    rig.client.set_registered_model_alias(rig.name, "champion", "2")
    rig.recur(0.80)
    rig.make_pass()
    assert rig.aliases()["champion"] == 2
    assert "0.85 of version 2" in rig.versions()[3]["zf.reason"]


def test_a_version_that_was_deleted_is_no_rival(rig: ModelRig) -> None:
    rig.recur(0.90)
    rig.make_pass()
    rig.client.delete_registered_model_alias(rig.name, "champion")
    rig.client.delete_model_version(rig.name, "1")
    rig.recur(0.80)
    rig.make_pass()
    assert rig.aliases() == {"champion": 2}


def test_a_champion_that_was_deleted_before_it_got_its_alias_breaks_no_pass(rig: ModelRig) -> None:
    rig.recur(0.80)
    rig.make_pass()
    rig.recur(0.81)

    def hook(point: str) -> None:
        if point == "after-verdict":
            raise KeyboardInterrupt

    killpoints.listen(hook)
    try:
        with pytest.raises(KeyboardInterrupt):
            rig.make_pass()
    finally:
        killpoints.listen(lambda _: None)
    rig.client.delete_model_version(rig.name, "2")
    assert not [line for line in rig.make_pass().lines if "broke off" in line]
    assert rig.aliases()["champion"] == 1


def test_two_jobs_with_one_model_name_are_refused(rig: ModelRig) -> None:
    rig.recur(0.80)
    rig.make_pass()
    other = replace(rig, job=replace(JOB, name="weekly"))
    with other.promoter() as promoter, pytest.raises(ConfigError, match="is the job nightly's"):
        promoter.check_owner()


def test_a_registered_model_that_no_job_made_is_refused_until_it_is_given_to_one(rig: ModelRig) -> None:
    rig.client.create_registered_model(rig.name)
    with rig.promoter() as promoter:
        with pytest.raises(ConfigError, match=r"was not made by a job.*zf\.job=nightly"):
            promoter.check_owner()
        rig.client.set_registered_model_tag(rig.name, "zf.job", "nightly")
        promoter.check_owner()


def test_a_writer_that_is_held_up_is_put_right_and_not_taken_for_a_hand(rig: ModelRig) -> None:
    rig.recur(0.80)
    rig.make_pass()
    rig.recur(0.81)
    held_up, go_on = threading.Event(), threading.Event()

    def hook(point: str) -> None:
        if point == "after-move" and threading.current_thread().name == "slow":
            held_up.set()
            go_on.wait(60)

    killpoints.listen(hook)
    try:
        slow = threading.Thread(target=rig.make_pass, name="slow")
        slow.start()
        assert held_up.wait(60)
        rig.recur(0.82)
        rig.make_pass()
        assert rig.aliases()["champion"] == 3
        go_on.set()
        slow.join(60)
    finally:
        killpoints.listen(lambda _: None)
    assert rig.aliases()["champion"] == 3
    assert not rig.make_pass().by_hand


def test_two_passes_at_once_make_one_version_of_each_model(rig: ModelRig) -> None:
    for accuracy in (0.80, 0.81):
        rig.recur(accuracy)
    passes = [threading.Thread(target=rig.make_pass) for _ in range(3)]
    for thread in passes:
        thread.start()
    for thread in passes:
        thread.join(120)
    rig.make_pass()
    assert sorted(tags["zf.recurrence"] for tags in rig.versions().values()) == ["1", "2"]
    champion = rig.versions()[rig.aliases()["champion"]]
    assert champion["zf.recurrence"] == "2"


# -- the gate --------------------------------------------------------------------------------------------------------


def gated(rig: ModelRig, found: float, *, accuracy: float, max_age: int | None = None) -> tuple[Recurrence, Question]:
    """Run a recurrence whose gate finds so much of the champion; return it, and what the gate was asked."""
    asked: list[Question] = []

    def evaluate(question: Question) -> float:
        asked.append(question)
        return found

    gate = Gate(evaluate, Target(metric="accuracy", value=0.9, better="higher"), max_age=max_age)
    with opened(rig.uri, rig.folder, rig.job) as ledger:
        promoter = rig.promoter_of(ledger)
        trainer = KeepingTrainer(rig.uri, rig.folder, {"accuracy": accuracy, "recall": 0.9})
        steps = LocalSteps(rig.job, ledger, trainer, gate=gate, champion=promoter.champion)
        done = run_recurrence(rig.job, steps)
        promoter.make_pass()
    return done, asked[0]


def test_a_gate_is_asked_about_the_champion_and_a_refused_challenger_counts_as_trained(rig: ModelRig) -> None:
    rig.recur(0.95)
    rig.make_pass()
    done, question = gated(rig, 0.5, accuracy=0.80)  # trains, and is refused
    assert not done.skipped
    assert (question.trained_in, question.age) == (1, 1)
    assert rig.aliases() == {"champion": 1, "challenger": 2}
    done, question = gated(rig, 0.95, accuracy=0.80, max_age=2)
    assert (question.trained_in, question.last_trained, question.age) == (1, 2, 1)
    assert question.model_uri == rig.asked[0].model_uri
    assert done.skipped  # the champion is two recurrences old, but a model was trained one ago
    done, _ = gated(rig, 0.95, accuracy=0.96, max_age=2)
    assert not done.skipped
    assert rig.aliases() == {"champion": 3}


# -- MLflow is away --------------------------------------------------------------------------------------------------


def test_a_model_waits_on_this_machine_while_mlflow_is_away(rig: ModelRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.recur(0.80)

    def away(*_: object) -> None:
        raise StoreUnavailable("MLflow: away for a test")

    with rig.promoter() as promoter, monkeypatch.context() as patch:
        patch.setattr(Store, "_call", away)
        promoter.check_owner()
        (line,) = promoter.make_pass().lines
        assert "is sent with the next recurrence" in line
        assert promoter.champion() is None
    rig.make_pass()
    assert rig.aliases() == {"champion": 1}


def test_models_of_a_job_behind_a_server_are_kept_and_judged(server_on_sqlite: str, tmp_path: Path) -> None:
    rig = ModelRig(server_on_sqlite, tmp_path, job=replace(JOB, name="served"), name="served")
    for accuracy in (0.80, 0.81, 0.70):
        rig.recur(accuracy)
        rig.make_pass()
    assert rig.aliases() == {"champion": 2, "challenger": 3}


def test_a_job_that_keeps_no_model_makes_no_call_for_one(rig: ModelRig, monkeypatch: pytest.MonkeyPatch) -> None:
    def unwanted(*_: object) -> None:
        raise AssertionError("MLflow was asked")

    with opened(rig.uri, rig.folder, rig.job) as ledger:
        monkeypatch.setattr(Store, "_call", unwanted)
        state_dir = rig.folder / "state"
        assert open_promoter(job_file(), rig.job, ledger, tracking_uri=rig.uri, state_dir=state_dir) is None


def test_the_model_of_an_attempt_that_was_declared_dead_is_kept_and_not_registered(rig: ModelRig) -> None:
    ledger = open_direct(rig.job, tracking_uri=rig.uri, energy_source=EnergySource.SIMULATED)
    run_id = ledger.decided(decision(ledger.begin()), {})
    (attempt,) = ledger.open_attempts()
    ledger.declare_dead(attempt, "nothing was heard of it")
    keeper = Keeper(rig.folder / "state" / "models", lambda: ledger.key, run_id)
    keeper.keep({"a": torch.zeros(1)}, {})
    keeper.close(converged=True)  # it was alive after all
    rig.make_pass()
    (model,) = rig.client.search_logged_models(["1"])
    assert (model.source_run_id, str(model.status)) == (run_id, "READY")
    assert rig.client.search_registered_models() == []


def test_a_model_whose_attempt_was_decided_while_mlflow_was_away_finds_its_run(
    rig: ModelRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.recur(0.80)
    rig.make_pass()

    def away(*_: object) -> None:
        raise StoreUnavailable("MLflow: away for a test")

    with monkeypatch.context() as patch:
        impatient(patch)
        patch.setattr(Store, "_call", away)
        rig.recur(0.81)
    assert rig.make_pass().champion is not None  # opening the ledger delivers what was left here, sooner or later
    rig.recur(0.815)
    rig.make_pass()
    assert sorted(tags["zf.recurrence"] for tags in rig.versions().values()) == ["1", "2", "3"]
    assert list((rig.folder / "state" / "models").iterdir()) == []
