"""What ranks do in tests/train/test_kvstore.py."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import ringdp
from ringdp import kvstore

SHAPES: Mapping[str, tuple[int, ...]] = {
    "scalar": (),
    "bias": (7,),
    "even": (64, 64),
    "odd": (123, 77),
    "large": (130, 333),
    "none": (0, 4),
}


def values(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, dtype=dtype, generator=generator) for name, shape in SHAPES.items()}


def make_model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(96, 130), nn.Tanh(), nn.Linear(130, 33), nn.LayerNorm(33), nn.Linear(33, 3)).to(
        dtype
    )


def batch(step: int, rank: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(9, 96, dtype=dtype, generator=torch.Generator().manual_seed(100 * step + rank))


def train(how: str, optimizer: Any, numbers: dict[str, Any], dtype: torch.dtype, steps: int = 4) -> list[Tensor]:
    """Parameters after some steps: with RingDP and the optimizer, or through a store."""
    model = make_model(dtype)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    step: Callable[[], None]
    wrapped: nn.Module = model
    if how == "ringdp":
        wrapped = ringdp.RingDP(model)
        step = optimizer(model.parameters(), **numbers).step
    elif how == "trainer":
        trainer = kvstore.Trainer(model, optimizer, numbers)
        step = functools.partial(trainer.step, ranks)
    elif how == "gradients":
        own = kvstore.Trainer(model, optimizer, numbers, update_on_kvstore=False)
        step = functools.partial(own.step, ranks)
    else:
        store = kvstore.create(reduce="mean")
        store.set_optimizer(optimizer, **numbers)
        if how == "attached":
            step = store.attach(model).step
        else:
            step = _push_and_pull(store, model)
    for number in range(steps):
        model.zero_grad()
        wrapped(batch(number, rank, dtype)).square().mean().backward()
        step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def _push_and_pull(store: kvstore.KVStore, model: nn.Module) -> Callable[[], None]:
    """One key at a time, in an order of each rank's own."""
    named = dict(model.named_parameters())
    order = list(named) if store.rank % 2 else list(reversed(named))
    for name in order:
        store.init(name, named[name])

    def step() -> None:
        with torch.no_grad():
            for name in order:
                store.push(name, named[name].grad)
            for name in reversed(order):
                store.pull(name, named[name].data)

    return step


def train_all(
    hows: Sequence[str], optimizer: Any, numbers: dict[str, Any], dtype: torch.dtype
) -> dict[str, list[Tensor]]:
    return {how: train(how, optimizer, numbers, dtype) for how in hows}


def compressed(spec: Any, steps: int) -> list[Tensor]:
    """A key's values after each of some pushes with SGD and a learning rate of 1."""
    store = kvstore.create(reduce="mean")
    store.set_optimizer(torch.optim.SGD, lr=1.0)
    store.set_gradient_compression(spec)
    store.init("w", torch.zeros(70, 50))
    results = []
    for step in range(steps):
        out = torch.empty(70, 50)
        store.pushpull("w", gradient(step, store.rank), out)
        results.append(out)
    return results


