# torch.distributed is annotated for one process group of its own; the calls here go past what its stubs know.
# mypy: disable-error-code="arg-type, attr-defined, union-attr, call-arg"
"""c10d's reconfigure on ring (torch 2.14 and newer): the process group outlives a change of its members.

What c10d asks of any backend is asked here of gloo, too. Meetings by themselves: test_reconfiguration_core.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import need
from tests.train.harness import ring_is_built, run_outcomes, run_ranks

torch: Any = need("torch")
import torch.distributed as dist  # noqa: E402

pytestmark = [
    pytest.mark.skipif(not ring_is_built(), reason="ringdp is not built (make build)"),
    pytest.mark.skipif(not hasattr(dist, "_reconfigure"), reason="torch has reconfigure since 2.14"),
]


def has_completion_hooks() -> bool:
    return hasattr(torch._C._distributed_c10d.Backend, "supports_completion_hooks")


class Member:
    """One rank of a test: a process group without members yet, and a store by which the test hands handles around."""

    def __init__(self, path: str, world: int, backend: str) -> None:
        self.rank, self.world, self.backend = int(os.environ["RANK"]), world, backend
        self.store = dist.FileStore(path, world)
        dist.init_process_group(
            backend,
            rank=self.rank,
            world_size=world,
            store=dist.PrefixStore("group", self.store),
            timeout=timedelta(seconds=30),
            enable_reconfigure=True,
        )
        self.group = dist.distributed_c10d._get_default_group()
        self.ring = self.group._get_backend(torch.device("cpu"))
        self.calls = 0

    def handles(self, who: Any = None) -> list[str]:
        """Of the members `who` (all), which call this together."""
        self.calls += 1
        self.store.set(f"handle {self.calls} {self.rank}", dist._get_reconfigure_handle())
        return [self.store.get(f"handle {self.calls} {i}").decode() for i in who or range(self.world)]

    def reconfigure(self, uuid: int, handles: Any, seconds: float = 30) -> float:
        begin = time.perf_counter()
        dist._reconfigure(uuid, handles, timeout=timedelta(seconds=seconds)).wait()
        return time.perf_counter() - begin

    def together(self, name: str) -> None:
        self.store.set(f"{name} {self.rank}", "")
        for i in range(self.world):
            self.store.get(f"{name} {i}")

    def add_up(self) -> None:
        size = dist.get_world_size()
        total = torch.full((1000,), dist.get_rank() + 1.0)
        dist.all_reduce(total)
        assert (total == size * (size + 1) / 2).all()


@contextlib.contextmanager
def member(path: str, world: int, backend: str = "ring") -> Iterator[Member]:
    import ringdp  # noqa: F401  (registers ring)

    made = Member(path, world, backend)
    yield made
    made.together("the end")
    dist.destroy_process_group()


def changes(path: str, world: int, backend: str) -> None:
    with member(path, world, backend) as me:
        assert dist._supports_reconfigure()
        rank, last, middle = me.rank, world - 1, world // 2
        me.reconfigure(10 + rank, [dist._get_reconfigure_handle()])  # each by itself
        assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
        me.add_up()
        me.reconfigure(20, me.handles())  # all
        assert (dist.get_rank(), dist.get_world_size()) == (rank, world)
        me.add_up()
        for uuid, left_out in ((30, last), (40, middle)):
            handles = me.handles()
            if rank != left_out:
                me.reconfigure(uuid, handles[:left_out] + handles[left_out + 1 :])
                assert (dist.get_rank(), dist.get_world_size()) == (rank - (rank > left_out), world - 1)
                me.add_up()
            me.together(f"{uuid}")
            me.reconfigure(uuid + 1, me.handles())  # it comes back
            assert dist.get_rank() == rank
            me.add_up()
        handles = me.handles()
        me.reconfigure(50 + (rank < middle), handles[:middle] if rank < middle else handles[middle:])  # halves
        me.add_up()
        me.together("halves")
        me.reconfigure(60, set(me.handles()))
        me.add_up()
        everywhere = [torch.zeros(1) for _ in range(world)]
        dist.all_gather(everywhere, torch.tensor([float(dist.get_rank())]))
        assert [int(it) for it in everywhere] == list(range(world))
        with pytest.raises(RuntimeError, match="already used"):
            me.reconfigure(60, me.handles())
        me.add_up()


@pytest.mark.parametrize("world", (2, 3, pytest.param(4, marks=pytest.mark.slow)))
@pytest.mark.parametrize("backend", ("ring", pytest.param("gloo", marks=pytest.mark.slow)))
def test_members_come_and_go(tmp_path: Path, world: int, backend: str) -> None:
    run_ranks(changes, str(tmp_path / "store"), world, backend, world_size=world, backend=None)


def fails_and_recovers(path: str) -> None:
    from torch._C._distributed_c10d import ErrorType

    from ringdp.errors import InvalidStateError, RingTimeoutError

    with member(path, 3) as me:
        with pytest.raises(InvalidStateError, match=r"no members yet.*call reconfigure first"):
            dist.all_reduce(torch.ones(1))
        me.reconfigure(1, me.handles())
        assert me.ring.get_error() == ErrorType.SUCCESS
        me.ring.abort()  # on all
        assert me.ring.get_error() == ErrorType.SUCCESS  # as it was asked to
        with pytest.raises(RuntimeError, match="aborted on rank"):
            dist.all_reduce(torch.ones(1))
        me.together("aborted")
        me.reconfigure(2, me.handles())
        me.add_up()

        hooked = threading.Event()
        me.ring.register_abort_hook(7, hooked.set)
        me.ring.set_timeout(timedelta(milliseconds=300))
        if me.rank == 1:  # the others do not call it
            with pytest.raises(RingTimeoutError, match="rank 1"):
                dist.all_reduce(torch.ones(1))
            assert me.ring.get_error() == ErrorType.TIMEOUT
        assert hooked.wait(10)
        assert me.ring.get_error() != ErrorType.SUCCESS
        me.ring.set_timeout(timedelta(seconds=30))
        me.ring.unregister_abort_hook(7)
        with pytest.raises(ValueError, match="no abort hook with the number 7"):
            me.ring.unregister_abort_hook(7)
        me.together("timed out")
        me.reconfigure(3, me.handles())
        assert me.ring.get_error() == ErrorType.SUCCESS
        me.add_up()


def test_a_failed_group_gets_members_again(tmp_path: Path) -> None:
    run_ranks(fails_and_recovers, str(tmp_path / "store"), world_size=3, backend=None)


def ends_what_is_in_flight(path: str) -> None:
    from ringdp.errors import RingError

    with member(path, 2) as me:
        handles = me.handles()
        me.reconfigure(1, handles)
        waiting = dist.irecv(torch.ones(1), 1 - me.rank, tag=9)  # nobody sends it
        me.together("waiting")
        me.reconfigure(2, handles)
        with pytest.raises(RingError, match="was reconfigured"):
            waiting.wait()
        me.add_up()


def test_what_is_in_flight_ends_and_says_why(tmp_path: Path) -> None:
    run_ranks(ends_what_is_in_flight, str(tmp_path / "store"), world_size=2, backend=None)


def failed_attempts(path: str) -> None:
    from ringdp.errors import InvalidStateError, RingError

    with member(path, 3) as me:
        me.reconfigure(1, me.handles())
        handles = me.handles()
        if me.rank < 2:  # the third one does not come
            work = dist._reconfigure(2, handles, timeout=timedelta(seconds=1))
            with pytest.raises(InvalidStateError, match="under way"):
                dist.all_reduce(torch.ones(1))
            with pytest.raises(InvalidStateError, match="another attempt"):
                dist._reconfigure(3, handles)
            with pytest.raises(RingError, match=r"uuid 2\) failed"):
                work.wait()
        me.together("failed")
        assert dist.get_world_size() == 3
        me.add_up()  # as it was
        me.reconfigure(4, me.handles())
        me.add_up()
        with pytest.raises(ValueError, match="no hint 'speed'"):
            dist._reconfigure(5, handles, hints={"speed": "high"})
        with pytest.raises(ValueError, match="own handle is not among"):
            dist._reconfigure(6, [handles[(me.rank + 1) % 3]]).wait()
        me.add_up()


def test_a_failed_attempt_leaves_all_as_they_were(tmp_path: Path) -> None:
    run_ranks(failed_attempts, str(tmp_path / "store"), world_size=3, backend=None)


def one_is_killed(path: str) -> float:
    from ringdp.errors import PeerLostError

    me = Member(path, 3, "ring")
    handles = me.handles()
    me.reconfigure(1, handles)
    if me.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)

    def go_on() -> None:
        while True:
            dist.all_reduce(torch.ones(100_000))

    with pytest.raises(PeerLostError, match="rank 1"):
        go_on()
    took = me.reconfigure(2, [handles[0], handles[2]])
    me.add_up()
    with pytest.raises(RuntimeError):  # it cannot come back under its old handle
        me.reconfigure(3, handles, seconds=10)
    me.add_up()
    return took


def test_survivors_go_on_without_a_killed_rank(tmp_path: Path) -> None:
    import ringdp  # noqa: F401

    begin = time.monotonic()
    outcomes = run_outcomes(one_is_killed, str(tmp_path / "store"), world_size=3, backend=None)
    assert outcomes[1].text is not None
    for rank in (0, 2):
        assert outcomes[rank].text is None, outcomes[rank].text
    assert time.monotonic() - begin < 45


def completion(path: str) -> None:
    """torch's flight recorder, which hears of completions by these hooks, knows what has ended."""
    from torch._C._distributed_c10d import _dump_fr_trace_json, _reset_fr_trace

    with member(path, 2) as me:
        me.reconfigure(1, me.handles())
        assert me.ring.supports_completion_hooks
        _reset_fr_trace(backend="ring")  # what this process had in other tests
        for _ in range(3):
            dist.all_reduce(torch.ones(3))
        for work in [dist.all_reduce(torch.ones(3), async_op=True) for _ in range(2)]:
            work.wait()
        lost = dist.irecv(torch.ones(1), 1 - me.rank, tag=9)  # nobody sends it
        deadline = time.monotonic() + 10
        states: list[str] = []
        while states.count("completed") < 5 and time.monotonic() < deadline:
            states = [entry["state"] for entry in json.loads(_dump_fr_trace_json(backend="ring"))["entries"]]
            time.sleep(0.01)
        assert states.count("completed") == 5, states
        assert len(states) == 6
        del lost


