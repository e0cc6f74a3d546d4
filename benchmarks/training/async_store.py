"""The asynchronous store beside dist_sync and torch's RPC: what a push and a pull take, slow workers, and losses.

    python -m benchmarks async_store                     2 ranks on this machine
    python -m benchmarks async_store --seeds 0           without trainings

First a push and a pull of 4 KiB, of 25 MiB and of 4,096 rows of 64, which an SGD updates: by `dist_async`, by
`dist_sync` (rows: by a ShardedEmbedding of each kind) in turns, then by torch's RPC to an owner on the next rank. Then
how fast a worker is while rank 1 is half as fast, or unsteady: in four of twenty steps half as fast, in eight twice.
Then the loss of a factorisation and of the small GPT of examples/char_lm.py after as many steps of each rank, with rank
1 half as fast, by staleness, beside dist_sync: mean and spread over seeds.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.lib import session
from benchmarks.lib.measure import format_time, table

SIZES = {"4 KiB": 1 << 10, "25 MiB": 25 << 18}  # elements
ROWS, DIM, TABLE_ROWS = 4096, 64, 100_000
STALENESS: dict[str, int | None] = {"s=0": 0, "s=1": 1, "s=4": 4, "s=16": 16, "None": None}
MODELS = ("factorisation", "char_lm")
_OF_ROWS = f"{ROWS:,} rows x {DIM}"
_STEP_S = 0.004
_held: dict[str, Tensor] = {}  # of an owner over RPC


def _serve_dense(name: str, gradient: Tensor) -> Tensor:
    value = _held.setdefault(name, torch.zeros_like(gradient))
    return value.add_(gradient, alpha=-0.1)


def _serve_rows(ids: Tensor, gradient: Tensor) -> Tensor:
    value = _held.setdefault("rows", torch.zeros(TABLE_ROWS, DIM))
    value.index_add_(0, ids, gradient, alpha=-0.1)
    return value[ids]


def _ways(group: dist.ProcessGroup) -> dict[str, dict[str, Callable[[], object]]]:
    """By what is moved and by way, a call of a push and a pull."""
    import ringdp
    from ringdp import kvstore

    found: dict[str, dict[str, Callable[[], object]]] = {}
    for size, numel in SIZES.items():
        gradient, out = torch.ones(numel), torch.zeros(numel)
        calls: dict[str, Callable[[], object]] = {}
        for name in ("dist_async", "dist_sync"):
            store = kvstore.create(name, group=group)
            store.set_optimizer("sgd", learning_rate=0.1)
            store.init("w", torch.zeros(numel))
            store.pushpull("w", gradient, out)
            calls[name] = functools.partial(store.pushpull, "w", gradient, out)
        found[size] = calls
    ids = _ids(group.rank())
    calls = {}
    for name, asynchronous in (("dist_async", True), ("dist_sync", False)):
        rows = ringdp.nn.ShardedEmbedding(
            TABLE_ROWS, DIM, mode="none", optimizer="sgd", lr=0.1, asynchronous=asynchronous, group=group
        )

        def use(rows: Any = rows) -> None:
            rows(ids).sum().backward()
            rows.step()

        calls[name] = use
    found[_OF_ROWS] = calls
    return found


def _ids(rank: int) -> Tensor:
    return torch.randperm(TABLE_ROWS, generator=torch.Generator().manual_seed(rank))[:ROWS]


def _ways_of_rpc(joined: session.Joined) -> dict[str, Callable[[], object]]:
    rpc: Any = torch.distributed.rpc
    owner = f"rank{(joined.rank + 1) % joined.world_size}"
    found: dict[str, Callable[[], object]] = {
        size: functools.partial(rpc.rpc_sync, owner, _serve_dense, args=(size, torch.ones(numel)))
        for size, numel in SIZES.items()
    }
    found[_OF_ROWS] = functools.partial(
        rpc.rpc_sync, owner, _serve_rows, args=(_ids(joined.rank), torch.ones(ROWS, DIM))
    )
    return found


def _bytes(joined: session.Joined, group: dist.ProcessGroup) -> dict[str, dict[str, list[float]]]:
    repeats = {"4 KiB": 100, "25 MiB": 3}
    rounds = joined.settings["rounds"]
    seconds = {what: session.alternate(calls, rounds, repeats.get(what, 20)) for what, calls in _ways(group).items()}
    # Not in turns: beside the threads of an RPC agent each small operation of either store takes up to five times.
    rpc: Any = torch.distributed.rpc
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{joined.settings['rpc']}")
    rpc.init_rpc(f"rank{joined.rank}", rank=joined.rank, world_size=joined.world_size, rpc_backend_options=options)
    for what, call in _ways_of_rpc(joined).items():
        seconds[what] |= session.alternate({"torch RPC": call}, rounds, repeats.get(what, 20))
    rpc.shutdown()
    return seconds


def _paced(group: dist.ProcessGroup, staleness: int | None, factor: Callable[[int], float], steps: int) -> float:
    """Seconds of rank 0 for its steps; those of rank 1 take `factor` times as long."""
    from ringdp import kvstore

    kv = kvstore.create("dist_async", staleness=staleness, group=group)
    kv.set_optimizer("sgd", learning_rate=0.1)
    value, gradient = torch.zeros(1000), torch.ones(1000)
    kv.init("w", value)
    kv.barrier()
    began = time.perf_counter()
    for step in range(steps):
        time.sleep(_STEP_S * (factor(step) if kv.rank == 1 else 1.0))
        kv.push("w", gradient)
        kv.step()
        kv.pull("w", value)
    took_s = time.perf_counter() - began
    kv.close()
    return took_s


def _speeds(group: dist.ProcessGroup, steps: int) -> dict[str, float]:
    """Rank 0's speed beside a slow rank, over its speed beside one that is not."""
    alone = _paced(group, None, lambda step: 1.0, steps)

    def unsteady(step: int) -> float:
        return 2.0 if step % 20 < 4 else 0.5 if step % 20 < 12 else 1.0

    return {
        "unsteady, on average as fast, s=0": alone / _paced(group, 0, unsteady, steps),
        "unsteady, on average as fast, s=4": alone / _paced(group, 4, unsteady, steps),
        "always half as fast, s=4": alone / _paced(group, 4, lambda step: 2.0, steps),
        "always half as fast, None": alone / _paced(group, None, lambda step: 2.0, steps),
    }


