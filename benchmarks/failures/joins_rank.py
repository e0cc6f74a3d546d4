"""One rank of joins.py, as a program with the arguments FOLDER PEER MODEL RANKS STEP_S [RANK].

It trains a model until the file `finish` is there, or until it is ended, and writes down when, with the sums of the
bits of each step's means and parameters.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import sys
import time
from pathlib import Path

import torch

import ringdp
from benchmarks.failures.elastic_peers_rank import TRAINEES, Trainee
from benchmarks.lib import models
from ringdp.job.byte_collectives import all_gather_bytes
from ringdp.job.elastic import as_unit

MODELS = {"small": [64] * 30, "mlp": [1024, 4096, 4096, 512]}
"""By name, the widths of linear layers: 0.1 and 23.1 million parameters."""
ROWS = 2
"""Of a rank's batch, where ranks do not share a dataset."""


class Book:
    """What this process tells, a line of JSON for each event."""

    def __init__(self, folder: Path, module: torch.nn.Module, step_s: float) -> None:
        self._out = open(folder / f"{os.getpid()}.jsonl", "a", buffering=1)  # noqa: SIM115
        self._module, self._step_s = module, step_s

    def tell(self, what: str, **fields: object) -> None:
        self._out.write(json.dumps({"what": what, "at": time.time(), **fields}) + "\n")

    def step(self, rank: int, number: int, *, takes_part: bool = True) -> None:
        """One that counts, before its gradients are set to zero. `takes_part`: with this rank's batch."""
        at = time.time()
        tensors = [one for parameter in self._module.parameters() for one in (parameter.grad, parameter.detach())]
        bits = sum(int(one.view(torch.int32).sum()) for one in tensors if one is not None)
        self.tell("step", at=at, rank=rank, number=number, bits=bits, takes_part=takes_part)
        time.sleep(self._step_s)


class Watch:
    """What `Trainee.train` calls around each step."""

    over = False

    def __init__(self, book: Book, trainee: Trainee) -> None:
        self._book, self._trainee = book, trainee

    def begin(self) -> None:
        pass

    def end(self, *, counts: bool) -> None:
        if counts:
            self._book.step(self._trainee.rank, self._trainee.number, takes_part=self._trainee.takes_part)


def make(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    widths = MODELS[name]
    layers = [layer for pair in itertools.pairwise(widths) for layer in (torch.nn.Linear(*pair), torch.nn.ReLU())]
    return torch.nn.Sequential(*layers)


def loss(module: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return module(batch[0]).square().mean()


def train_in_a_job(book: Book, folder: Path, module: torch.nn.Module, width: int) -> None:
    """RingDP's way: `ringdp.elastic.Job`."""
    ringdp.init(device="cpu")
    model = ringdp.RingDP(module, weight="samples")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    job = ringdp.elastic.Job(model, optimizer)
    state_bytes = 3 * sum(parameter.nbytes for parameter in module.parameters())  # with AdamW's two moments
    job.on_change(lambda it: book.tell("change", now=it.now, joined=it.joined, seconds=it.seconds))
    group = torch.distributed.group.WORLD
    assert group is not None
    loader = job.loader(torch.utils.data.TensorDataset(torch.randn(160, width)), global_batch=8)
    book.tell("ready", state_bytes=state_bytes)

    def finished() -> bool:
        seen = bytes([(folder / "finish").exists()])
        return b"\1" in as_unit(group, "the question for the end", lambda: all_gather_bytes(seen, group, room=1))

    for _ in job.epochs(1_000_000):
        for (x,) in loader:
            model(x).square().mean().backward()
            optimizer.step()
            book.step(ringdp.rank(), job.step)
            optimizer.zero_grad()
        if finished():
            break
    job.close()


def main(folder: Path, peer: str, name: str, ranks: int, step_s: float, rank: int) -> None:
    module = make(name)
    book = Book(folder, module, step_s)
    book.tell("began")
    width = MODELS[name][0]
    if peer == "ringdp":
        train_in_a_job(book, folder, module, width)
        return
    logging.disable()  # torchft tells each loss with a traceback
    batch = torch.randn(ROWS, width, generator=torch.Generator().manual_seed(os.getpid()))
    if peer == "horovod":
        import horovod.torch as hvd

        book.tell("ready")  # what follows waits for the others
        hvd.init()
        rank = hvd.rank()
    task = models.Task(module, (batch, batch), loss, 1e-4)
    trainee = TRAINEES[peer](task, folder, rank, ranks, torch.optim.AdamW)
    if peer == "torchft":
        book.tell("ready")
    trainee.train(Watch(book, trainee))


if __name__ == "__main__":
    torch.set_num_threads(1)
    _, where, of, which, size, pause, *rest = sys.argv
    main(Path(where), of, which, int(size), float(pause), int(rest[0]) if rest else -1)
