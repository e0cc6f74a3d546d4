# torch.distributed is annotated for one process group of its own; the calls here go past what its stubs know.
# mypy: disable-error-code="arg-type, attr-defined, union-attr, func-returns-value"
"""The backend ring through torch.distributed: what every collective gives, takes and refuses, on real processes."""

from __future__ import annotations

import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import need
from tests.train.harness import ring_is_built, run_ranks

torch: Any = need("torch")
import torch.distributed as dist  # noqa: E402
import torch.distributed._functional_collectives as functional  # noqa: E402
from torch import nn  # noqa: E402

pytestmark = pytest.mark.skipif(not ring_is_built(), reason="ringdp is not built (make build)")

DTYPES = {
    "uint8": torch.uint8,
    "int8": torch.int8,
    "int16": torch.int16,
    "int32": torch.int32,
    "int64": torch.int64,
    "uint16": torch.uint16,
    "uint32": torch.uint32,
    "uint64": torch.uint64,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
    "bool": torch.bool,
    "complex64": torch.complex64,
    "complex128": torch.complex128,
}


def on_ring(case: Callable[..., Any], *args: Any, world_size: int = 2) -> list[Any]:
    return run_ranks(case, *args, world_size=world_size, backend="ring")


def filled(value: float, *shape: int, dtype: Any = torch.float32) -> Any:
    return torch.full(shape, value).to(dtype)


def me() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


# Every type of the core, in every collective.


def all_types() -> None:
    rank, world = me()
    total = world * (world + 1) // 2
    for dtype in DTYPES.values():
        mine = filled(rank + 1, 33, dtype=dtype)
        one = torch.ones((), dtype=dtype)
        every = [filled(r + 1, 33, dtype=dtype) for r in range(world)]

        summed = mine.clone()
        dist.all_reduce(summed)
        assert torch.equal(summed, one.expand(33) if dtype == torch.bool else filled(total, 33, dtype=dtype)), dtype

        copied = mine.clone()
        dist.broadcast(copied, src=world - 1)
        assert torch.equal(copied, every[-1]), dtype

        listed = [torch.zeros(33, dtype=dtype) for _ in range(world)]
        dist.all_gather(listed, mine)
        assert all(torch.equal(a, b) for a, b in zip(listed, every, strict=True)), dtype

        joined = torch.zeros(33 * world, dtype=dtype)
        dist.all_gather_into_tensor(joined, mine)
        assert torch.equal(joined, torch.cat(every)), dtype

        scattered = torch.zeros(33, dtype=dtype)
        dist.reduce_scatter(scattered, [filled(r + 1, 33, dtype=dtype) for r in range(world)])
        wanted = one.expand(33) if dtype == torch.bool else filled((rank + 1) * world, 33, dtype=dtype)
        assert torch.equal(scattered, wanted), dtype

        dist.reduce_scatter_tensor(scattered, torch.cat(every))
        assert torch.equal(scattered, wanted), dtype


@pytest.mark.parametrize("world_size", (1, 3))
def test_every_type_in_every_collective(world_size: int) -> None:
    on_ring(all_types, world_size=world_size)


def all_ops() -> None:
    rank, world = me()
    values = [5, 3, 6]
    wanted = {
        dist.ReduceOp.SUM: sum(values),
        dist.ReduceOp.AVG: sum(values) // world,
        dist.ReduceOp.PRODUCT: 90,
        dist.ReduceOp.MIN: min(values),
        dist.ReduceOp.MAX: max(values),
        dist.ReduceOp.BAND: 0,
        dist.ReduceOp.BOR: 7,
        dist.ReduceOp.BXOR: 0,
    }
    for op, value in wanted.items():
        x = torch.full((5,), values[rank], dtype=torch.int32)
        dist.all_reduce(x, op=op)
        assert x.tolist() == [value] * 5, op
        out = torch.zeros(2, dtype=torch.int32)
        dist.reduce_scatter_tensor(out, torch.full((2 * world,), values[rank], dtype=torch.int32), op=op)
        assert out.tolist() == [value] * 2, op
    mean = torch.tensor([float(rank), 1.0])
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    assert mean.tolist() == [(world - 1) / 2, 1.0]
    # A mean through functions of torch that spell the reduction as a word.
    assert functional.all_reduce(torch.tensor(float(rank)), "avg", dist.group.WORLD).item() == (world - 1) / 2


