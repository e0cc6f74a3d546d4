"""What ranks do in tests/train/test_async_store.py."""

from __future__ import annotations

import os
import pickle
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ringdp
from ringdp import kvstore
from ringdp.errors import InvalidStateError
from ringdp.kvstore.async_store import AsyncStore
from tests.train.kvstore_cases import SHAPES, values


def store(**options: Any) -> AsyncStore:
    made = kvstore.create("dist_async", **options)
    assert isinstance(made, AsyncStore)
    return made


def trained(name: str, kind: Any, numbers: dict[str, Any], steps: int, **options: Any) -> dict[str, Tensor]:
    """Values after some steps in which every rank pushes all keys, one by one, and pulls them together."""
    kv = kvstore.create(name, **options)
    kv.set_optimizer(kind, **numbers)
    have = values(1)
    names = list(have)
    kv.init(names, list(have.values()))
    for step in range(steps):
        for key, gradient in values(10 * step + dist.get_rank()).items():
            kv.push(key, gradient)
        if isinstance(kv, AsyncStore):
            kv.step()
        kv.pull(names, list(have.values()))
    if isinstance(kv, AsyncStore):
        kv.close()
    return have


def equal_to_sync(kind: Any, numbers: dict[str, Any], reduce: str) -> None:
    waiting = trained("dist_sync", kind, numbers, 4, reduce=reduce)
    found = trained("dist_async", kind, numbers, 4, reduce=reduce, staleness=0)
    for name, value in waiting.items():
        assert torch.equal(found[name], value), name


def trainers_are_equal() -> None:
    """Gluon's Trainer over both stores."""
    results = []
    for kv in (kvstore.create("dist_sync"), store(staleness=0)):
        torch.manual_seed(3)
        net = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 1))
        trainer = kvstore.Trainer(net, "sgd", {"learning_rate": 0.1, "momentum": 0.9}, kvstore=kv)
        for step in range(4):
            net.zero_grad()
            torch.manual_seed(100 * step + kv.rank)
            net(torch.randn(8, 20)).square().sum().backward()
            trainer.step(8 * kv.num_workers)
        results.append([it.detach().clone() for it in net.parameters()])
        if isinstance(kv, AsyncStore):
            kv.close()
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def added(key: str, given: Tensor, value: Tensor) -> None:
    value.add_(given)


def own_writes() -> None:
    """Each rank adds to a key of its own, and to one of all: it sees all that it has pushed, and wholes of others."""
    kv = store()
    kv.set_updater(added)
    mine, shared = torch.zeros(40, 77), torch.zeros(5000)
    for rank in range(kv.num_workers):
        kv.init(f"of {rank}", mine)
    kv.init("shared", shared)
    for count in range(1, 30):
        kv.push([f"of {kv.rank}", "shared"], [torch.ones(40, 77), torch.ones(5000)])
        kv.pull([f"of {kv.rank}", "shared"], [mine, shared])
        assert torch.equal(mine, torch.full((40, 77), float(count)))
        part = kv._table.keys["shared"].cut.part
        for of_owner in shared[: part * kv.num_workers].split(part):
            assert int(of_owner.min()) == int(of_owner.max()) >= count
    kv.barrier()
    kv.pull("shared", shared)
    assert torch.equal(shared, torch.full((5000,), 29.0 * kv.num_workers))
    kv.close()


def paced(staleness: int | None, steps: int, slow_s: float) -> tuple[float, dict[int, int], float]:
    """Rank 1 sleeps in each step: the seconds that this rank took for its own, its ages, and its wait for slow ones."""
    kv = store(staleness=staleness)
    kv.set_optimizer("sgd", learning_rate=0.1)
    value = torch.zeros(1000)
    kv.init("w", value)
    kv.barrier()
    began = time.monotonic()
    for _ in range(steps):
        if kv.rank == 1:
            time.sleep(slow_s)
        kv.push("w", torch.ones(1000))
        kv.step()
        kv.pull("w", value)
        if kv.rank == 0 and staleness != 0 and kv._service.clock == steps:
            assert "rank 1 is behind, at clock" in kv.report()
    took_s = time.monotonic() - began
    stats = kv.stats()
    kv.close()
    return took_s, dict(stats.staleness), stats.held_s


