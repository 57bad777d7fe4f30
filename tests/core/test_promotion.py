"""Which model is champion: verdicts, their fold, and the alias, under whatever order things are written in."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeus_flows.core.promotion import (
    Bar,
    Candidate,
    Evaluated,
    ModelVerdict,
    Move,
    Version,
    fold,
    is_by_hand,
    judge,
    moves_to,
    rivals_of,
    too_late,
    unevaluated,
)

AUC = Bar("auc", lower_is_better=False, margin=0.01)
LOSS = Bar("loss", lower_is_better=True, margin=0.1)


def version(recurrence: int, attempt: int = 1) -> Version:
    return Version(recurrence, attempt, 64, number=recurrence, uri=f"models:/m-{recurrence}")


def scored(recurrence: int, **scores: float) -> Evaluated:
    return Evaluated(version(recurrence), scores)


def verdict_on(own: Evaluated, *against: Evaluated, bars: Sequence[Bar] = (AUC,)) -> ModelVerdict:
    return judge(own, against, bars, among=3, slice_of=own.version.recurrence)


# -- one verdict -----------------------------------------------------------------------------------------------------


def test_the_first_model_is_accepted() -> None:
    assert verdict_on(scored(1, auc=0.8)).accepted


@pytest.mark.parametrize(("auc", "accepted"), [(0.81, True), (0.80, True), (0.79, True), (0.7899, False)])
def test_a_model_may_be_worse_by_the_margin_and_no_more(auc: float, accepted: bool) -> None:
    assert verdict_on(scored(2, auc=auc), scored(1, auc=0.80)).accepted is accepted


def test_the_best_rival_counts_and_not_the_newest() -> None:
    given = verdict_on(scored(3, auc=0.80), scored(2, auc=0.79), scored(1, auc=0.82))
    assert not given.accepted
    assert "auc 0.8 is worse than 0.82 of version 1 by more than the margin of 0.01" in given.reason


def test_a_guard_refuses_what_the_target_would_accept() -> None:
    given = verdict_on(scored(2, auc=0.9, loss=0.7), scored(1, auc=0.8, loss=0.5), bars=(AUC, LOSS))
    assert not given.accepted
    assert "loss 0.7 is worse than 0.5 of version 1" in given.reason


@pytest.mark.parametrize(
    ("own", "says"),
    [
        (Evaluated(version(2), broken="ValueError: bad"), "it could not be evaluated: ValueError: bad"),
        (scored(2, auc=math.nan), "auc is nan"),
        (scored(2, auc=math.inf), "auc is inf"),
        (scored(2, loss=0.1), "returned loss, and not auc"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(own: Evaluated, says: str) -> None:
    given = verdict_on(own, scored(1, auc=0.8))
    assert not given.accepted
    assert says in given.reason


def test_what_cannot_be_compared_is_refused_unless_the_rival_is_gone() -> None:
    broken = Evaluated(version(1), broken="OSError: no such file")
    assert "version 1 could not be evaluated: OSError" in verdict_on(scored(2, auc=0.8), broken).reason
    assert not verdict_on(scored(2, auc=0.8), broken).accepted
    assert verdict_on(scored(2, auc=0.8), replace(broken, gone=True)).accepted


def test_without_an_evaluation_the_newest_is_accepted_and_that_is_said() -> None:
    assert unevaluated().accepted
    assert "nothing was compared" in unevaluated().reason


# -- the fold --------------------------------------------------------------------------------------------------------


def accepted(recurrence: int, *against: int, auc: float = 0.8, among: int = 3) -> Candidate:
    rivals = tuple(scored(r, auc=0.8) for r in against)
    return Candidate(version(recurrence), (ModelVerdict(True, "", {"auc": auc}, rivals, (AUC,), among),))


def test_the_champion_is_the_newest_accepted_one_whatever_came_last() -> None:
    refused = Candidate(version(3), (ModelVerdict(False, "worse"),))
    standing = fold([refused, accepted(2, 1), accepted(1)])
    assert standing.champion is not None
    assert standing.champion.version == version(2)
    assert standing.waiting == ()


def test_a_verdict_that_did_not_know_of_an_older_one_is_made_again() -> None:
    late = fold([accepted(1), accepted(2, 1), accepted(3, 1)])  # 3 was judged before 2 was accepted
    assert [c.version.recurrence for c in late.accepted] == [1, 2]
    assert [c.version.recurrence for c in late.waiting] == [3]
    again = replace(accepted(3, 1), verdicts=(*accepted(3, 1).verdicts, *accepted(3, 2, 1).verdicts))
    assert fold([accepted(1), accepted(2, 1), again]).champion == again


def test_what_was_judged_under_other_settings_stands() -> None:
    one = [accepted(1, among=1), accepted(2, 1, among=1), accepted(3, 2, among=1)]
    standing = fold([*one, accepted(4, 3, 2, 1, among=3)])
    assert len(standing.accepted) == 4


def test_the_best_is_carried_on_beyond_the_last_few() -> None:
    history = [accepted(1, auc=0.9)]
    for recurrence in range(2, 8):
        mine = Candidate(version(recurrence))
        rivals = rivals_of(mine, history, 2)
        assert version(1) in rivals
        assert len(rivals) <= 3
        against = tuple(scored(r.recurrence, auc=0.9 if r.recurrence == 1 else 0.89) for r in rivals)
        history.append(replace(mine, verdicts=(ModelVerdict(True, "", {"auc": 0.89}, against, (AUC,), 2),)))
    assert fold(history).waiting == ()


def test_models_of_another_fingerprint_are_no_rivals() -> None:
    other = replace(accepted(1), fingerprint="old")
    assert rivals_of(Candidate(version(2), fingerprint="new"), [other], 3) == ()


# -- the alias -------------------------------------------------------------------------------------------------------


def moved(*to: int, done: bool = True) -> list[Move]:
    return [Move(number, (number, 1), done) for number in to]


def test_a_champion_that_was_moved_by_hand_stays_until_there_is_a_newer_one() -> None:
    moves = moved(5, 7)
    assert is_by_hand(5, moves)
    assert not moves_to(version(7), 5, moves)
    assert not moves_to(version(6), 5, moves)  # 7 was refused after all: that is no newer one
    assert moves_to(version(8), 5, moves)
    assert not moves_to(version(7), None, moves)  # the alias was deleted by hand


def test_a_move_that_is_under_way_is_not_taken_for_a_hand() -> None:
    moves = [Move(5, (5, 1), False), Move(7, (7, 1), True)]
    assert not is_by_hand(5, moves)
    assert moves_to(version(7), 5, moves)


def test_the_alias_goes_back_where_the_champion_was_refused_after_all() -> None:
    assert moves_to(version(6), 7, moved(5, 6, 7))


# -- a thousand promotions -------------------------------------------------------------------------------------------


@dataclass
class Stalled:
    """A judge who has read the state, evaluated, and not written yet."""

    candidate: Candidate
    verdict: ModelVerdict
    rounds: int


@dataclass
class World:
    """Many processes that finish, stall, are killed and read bad data, over write-once params and one alias.

    Quality is what an exact evaluation on the same data returns; it is the same on every slice, so that a drift below
    the margin would show.
    """

    rng: random.Random
    quality: dict[int, float] = field(default_factory=dict)
    verdicts: dict[int, dict[int, ModelVerdict]] = field(default_factory=dict)
    late: list[int] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)
    dead: list[Move] = field(default_factory=list)
    alias: int | None = None
    stalled: list[Stalled] = field(default_factory=list)
    stalled_moves: list[Move] = field(default_factory=list)

    def candidates(self) -> list[Candidate]:
        return [
            Candidate(version(recurrence), tuple(self.verdicts.get(recurrence, {}).values()))
            for recurrence in self.quality
            if recurrence not in self.late
        ]

    def evaluated(self, of: Version, *, bad: float) -> Evaluated:
        if self.rng.random() < bad:
            return self.rng.choice([Evaluated(of, broken="KeyError"), Evaluated(of, {"auc": math.nan}), Evaluated(of)])
        return Evaluated(of, {"auc": self.quality[of.recurrence]})

    def verdict(self, candidate: Candidate, *, bad: float = 0.0) -> ModelVerdict:
        standing = fold(self.candidates())
        champion = standing.champion
        if champion is not None and champion.version.order > candidate.version.order:
            return too_late(champion.version)
        rivals = rivals_of(candidate, standing.accepted, 3)
        own = self.evaluated(candidate.version, bad=bad)
        against = [self.evaluated(rival, bad=bad) for rival in rivals]
        return judge(own, against, (AUC,), among=3, slice_of=candidate.version.recurrence)

    def give(self, candidate: Candidate, verdict: ModelVerdict, rounds: int) -> None:
        self.verdicts.setdefault(candidate.version.recurrence, {}).setdefault(rounds, verdict)  # a compare-and-set

    def make_pass(self, *, bad: float = 0.0, dies: float = 0.0) -> None:
        """A pass as `zeus_flows.training.promotion` makes it; with `dies` it may be killed or stall anywhere."""
        while (waiting := fold(self.candidates()).waiting) != ():
            candidate = self.rng.choice(waiting) if dies else waiting[0]
            verdict, rounds = self.verdict(candidate, bad=bad), len(candidate.verdicts) + 1
            if self.rng.random() < dies:
                if self.rng.random() < 0.7:
                    self.stalled.append(Stalled(candidate, verdict, rounds))
                return
            self.give(candidate, verdict, rounds)
        champion = fold(self.candidates()).champion
        assert champion is not None or not self.moves
        if champion is not None and moves_to(champion.version, self.alias, self.moves):
            move = Move(champion.version.number, champion.version.order, done=False)
            self.moves.append(move)
            if self.rng.random() < dies:
                (self.stalled_moves if self.rng.random() < 0.7 else self.dead).append(move)
                return
            self.set_alias(move)
        self.moves = [move for move in self.moves if all(move is not dead for dead in self.dead)][-50:]
        self.dead = []

    def set_alias(self, move: Move) -> None:
        self.alias = move.to
        self.alias = self.moves[-1].to  # whoever moved looks again
        self.moves = [replace(m, done=True) if m is move else m for m in self.moves]

    def wake(self) -> None:
        """Let somebody who stalled go on, long after."""
        if self.late and self.rng.random() < 0.3:
            self.late.pop(self.rng.randrange(len(self.late)))
        if self.stalled and self.rng.random() < 0.5:
            late = self.stalled.pop(self.rng.randrange(len(self.stalled)))
            self.give(late.candidate, late.verdict, late.rounds)
        if self.stalled_moves and self.rng.random() < 0.5:
            move = self.stalled_moves.pop(self.rng.randrange(len(self.stalled_moves)))
            if self.rng.random() < 0.8:
                self.set_alias(move)
            else:  # killed right after the alias was set
                self.alias = move.to
                self.dead.append(move)


@pytest.mark.slow
def test_a_thousand_promotions_never_drift_and_never_go_back() -> None:
    world, best, promoted, recurrence = World(random.Random(7)), -math.inf, set[int](), 0
    while len(promoted) < 1000:
        recurrence += 1
        worse = world.quality.get(world.alias or 0, 0.8) - 0.4 * AUC.margin  # small losses that would add up
        world.quality[recurrence] = world.rng.choice([worse, 0.8 + world.rng.gauss(0.0, 0.002)])
        if world.rng.random() < 0.3:
            world.late.append(recurrence)  # it is registered after newer ones
        for _ in range(world.rng.randrange(3)):  # others finish at the same time
            world.wake()
            world.make_pass(bad=0.05, dies=0.4)
        world.wake()
        if recurrence % 3:
            continue
        world.make_pass()  # the janitor's
        standing = fold(world.candidates())
        assert standing.waiting == ()
        if standing.champion is None:
            continue
        mine = standing.champion.version
        assert world.alias == mine.number, "the alias is behind the newest accepted one after a pass"
        best = max(best, *(world.quality[c.version.recurrence] for c in standing.accepted))
        assert world.quality[mine.recurrence] >= best - AUC.margin - 1e-9, "small losses added up"
        promoted |= {c.version.recurrence for c in standing.accepted}
        if len(world.quality) > 25:  # what is older was judged long ago, and is read no more
            rivals = rivals_of(Candidate(version(recurrence + 1)), standing.accepted, 3)
            kept = {c.version.recurrence for c in standing.accepted[-6:]} | {r.recurrence for r in rivals}
            world.quality = {r: q for r, q in world.quality.items() if r in kept or r > recurrence - 15}
    assert any(not rounds[1].accepted for rounds in world.verdicts.values())
    assert any(len(rounds) > 1 for rounds in world.verdicts.values()), "nothing was ever judged again"


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_verdicts_in_any_order_come_to_the_same_champion(qualities: list[float], shuffled: random.Random) -> None:
    world = World(random.Random(0), dict(enumerate(qualities, start=1)))
    world.make_pass()
    candidates = world.candidates()
    champion = fold(candidates).champion
    shuffled.shuffle(candidates)
    assert fold(candidates).champion == champion
    assert champion is not None
    kept = [world.quality[c.version.recurrence] for c in fold(candidates).accepted]
    assert world.quality[champion.version.recurrence] >= max(kept) - AUC.margin - 1e-9
