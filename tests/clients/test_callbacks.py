# mypy: disable-error-code="arg-type, attr-defined, union-attr, operator, assignment"
"""Collectives inside futures' callbacks, on threads that ranks do not agree on; what futures and Works hold."""

from __future__ import annotations

import queue
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.clients.both import on_both
from tests.helpers import need
from tests.train.harness import on_ranks

torch: Any = need("torch")
import torch.distributed as dist  # noqa: E402
from torch._C._distributed_c10d import AllgatherOptions  # noqa: E402


@on_ranks(3, timeout_s=30)
def test_callbacks_on_a_future_that_is_complete_on_one_rank(tmp_path: Path) -> None:
    """Rank 0 attaches to a complete future, whose callbacks torch runs at once; the others long before the end."""
    rank, world = dist.get_rank(), dist.get_world_size()
    store = dist.FileStore(str(tmp_path / "order"), world)
    other = dist.new_group()

    def first(future: Any) -> Any:
        value = future.value()[0]
        inner = dist.all_reduce(value * 2, async_op=True).get_future()
        return [inner.wait()[0], dist.all_reduce(value * 3, group=other, async_op=True).get_future().wait()[0]]

    def second(future: Any) -> Any:
        one, other_sum = future.value()
        total = one + other_sum
        dist.all_reduce(total)
        return total

    for turn in range(10):
        x = torch.full((3,), float(rank + 1 + turn))
        if rank == 0:
            store.wait([f"{turn}-{r}" for r in range(1, world)], timedelta(seconds=30))
            work = dist.all_reduce(x, async_op=True)
            future = work.get_future()
            future.wait()
        else:
            future = dist.all_reduce(x, async_op=True).get_future()
        nested = future.then(first).then(second)
        also: queue.Queue[float] = queue.Queue()
        future.add_done_callback(lambda f, also=also: also.put(summed_again(f.value()[0])))
        store.set(f"{turn}-{rank}", "attached")
        between = torch.ones(4)
        dist.all_reduce(between)  # of the thread itself
        base = sum(range(1 + turn, world + 1 + turn))
        assert between.tolist() == [world] * 4
        assert nested.wait().tolist() == [base * world * 5 * world] * 3, turn
        assert also.get(timeout=20) == base * world


def summed_again(value: Any) -> float:
    copy = value.clone()
    dist.all_reduce(copy)
    return float(copy[0])


def lists() -> list[Any]:
    """Several inputs, as torch's own tests of its backends use them."""
    rank, world = dist.get_rank(), dist.get_world_size()
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    inputs = [torch.tensor([2.0 * rank]), torch.tensor([2.0 * rank + 1])]
    outputs = [[torch.zeros(1) for _ in range(2 * world)] for _ in range(2)]
    gathered = backend.allgather(outputs, inputs, AllgatherOptions()).get_future().wait()
    assert len(gathered) == 2
    sparse = [torch.sparse_coo_tensor([[rank, 3]], [1.0, 2.0 + i], (5,)) for i in range(2)]
    backend.allreduce(sparse, dist.AllreduceOptions()).get_future().wait()
    assert torch.equal(sparse[0].to_dense(), sparse[1].to_dense())
    return [gathered, *(it.to_dense() for it in sparse)]


def lists_in_inference_mode() -> list[Any]:
    """Copies are made by whichever thread drives, in which torch would refuse to change such tensors."""
    with torch.inference_mode():
        results = lists()
        strided = torch.arange(6.0).reshape(2, 3).t() + dist.get_rank()
        for _ in range(20):
            dist.all_reduce(strided, async_op=True).wait()
        return [*results, strided]


def test_several_inputs() -> None:
    on_both(lists)
    on_both(lists_in_inference_mode)


@on_ranks(4, backend=None)
def test_destroyed_while_buffers_are_dropped(tmp_path: Path) -> None:
    """The last holder of a tensor takes Python's lock: no thread may wait for another that way."""
    import os
    import types

    from ringdp.job import backend as ring

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for turn in range(8):
        options = types.SimpleNamespace(
            store=dist.FileStore(str(tmp_path / str(turn)), world),
            group_rank=rank,
            group_size=world,
            timeout=timedelta(seconds=30),
            group_id=f"destroyed{turn}",
            global_ranks_in_group=list(range(world)),
        )
        backend = ring.create_process_group(options, None)
        futures = [
            backend.allgather(
                [[torch.zeros(1) for _ in range(world)]], [torch.ones(1)], AllgatherOptions()
            ).get_future()
            for _ in range(300)
        ]
        for future in futures:
            future.wait()
        del futures, future
        del backend