class Factorisation(nn.Module):
    """Ratings of 600 users and 300 films, of four hidden tastes and noise of 0.5."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.users, self.films = nn.Embedding(600, 8), nn.Embedding(300, 8)
        truth = torch.Generator().manual_seed(0)
        self.tastes = torch.randn(600, 4, generator=truth)
        self.traits = torch.randn(300, 4, generator=truth) / 2

    def loss(self, count: int, number: int) -> Tensor:
        generator = torch.Generator().manual_seed(number)
        who, what = (torch.randint(it, (count,), generator=generator) for it in (600, 300))
        noise = 0.5 * torch.randn(count, generator=generator)
        rating = (self.tastes[who] * self.traits[what]).sum(1) + noise
        return ((self.users(who) * self.films(what)).sum(1) - rating).square().mean()


class Language(nn.Module):
    """The GPT of examples/char_lm.py, small."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        from examples import char_lm

        options = char_lm.parse(["--width=48", "--layers=2", "--context=48"])
        data, alphabet = char_lm.encode(torch.frombuffer(bytearray(char_lm.read(200_000)), dtype=torch.uint8))
        self.data = data.long()
        torch.manual_seed(seed)
        self.net = char_lm.GPT(len(alphabet), options)

    def loss(self, count: int, number: int) -> Tensor:
        generator = torch.Generator().manual_seed(number)
        cut = len(self.data) * 9 // 10
        first, last = (0, cut) if number >= 0 else (cut, len(self.data))
        starts = torch.randint(first, last - 49, (count,), generator=generator)
        windows = torch.stack([self.data[it : it + 49] for it in starts.tolist()])
        found = self.net(windows[:, :-1])
        return nn.functional.cross_entropy(found.flatten(0, 1), windows[:, 1:].flatten())


