# torch.distributed is annotated for one process group of its own; the calls here go past what its stubs know.
# mypy: disable-error-code="arg-type, attr-defined, union-attr, func-returns-value"
"""torch.distributed's other operations on ring: rooted ones, all-to-all, messages, sparse tensors, several tensors per
rank. Each runs on gloo too where gloo can, and must give the same."""

from __future__ import annotations

import functools
import random
import threading
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from tests.helpers import need
from tests.train.harness import ring_is_built, run_ranks

torch: Any = need("torch")
import torch.distributed as dist  # noqa: E402

pytestmark = pytest.mark.skipif(not ring_is_built(), reason="ringdp is not built (make build)")

MOVABLE = [
    torch.complex32,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
    torch.bool,
    torch.int16,
    torch.uint64,
    torch.bfloat16,
    torch.complex128,
]


def me() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def mine(*shape: int, salt: int = 0) -> Any:
    return torch.randint(0, 100, shape, generator=torch.Generator().manual_seed(10 * dist.get_rank() + salt)).float()


def rooted() -> list[Any]:
    rank, world = me()
    seen = []
    for root in range(world):
        for shape in ((5, 3), (), (0,), (70_001,)):
            x = mine(*shape, salt=root)
            total = x.clone()
            dist.reduce(total, root, op=dist.ReduceOp.SUM)
            blocks = [torch.zeros(shape) for _ in range(world)] if rank == root else None
            dist.gather(x, blocks, dst=root)
            back = torch.zeros(shape)
            dist.scatter(back, [block + 1 for block in blocks] if blocks else None, src=root)
            assert torch.equal(back, x + 1)
            seen += [total if rank == root else x, *(blocks or [])]
        most = mine(7, salt=root)
        work: Any = dist.reduce(most, root, op=dist.ReduceOp.MAX, async_op=True)
        work.wait()
        assert work.is_success()
        seen += [most] if rank == root else []
    return seen


def rows(rank: int, world: int) -> list[int]:
    return [(rank + 2 * other) % 3 for other in range(world)]


def all_to_all_single() -> list[Any]:
    rank, world = me()
    equal = torch.zeros(2 * world, 3)
    dist.all_to_all_single(equal, mine(2 * world, 3))
    given = rows(rank, world)
    taken = [rows(other, world)[rank] for other in range(world)]
    uneven = torch.zeros(sum(taken), 2)
    dist.all_to_all_single(uneven, mine(sum(given), 2), taken, given)
    work = dist.all_to_all_single(equal, equal.clone() * 2, async_op=True)
    work.wait()
    return [equal, uneven]


def messages() -> list[Any]:
    rank, world = me()
    after, before = (rank + 1) % world, (rank - 1) % world
    got = [torch.zeros(9), torch.zeros(200_000), torch.zeros(4, 4)]
    sent = [mine(*x.shape) for x in got]
    operations = [dist.P2POp(dist.isend, x, after) for x in sent] + [dist.P2POp(dist.irecv, x, before) for x in got]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    tagged = [torch.zeros(3) for _ in range(4)]
    receiving: Any = [dist.irecv(x, before, tag=tag) for tag, x in enumerate(tagged)]
    for tag in (2, 0, 3, 1):
        dist.send(torch.full((3,), float(10 * rank + tag)), after, tag=tag)
    for work in receiving:
        work.wait()
    if rank == 0:
        for _ in range(2 * (world - 1)):
            block = torch.zeros(2)
            source = dist.recv(block)
            assert block.tolist() == [source] * 2
            got.append(block) if world == 2 else None
    else:
        for _ in range(2):
            dist.send(torch.full((2,), float(rank)), 0)
    return [*got, *tagged]