def large_sums(reduce: str) -> None:
    """Keys of which each is an all-reduce, and small ones beside them; results in memory of all kinds."""
    store = kvstore.create(reduce=reduce)
    shapes = {"huge": (333, 401), "small": (7,), "double": (200, 101), "long": (20_001,)}
    names = list(shapes)

    def pushed(rank: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(rank)
        made = {name: torch.randint(-99, 99, shape, generator=generator).float() for name, shape in shapes.items()}
        return made | {"double": made["double"].double()}

    everyone = [pushed(rank) for rank in range(store.num_workers)]
    by = store.num_workers if reduce == "mean" else 1
    wanted = {name: torch.stack([one[name] for one in everyone]).sum(0) / by for name in names}
    mine, out = pushed(store.rank), {name: torch.zeros_like(it) for name, it in wanted.items()}

    def check(found: Mapping[str, Tensor], what: str) -> None:
        for name in found:
            assert torch.allclose(found[name], wanted[name].to(found[name].dtype), rtol=1e-6), (what, name)

    store.init(names, [torch.zeros_like(it) for it in mine.values()])
    store.pushpull(names, list(mine.values()), list(out.values()))
    check(out, "out")
    assert all(torch.equal(mine[name], it) for name, it in pushed(store.rank).items())  # nothing was written there
    pulled = {name: torch.zeros_like(it) for name, it in wanted.items()}
    store.pull(names, list(pulled.values()))
    check(pulled, "pulled")
    across = {name: torch.zeros(shape[::-1], dtype=mine[name].dtype).T for name, shape in shapes.items()}
    store.pushpull(names, [[it, it] for it in mine.values()], [[it] for it in across.values()])
    check({name: it / 2 for name, it in across.items()}, "two devices, not contiguous")
    store.init("other", torch.zeros(333, 401))
    first, second = pushed(store.rank)["huge"], -pushed(store.rank)["huge"]
    store.pushpull(["huge", "other"], [first, second], [second, first])  # each result where the other's input is
    check({"huge": second}, "crossed")
    check({"huge": -first}, "crossed")
    store.pushpull(names, list(mine.values()))
    check(mine, "in place")


def gradient(step: int, rank: int) -> Tensor:
    return torch.randn(70, 50, generator=torch.Generator().manual_seed(1000 * step + rank))


def sums() -> dict[str, Any]:
    """The store without an optimizer, and its forms of keys and values."""
    store = kvstore.create("dist_sync")
    first = values(store.rank)
    names = list(first)
    store.init(names, list(first.values()))
    out = {name: torch.empty(SHAPES[name]) for name in names}
    store.pull(names, list(out.values()))
    begun = {name: it.clone() for name, it in out.items()}
    mine = values(50 + store.rank)
    store.push(names, [[mine[name], mine[name]] for name in names])  # as from two devices
    store.pull(names, [[out[name]] for name in names])
    pushed = {name: it.clone() for name, it in out.items()}
    transposed = torch.empty(77, 123).t()
    store.pushpull("odd", mine["odd"].t().contiguous().t(), transposed)
    store.init("empty", torch.empty(0, 4))
    store.pushpull("empty", torch.empty(0, 4))
    store.init([3], [torch.full((5,), float(store.rank))])
    number = torch.empty(5)
    store.push(3, torch.ones(5))
    store.push("3", torch.ones(5) * 2)  # the same key: a second round
    store.pull(3, number)
    equal = [torch.ones(256, 256), torch.ones(128, 192)]  # cut without a rest: nothing is packed
    store.init(["p", "q"], equal)
    store.pushpull(["p", "q"], equal)
    assert all(torch.equal(it, torch.full_like(it, float(store.num_workers))) for it in equal)
    small = torch.empty(1100)  # a single small key: one all-reduce
    store.init("small", small)
    store.pushpull("small", torch.full((1100,), float(store.rank + 1)), small)
    again = torch.empty(1100)
    store.pull("small", again)
    assert torch.equal(small, torch.full((1100,), store.num_workers * (store.num_workers + 1) / 2))
    assert torch.equal(again, small)
    for turn in (1.0, 2.0):  # now by the short way: into another tensor, in place, and without an optimizer no longer
        gradient_of_turn = torch.full((1100,), turn)
        store.pushpull(["small"], [gradient_of_turn], [small]) if turn == 1.0 else store.pushpull(
            "small", gradient_of_turn
        )
        store.pull("small", again)
        assert torch.equal(again, small if turn == 1.0 else gradient_of_turn)
        assert torch.equal(again, torch.full((1100,), store.num_workers * turn))
    store.pushpull("small", torch.ones(1100, requires_grad=True), again.t())
    assert torch.equal(again, torch.full((1100,), float(store.num_workers)))
    rows = torch.empty(store.rank + 1, 77)
    store.row_sparse_pull("odd", rows, row_ids=torch.arange(store.rank + 1) * 3)
    store.barrier()
    return {"begun": begun, "pushed": pushed, "odd": transposed.contiguous(), "number": number, "rows": rows}


def updater() -> Tensor:
    store = kvstore.create()

    def add_twice(key: str, total: Tensor, value: Tensor) -> None:
        assert key == "w"
        value.add_(total, alpha=2.0)

    store.set_updater(add_twice)
    store.init("w", torch.ones(90, 90))
    out = torch.empty(90, 90)
    store.pushpull("w", torch.full((90, 90), float(store.rank + 1)), out)
    return out


def disagree(how: str) -> None:
    """Rank 1 does something else than rank 0, which must raise on both."""
    other = dist.get_rank() == 1
    store = kvstore.create("dist_device_sync" if how == "type" and other else "dist_sync")
    numbers: dict[str, Any] = {"lr": 0.5 if how == "numbers" and other else 0.1}
    if how != "small":
        store.set_optimizer(torch.optim.Adam if how == "optimizer" and other else torch.optim.SGD, **numbers)
    if how == "compression" and other:
        store.set_gradient_compression(ringdp.Compression("int8"))
    shape = (30, 41) if how == "shape" and other else (30, 40)
    dtype = torch.float64 if how == "dtype" and other else torch.float32
    store.init("first", torch.ones(3))
    if not (how == "missing" and other):
        store.init("w", torch.zeros(shape, dtype=dtype))
    out = torch.empty(shape, dtype=dtype)
    if how == "missing":
        store.pushpull("first", torch.ones(3))
    if how == "later lr":
        store.pushpull("w", out)
        store.set_learning_rate(0.3 if other else 0.2)
    if how == "pushed" and other:
        store.push("first", torch.ones(3))
    if how == "priority":
        store.push(["first", "w"], [torch.ones(3), out])
        store.push("w", out, priority=5 if other else -5)
        store.push("first", torch.ones(3))
    wrong = torch.empty(4) if how == "value" and other else out
    if how == "small":
        for _ in range(2):
            store.pushpull("first", torch.ones(3))
        store.pushpull("first", torch.ones(3), torch.ones(4) if other else None)
    if how == "scale":
        store.pushpull("w", out, scale=float("nan") if other else 1.0)
    if how in ("step", "batch size"):
        step_with(how, store, (float("inf") if how == "step" else float("nan")) if other else 1.0)
    if other:
        _misuse(how, store)
    if how == "updater":
        store.set_updater(_fail_on_rank_1)
    if how == "barrier" and other:
        store.barrier()
    store.push("w", wrong)
    store.pull("w", out)


def _misuse(how: str, store: kvstore.KVStore) -> None:
    """Arguments of kinds that no call takes: what Python itself would raise about them the other ranks hear of, too."""
    if how == "keys":
        store.push(None, torch.ones(3))  # type: ignore[arg-type]
    elif how == "urgent":
        store.push("w", torch.empty(30, 40), priority="high")  # type: ignore[arg-type]
    elif how == "row numbers":
        store.row_sparse_pull("w", [torch.empty(1, 40), torch.empty(1, 40)], row_ids=torch.zeros(1, dtype=torch.long))
    elif how == "rows of floats":
        store.row_sparse_pull("w", torch.empty(1, 40), row_ids=torch.zeros(1))
    elif how == "no model":
        store.attach([nn.Linear(2, 2)])  # type: ignore[arg-type]
    elif how == "rate":
        store.set_learning_rate("0.1")  # type: ignore[arg-type]
    elif how == "two bits":
        store.set_gradient_compression({"type": "2bit", "threshold": "high"})


def step_with(how: str, store: kvstore.KVStore, number: float) -> None:
    model = nn.Linear(9, 9)
    update: Callable[..., None]
    if how == "step":
        update = store.attach(model).step
    else:
        update = kvstore.Trainer(model, "sgd", {"learning_rate": 0.1}, store).step
    model(torch.ones(9)).sum().backward()
    update(number)


def _fail_on_rank_1(key: str, total: Tensor, value: Tensor) -> None:
    if dist.get_rank() == 1:
        raise OverflowError("the updater cannot")


def outcome_of(case: Callable[..., Any], *arguments: Any) -> tuple[str, str]:
    """The type and text of what it raises."""
    try:
        case(*arguments)
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def saved_state(steps: int, path: str) -> dict[str, Any]:
    """A store's state after some steps, with compression and Adam; its optimizer's is in the file too."""
    store = _trained_store(steps)
    store.save_optimizer_states(path)
    return store.state_dict()


def _trained_store(steps: int, begin: int = 0, state: Mapping[str, Any] | None = None) -> kvstore.KVStore:
    store = kvstore.create(reduce="mean")
    store.set_optimizer(torch.optim.Adam, lr=0.1)
    first = values(3)
    if state is not None:
        store.load_state_dict(state)
    else:
        store.init(list(first), list(first.values()))
    for step in range(begin, begin + steps):
        pushed = values(1000 + step)  # the same on all ranks: then the mean does not depend on their number
        store.pushpull(list(pushed), list(pushed.values()))
    return store


def go_on(steps: int, begin: int, state: Mapping[str, Any] | None) -> dict[str, Any]:
    return _trained_store(steps, begin, state).state_dict()


def load_file(path: str) -> dict[str, Any]:
    """The optimizer's state of a new store that loads the file."""
    store = kvstore.create(reduce="mean")
    store.set_optimizer(torch.optim.Adam, lr=0.5)
    first = values(3)
    store.init(list(first), list(first.values()))
    store.load_optimizer_states(path)
    return store.state_dict()["optimizer"]


def load_differently() -> None:
    state = _trained_store(1).state_dict()
    if dist.get_rank() == 1:
        state["values"]["odd"] += 1
    _trained_store(0, state=state)


def bytes_of_states() -> tuple[int, int]:
    """Of the optimizer's tensors and of the values, on this rank."""
    store = _trained_store(1)
    states = store.optimizer.state.values()
    held = sum(it.numel() for state in states for it in state.values() if it.dim())
    return held, sum(it.numel() for it in store._table.slices.values())


def attached_forms() -> dict[str, Any]:
    """Accumulation, a parameter that is not used, steps that are thrown away, and a second backward too many."""
    model = make_model(torch.float64)
    model.register_parameter("unused", nn.Parameter(torch.ones(5, dtype=torch.float64)))
    store = kvstore.create(reduce="mean")
    store.set_optimizer("sgd", learning_rate=0.1)
    attached = store.attach(model)
    rank = store.rank
    with attached.no_sync():
        model(batch(0, rank, torch.float64)).square().mean().backward()
    model(batch(1, rank, torch.float64)).square().mean().backward()
    attached.step()
    accumulated = [it.detach().clone() for it in model.parameters()]
    model.zero_grad()
    model(batch(2, rank, torch.float64)).square().mean().backward()
    attached.discard()
    model.zero_grad()
    model(batch(3, rank, torch.float64)).square().mean().backward()
    attached.step(scale=0.5)
    model.zero_grad()
    model(batch(4, rank, torch.float64)).square().mean().backward()
    twice = outcome_of(lambda: model(batch(4, rank, torch.float64)).square().mean().backward())
    attached.discard()
    attached.detach()
    last = [it.detach().clone() for it in model.parameters()]
    state = store.state_dict()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    store.load_state_dict(state)
    attached.pull()
    assert all(torch.equal(x, y) for x, y in zip(last, model.parameters(), strict=True))
    return {"accumulated": accumulated, "last": last, "twice": twice}