def test_every_reduction() -> None:
    on_ring(all_ops, world_size=3)


# Shapes and layouts.


def shapes() -> None:
    rank, world = me()
    scalar = torch.tensor(float(rank + 1))
    dist.all_reduce(scalar)
    assert scalar.shape == ()
    assert scalar.item() == world * (world + 1) / 2
    scalars = [torch.tensor(0.0) for _ in range(world)]
    dist.all_gather(scalars, torch.tensor(float(rank)))
    assert [x.item() for x in scalars] == list(range(world))

    for empty in (torch.empty(0), torch.empty(3, 0, 2)):
        dist.all_reduce(empty)
        dist.broadcast(empty, src=0)
        dist.all_gather([empty.clone() for _ in range(world)], empty)
        dist.all_gather_into_tensor(torch.empty(0), torch.empty(0))
        dist.reduce_scatter_tensor(torch.empty(0), torch.empty(0))

    stacked = torch.zeros(world, 3, 2)
    dist.all_gather_into_tensor(stacked, filled(rank, 3, 2))
    assert torch.equal(stacked, torch.arange(float(world)).view(world, 1, 1).expand(world, 3, 2))

    grad = filled(rank + 1, 4).requires_grad_()
    dist.all_reduce(grad)  # torch's backends write into leaves that require grad, too
    assert grad.detach().tolist() == [world * (world + 1) / 2] * 4


def layouts() -> None:
    rank, world = me()
    total = world * (world + 1) / 2

    def transposed(value: float) -> Any:
        return filled(value, 6, 10).t()

    def every_second(value: float) -> Any:
        return filled(value, 10, 12)[:, ::2]

    def channels_last(value: float) -> Any:
        return filled(value, 2, 3, 4, 5).to(memory_format=torch.channels_last)

    for make in (transposed, every_second, channels_last):
        whole = make(rank + 1.0)
        x = whole
        assert not x.is_contiguous()
        dist.all_reduce(x)
        assert bool((x == total).all()), make
        y = make(rank + 1.0)
        work = dist.all_reduce(y, async_op=True)
        assert work is not None
        work.wait()
        assert bool((y == total).all()), make
        z = make(float(rank))
        dist.broadcast(z, src=world - 1)
        assert bool((z == world - 1).all()), make
        blocks = [make(-1.0) for _ in range(world)]
        dist.all_gather(blocks, make(float(rank)))
        assert all(bool((block == r).all()) for r, block in enumerate(blocks)), make
        out = make(-1.0)
        dist.reduce_scatter(out, [make(float(r)) for r in range(world)])
        assert bool((out == rank * world).all()), make

    # What lies between the elements of a view stays as it is.
    base = filled(rank + 1, 10)
    dist.all_reduce(base[::2])
    assert base.tolist() == [total, rank + 1] * 5
    base = filled(rank + 1, 10)
    dist.all_reduce(base[3:5])
    assert base.tolist() == [rank + 1] * 3 + [total] * 2 + [rank + 1] * 5
    # Inputs that are not contiguous are read element by element, in the order of their indices.
    grid = torch.arange(6.0).view(2, 3).t()
    joined = torch.zeros(world * 3, 2)
    dist.all_gather_into_tensor(joined, grid + 100 * rank)
    assert torch.equal(joined[:3], grid)


@pytest.mark.parametrize("case", (shapes, layouts))
def test_shapes_and_layouts(case: Callable[[], None]) -> None:
    on_ring(case, world_size=3)


