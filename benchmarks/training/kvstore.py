"""The key-value store beside what it is made of, and beside RingDP: bytes, steps, memory.

    python -m benchmarks kvstore                          2 ranks on this machine
    python -m benchmarks kvstore --hosts 4 --rate 1gbit   4 ranks on hosts of their own (needs root)

First the bytes: a pushpull of 25 MiB in 40 keys and of 4 KiB in one, without an optimizer, beside a reduce-scatter and
an all-gather of as many bytes in one tensor, and an all-reduce. All must give the same sums before anything is timed.
Then training steps with Adam: RingDP, RingDP with torch's ZeroRedundancyOptimizer, a model attached to a store, and a
Trainer. All must give the same parameters. Times are medians over alternating blocks, of the slowest rank; memory is
what rank 0's optimizer holds.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.lib import models, session
from benchmarks.lib.measure import format_size, format_time, table

LARGE, KEYS, SMALL = 25 << 20, 40, 4 << 10
PEERS = ("reduce-scatter + all-gather", "all-reduce")
STEPS = ("ringdp", "ringdp + ZeRO", "attached", "Trainer")
_RATE = 1e-4


class Bytes:
    """One amount of bytes in some keys, by all ways of adding it up over the ranks."""

    def __init__(self, size: int, keys: int, group: dist.ProcessGroup) -> None:
        from ringdp import kvstore

        ranks = group.size()
        count = size // 4 // (keys * ranks * 64) * ranks * 64
        generator = torch.Generator().manual_seed(group.rank())
        self.values = [torch.randn(count, generator=generator) for _ in range(keys)]
        self.names = [f"key{index}" for index in range(keys)]
        self.out = [torch.empty(count) for _ in range(keys)]
        self.flat = torch.cat(self.values)
        self.chunk, self.gathered = torch.empty(self.flat.numel() // ranks), torch.empty_like(self.flat)
        self.store = kvstore.create(group=group)
        self.store.init(self.names, self.values)
        self.stepping = kvstore.create(group=group)
        self.stepping.set_optimizer(torch.optim.SGD, lr=_RATE)
        self.stepping.init(self.names, self.values)
        self.group = group
        self.calls: dict[str, Callable[[], object]] = {
            "kvstore": lambda: self.store.pushpull(self.names, self.values, self.out),
            "kvstore, SGD": lambda: self.stepping.pushpull(self.names, self.values, self.out),
            PEERS[0]: self.scatter_and_gather,
            PEERS[1]: lambda: dist.all_reduce(self.gathered, group=group),
        }

    def scatter_and_gather(self) -> None:
        dist.reduce_scatter_tensor(self.chunk, self.flat, group=self.group)
        dist.all_gather_into_tensor(self.gathered, self.chunk, group=self.group)

    def check(self) -> None:
        """Raises AssertionError where the ways differ."""
        self.store.pushpull(self.names, self.values, self.out)
        together = torch.cat(self.out)
        self.scatter_and_gather()
        assert torch.allclose(together, self.gathered, atol=1e-5), "the sums differ"
        self.gathered.zero_()  # all-reduces add to it


class Trainee:
    """One model by one way."""

    def __init__(self, name: str, how: str, group: dist.ProcessGroup) -> None:
        import ringdp
        from ringdp import kvstore

        self.task = models.make(name, rank=group.rank())
        module = self.task.module
        self.module: nn.Module = module
        self.update: Callable[[], object]
        self.states: Callable[[], Any]
        if how == "attached":
            store = kvstore.create(reduce="mean", group=group)
            store.set_optimizer(torch.optim.Adam, lr=_RATE)
            self.update = store.attach(module).step
            self.states = lambda: store.optimizer.state
        elif how == "Trainer":
            trainer = kvstore.Trainer(
                module, torch.optim.Adam, {"lr": _RATE}, kvstore.create(reduce="mean", group=group)
            )
            self.update = lambda: trainer.step(1)
            self.states = lambda: trainer.optimizer.state
        else:
            self.module = ringdp.RingDP(module, process_group=group)
            optimizer: Any = torch.optim.Adam(module.parameters(), lr=_RATE)
            if how != "ringdp":
                from torch.distributed.optim import ZeroRedundancyOptimizer

                optimizer = ZeroRedundancyOptimizer(
                    module.parameters(), optimizer_class=torch.optim.Adam, process_group=group, lr=_RATE
                )
            self.update = optimizer.step
            self.states = lambda: optimizer.optim.state if how != "ringdp" else optimizer.state

    def step(self) -> None:
        self.module.zero_grad()
        self.task.loss(self.module, self.task.batch).backward()
        self.update()

    def state_bytes(self) -> int:
        held = [it for state in self.states().values() for it in state.values() if isinstance(it, Tensor)]
        return sum(it.numel() * it.element_size() for it in held if it.dim())

    def parameters(self) -> Tensor:
        return torch.cat([it.detach().reshape(-1) for it in self.task.module.parameters()])


def run_rank(joined: session.Joined) -> None:
    given = joined.settings
    torch.set_num_threads(1)
    group = dist.new_group(list(range(joined.world_size)), backend="ring")
    assert isinstance(group, dist.ProcessGroup)
    moved = []
    for size, keys, repeats in ((LARGE, KEYS, 5), (SMALL, 1, 200)):
        one = Bytes(size, keys, group)
        one.check()
        seconds = session.alternate(one.calls, given["rounds"], repeats)
        moved.append({"bytes": one.flat.numel() * 4, "keys": keys, "seconds": seconds})
        del one
    trained = []
    for name in given["models"]:
        trainees = {how: Trainee(name, how, group) for how in STEPS}
        for one_of_them in trainees.values():
            for _ in range(3):
                one_of_them.step()
        first = trainees["ringdp"].parameters()
        for how, trainee in trainees.items():
            assert torch.allclose(trainee.parameters(), first, atol=1e-5), f"{how} trains otherwise"
        seconds = session.alternate({how: it.step for how, it in trainees.items()}, given["rounds"], given["steps"])
        memory = {how: it.state_bytes() for how, it in trainees.items()}
        trained.append({"model": name, "seconds": seconds, "state_bytes": memory})
        del trainees
    joined.deliver({"moved": moved, "trained": trained})


def settings(args: argparse.Namespace) -> dict[str, Any]:
    return {"models": args.models, "rounds": args.rounds, "steps": args.steps}


def report(result: dict[str, Any]) -> str:
    """The result as text."""
    parts = []
    for row in result["rows"]["moved"]:
        medians = {name: statistics.median(seconds) for name, seconds in row["seconds"].items()}
        cells = [
            [name, format_time(it), f"{medians['kvstore'] / it:.2f}", format_time(min(row["seconds"][name]))]
            for name, it in medians.items()
        ]
        title = f"{format_size(row['bytes'])} in {row['keys']} keys"
        parts.append(table([title, "median", "kvstore / it", "least"], cells))
    for row in result["rows"]["trained"]:
        medians = {name: statistics.median(seconds) for name, seconds in row["seconds"].items()}
        cells = [
            [name, format_time(it), f"{medians['attached'] / it:.3f}", f"{row['state_bytes'][name] / 2**20:.1f} MiB"]
            for name, it in medians.items()
        ]
        parts.append(table([f"step of {row['model']}", "median", "attached / it", "optimizer on rank 0"], cells))
    return session.text(result, "key-value store", *parts)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", default=",".join(models.NAMES), help=f"of {', '.join(models.NAMES)}; empty: none")
    parser.add_argument("--rounds", type=int, default=7, help="blocks of each way (default 7)")
    parser.add_argument("--steps", type=int, default=5, help="steps of a block (default 5)")


def check(args: argparse.Namespace) -> None:
    args.models = session.chosen(args.models, models.NAMES)
    session.at_least(1, rounds=args.rounds, steps=args.steps)