def sparse() -> list[Any]:
    rank, _ = me()
    where = torch.tensor([[0, 1, 1, 0], [2, 0, 2, 2]])[:, : 2 + rank]
    what = (torch.arange(4.0) + 1)[: 2 + rank] * (rank + 1)
    flat = torch.sparse_coo_tensor(where, what, (3, 4))  # not coalesced on some ranks
    hybrid = torch.sparse_coo_tensor(where[:1], torch.stack([what, -what], 1), (3, 2))
    empty = torch.sparse_coo_tensor(where[:, :0], what[:0], (3, 4))
    dist.all_reduce(flat)
    work = dist.all_reduce(hybrid, async_op=True)
    future = work.get_future()
    work.wait()
    assert torch.equal(future.value()[0].to_dense(), hybrid.to_dense())
    dist.all_reduce(empty)
    return [x.to_dense() for x in (flat, hybrid, empty)]


def objects() -> list[Any]:
    rank, world = me()
    gathered: list[Any] | None = [None] * world if rank == 1 else None
    dist.gather_object({"rank": rank, "of": [world]}, gathered, dst=1)
    scattered: list[Any] = [None]
    dist.scatter_object_list(scattered, [f"for {r}" for r in range(world)] if rank == 0 else None, src=0)
    if rank == 0:
        dist.send_object_list(["a", {2: 3}], dst=1)
    letters: list[Any] = [None, None]
    if rank == 1:
        dist.recv_object_list(letters, src=0)
    return [gathered, scattered, letters]


def coalesced_list() -> list[Any]:
    _, world = me()
    inputs = [mine(3), mine(2, 2)]
    outputs = [[torch.zeros_like(x) for x in inputs] for _ in range(world)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.all_gather_coalesced(outputs, inputs)
    return [x for one in outputs for x in one]


def several_per_rank() -> list[Any]:
    rank, world = me()
    group = dist.group.WORLD._get_backend(torch.device("cpu"))
    seen = []
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX):
        pair = [torch.tensor([2.0 * rank + 1]), torch.tensor([2.0 * rank + 2])]
        options: Any = dist.AllreduceOptions()
        options.reduceOp = op
        group.allreduce(pair, options).wait()
        seen += pair
    second = dist.BroadcastOptions()
    second.rootRank, second.rootTensor = 1, 1
    pair = [mine(4), mine(4, salt=1)]
    group.broadcast(pair, second).wait()
    twice = mine(3)
    group.allreduce_coalesced([twice, pair[0], twice]).wait()  # the same one: each stands for what it was before
    seen.append(twice)
    lists = [[torch.zeros(2) for _ in range(2 * world)] for _ in range(2)]
    group.allgather(lists, [mine(2), mine(2, salt=1)]).wait()
    return [*seen, *pair, *lists[0], *lists[1]]


CASES: list[Callable[[], list[Any]]] = [
    rooted,
    all_to_all_single,
    messages,
    sparse,
    objects,
    coalesced_list,
    several_per_rank,
]


def every_case() -> dict[str, list[Any]]:
    return {case.__name__: case() for case in CASES}