def inputs_stay() -> None:
    rank, world = me()
    mine = filled(rank, 70_000)
    dist.all_gather([torch.zeros(70_000) for _ in range(world)], mine)
    assert bool((mine == rank).all())
    pieces = [filled(r, 70_000) for r in range(world)]
    dist.reduce_scatter(torch.zeros(70_000), pieces)
    assert all(bool((piece == r).all()) for r, piece in enumerate(pieces))
    # An output may be a part of what is gathered or scattered, in place.
    joined = torch.zeros(world * 70_000)
    own = joined[rank * 70_000 : (rank + 1) * 70_000].fill_(rank + 1)
    dist.all_gather_into_tensor(joined, own)
    assert torch.equal(joined.view(world, -1)[:, 0], torch.arange(1.0, world + 1))
    scattered = torch.ones(world * 70_000)
    own = scattered[rank * 70_000 : (rank + 1) * 70_000]
    dist.reduce_scatter_tensor(own, scattered)
    assert bool((own == world).all())


def test_inputs_stay_as_they_are_and_may_overlap_outputs() -> None:
    on_ring(inputs_stay, world_size=3)


def objects() -> list[Any]:
    rank, world = me()
    gathered: list[Any] = [None] * world
    dist.all_gather_object(gathered, {"rank": rank, "list": [None] * rank})
    sent: list[Any] = ["left", 2, {3}] if rank == 1 else [None] * 3
    dist.broadcast_object_list(sent, src=1)
    return [gathered, sent]


def test_objects() -> None:
    for gathered, sent in on_ring(objects, world_size=3):
        assert gathered == [{"rank": rank, "list": [None] * rank} for rank in range(3)]
        assert sent == ["left", 2, {3}]


# Asynchronous operations.


def hands_exceptions() -> bool:
    """Whether this torch has a Python type for an operation's exception; torch 2.11 has none, not even for None."""
    try:
        dist.Work().exception()
    except TypeError:
        return False
    return True


def asynchronous(ends_in_wait: bool = True) -> list[str]:
    rank, world = me()
    total = world * (world + 1) / 2
    xs = [filled(rank + 1, size) for size in (1, 100, 300_000, 7)]
    works = [dist.all_reduce(x, async_op=True) for x in xs]
    for work in reversed(works):  # in any order
        assert work.wait() is True
        if ends_in_wait:  # on a device it orders a stream
            assert work.is_completed()
            assert work.is_success()
        if hands_exceptions():
            assert work.exception() is None
    assert all(bool((x == total).all()) for x in xs)
    assert works[2].result()[0].data_ptr() == xs[2].data_ptr()

    # A chain of callbacks, in the order of the operations.
    order: list[str] = []
    x, y = filled(rank + 1, 1000), filled(rank + 1, 1000)
    first = dist.all_reduce(x, async_op=True).get_future()
    second = dist.all_reduce(y, async_op=True).get_future()
    halved = first.then(lambda future: (order.append("x"), future.value()[0] / 2)[1])
    shown = halved.then(lambda future: (order.append("x again"), future.value() + 1)[1])
    last = second.then(lambda future: (order.append("y"), future.value()[0] * 3)[1])
    assert torch.equal(shown.wait(), filled(total / 2 + 1, 1000))
    assert torch.equal(last.wait(), filled(total * 3, 1000))
    both = torch.futures.collect_all([first, second]).wait()
    assert [bool((f.value()[0] == total).all()) for f in both] == [True, True]

    # A callback that fails fails its own future and nothing else.
    def fails(_: Any) -> Any:
        raise ValueError("mine")

    broken = dist.all_reduce(filled(1, 4), async_op=True).get_future().then(fails)
    with pytest.raises(Exception, match="mine"):
        broken.wait()
    # The future of an operation that is over already.
    work = dist.all_reduce(x := filled(1, 3), async_op=True)
    work.wait()
    assert work.get_future().done()
    assert torch.equal(work.get_future().value()[0], filled(world, 3))
    assert torch.equal(x, filled(world, 3))
    dist.barrier(async_op=True).wait()
    return order


