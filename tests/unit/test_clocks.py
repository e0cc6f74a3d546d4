"""The clocks of an asynchronous store, and its owner, without a network: no answer is older than it may be, and
somebody can always go on, for any order of joins, leaves, losses and speeds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from ringdp.kvstore.clocks import Clocks, Waits
from ringdp.kvstore.messages import Kind, Message
from ringdp.kvstore.owner import Owner, Push

_BODY = torch.zeros(1, dtype=torch.uint8, device="cpu")


def test_a_request_waits_for_the_slowest() -> None:
    clocks = Clocks({0: 0, 1: 0, 2: 0}, 1)
    clocks.reached(0, 3)
    clocks.reached(1, 1)
    assert clocks.waits(1) is None
    assert clocks.waits(2) == Waits((2,), 0)
    assert clocks.age(3) == 3
    clocks.left(2)
    assert clocks.waits(2) is None
    assert clocks.waits(3) == Waits((1,), 1)


def test_without_a_limit_nothing_waits() -> None:
    clocks = Clocks({0: 0, 1: 0}, None)
    clocks.reached(0, 100)
    assert clocks.waits(100) is None
    assert clocks.age(100) == 100


class _Values:
    """Served: counts the pushes that each pull could see."""

    def __init__(self) -> None:
        self.applied: list[list[int]] = []
        self.saved: list[tuple[str, int]] = []

    def apply(self, pushes: Sequence[Push]) -> None:
        self.applied.append([one.worker for one in pushes])

    def answer(self, asked: Message) -> Tensor:
        return torch.tensor([self.of(worker) for worker in range(4)], device="cpu").view(torch.uint8)

    def set(self, body: Tensor | None) -> None:
        pass

    def writer(self, folder: str, clock: int, pushes: Mapping[int, int]) -> Callable[[], None]:
        self.saved.append((folder, clock))
        return lambda: None

    def of(self, worker: int) -> int:
        return sum(workers.count(worker) for workers in self.applied)


class _Network:
    """Takes the owner's answers."""

    def __init__(self) -> None:
        self.answers: dict[int, list[Message]] = {}
        self.free: set[int] = set()

    def answer(self, worker: int, message: Message) -> None:
        self.answers.setdefault(worker, []).append(message)

    def expect(self, worker: int) -> None:
        self.free.add(worker)


class Workers(RuleBasedStateMachine):
    """Up to four workers of one owner, which push, pull, tick, leave and die in any order."""

    @initialize(count=st.integers(1, 4), staleness=st.sampled_from([0, 1, 2, 4, None]))
    def begin(self, count: int, staleness: int | None) -> None:
        self.staleness = staleness
        self.values, self.network = _Values(), _Network()
        self.owner = Owner(
            self.values, Clocks(dict.fromkeys(range(count), 0), staleness), self.network, rank=0, timeout_s=60
        )
        self.network.free.update(range(count))
        self.clock = dict.fromkeys(range(count), 0)  # of the workers that are there
        self.pushed: dict[int, list[int]] = {worker: [] for worker in range(count)}  # clocks that have ended, of pushes
        self.pushed_now: set[int] = set()
        self.waiting: dict[int, Message] = {}
        self.sequence = 0

    def may_ask(self, worker: int) -> bool:
        return worker in self.clock and worker in self.network.free

    def ask(self, worker: int, kind: Kind) -> None:
        self.network.free.discard(worker)
        self.sequence += 1
        message = Message(kind, self.sequence, self.clock[worker], payload=_BODY)
        self.waiting[worker] = message
        self.owner.take(worker, message)

    @rule(worker=st.integers(0, 3))
    def push(self, worker: int) -> None:
        if self.may_ask(worker) and worker not in self.pushed_now:
            self.ask(worker, Kind.PUSH)
            self.pushed_now.add(worker)

    @rule(worker=st.integers(0, 3))
    def pull(self, worker: int) -> None:
        if self.may_ask(worker) and (self.staleness != 0 or worker not in self.pushed_now):
            self.ask(worker, Kind.PULL)

    @rule(worker=st.integers(0, 3))
    def tick(self, worker: int) -> None:
        if not self.may_ask(worker):
            return
        self.clock[worker] += 1
        if worker in self.pushed_now:
            self.pushed[worker].append(self.clock[worker] - 1)
            self.pushed_now.discard(worker)
        self.ask(worker, Kind.TICK)

    @rule(worker=st.integers(0, 3), rarely=st.integers(0, 7))
    def leave(self, worker: int, rarely: int) -> None:
        if not rarely and self.may_ask(worker):
            self.ask(worker, Kind.LEAVE)
            del self.clock[worker]

    @rule(worker=st.integers(0, 3), rarely=st.integers(0, 7))
    def die(self, worker: int, rarely: int) -> None:
        if rarely or worker not in self.clock:
            return
        del self.clock[worker]
        self.network.free.discard(worker)
        self.waiting.pop(worker, None)
        self.owner.lost(worker)

    @invariant()
    def no_answer_is_older_than_it_may_be(self) -> None:
        if not hasattr(self, "owner"):
            return
        for worker in list(self.waiting):
            if worker in self.network.free:
                message = self.waiting.pop(worker)
                if message.kind is not Kind.PULL:
                    continue
                answer = self.network.answers[worker][-1]
                assert answer.kind is Kind.ANSWER
                assert answer.sequence == message.sequence
                assert answer.payload is not None
                seen = answer.payload.view(torch.int64).tolist()
                assert self.staleness is None or answer.age <= self.staleness
                for other in self.clock:
                    sure = message.clock if other == worker else message.clock - (self.staleness or 0)
                    if self.staleness is not None or other == worker:
                        assert seen[other] >= sum(clock < sure for clock in self.pushed[other])

    @invariant()
    def somebody_can_go_on(self) -> None:
        if hasattr(self, "owner") and self.clock:
            assert self.network.free & self.clock.keys(), "all workers wait"

    @invariant()
    def the_memory_is_bounded(self) -> None:
        if hasattr(self, "owner"):
            kept = [push.worker for pushes in self.owner._kept.values() for push in pushes]
            assert all(kept.count(worker) <= 1 + (worker not in self.clock) for worker in kept)

    @precondition(lambda self: hasattr(self, "clock"))
    @invariant()
    def what_is_over_counts(self) -> None:
        if self.staleness == 0:
            least = min(self.clock.values(), default=None)
            for worker in self.clock:
                if least is not None and self.clock[worker] == least:
                    assert self.values.of(worker) == len(self.pushed[worker])