def _trained(group: dist.ProcessGroup, model: str, how: str, seed: int, steps: int) -> float:
    """The loss on unseen data, of rank 0, after as many steps of each rank."""
    from ringdp import kvstore

    module: Any = Factorisation(seed) if model == "factorisation" else Language(seed)
    kv = (
        kvstore.create("dist_sync", reduce="mean", group=group)
        if how == "dist_sync"
        else kvstore.create("dist_async", reduce="mean", staleness=STALENESS[how], group=group)
    )
    rate = 0.02 if model == "factorisation" else 0.003
    trainer = kvstore.Trainer(module, "adam", {"learning_rate": rate}, kvstore=kv)
    for step in range(steps):
        number = 1 + (seed * steps + step) * group.size() + group.rank()
        began = time.perf_counter()
        module.zero_grad()
        module.loss(128 if model == "factorisation" else 16, number).backward()
        if group.rank() == 1:
            time.sleep(time.perf_counter() - began)
        trainer.step(1)
    values = [it.detach() for it in module.parameters()]
    names = [name for name, _ in module.named_parameters()]
    kv.barrier()
    kv.pull(names, values)
    if isinstance(kv, kvstore.AsyncStore):
        kv.close()
    with torch.no_grad():
        return float(module.loss(1024 if model == "factorisation" else 256, -1))


def run_rank(joined: session.Joined) -> None:
    given = joined.settings
    torch.set_num_threads(1)
    group = dist.new_group(list(range(joined.world_size)), backend="ring")
    assert isinstance(group, dist.ProcessGroup)
    seconds = _bytes(joined, group)
    speeds = [_speeds(group, given["steps"]) for _ in range(3)]
    losses = {
        model: {
            how: [_trained(group, model, how, seed, given["train_steps"]) for seed in range(given["seeds"])]
            for how in ("dist_sync", *STALENESS)
        }
        for model in given["models"]
        if given["seeds"]
    }
    joined.deliver({"seconds": seconds, "speeds": speeds, "losses": losses})


def settings(args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(prefix="ringdp-rpc-") as file:
        rpc = file.name  # a name that nothing has: torch's file store makes it
    names = ("rounds", "steps", "seeds", "train_steps", "models")
    return {name: getattr(args, name) for name in names} | {"rpc": rpc}


def report(result: dict[str, Any]) -> str:
    """The result as text."""
    found, parts = result["rows"], []
    for what, seconds in found["seconds"].items():
        medians = {name: statistics.median(it) for name, it in seconds.items()}
        cells = [[name, format_time(it), f"{medians['dist_async'] / it:.2f}"] for name, it in medians.items()]
        parts.append(table([f"push + pull of {what}", "median", "dist_async / it"], cells))
    shares = {name: statistics.median(one[name] for one in found["speeds"]) for name in found["speeds"][0]}
    parts.append(table(["rank 0 beside a rank 1 that is", "speed kept"], [[k, f"{v:.0%}"] for k, v in shares.items()]))
    for model, losses in found["losses"].items():
        cells = [[how, f"{statistics.mean(it):.4f}", f"{max(it) - min(it):.4f}"] for how, it in losses.items()]
        parts.append(table([f"{model}: staleness", "loss on unseen data", "spread"], cells))
    return session.text(result, "asynchronous store", *parts)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=7, help="blocks of each way (default 7)")
    parser.add_argument("--steps", type=int, default=100, help="beside a slow rank (default 100)")
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each kind (default 3)")
    parser.add_argument("--train-steps", type=int, default=300, help="of each rank (default 300)")
    parser.add_argument("--models", default=",".join(MODELS), help=f"of {', '.join(MODELS)}")


def check(args: argparse.Namespace) -> None:
    args.models = session.chosen(args.models, MODELS)
    session.at_least(1, rounds=args.rounds, steps=args.steps, train_steps=args.train_steps)
    session.at_least(0, seeds=args.seeds)
