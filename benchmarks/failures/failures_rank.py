"""What each rank of `failures.py` does: work together, suffer one fault, tell what came of it."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

VICTIM = 1
ELEMENTS = 1 << 20


def main(backend: str, fault: str, folder: Path, timeout_s: float) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if backend == "ring":
        import ringdp  # noqa: F401  (registers the backend)
    dist.init_process_group(
        backend,
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout_s),
    )
    buffer = torch.ones(ELEMENTS)
    for _ in range(5):
        dist.all_reduce(buffer)
    dist.barrier()
    (folder / f"met-{rank}").touch()
    outcome = suffer(fault, folder, buffer, at_fault=rank == VICTIM)
    write(folder / f"outcome-{rank}", json.dumps(outcome))
    while True:  # until the starter has seen everybody: leaving would be news to those who still wait
        signal.pause()


def suffer(fault: str, folder: Path, buffer: torch.Tensor, *, at_fault: bool) -> dict[str, str | float | bool]:
    """Work until something is wrong. `seconds` is on the clock that all processes of a machine share."""
    one_call = ONE_CALL.get(fault)
    try:
        if one_call is not None:
            one_call[at_fault]()
            dist.all_reduce(torch.ones(3))  # one that only sends may end before it hears of it
            return {"seconds": time.monotonic(), "error": "", "text": ""}
        if fault == "host gone, idle":
            wait_for(folder / "injured", wait_s=5.0)
        elif fault == "stopped, then goes on" and not at_fault:
            for _ in range(3):
                dist.all_reduce(torch.ones(3))
            return {"seconds": time.monotonic(), "error": "", "text": ""}
        elif at_fault and fault in INJURIES:
            time.sleep(0.3)  # the others are in a call by then
            write(folder / "injured", str(time.monotonic()))
            INJURIES[fault]()
        while True:
            dist.all_reduce(torch.ones(3) if fault in ONLY_SMALL else buffer)
    except Exception as error:
        return {"seconds": time.monotonic(), "error": type(error).__name__, "text": str(error)}


def wait_for(path: Path, *, wait_s: float) -> None:
    """Idle until the link has been cut for that long."""
    while not path.exists() or time.monotonic() - float(path.read_text()) < wait_s:
        time.sleep(0.02)


def write(path: Path, text: str) -> None:
    new = path.with_name(f"{path.name}.new")
    new.write_text(text)
    new.rename(path)


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed_with_a_child() -> None:
    if os.fork() == 0:
        signal.pause()
    killed()


def raised() -> NoReturn:
    raise NobodyCatchesIt("no such file: train.csv")


class NobodyCatchesIt(BaseException):
    """Ends the script; `suffer` catches what a process group raises."""


INJURIES: dict[str, Callable[[], object]] = {
    "killed": killed,
    "killed, a forked child lives on": killed_with_a_child,
    "crashed (SIGSEGV)": lambda: ctypes.string_at(0),
    "raised an exception": raised,
    "stopped (SIGSTOP)": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "stopped, then goes on": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "stuck in Python": lambda: time.sleep(3600),
}
ONLY_SMALL = ("stopped (SIGSTOP)", "stopped, then goes on", "stuck in Python")


def swapped(*, first: bool) -> None:
    import ringdp

    for name in ("a", "b") if first else ("b", "a"):
        with ringdp.named(name) if dist.get_backend() == "ring" else contextlib.nullcontext():
            dist.all_reduce(torch.ones(12))


# What the others do, what the rank at fault does.
ONE_CALL: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
    "another dtype": (
        lambda: dist.all_reduce(torch.ones(12)),
        lambda: dist.all_reduce(torch.ones(12, dtype=torch.int32)),
    ),
    "another shape": (lambda: dist.all_reduce(torch.ones(12)), lambda: dist.all_reduce(torch.ones(13))),
    "another operation": (
        lambda: dist.all_reduce(torch.ones(12)),
        lambda: dist.broadcast(torch.ones(12), src=VICTIM),
    ),
    "another root": (
        lambda: dist.broadcast(torch.ones(12), src=0),
        lambda: dist.broadcast(torch.ones(12), src=VICTIM),
    ),
    "another order (named)": (lambda: swapped(first=True), lambda: swapped(first=False)),
}


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), float(sys.argv[4]))