def back_pressure(count: int) -> tuple[int, float]:
    """Rank 1's owner stands still; rank 0 pushes what does not fit on the way. How many pushes it had got rid of before
    the owner went on, and for how long it says that it waited for rank 1."""
    kv = store()
    kv.set_updater(lambda key, given, value: None)
    kv.init("w", torch.zeros(2, 1 << 20))
    kv.barrier()
    done, stopped_s = 0, 2.0
    owner = kv._service.owner
    assert owner is not None
    if kv.rank == 1:
        with owner.lock:
            time.sleep(stopped_s)
    else:
        began = time.monotonic()
        gradient = torch.ones(2, 1 << 20)
        for _ in range(count):
            kv.push("w", gradient)
            done += time.monotonic() - began < 0.7 * stopped_s
    kv.flush()
    waited_s, said = dict(kv.stats().waited_s), kv.report()
    assert kv.rank == 1 or "the owner on rank 1, or the way to it, is slow" in said, said
    kv.close()
    return done, waited_s[1]


def not_a_number(what: float) -> None:
    kv = store()
    kv.set_optimizer("sgd", learning_rate=0.1)
    kv.init(["a", "w"], [torch.zeros(3), torch.zeros(200, 30)])
    kv.barrier()
    gradient = torch.ones(200, 30)
    gradient[17, 3] = what
    try:
        kv.push(["a", "w"], [torch.ones(3), gradient])
    finally:
        kv.barrier()
        value = torch.ones(200, 30)
        kv.pull("w", value)
        assert not value.any()
        kv.close()


def disagree(how: str) -> None:
    odd = dist.get_rank() == 1
    kv = store(staleness=3 if how == "staleness" and odd else 2, reduce="mean" if how == "reduce" and odd else "sum")
    kv.set_optimizer(
        "adam" if how == "optimizer" and odd else "sgd", learning_rate=0.2 if how == "rate" and odd else 0.1
    )
    kv.init("w", torch.zeros(30, 41 if how == "shape" and odd else 40))
    if how == "type":
        kv.init("v", torch.zeros(3, dtype=torch.float64 if odd else torch.float32))
    if how == "missing" and not odd:
        kv.init("v", torch.zeros(3))
    try:
        kv.push("w", torch.ones(30, 40))
    finally:
        kv._service.close(wait=False)