def equal(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else bool(a == b)


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_same_as_on_gloo(world_size: int) -> None:
    theirs = run_ranks(every_case, world_size=world_size, backend="gloo")
    ours = run_ranks(every_case, world_size=world_size, backend="ring")
    for rank in range(world_size):
        for name, wanted in theirs[rank].items():
            got = ours[rank][name]
            assert len(got) == len(wanted), (rank, name)
            assert all(equal(a, b) for a, b in zip(got, wanted, strict=True)), (rank, name, got, wanted)


def more_than_gloo() -> None:
    """What gloo 2.13 refuses."""
    rank, world = me()
    inputs = [torch.full((rank + other,), 10.0 * rank + other) for other in range(world)]
    outputs = [torch.zeros(rank + other) for other in range(world)]
    dist.all_to_all(outputs, inputs)
    assert all(torch.equal(x, torch.full((rank + r,), 10.0 * r + rank)) for r, x in enumerate(outputs))

    half = dist._make_nccl_premul_sum(0.5)
    doubled = dist._make_nccl_premul_sum(torch.tensor([2.0]))
    x = torch.full((5,), float(rank + 1))
    dist.all_reduce(x, op=half)
    assert x.tolist() == [world * (world + 1) / 4] * 5
    piece, whole = torch.zeros(2), torch.ones(2 * world, dtype=torch.float32)
    dist.reduce_scatter_tensor(piece, whole, op=doubled)
    assert piece.tolist() == [2.0 * world] * 2
    assert whole.tolist() == [1.0] * 2 * world  # an input stays as it is

    for dtype in MOVABLE:
        bits = torch.arange(16, dtype=torch.uint8)
        bits = bits % 2 if dtype == torch.bool else bits
        x = (bits if rank == 0 else torch.zeros_like(bits)).view(dtype)
        dist.broadcast(x, src=0)
        assert torch.equal(x.view(torch.uint8), bits), dtype
        if rank == 0:
            dist.send(x, 1)
        elif rank == 1:
            got = torch.zeros_like(x.view(torch.uint8)).view(dtype)
            dist.recv(got, 0)
            assert torch.equal(got.view(torch.uint8), bits), dtype

    strided = torch.arange(12.0).view(3, 4).t()
    if rank == 0:
        dist.send(strided, 1)
    elif rank == 1:
        got = torch.zeros(8, 3)[::2]
        dist.recv(got, 0)
        assert torch.equal(got, strided)


def gathered_in_one() -> None:
    """Since torch 2.14, under two names."""
    rank, world = me()
    for name in ("gather_single", "gather_into_tensor"):
        for root in range(world) if hasattr(dist, name) else ():
            whole = torch.zeros(2 * world, 3) if rank == root else None
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                getattr(dist, name)(torch.full((2, 3), float(rank)), whole, dst=root)
            if whole is not None:
                assert torch.equal(whole, torch.arange(world).repeat_interleave(2)[:, None].expand(-1, 3).float())


def test_what_gloo_does_not_have() -> None:
    for world_size in (2, 3):
        run_ranks(more_than_gloo, world_size=world_size, backend="ring")
        run_ranks(gathered_in_one, world_size=world_size, backend="ring")


def refusals() -> None:
    from ringdp.errors import InvalidArgumentError

    rank, world = me()
    group = dist.group.WORLD._get_backend(torch.device("cpu"))
    ones = torch.ones(4)
    options: Any = dist.ReduceOptions()
    options.rootRank = world
    with pytest.raises(InvalidArgumentError, match="invalid root rank"):
        group.reduce([ones], options)
    options = dist.GatherOptions()
    options.rootRank = rank
    with pytest.raises(InvalidArgumentError, match=f"Incorrect output list size 1. .*should be {world}"):
        group.gather([[ones]], [ones], options)
    with pytest.raises(InvalidArgumentError, match="invalid tensor size at index 0"):
        group.gather([[torch.ones(5)] * world], [ones], options)
    options.rootRank = (rank + 1) % world
    with pytest.raises(InvalidArgumentError, match="requires empty output on non-root"):
        group.gather([[ones] * world], [ones], options)
    options = dist.ScatterOptions()
    options.rootRank = rank
    with pytest.raises(InvalidArgumentError, match="Incorrect input list size 1"):
        group.scatter([ones], [[ones]], options)
    with pytest.raises(RuntimeError, match="does not divide equally"):
        dist.all_to_all_single(torch.ones(world + 1), torch.ones(world + 1))
    with pytest.raises(InvalidArgumentError, match="doesn't match total dim 0 size"):
        dist.all_to_all_single(torch.ones(world), torch.ones(world), [1] * world, [2] * world)
    splits = [1] * world
    splits[rank] += 1
    with pytest.raises(InvalidArgumentError, match=r"rank \d sends itself 8 bytes and expects 4"):
        dist.all_to_all_single(torch.ones(world), torch.ones(world + 1), [1] * world, splits)
    with pytest.raises(InvalidArgumentError, match="Tag must be nonnegative"):
        group.send([ones], (rank + 1) % world, -3)
    with pytest.raises(InvalidArgumentError, match="a rank cannot send to itself"):
        group.send([ones], rank, 0)
    dist.all_reduce(ones)  # none of it has reached the others
    assert ones.tolist() == [world] * 4


def test_refusals_in_words() -> None:
    run_ranks(refusals, world_size=2, backend="ring")


def disagreement(what: str) -> tuple[str, str]:
    rank, world = me()
    ones = torch.ones(world)
    try:
        if what == "splits":  # rank 1 expects more from rank 0 than that sends
            dist.all_to_all_single(torch.ones(world + rank), ones, [1 + rank, *[1] * (world - 1)], [1] * world)
        elif what == "roots":
            dist.gather(ones, [ones.clone() for _ in range(world)], dst=rank)
        elif what == "sparse shapes":
            dist.all_reduce(torch.sparse_coo_tensor([[0]], [1.0], (4 + rank,)))
        dist.barrier()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("splits", ("all_to_all(float32[1])", "all_to_all(float32[2])")),
        ("roots", ("root 0", "root 1")),
        ("sparse shapes", ("[4]", "[5]")),
    ],
)
def test_disagreements_are_told_on_all_ranks(what: str, words: tuple[str, str]) -> None:
    for error, text in run_ranks(disagreement, what, world_size=2, backend="ring"):
        assert error == "MismatchError", text
        assert all(word in text for word in words), text


