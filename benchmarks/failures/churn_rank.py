"""What each rank of churn.py does: train until it is killed or told to end, and write down what counts for it.

The gradients are whole numbers that follow from the rank's place (its rank at the start) and the step, so their exact
mean over any members can be computed elsewhere; the first one is 2 to the place, so the mean says whose it is.
"""

from __future__ import annotations

import faulthandler
import hashlib
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

SHAPES = ((90, 300), (1,), (64, 500), (301,), (7, 3), (20_000,))
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "micro-batches": {},
    "units": {},  # a mean of metrics in each step, and checkpoints
    "samples": {"weight": "samples"},
    "int8": {"compression": "int8"},
    "reproducible": {"reproducible": True},
}
EXACT = ("plain", "micro-batches", "units", "reproducible")
"""Of these the mean is compared to the bit with one that is computed from the members."""
SAVE_EVERY = 10
ASK_EVERY = 4


def coefficients(place: int, step: int) -> list[Tensor]:
    """The gradients of that rank in that step, before the mean."""
    generator = torch.Generator().manual_seed(100_003 * step + place)
    made = [torch.randint(-8, 9, shape, generator=generator).float() for shape in SHAPES]
    made[0].view(-1)[0] = 2.0**place
    return made


def samples_of(place: int, step: int) -> int:
    return 1 + (place + step) % 3


def digest(tensors: Sequence[Tensor]) -> str:
    found = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        found.update(tensor.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


class Functional(nn.Module):
    """Its gradients are what it is given; `x` has as many rows as the batch has samples."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in SHAPES])

    def forward(self, x: Tensor, given: list[Tensor]) -> Tensor:
        parts = [(part * one).sum() for part, one in zip(self.parts, given, strict=True)]
        return torch.stack(parts).sum() + 0 * x.sum()


class Record(logging.Handler):
    """Lines of a file, each written at once: a rank that is killed leaves what counted for it."""

    def __init__(self, path: Path) -> None:
        super().__init__(logging.DEBUG)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, *words: object) -> None:
        os.write(self._file, ("\t".join(map(str, words)) + "\n").encode())

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.levelno == logging.DEBUG and text.startswith("view ") and isinstance(record.args, tuple):
            self.write("view", record.args[0], record.args[1])
        elif "lost" in text:
            self.write("line", text.replace("\n", " "))


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def raises(number: int, frame: object) -> NoReturn:
    raise ValueError("a sample of another size")


def train(folder: Path, kind: str, pause_s: float) -> None:
    import ringdp
    from ringdp import checkpoint

    record = Record(folder / f"record-{os.environ['RANK']}")
    logging.getLogger("ringdp").addHandler(record)
    logging.getLogger("ringdp.elastic").setLevel(logging.DEBUG)  # it says who is in each view
    ringdp.init(device="cpu", timeout=60)
    place = ringdp.rank()
    module = Functional()
    model = ringdp.RingDP(module, bucket_cap_mb=0.1, **KINDS[kind])
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.5)
    record.write("begins", os.getpid(), time.time())
    step = 0
    while True:
        given = coefficients(place, step)
        x = torch.ones(samples_of(place, step), 1)
        if kind == "micro-batches":
            halves = [[one * 0.25 for one in given], [one * 0.75 for one in given]]
            with model.no_sync():
                model(x, halves[0]).backward()
            model(x, halves[1]).backward()
        else:
            model(x, given).backward()
        gradients = [part.grad for part in module.parts]
        mark = gradients[0].view(-1)[0].item().hex()
        grads = digest([one for one in gradients if one is not None])
        optimizer.step()
        optimizer.zero_grad()
        record.write(
            "step", step, ringdp.world_size(), mark, grads, digest(list(module.parts)), time.time(), descriptors()
        )
        if kind == "units":
            record.write("mean", step, ringdp.metrics.mean(float(step)))
            if step % SAVE_EVERY == 0:
                checkpoint.save(folder / "checkpoints", step, {"model": model.state_dict()})
        step += 1
        if step % ASK_EVERY == 0 and ringdp.metrics.mean(float((folder / "stop").exists())) > 0:
            break
        time.sleep(pause_s)
    record.write("ends", time.time())
    ringdp.shutdown()


def main() -> None:
    folder, kind, pause_s = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    stacks = open(folder / f"stacks-{os.environ['RANK']}", "w")  # noqa: SIM115
    faulthandler.register(signal.SIGUSR2, file=stacks, all_threads=True)
    signal.signal(signal.SIGUSR1, raises)
    torch.set_num_threads(1)
    train(folder, kind, pause_s)


if __name__ == "__main__":
    main()