def wrong_calls() -> None:
    """Errors of one rank that the others do not notice."""
    kv = store(staleness=0)
    kv.set_optimizer("sgd", learning_rate=0.1)
    value = torch.zeros(3)
    kv.init("w", value)
    kv.barrier()
    for _ in range(2):
        kv.push("w", torch.ones(3))
        for call in (lambda: kv.push("w", torch.ones(3)), lambda: kv.pull("w", value)):
            _raises(call, "call step() first")
        kv.step()
        kv.pull("w", value)
    _raises(lambda: kv.serve(), "is a worker")
    child = os.fork()
    if child == 0:
        try:
            kv.pull("w", value)
        except InvalidStateError as error:
            os._exit(0 if "forked" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    kv.close()
    kv.close()
    _raises(lambda: kv.pull("w", value), "closed")
    kv = store()
    kv.init("w", value)
    _raises(lambda: kv.push("w", torch.ones(3)), "needs an optimizer")
    kv.close()


def _raises(call: Any, words: str) -> None:
    with pytest.raises(InvalidStateError, match=re.escape(words)):
        call()


def with_servers(servers: int) -> Any:
    kv = store(staleness=0, servers=servers)
    kv.set_optimizer("sgd", learning_rate=1.0)
    have = values(1)
    names = list(have)
    kv.init(names, list(have.values()))
    if kv.is_server:
        kv.serve()
        return kv.stats().pushes
    for step in range(3):
        kv.push(names, list(values(10 * step + kv.rank).values()))
        kv.step()
        kv.pull(names, list(have.values()))
    kv.close()
    return have


def saves(folder: str) -> dict[str, Tensor]:
    """Saves in the middle of training, at clock 3, and trains on; the values of clock 3."""
    kv = store(staleness=2)
    kv.set_optimizer("adam", learning_rate=0.1)
    have = values(1)
    names = list(have)
    kv.init(names, list(have.values()))
    at_save: dict[str, Tensor] = {}
    for step in range(6):
        if step == 3:
            kv.barrier()
            kv.pull(names, list(have.values()))
            at_save = {name: it.clone() for name, it in have.items()}
            kv.barrier()
            kv.save(folder)
        kv.push(names, list(values(10 * step + kv.rank).values()))
        kv.step()
        if kv.rank == 0:
            time.sleep(0.01)
    kv.close()
    return at_save


def loads(folder: str, expected: dict[str, Tensor]) -> tuple[int, dict[str, Tensor]]:
    """Values and state of the files: a step from them equals that of any number of ranks."""
    kv = store(staleness=0)
    kv.set_optimizer("adam", learning_rate=0.5)
    have = values(2)
    names = list(have)
    kv.init(names, list(have.values()))
    clock = kv.load(folder)
    kv.pull(names, list(have.values()))
    for name in names:
        assert torch.equal(have[name], expected[name]), name
    kv.push(names, [it / kv.num_workers for it in values(77).values()])
    kv.step()
    kv.pull(names, list(have.values()))
    assert kv.learning_rate == 0.1
    kv.close()
    return clock, have


def states(path: str) -> None:
    """state_dict, as of dist_sync."""
    kv = store(staleness=1)
    kv.set_optimizer("sgd", learning_rate=0.1, momentum=0.9)
    have = values(1)
    names = list(have)
    kv.init(names, list(have.values()))
    kv.push(names, list(values(5).values()))
    kv.step()
    state = kv.state_dict()
    if kv.rank == 0:
        Path(path).write_bytes(pickle.dumps(state))
    kv.push(names, list(values(6).values()))
    kv.load_state_dict(state)
    kv.pull(names, list(have.values()))
    for name in SHAPES:
        assert torch.equal(have[name], state["values"][name])
    kv.set_learning_rate(0.0)
    kv.push(names, list(values(6).values()))
    kv.flush()
    assert kv.learning_rate == 0.0
    kv.close()


def late_updates() -> list[float]:
    """Rank 0 pushes three times; then rank 1, which pulled before: its update is divided by 1 + 3."""
    kv = store(compensation=True)
    kv.set_optimizer("sgd", learning_rate=1.0)
    value = torch.zeros(2)
    kv.init("w", value)
    kv.pull("w", value)
    kv.barrier()
    if kv.rank == 0:
        for _ in range(3):
            kv.push("w", torch.full((2,), -4.0))
    kv.barrier()
    if kv.rank == 1:
        kv.push("w", torch.full((2,), -4.0))
    kv.barrier()
    kv.pull("w", value)
    kv.close()
    return value.tolist()


def alone(kind: Any, numbers: dict[str, Any], staleness: int | None) -> tuple[list[Tensor], list[Tensor]]:
    """One worker: the store's values, and those of plain training."""

    def train(push: Any) -> list[Tensor]:
        torch.manual_seed(4)
        net = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 3))
        step = push(net)
        for number in range(5):
            net.zero_grad()
            torch.manual_seed(number)
            net(torch.randn(6, 20)).square().mean().backward()
            step()
        return [it.detach() for it in net.parameters()]

    def through_store(net: nn.Module) -> Any:
        kv = store(staleness=staleness)
        trainer = kvstore.Trainer(net, kind, numbers, kvstore=kv)
        return lambda: trainer.step(1)

    return train(through_store), train(lambda net: kind(net.parameters(), **numbers).step)


def tables_are_equal(optimizer: str, wire: str) -> None:
    """An asynchronous table at staleness 0, and one that is not, to the bit."""
    rank, found = dist.get_rank(), []
    for asynchronous in (False, True):
        options: dict[str, Any] = {"asynchronous": True, "staleness": 0} if asynchronous else {}
        table = ringdp.nn.ShardedEmbedding(50, 8, optimizer=optimizer, lr=0.1, wire=wire, **options)
        for step in range(5):
            draw = torch.Generator().manual_seed(10 * step + rank)
            ids = torch.randint(0, 50, (12 + 3 * rank,), generator=draw)
            vectors = table(ids, torch.tensor([0, 4, 4, 9]))
            vectors.backward(torch.randn(vectors.shape, generator=draw))
            table.step()
        found.append(table.rows(torch.arange(50)))
        if asynchronous:
            table.close()
    assert torch.equal(*found)
    assert bool(found[0].isfinite().all())