TestWorkers = Workers.TestCase
TestWorkers.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)


def _owner(staleness: int | None, workers: int = 2) -> tuple[Owner, _Values, _Network]:
    values, network = _Values(), _Network()
    return (
        Owner(values, Clocks(dict.fromkeys(range(workers), 0), staleness), network, rank=0, timeout_s=60),
        values,
        network,
    )


def test_pushes_of_a_clock_are_applied_in_the_order_of_the_workers() -> None:
    owner, values, _ = _owner(0)
    for worker in (1, 0):
        owner.take(worker, Message(Kind.PUSH, 1, 0, payload=_BODY))
        assert not values.applied
        owner.take(worker, Message(Kind.TICK, 2, 1))
    assert values.applied == [[0, 1]]


def test_a_worker_that_dies_in_a_clock_leaves_nothing_in_it() -> None:
    owner, values, _ = _owner(0)
    owner.take(1, Message(Kind.PUSH, 1, 0, payload=_BODY))
    owner.take(0, Message(Kind.PUSH, 1, 0, payload=_BODY))
    owner.take(0, Message(Kind.TICK, 2, 1))
    owner.lost(1)
    assert values.applied == [[0]]
    assert owner.lost_pushes == 1


def test_a_save_waits_for_all_workers_and_holds_what_follows() -> None:
    owner, values, network = _owner(None)
    folder = torch.tensor(list(b"there"), dtype=torch.uint8, device="cpu")
    owner.take(0, Message(Kind.SAVE, 1, 5, payload=folder))
    assert not values.saved
    owner.take(1, Message(Kind.PUSH, 1, 4, payload=_BODY))
    owner.take(1, Message(Kind.SAVE, 2, 5, payload=folder))
    assert values.saved == [("there", 5)]
    assert network.free == {0, 1}


def test_an_update_that_raises_reaches_all_workers_by_name() -> None:
    owner, values, network = _owner(None)

    def fail(pushes: Any) -> None:
        raise ValueError("no such number")

    values.apply = fail  # type: ignore[method-assign]
    owner.take(1, Message(Kind.PUSH, 1, 0, payload=_BODY))
    for worker in (0, 1):
        owner.take(worker, Message(Kind.PULL, 2, 0, payload=_BODY))
        answer = network.answers[worker][-1]
        assert answer.kind is Kind.ERROR
        assert answer.payload is not None
        text = bytes(answer.payload.tolist()).decode()
        for words in ("the owner on rank 0", "push of rank 1", "no such number"):
            assert words in text
        network.free.discard(worker)


def test_who_is_waited_for_too_long_is_named(caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> None:
    owner, _, network = _owner(1)
    now = [0.0]
    monkeypatch.setattr("ringdp.kvstore.owner.time.monotonic", lambda: now[0])
    for clock in (1, 2):
        owner.take(0, Message(Kind.TICK, clock, clock))
        network.free.clear()
    owner.take(0, Message(Kind.PULL, 3, 2, payload=_BODY))
    assert not network.answers
    now[0] = 11.0
    owner.look()
    assert "rank 0 has waited 11 s in its pull at clock 2 for rank 1, at clock 0" in caplog.text
    now[0] = 61.0
    owner.look()
    answer = network.answers[0][-1]
    assert answer.kind is Kind.ERROR
    assert answer.payload is not None
    assert bytes(answer.payload.tolist()).decode().startswith("RingTimeoutError\nrank 0 has waited 61 s")