@pytest.mark.skipif(not has_completion_hooks(), reason="torch has completion hooks since 2.15")
def test_completion_hooks_hear_of_each_success(tmp_path: Path) -> None:
    run_ranks(completion, str(tmp_path / "store"), world_size=2, backend=None)


def trains(path: str) -> None:
    """RingDP on a group that loses a member and gets it back averages over those that are there."""
    from ringdp import RingDP

    with member(path, 3) as me:
        me.reconfigure(1, me.handles())
        model = RingDP(torch.nn.Linear(4, 1, bias=False))

        def gradient() -> float:
            model.zero_grad()
            model(torch.full((1, 4), float(dist.get_rank() + 1))).sum().backward()
            return float(model.module.weight.grad[0, 0])

        assert gradient() == 2.0  # (1 + 2 + 3) / 3
        handles = me.handles()
        if me.rank < 2:
            me.reconfigure(2, handles[:2])
            assert gradient() == 1.5
        me.together("two")
        me.reconfigure(3, me.handles())
        assert gradient() == 2.0


def test_ringdp_follows_its_group(tmp_path: Path) -> None:
    run_ranks(trains, str(tmp_path / "store"), world_size=3, backend=None)


def trains_compressed(path: str) -> None:
    from ringdp import RingDP
    from ringdp.errors import InvalidStateError

    with member(path, 3) as me:
        handles = me.handles()
        me.reconfigure(1, handles)
        model = RingDP(torch.nn.Linear(64, 64), compression="int8")
        model(torch.ones(1, 64)).sum().backward()
        me.together("one step")
        me.reconfigure(2, list(reversed(handles)))  # as many
        model(torch.ones(1, 64)).sum().backward()
        me.together("another step")
        if me.rank < 2:
            me.reconfigure(3, handles[:2])
            with pytest.raises(InvalidStateError, match="from 3 to 2 ranks"):
                model(torch.ones(1, 64))


def test_compression_does_not_follow_to_another_number_of_ranks(tmp_path: Path) -> None:
    run_ranks(trains_compressed, str(tmp_path / "store"), world_size=3, backend=None)


def later_groups(path: str) -> None:
    with member(path, 3) as me:
        me.reconfigure(1, me.handles())
        pair = dist.new_group([0, 2])
        if me.rank != 1:
            total = torch.tensor([float(me.rank)])
            dist.all_reduce(total, group=pair)
            assert total.item() == 2
        me.add_up()


def test_groups_made_from_it(tmp_path: Path) -> None:
    run_ranks(later_groups, str(tmp_path / "store"), world_size=3, backend=None)