def test_asynchronous_works_and_futures() -> None:
    for order in on_ring(asynchronous, world_size=3):
        assert sorted(order) == ["x", "x again", "y"]
        assert order.index("x") < order.index("x again")


def thousand(ends_in_order: bool = True) -> None:
    rank, world = me()
    xs = [filled(rank + i, 1 + i * 7919 % 3001) for i in range(1000)]
    works = [dist.all_reduce(x, async_op=True) for x in xs]
    works[-1].wait()
    if ends_in_order:  # operations of a group do; copies back to a device need not
        assert all(work.is_completed() for work in works)
    for work in works:
        work.wait()
    for i, x in enumerate(xs):
        assert bool((x == world * (world - 1) / 2 + world * i).all()), i
    # The buffers may be dropped while they are in use.
    later = [dist.all_reduce(filled(rank, 20_000), async_op=True) for _ in range(50)]
    later.reverse()
    del later[10:]
    for work in later:
        work.wait()


def test_a_thousand_in_flight() -> None:
    on_ring(thousand, world_size=3)


def coalesced() -> None:
    rank, world = me()
    total = world * (world + 1) / 2
    xs = [filled(rank + 1, size) for size in (3, 0, 100_000, 1)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for x in xs:
            dist.all_reduce(x)
    manager.wait()
    assert all(bool((x == total).all()) for x in xs)
    with dist._coalescing_manager():
        for x in xs:
            dist.all_reduce(x.fill_(1.0))
    assert all(bool((x == world).all()) for x in xs)

    outs = [torch.zeros(world * size) for size in (2, 5)]
    with dist._coalescing_manager():
        for out, size in zip(outs, (2, 5), strict=True):
            dist.all_gather_into_tensor(out, filled(rank, size))
    assert outs[1].view(world, 5)[:, 0].tolist() == list(range(world))
    pieces = [torch.zeros(2), torch.zeros(5)]
    with dist._coalescing_manager():
        for piece in pieces:
            dist.reduce_scatter_tensor(piece, filled(rank + 1, world * len(piece)))
    assert all(bool((piece == total).all()) for piece in pieces)
    # Results across each other's inputs: each input counts as it was.
    count = 30_001
    crossed = [filled(rank + 1, count, dtype=torch.float64), filled(rank + 2, count, dtype=torch.float64)]
    group: Any = dist.group.WORLD
    wholes = [torch.cat([crossed[1]] * world), torch.cat([crossed[0]] * world)]
    group.reduce_scatter_tensor_coalesced([wholes[1][:count], wholes[0][:count]], wholes).wait()
    assert wholes[1][:count].tolist() == [total + world] * count
    assert wholes[0][:count].tolist() == [total] * count
    one, other = filled(rank, world * 5), filled(10 + rank, world * 5)
    group.allgather_into_tensor_coalesced([one, other], [other[:5], one[5:10]]).wait()
    assert one.view(world, 5)[:, 4].tolist() == [10 + r for r in range(world)]
    assert other.view(world, 5)[:, 0].tolist() == list(range(world))

    # The functional collectives, which DTensor and compiled code call.
    gathered = functional.all_gather_tensor(filled(rank, 2, 2), 0, dist.group.WORLD)
    assert gathered.shape == (2 * world, 2)
    scattered = functional.reduce_scatter_tensor(torch.ones(2 * world), "sum", 0, dist.group.WORLD)
    assert scattered.tolist() == [world, world]


def test_coalesced_and_functional() -> None:
    on_ring(coalesced, world_size=3)


# Groups.


def groups() -> None:
    rank, _ = me()
    # Made by its members only. Each rank makes one: from torch 2.14 on such a group counts in the names of later ones,
    # so that ranks which made different numbers of them wait in torch's store for each other, on any backend.
    dist.barrier(group=dist.new_group([rank % 2, rank % 2 + 2], use_local_synchronization=True))
    subsets = {"even": [0, 2], "odd": [1, 3], "all": [0, 1, 2, 3], "three": [3, 0, 1], "again": [0, 2]}
    made = {name: dist.new_group(ranks) for name, ranks in subsets.items()}
    mine = [name for name, ranks in subsets.items() if rank in ranks]
    if rank % 2:
        mine.reverse()  # in a different order on different ranks
    xs = {name: filled(2.0**rank, 50_000) for name in mine}
    works = {name: dist.all_reduce(xs[name], group=made[name], async_op=True) for name in mine}
    for name in reversed(mine):
        works[name].wait()
        assert bool((xs[name] == sum(2.0**r for r in subsets[name])).all()), name
    for name in sorted(mine):  # these wait, so the order must be the same
        ranks = dist.get_process_group_ranks(made[name])
        x = filled(rank, 3)
        dist.broadcast(x, src=ranks[-1], group=made[name])
        assert x.tolist() == [ranks[-1]] * 3, name
        out = torch.zeros(len(ranks))
        dist.all_gather_into_tensor(out, filled(rank, 1), group=made[name])
        assert out.tolist() == ranks, name
    # Made, used, destroyed and made again, while others live on.
    for _ in range(5):
        group = dist.new_group([0, 1, 2])
        if rank < 3:
            x = torch.ones(10)
            dist.all_reduce(x, group=group)
            assert x[0].item() == 3
            dist.destroy_process_group(group)
    x = torch.ones(4)
    dist.all_reduce(x, group=made["all"])
    assert x.tolist() == [4.0] * 4


def test_groups_of_some_ranks() -> None:
    on_ring(groups, world_size=4)


def threads() -> None:
    rank, world = me()
    made = [dist.new_group(list(range(world))) for _ in range(4)]
    problems: list[BaseException] = []

    def work(index: int) -> None:
        try:
            for step in range(30):
                x = filled(rank + step, 1 + 5000 * index)
                dist.all_reduce(x, group=made[index])
                assert bool((x == world * (world - 1) / 2 + world * step).all())
                if step % 7 == index:
                    dist.barrier(group=made[index])
        except BaseException as error:
            problems.append(error)

    workers = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    if rank == 1:
        workers.reverse()
    for worker in workers:
        worker.start()
    x = torch.ones(10)
    for _ in range(30):
        dist.all_reduce(x.fill_(1.0))
    for worker in workers:
        worker.join()
    assert not problems, problems
    assert x.tolist() == [world] * 10


def test_several_groups_from_several_threads() -> None:
    on_ring(threads)


def again(folder: str) -> None:
    """Without the process group of the harness: made and destroyed here, three times."""
    import os

    import ringdp

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for turn in range(3):
        dist.init_process_group("ring", init_method=f"file://{folder}/store{turn}", rank=rank, world_size=world)
        assert dist.get_backend() == "ring"
        x = torch.ones(1000)
        dist.all_reduce(x)
        assert x[0].item() == world
        dist.destroy_process_group()
        assert not dist.is_initialized()
    ringdp.init(rank=rank, world_size=world, init_method=f"file://{folder}/last", backend="ring")
    assert ringdp.world_size() == world
    ringdp.shutdown()
    # One store for several process groups: torch's keys differ, ours must, too.
    store = dist.FileStore(f"{folder}/shared", world)
    for _ in range(2):
        dist.init_process_group("ring", store=store, rank=rank, world_size=world)
        dist.barrier()
        dist.destroy_process_group()


def test_initialised_again_after_destroy(tmp_path: Path) -> None:
    run_ranks(again, str(tmp_path), world_size=2, backend=None)


# Refusals.


def refused(error: Sequence[type[BaseException]], *words: str) -> Any:
    """The error is one of ringdp's, says all the words, and leaves the group usable."""
    return pytest.raises(tuple(error), match="(?s)" + "".join(f"(?=.*{word})" for word in words))


def refusals() -> None:
    from ringdp.errors import InvalidArgumentError

    _, world = me()
    ours = (InvalidArgumentError,)
    ones = torch.ones(4)

    with refused(ours, "allreduce", "SUM", "float8_e4m3fn"):
        dist.all_reduce(torch.empty(4, dtype=torch.float8_e4m3fn))
    for name, dtype in (("BAND", torch.float32), ("BXOR", torch.bfloat16), ("AVG", torch.bool)):
        with refused(ours, str(dtype).removeprefix("torch."), name):
            dist.all_reduce(torch.ones(4, dtype=dtype), op=getattr(dist.ReduceOp, name))
    with refused(ours, "PREMUL_SUM", "floating-point", "Int"):
        dist.all_reduce(ones.int(), op=dist._make_nccl_premul_sum(2.0))
    sparse = torch.sparse_coo_tensor([[0]], [1.0], (4,))
    with refused(ours, "unsupported reduction operation"):
        dist.all_reduce(sparse, op=dist.ReduceOp.MAX)

    # Some of these torch finds before the backend does.
    either = (ValueError, RuntimeError)
    with refused(ours, "size"):
        dist.all_gather([torch.zeros(5) for _ in range(world)], ones)
    with refused(either, "type"):
        dist.all_gather([torch.zeros(4, dtype=torch.int32) for _ in range(world)], ones)
    with refused(either, "length"):
        dist.all_gather([torch.zeros(4) for _ in range(world + 1)], ones)
    with refused(either, "size"):
        dist.all_gather_into_tensor(torch.zeros(4 * world + 1), ones)
    with refused(either, "type"):
        dist.all_gather_into_tensor(torch.zeros(4 * world, dtype=torch.int32), ones)
    with refused(either, "length"):
        dist.reduce_scatter(ones, [ones.clone() for _ in range(world - 1)])
    with refused(either, "size"):
        dist.reduce_scatter(ones, [torch.zeros(3) for _ in range(world)])
    with refused(either, "size"):
        dist.reduce_scatter_tensor(ones, torch.zeros(4 * world - 1))
    with refused(either, "type"):
        dist.reduce_scatter_tensor(ones, torch.zeros(4 * world, dtype=torch.float64))

    # What the functions of dist would not let through.
    group = dist.group.WORLD._get_backend(torch.device("cpu"))
    for root in (-1, world):
        options = dist.BroadcastOptions()
        options.rootRank = root
        with refused(ours, "root rank", str(root)):
            group.broadcast([ones], options)
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 1
    with refused(ours, "invalid root tensor: 1"):
        group.broadcast([ones], options)
    with refused(ours, "dense"):
        group.broadcast([sparse], dist.BroadcastOptions())
    quantized = torch.quantize_per_tensor(ones, 1.0, 0, torch.qint8)
    with refused(ours, "broadcast", "QInt8", "not supported"):
        group.broadcast([quantized], dist.BroadcastOptions())
    with refused(ours, "non-empty"):
        group.allreduce([], dist.AllreduceOptions())
    with refused(ours, "invalid tensor type at index 1"):
        group.allreduce([ones, ones.double()], dist.AllreduceOptions())
    with refused(ours, "invalid tensor size at index 1"):
        group.allreduce([ones, torch.ones(5)], dist.AllreduceOptions())
    with pytest.raises((ValueError, RuntimeError)):
        dist.broadcast(ones, src=world)

    # Nothing of this has reached the other ranks or broken the group.
    dist.all_reduce(ones)
    assert ones.tolist() == [world] * 4


def test_refusals_in_words() -> None:
    on_ring(refusals)


def other_devices_are_refused() -> str:
    x = torch.ones(3)
    with pytest.raises(RuntimeError) as failure:
        dist.group.WORLD._get_backend(torch.device("cpu")).allreduce([x.to("meta")], dist.AllreduceOptions())
    dist.barrier()
    return str(failure.value)


def test_tensors_of_other_devices() -> None:
    for text in on_ring(other_devices_are_refused):
        assert "CPU and CUDA tensors" in text
        assert "meta" in text


# Training with torch's own wrapper.


def ddp_steps(hook: bool) -> list[Any]:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    rank, _ = me()
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Linear(20, 64), nn.ReLU(), nn.BatchNorm1d(64), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 5)
    )
    wrapped = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.01, gradient_as_bucket_view=not hook)
    if hook:
        wrapped.register_comm_hook(None, fp16_compress_hook)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(100 + rank)
    for _ in range(6):
        x = torch.randn(16, 20, generator=generator)
        y = torch.randint(5, (16,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(wrapped(x), y).backward()
        optimizer.step()
    dist.barrier()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize(
    ("hook", "world_size"), [(False, 2), (True, 3)], ids=("two ranks", "three ranks with fp16_compress_hook")
)
def test_ddp_trains_as_on_gloo(hook: bool, world_size: int) -> None:
    ring = run_ranks(ddp_steps, hook, world_size=world_size, backend="ring")
    gloo = run_ranks(ddp_steps, hook, world_size=world_size, backend="gloo")
    for rank in range(1, world_size):
        assert all(torch.equal(a, b) for a, b in zip(ring[0], ring[rank], strict=True)), "the ranks differ"
    for mine, theirs in zip(ring[0], gloo[0], strict=True):
        if hook:
            torch.testing.assert_close(mine, theirs, rtol=2e-3, atol=2e-4)
        else:
            assert torch.equal(mine, theirs)  # a + b has one answer


# What torch sees of the backend.


def profiled() -> list[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        dist.all_reduce(torch.ones(100))
        dist.all_reduce(torch.ones(100), async_op=True).wait()
        dist.broadcast(torch.ones(100), src=0)
        dist.barrier()
    return [event.key for event in profile.key_averages()]


def test_profiler_sees_the_operations() -> None:
    for names in on_ring(profiled):
        assert {"ring:all_reduce", "ring:broadcast", "ring:barrier"} <= set(names)


def timeouts_and_names() -> None:
    from ringdp.errors import RingTimeoutError

    rank, _ = me()
    assert dist.get_backend() == "ring"
    work = dist.all_reduce(torch.ones(3), async_op=True)
    work.wait(timedelta(seconds=20))
    group = dist.new_group([0, 1], timeout=timedelta(milliseconds=300))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if rank == 0:
            with pytest.raises(RingTimeoutError, match=" Timed out "):
                dist.all_reduce(torch.ones(3), group=group)
    dist.barrier()  # the default group is not concerned


def test_timeout_of_a_new_group() -> None:
    on_ring(timeouts_and_names)


IMPORT_TORCH_ALONE = """
import importlib.metadata, sys
if not any(point.name == "ringdp" for point in importlib.metadata.entry_points(group="torch.backends")):
    sys.exit("not installed")
import torch, torch.distributed as dist
dist.init_process_group("ring", store=dist.HashStore(), rank=0, world_size=1)
x = torch.ones(3)
dist.all_reduce(x)
assert x.tolist() == [1.0] * 3
dist.destroy_process_group()
print("done")
"""


def test_import_torch_alone(tmp_path: Path) -> None:
    """Elsewhere than in the checkout, whose files Python would find without an installation."""
    command = [sys.executable, "-c", IMPORT_TORCH_ALONE]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    if done.stderr == "not installed\n":
        pytest.skip("ringdp is not installed (pip install --no-build-isolation -e .)")
    assert done.stdout == "done\n", done.stderr
