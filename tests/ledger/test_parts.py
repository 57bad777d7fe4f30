"""The ledger's small parts: pages, snapshots, leases."""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
from dataclasses import replace

import pytest

from tests.builders import GPU, JOB, observation
from zeus_flows.core import policy
from zeus_flows.core.json import plain_text
from zeus_flows.core.power_profile import Part, Parts, PowerProfile, SettingMeasurement
from zeus_flows.core.records import Outcome
from zeus_flows.ledger import lease
from zeus_flows.ledger.mlflow import names, pages, snapshot
from zeus_flows.ledger.mlflow.pages import Page
from zeus_flows.ledger.mlflow.record_text import dump_observation, load_observation
from zeus_flows.ledger.mlflow.snapshot import Snapshot


def test_a_page_reads_claims_attempts_and_ends_and_leaves_the_rest_alone() -> None:
    params = {names.claim(3): "who", names.attempt_run(3, 2): "run", names.end(3): "ended", "zf.rx.1": "", "other": "x"}
    page = Page().read(params)
    assert (page.claims, page.attempts, page.ended) == ({3: "who"}, {(3, 2): "run"}, {3})
    assert page.attempts_of(3) == {2: "run"}


def test_a_page_is_full_after_so_many_recurrences() -> None:
    assert pages.number_of(pages.SIZE) == 0
    assert pages.number_of(pages.SIZE + 1) == 1


def test_the_closed_prefix_ends_before_a_gap_and_before_an_open_attempt() -> None:
    page = Page(ended={1, 2, 4})
    assert page.closed_upto(0) == 2
    assert page.closed_upto(0, still_open={1}) == 0
    assert page.closed_upto(3) == 4


def states(upto: int, batch_size: int = 64) -> policy.State:
    return policy.fold(JOB, [observation(n, batch_size=batch_size) for n in range(1, upto + 1)])


def test_a_snapshot_comes_back_as_it_was() -> None:
    written = Snapshot(9, states(9))
    assert snapshot.load(JOB, snapshot.dump(written)) == written


def test_pieces_of_two_writers_do_not_fit_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "MAX_TAG", 200)
    mine, theirs = snapshot.dump(Snapshot(9, states(9))), snapshot.dump(Snapshot(10, states(10, batch_size=32)))
    assert len(mine) > 3
    piece = f"{snapshot.HEAD}.1"
    assert snapshot.load(JOB, mine | {piece: theirs[piece]}) is None
    assert snapshot.load(JOB, {k: v for k, v in mine.items() if k != piece}) is None
    assert snapshot.load(JOB, mine | {snapshot.HEAD: "not json"}) is None


def test_a_snapshot_that_an_earlier_version_wrote_in_plain_text_is_read() -> None:
    body = json.dumps(policy.to_json(states(9)))
    head = {"upto": 9, "pieces": 1, "digest": hashlib.sha256(body.encode()).hexdigest()}
    tags = {snapshot.HEAD: json.dumps(head), f"{snapshot.HEAD}.0": body}
    assert snapshot.load(JOB, tags) == Snapshot(9, states(9))
    assert (snapshot.covers(tags), snapshot.counted(tags)) == (9, (9, 9))


def test_a_shorter_snapshot_empties_the_pieces_of_a_longer_one(monkeypatch: pytest.MonkeyPatch) -> None:
    long, anew = (
        dict.fromkeys(map(names.snapshot_piece, range(7)), "x"),
        {snapshot.ANEW: "y", f"{snapshot.ANEW}.0": "z"},
    )
    monkeypatch.setattr(snapshot, "MAX_TAG", 1000)
    written = snapshot.dump(Snapshot(9, states(9)), over=long | anew)
    now = long | anew | written
    assert snapshot.load(JOB, now) == Snapshot(9, states(9))
    assert {name for name, value in now.items() if not value} == set(long) - set(snapshot.dump(Snapshot(9, states(9))))
    assert not set(anew) & set(written)


def test_a_snapshot_of_fifty_arms_and_sixty_limits_is_packed_to_a_quarter() -> None:
    sizes = tuple(8 * b for b in range(1, 51))
    job, draw = replace(JOB, batch_sizes=sizes), random.Random(0)
    seen = []
    for number, size in enumerate(sizes, start=1):
        rows = (SettingMeasurement(400.0 - 3 * i, draw.uniform(1e3, 6e3), draw.uniform(1e3, 9e3)) for i in range(60))
        profile = PowerProfile(size, GPU, tuple(rows))
        parts = Parts(
            evaluation=tuple((400.0 - 3 * i, Part(2, draw.uniform(1, 1e4), draw.random())) for i in range(60))
        )
        seen.append(load_observation(dump_observation(observation(number, 1, size, profile=profile, parts=parts))))
    written = Snapshot(50, policy.fold(job, seen))
    tags = snapshot.dump(written)
    plain = len(plain_text(policy.to_json(written.state)))
    assert plain > 250_000
    assert sum(map(len, tags.values())) < plain / 4
    assert len(tags) < 25
    assert snapshot.load(job, tags) == written


@pytest.mark.parametrize(
    "changes", [{"eta": 0.9}, {"batch_sizes": (32, 64)}, {"policy": "zeus"}, {"fingerprint": "f1"}]
)
def test_a_snapshot_for_other_settings_is_not_used(changes: dict[str, object]) -> None:
    written = snapshot.dump(Snapshot(9, states(9)))
    assert snapshot.load(replace(JOB, **changes), written) is None  # type: ignore[arg-type]


def test_a_snapshot_does_not_grow_with_the_history() -> None:
    def size(upto: int) -> int:
        return sum(len(piece) for piece in snapshot.dump(Snapshot(upto, states(upto))).values())

    assert size(300) < 1.1 * size(30)


def test_this_process_is_there() -> None:
    me = lease.this_process()
    assert lease.is_gone(me) is False
    assert lease.read_holder(me.next().dump()) == me.next()
    assert me.next().beat == me.beat + 1


@pytest.mark.slow
def test_a_process_that_has_ended_is_gone_and_so_is_one_whose_number_came_round_again() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    me = lease.this_process()
    started = lease._started(child.pid) or 0
    child.wait()
    assert lease.is_gone(replace(me, pid=child.pid, started=started)) is True
    assert lease.is_gone(replace(me, pid=os.getpid(), started=me.started - 1)) is True


def test_a_rebooted_machine_has_lost_its_processes_but_a_namesake_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "_machine_id", lambda: "machine-1")
    me = lease.this_process()
    assert lease.is_gone(replace(me, boot="before")) is True
    assert lease.is_gone(replace(me, boot="before", machine="machine-2")) is None
    assert lease.is_gone(replace(me, boot="before", machine="")) is None


def test_of_another_machine_or_container_nothing_is_known() -> None:
    me = lease.this_process()
    assert lease.is_gone(replace(me, host="elsewhere")) is None
    assert lease.is_gone(replace(me, namespace="pid:[1]")) is None


def test_an_unconverged_run_is_in_the_snapshot_too() -> None:
    state = policy.fold(JOB, [observation(1), observation(2, batch_size=32, outcome=Outcome.EXHAUSTED)])
    assert snapshot.load(JOB, snapshot.dump(Snapshot(2, state))) == Snapshot(2, state)