def late_ranks() -> tuple[str, float]:
    import ringdp

    rank, _ = me()
    ringdp.monitored_barrier(timeout=20)
    start = time.monotonic()
    if rank in (0, 2):
        with pytest.raises(ringdp.RingTimeoutError) as caught:
            ringdp.monitored_barrier(timeout=timedelta(seconds=1))
        return str(caught.value), time.monotonic() - start
    dist.distributed_c10d._get_default_store().wait(["seen/0", "seen/2"])
    return "", 0.0


def told() -> tuple[str, float]:
    outcome = late_ranks()
    dist.distributed_c10d._get_default_store().set(f"seen/{dist.get_rank()}", "")
    return outcome


def test_monitored_barrier_names_who_is_missing() -> None:
    for rank, (text, seconds) in enumerate(run_ranks(told, world_size=4, backend="ring")):
        if rank in (0, 2):
            missing = text.split("waiting for ")[1]
            assert "rank 1 (host" in missing, text
            assert "rank 3 (host" in missing, text
            assert seconds < 2.0


def many_groups(seed: int) -> int:
    """Groups of all sizes, used from several threads, messages and collectives mixed, ranks in different orders."""
    rank, _ = me()
    members = [[0, 1], [1, 2], [0, 2], [0, 1, 2]] * 5
    groups = [dist.new_group(ranks) for ranks in members]
    failures: list[BaseException] = []
    done = [0]

    def use(index: int) -> None:
        group, ranks = groups[index], members[index]
        order = random.Random(f"{seed} {rank} {index}")
        try:
            for step in range(6):
                ones = torch.full((500 + index,), 1.0)
                after = ranks[(ranks.index(rank) + 1) % len(ranks)]
                before = ranks[(ranks.index(rank) - 1) % len(ranks)]
                got = torch.zeros(4)
                calls = [
                    functools.partial(dist.isend, torch.full((4,), float(step)), after, group=group),
                    functools.partial(dist.irecv, got, before, group=group),
                    functools.partial(dist.all_reduce, ones, group=group, async_op=True),
                ]
                order.shuffle(calls)
                for work in [call() for call in calls]:
                    work.wait()
                assert got.tolist() == [step] * 4
                assert ones.tolist() == [len(ranks)] * len(ones)
                done[0] += 1
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=use, args=(i,)) for i, ranks in enumerate(members) if rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return done[0]


def test_dozens_of_groups_from_several_threads() -> None:
    assert run_ranks(many_groups, 1, world_size=3, backend="ring") == [15 * 6] * 3
