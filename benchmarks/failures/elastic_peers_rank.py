"""One rank of elastic_peers.py, as a program with the arguments FOLDER PEER MODEL RANKS VICTIM [RANK].

It trains until one rank has killed itself and the next step counts (`Watch`). PEER is a key of `TRAINEES`; `cost` in
its place trains by several in turns while no rank is lost. Horovod numbers its ranks itself, so RANK is left out there.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

import ringdp
from benchmarks.lib import models
from benchmarks.lib.measure import interval

STEPS_BEFORE = 6  # that count, before the kill
PATIENCE_S = 60.0


class Watching(Protocol):
    """What is called around each step, until it is over."""

    over: bool

    def begin(self) -> None: ...
    def end(self, *, counts: bool) -> None: ...


class Trainee:
    """A model in a peer's wrapper, and its step as the peer's own example has it."""

    number = 0
    """Of the last step that counts, also on a rank that replaces another one."""
    takes_part = True
    """Whether this rank's batch is in it."""

    def __init__(
        self,
        task: models.Task,
        folder: Path,
        rank: int,
        ranks: int,
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    ) -> None:
        self.task, self.folder, self.rank, self.ranks = task, folder, rank, ranks
        self.model: Any = task.module
        self.optimizer: Any = optimizer(task.module.parameters(), task.learning_rate)
        self.join()

    def join(self) -> None:
        """Wrap `model` and `optimizer`; all ranks call it."""

    def step(self) -> bool:
        """Whether it counts: whether the optimizer stepped."""
        self.optimizer.zero_grad()
        self.task.loss(self.model, self.task.batch).backward()
        self.optimizer.step()
        return True

    def train(self, watch: Watching) -> None:
        """Step until the watch is over."""
        while not watch.over:
            watch.begin()
            watch.end(counts=self.step())

    def leave(self) -> None:
        """End what runs beside the training."""


class Elastic(Trainee):
    """RingDP in an elastic job."""

    def join(self) -> None:
        os.environ["RINGDP_ELASTIC"] = "1"
        where = f"file://{self.folder}/store"
        ringdp.init(init_method=where, rank=self.rank, world_size=self.ranks, timeout=PATIENCE_S)
        self.model = ringdp.RingDP(self.model)

    def leave(self) -> None:
        ringdp.shutdown()


class Plain(Trainee):
    """RingDP over a group that no loss survives: only beside the others in `cost`."""

    def join(self) -> None:
        os.environ["RINGDP_ELASTIC"] = "0"
        self.model = ringdp.RingDP(self.model, process_group=dist.new_group(backend="ring"))
        os.environ["RINGDP_ELASTIC"] = "1"


class TorchFT(Trainee):
    """torchft as its train_ddp.py has it: a replica group is one process; the lighthouse is the parent's."""

    def join(self) -> None:
        from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

        inner = self.optimizer
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        self._manager = Manager(
            pg=ProcessGroupGloo(timeout=timedelta(milliseconds=int(os.environ["GLOO_TIMEOUT_MS"]))),
            min_replica_size=1,
            load_state_dict=lambda state: (
                self.task.module.load_state_dict(state["model"]),
                inner.load_state_dict(state["optimizer"]),
            ),
            state_dict=lambda: {"model": self.task.module.state_dict(), "optimizer": inner.state_dict()},
            replica_id=f"peer_{self.rank}",
            timeout=timedelta(seconds=30),
            heartbeat_interval=timedelta(milliseconds=int(os.environ["HEARTBEAT_INTERVAL_MS"])),
            rank=0,
            world_size=1,
            store_addr="127.0.0.1",
            store_port=self._store.port,
            hostname="127.0.0.1",
        )
        self.model = DistributedDataParallel(self._manager, self.model)
        self.optimizer = Optimizer(self._manager, inner)
        self._wait_for_all_managers()

    def _wait_for_all_managers(self) -> None:
        """They send heartbeats from now on, so that the first quorum is one of all ranks."""
        here = Path(self.folder, f"here-{self.rank}")
        if here.exists():  # this process replaces one that died
            return
        here.touch()
        end = time.monotonic() + PATIENCE_S
        while len(list(self.folder.glob("here-*"))) < self.ranks and time.monotonic() < end:
            time.sleep(0.02)
        time.sleep(0.3)

    def step(self) -> bool:
        self.optimizer.zero_grad()  # asks the lighthouse who takes part
        self.task.loss(self.model, self.task.batch).backward()
        before = self._manager.current_step()
        self.optimizer.step()
        self.number = self._manager.current_step()
        self.takes_part = self._manager.is_participating()
        return self.number > before

    def leave(self) -> None:
        self._manager.shutdown(wait=False)


class Horovod(Trainee):
    """Horovod Elastic with a commit behind each step, so that no more than the step itself can be lost."""

    def join(self) -> None:
        import horovod.torch as hvd

        names = self.model.named_parameters()
        self.optimizer = hvd.DistributedOptimizer(self.optimizer, named_parameters=names)

    def train(self, watch: Watching) -> None:
        import horovod.torch as hvd

        @hvd.elastic.run
        def steps(state: Any) -> None:
            while not watch.over:
                watch.begin()  # again after a loss, from the last commit
                counts = self.step()
                self.number = state.number = state.number + 1
                watch.end(counts=counts)
                state.commit()

        steps(hvd.elastic.TorchState(model=self.model, optimizer=self.optimizer, number=0))


