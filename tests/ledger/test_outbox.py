"""The outbox: durable, shared by processes, each item delivered by one of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Barrier

import pytest

from tests.processes import fork_server
from zeus_flows.errors import StoreError
from zeus_flows.ledger.lease import Holder, this_process
from zeus_flows.ledger.outbox import Outbox


@pytest.fixture
def outbox(tmp_path: Path) -> Iterator[Outbox]:
    outbox = Outbox(tmp_path)
    yield outbox
    outbox.close()


def put(outbox: Outbox, owner: Holder, payload: str, ledger: str = "job", attempt: str = "run") -> int:
    return outbox.put(ledger, attempt, "epoch", payload, owner=owner.dump(), wall_s=1.0)


def dead() -> Holder:
    return replace(this_process(), started=1)


def test_items_come_in_the_order_they_were_put_and_only_to_their_owner(outbox: Outbox) -> None:
    me, other = this_process(), this_process()
    put(outbox, me, "a")
    put(outbox, other, "theirs")
    put(outbox, me.next(), "b")
    put(outbox, me, "elsewhere", ledger="another job")
    assert [i.payload for i in outbox.due("job", owner=me.dump())] == ["a", "b"]
    assert [i.payload for i in outbox.due("job", owner=other.dump())] == ["theirs"]


def test_an_item_is_there_until_it_is_removed_and_after_a_restart(outbox: Outbox, tmp_path: Path) -> None:
    me = this_process()
    item = put(outbox, me, "a", attempt="token")
    again = Outbox(tmp_path)
    assert again.waiting("job", item)
    assert again.unsettled("job") == {"token"}
    again.remove(item, token="token", run_id="r" * 32)  # noqa: S106
    assert not outbox.waiting("job", item)
    assert outbox.run_of("token") == "r" * 32
    assert outbox.unsettled("job") == frozenset()
    again.close()


def test_what_a_dead_owner_left_is_taken_over_once(outbox: Outbox) -> None:
    put(outbox, dead(), "left")
    first, second = this_process(), this_process()
    assert [i.payload for i in outbox.due("job", owner=first.dump())] == ["left"]
    assert outbox.due("job", owner=second.dump()) == []
    assert [i.payload for i in outbox.due("job", owner=first.next().dump())] == ["left"]


def test_what_was_released_is_taken_over_although_its_process_goes_on(outbox: Outbox) -> None:
    first, second = this_process(), this_process()
    put(outbox, first, "a")
    put(outbox, second, "b")
    outbox.release("job", token=first.token)
    assert [i.payload for i in outbox.due("job", owner=second.dump())] == ["a", "b"]


def _take_over(folder: Path, results: Path, all_done: Barrier) -> None:
    me = this_process()
    taken = Outbox(folder).due("job", owner=me.dump())
    (results / me.token).write_text("\n".join(item.payload for item in taken))
    all_done.wait(300)  # one that ends leaves its items to the others


@pytest.mark.slow
def test_of_several_processes_one_takes_each_item(outbox: Outbox, tmp_path: Path) -> None:
    expected = [str(n) for n in range(20)]
    owner = dead()
    for n in expected:
        put(outbox, owner, n)
    results = tmp_path / "results"
    results.mkdir()
    processes = fork_server()
    all_done = processes.Barrier(4)
    crew = [processes.Process(target=_take_over, args=(tmp_path, results, all_done)) for _ in range(4)]
    for process in crew:
        process.start()
    for process in crew:
        process.join(300)
    taken = [path.read_text().split() for path in results.iterdir()]
    assert len(taken) == 4
    assert sorted((n for items in taken for n in items), key=int) == expected


def test_guesses_go_up_and_never_back(outbox: Outbox) -> None:
    outbox.saw_recurrence("job", 7)
    assert [outbox.guess_recurrence("job"), outbox.guess_recurrence("job")] == [8, 9]
    outbox.saw_recurrence("job", 8)
    assert outbox.guess_recurrence("job") == 10
    assert outbox.guess_recurrence("another job") == 1


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="ZEUS_FLOWS_STATE_DIR"):
        Outbox(tmp_path / "file")


def test_a_lease_that_changes_is_heard_and_one_that_stays_gets_old(outbox: Outbox) -> None:
    seen = [outbox.unchanged_for_s("a", lease, boot="b", now_s=now) for lease, now in (("1", 0.0), ("1", 299.0))]
    assert seen == [0.0, 299.0]
    assert outbox.unchanged_for_s("a", "2", boot="b", now_s=400.0) == 0.0
    assert outbox.unchanged_for_s("a", "2", boot="rebooted", now_s=10.0) == 0.0
