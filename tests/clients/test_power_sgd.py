# mypy: disable-error-code="arg-type, attr-defined, union-attr, operator, assignment"
"""torch's PowerSGD hooks, whose callbacks wait for collectives, on DDP over ring and in one process.

On gloo they abort: callbacks issue their collectives in whatever order the operations end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.helpers import need
from tests.train.harness import run_ranks

torch: Any = need("torch")
need("numpy")
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

STEPS = 8
HOOKS = {"PowerSGD": power_sgd.powerSGD_hook, "batched PowerSGD": power_sgd.batched_powerSGD_hook}
_orthogonalize = power_sgd._orthogonalize


def orthogonalize(matrices: Any, epsilon: float = 0) -> None:
    """torch 2.13's batched hook hands one matrix to a function that takes batches of them, and so always raises."""
    _orthogonalize(matrices.unsqueeze(0) if matrices.dim() == 2 else matrices, epsilon)


@dataclass
class Call:
    """One call of the hook: what was in the bucket, and what came out."""

    index: int
    last: bool
    buffer: Any
    places: list[tuple[int, tuple[int, ...]]]  # offset and shape of each gradient
    result: Any = None


def make_state(group: Any) -> Any:
    return power_sgd.PowerSGDState(group, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=1.0)


def recorded(name: str) -> tuple[list[Call], list[Any]]:
    """Train with the hook; its calls, and the parameters at the end."""
    power_sgd._orthogonalize = orthogonalize
    torch.manual_seed(3)
    model = nn.Sequential(*[nn.Linear(24, 24) for _ in range(5)])
    model = DistributedDataParallel(model, bucket_cap_mb=0.004)
    calls: list[Call] = []

    def hook(state: Any, bucket: Any) -> Any:
        base = bucket.buffer()
        places = [(g.storage_offset() - base.storage_offset(), tuple(g.shape)) for g in bucket.gradients()]
        call = Call(bucket.index(), bucket.is_last(), base.clone(), places)
        calls.append(call)

        def keep(future: Any) -> Any:
            result = future.value()
            call.result = result.clone()
            return result

        return HOOKS[name](state, bucket).then(keep)

    model.register_comm_hook(make_state(None), lambda state, bucket: hook(state, bucket))  # DDP looks at annotations
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(8, 24, generator=generator)).pow(2).mean().backward()
        optimizer.step()
    power_sgd._orthogonalize = _orthogonalize
    return calls, [p.detach().clone() for p in model.parameters()]


# The same in one process: a thread for each rank, one of which runs at a time.


@dataclass
class OneProcess:
    """Stands in for the process group and for the collective."""

    world: int
    turn: threading.Lock = field(default_factory=threading.Lock)
    given: dict[int, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.meeting = threading.Barrier(self.world, timeout=60)
        self.local = threading.local()

    def size(self) -> int:
        return self.world

    def all_reduce(self, tensor: Any, group: Any = None, async_op: bool = False) -> Any:
        self.turn.release()
        self.given[self.local.rank] = tensor.clone()
        self.meeting.wait()
        tensor.copy_(sum(self.given[rank] for rank in range(1, self.world)) + self.given[0])
        self.meeting.wait()
        self.turn.acquire()
        self.local.tensor = tensor
        return self

    def get_future(self) -> Any:
        future: Any = torch.futures.Future()
        future.set_result([self.local.tensor])
        return future


class Bucket:
    """What the hooks ask of a bucket."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.memory = call.buffer.clone()

    def index(self) -> int:
        return self.call.index

    def is_last(self) -> bool:
        return self.call.last

    def buffer(self) -> Any:
        return self.memory

    def gradients(self) -> list[Any]:
        return [
            self.memory[offset : offset + torch.Size(shape).numel()].view(shape) for offset, shape in self.call.places
        ]


def reenact(hook: Callable[..., Any], calls: list[list[Call]], monkeypatch: pytest.MonkeyPatch) -> list[list[Any]]:
    """The results of the calls of every rank, by the hook's own code and a sum in rank order."""
    group = OneProcess(len(calls))
    monkeypatch.setattr(dist, "all_reduce", group.all_reduce)
    monkeypatch.setattr(power_sgd, "_orthogonalize", orthogonalize)
    results: list[list[Any]] = [[] for _ in calls]
    problems: list[BaseException] = []

    def run(rank: int) -> None:
        group.local.rank = rank
        state = make_state(group)
        try:
            with group.turn:
                for call in calls[rank]:
                    results[rank].append(hook(state, Bucket(call)).wait().clone())
        except BaseException as error:
            problems.append(error)
            group.meeting.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems, problems
    return results


@pytest.mark.parametrize("name, world_size", [("PowerSGD", 3), ("batched PowerSGD", 2)])
def test_as_in_one_process(name: str, world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = run_ranks(recorded, name, world_size=world_size, backend="ring")
    calls = [rank[0] for rank in ranks]
    assert len(calls[0]) > 2 * STEPS, "one bucket only: nothing could get into disorder"
    for rank in ranks[1:]:
        assert all(torch.equal(a, b) for a, b in zip(rank[1], ranks[0][1], strict=True)), "the ranks differ"

    wanted = reenact(HOOKS[name], calls, monkeypatch)
    for mine, theirs in zip(calls, wanted, strict=True):
        for call, result in zip(mine, theirs, strict=True):
            assert not torch.equal(call.buffer, call.result)
            torch.testing.assert_close(call.result, result, rtol=1e-4, atol=1e-6)