class Ddp(Trainee):
    """torch's DistributedDataParallel on gloo, which no loss survives: only beside the others in `cost`."""

    def join(self) -> None:
        group = dist.new_group(backend="gloo")
        self.model = torch.nn.parallel.DistributedDataParallel(self.model, process_group=group)


TRAINEES: dict[str, type[Trainee]] = {"ringdp": Elastic, "torchft": TorchFT, "horovod": Horovod}


class Watch:
    """Counts steps, kills the victim in the backward of one, and notes how the others come to the next that counts."""

    def __init__(self, task: models.Task, folder: Path, rank: int, victim: int) -> None:
        self.over = False
        self._task, self._folder, self._rank, self._victim = task, folder, rank, victim
        self._counted = 0
        self._lost = 0  # attempts of the step of the loss that did not count
        self._open = False
        self._start: list[torch.Tensor] = []  # the parameters that the step of the loss starts from
        self._means: list[torch.Tensor] = []
        list(task.module.parameters())[-1].register_hook(self._die)  # its gradient is the first one of a backward

    @property
    def _armed(self) -> bool:
        return self._counted == STEPS_BEFORE

    def begin(self) -> None:
        if self._open:  # the last attempt ended in an exception that the peer caught
            self._lost += 1
        elif self._armed and not self._start:
            self._start = [parameter.detach().clone() for parameter in self._task.module.parameters()]
        self._open = True

    def end(self, *, counts: bool) -> None:
        self._open = False
        if not counts:
            self._lost += self._armed
        elif not self._armed:
            self._counted += 1
        else:
            self._ended = time.time()
            self._means = [parameter.grad.clone() for parameter in self._task.module.parameters()]  # type: ignore[union-attr]
            self.over = True

    def _die(self, _gradient: torch.Tensor) -> None:
        if self._armed and self._rank == self._victim:
            Path(self._folder, "killed").write_text(repr(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)

    def report(self, name: str) -> None:
        """Into rank-<r>.pt: when, what was lost, the step's means, and this rank's own gradients in that step."""
        own = models.make(name, rank=self._rank)
        with torch.no_grad():
            for parameter, value in zip(own.module.parameters(), self._start, strict=True):
                parameter.copy_(value)
        own.loss(own.module, own.batch).backward()
        gradients = [parameter.grad for parameter in own.module.parameters()]
        found = {"ended": self._ended, "lost": self._lost}
        found |= {"means": _flat(self._means), "own": _flat(gradients)}  # type: ignore[dict-item]
        torch.save(found, self._folder / f"rank-{self._rank}.pt")


def _flat(tensors: list[Any]) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def lose(folder: Path, peer: str, model: str, ranks: int, victim: int, rank: int) -> None:
    try:
        task = models.make(model, rank=rank)
        trainee = TRAINEES[peer](task, folder, rank, ranks)
        watch = Watch(task, folder, rank, victim)
        trainee.train(watch)
        watch.report(model)
        trainee.leave()
    except BaseException as error:
        Path(folder, f"error-{rank}").write_text(f"{type(error).__name__} {error}".strip())
        raise


def cost(folder: Path, model: str, ranks: int, rank: int, rounds: int, block: int) -> None:
    """Step times of all peers that are here, blocks in turns; the slowest rank's, into FOLDER/cost."""
    peers: dict[str, type[Trainee]] = {
        "ringdp": Elastic,
        "plain": Plain,
        "ddp": Ddp,
    }  # ringdp first: it makes the default group
    if find_spec("torchft") is not None:
        peers["torchft"] = TorchFT
    trainees = {name: kind(models.make(model, rank=rank), folder, rank, ranks) for name, kind in peers.items()}
    times: dict[str, list[float]] = {name: [] for name in trainees}
    for number in range(-1, rounds):  # the first one is not counted
        for name in list(trainees) if number % 2 else reversed(trainees):
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(block):
                trainees[name].step()
            slowest = torch.tensor([(time.perf_counter() - begin) / block])
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            if number >= 0:
                times[name].append(slowest.item())
    if rank == 0:
        found: dict[str, list[float]] = {}
        for name, seconds in times.items():
            ratios = [100 * (ours / theirs - 1) for ours, theirs in zip(seconds, times["ddp"], strict=True)]
            found[name] = [statistics.median(seconds), *interval(ratios)]
        Path(folder, "cost").write_text(json.dumps(found))
    dist.barrier()
    for trainee in reversed(trainees.values()):
        trainee.leave()


def main() -> None:
    logging.disable()  # torchft tells each loss with a traceback
    torch.set_num_threads(1)
    folder, peer, model, ranks, victim, *rest = sys.argv[1:]
    if peer == "cost":
        cost(Path(folder), model, int(ranks), *map(int, rest))
        return
    if peer == "horovod":
        import horovod.torch as hvd

        hvd.init()
        rest = [str(hvd.rank())]
    lose(Path(folder), peer, model, int(ranks), int(victim), int(rest[0]))


if __name__ == "__main__":
    main()
