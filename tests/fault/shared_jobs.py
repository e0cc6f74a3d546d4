"""What the ranks of the shared-memory tests do. Each is a process of its own, forked from one that has imported torch
already (tests/fault/hosts.py), so that limits and filters are its own and its death costs the next test nothing."""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import os
import platform
import random
import resource
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

import ringdp
from tests.contract.reduction_order import COMPLEX, pairs, random_input
from tests.fault.hosts import Outcome, RankSpec
from tests.fault.rank_jobs import Story, descriptors, die, job, leftovers, me, record, suffer, tell, told


def play(spec: RankSpec, outcome: Outcome) -> None:
    """The body of a rank: calls the function of this file that its environment names, and leaves what that returns."""
    folder = os.environ["JOB_FOLDER"]
    tell(folder, "pid", str(os.getpid()))
    name, arguments = json.loads(os.environ["JOB"])
    tell(folder, "story", json.dumps(globals()[name](folder, *arguments)))


def transports() -> dict[int, str]:
    """What carries this rank's bytes to each of the others."""
    from ringdp import _C

    found: dict[int, str] = _C.transports()
    return found


class Lines(logging.Handler):
    """What ringdp logs in this process while the block runs; `first` is called with the first line."""

    def __init__(self, level: int = logging.WARNING, first: Callable[[str], None] | None = None) -> None:
        super().__init__(level)
        self.lines: list[str] = []
        self._first = first

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        if self._first is not None and len(self.lines) == 1:
            self._first(self.lines[0])

    def __enter__(self) -> Lines:
        logging.getLogger("ringdp").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("ringdp").removeHandler(self)


def at_byte(count: int, action: Callable[[], Any]) -> None:
    """Run `action` on another thread when this rank has sent `count` more bytes, wherever its operation is then."""
    begin = ringdp.traffic().bytes_sent
    sys.setswitchinterval(1e-4)

    def watch() -> None:
        while ringdp.traffic().bytes_sent - begin < count:
            pass
        action()

    threading.Thread(target=watch, daemon=True).start()


# Killed.


def killed_at(folder: str, victim: int, elements: int, count: int, child: bool) -> dict[str, Any]:
    """The victim dies when it has sent `count` bytes of all-reduces; with `child`, a child that it forked lives on."""
    buffer = torch.ones(elements)
    with job(folder) as story:
        dist.all_reduce(torch.ones(3))
        if me()[0] == victim:
            if child and os.fork() == 0:
                live_on(folder)
            if child:
                told(folder, "child", victim)
            at_byte(count, lambda: die(folder))
        used = transports()
        suffer(story, lambda: dist.all_reduce(buffer))
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return {"story": asdict(story), "transports": used, "children": children}


def live_on(folder: str) -> NoReturn:
    """In the child: tell what it has of the parent's, and stay."""
    tell(folder, "child", json.dumps({"pid": os.getpid(), "left": leftovers([])}))
    while True:
        signal.pause()


# Stopped.


def stopped_at(folder: str, victim: int, elements: int, count: int) -> dict[str, Any]:
    """The victim stops itself when it has sent `count` bytes, and is continued from outside; it says when that is over,
    in the first element."""
    rank, world = me()
    wrong, turn, over = 0, 0, threading.Event()
    with Lines(first=lambda line: tell(folder, "noticed", line)) as log, job(folder) as story:
        used = transports()
        if rank == victim:
            at_byte(count, lambda: stop(folder, over))
        done = False
        while not done:
            turn += 1
            x = torch.full((elements,), float(rank + turn % 100))
            x[0] = float(over.is_set())
            dist.all_reduce(x)
            wrong += int((x[1:] != sum(range(world)) + world * (turn % 100)).sum())
            done = bool(x[0])
    return {"story": asdict(story), "transports": used, "wrong": wrong, "notices": log.lines}


def stop(folder: str, over: threading.Event) -> None:
    tell(folder, "stopping")
    os.kill(os.getpid(), signal.SIGSTOP)
    over.set()


# Limits.


def limited(folder: str, who: list[int], limit: str, argument: Any) -> dict[str, Any]:
    """Meet and add up, with a limit set on some ranks; then everything that can be seen of it."""
    rank, _ = me()
    story, value, used = Story(), 0.0, {}
    before = descriptors()
    with Lines() as log:
        start = time.monotonic()
        if rank in who:
            LIMITS[limit](argument)
        try:
            with job(folder) as story:
                used = transports()
                x = torch.full((300_000,), float(rank + 1))
                dist.all_reduce(x)
                dist.all_reduce(torch.ones(3))
                value = float(x[-1])
        except Exception as error:
            record(story, error)
            story.leftovers = leftovers(before)
        story.at = time.monotonic() - start
    # Above such a limit nothing more could be written.
    for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE, resource.RLIMIT_AS):
        resource.setrlimit(kind, (resource.getrlimit(kind)[1],) * 2)
    return {"story": asdict(story), "transports": used, "value": value, "lines": log.lines}


def limit_descriptors(more: int) -> None:
    """As many as are open now, and `more`."""
    used = max(int(name) for name in os.listdir("/proc/self/fd"))  # counts the one that lists
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + more, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def limit_address_space(more_bytes: int) -> None:
    """As much as is mapped now, and `more_bytes`."""
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + more_bytes, resource.getrlimit(resource.RLIMIT_AS)[1]))


def limit_file_size(bytes_: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def limit_locked_memory(bytes_: int) -> None:
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (bytes_, bytes_))


def join_memory_group(path: str) -> None:
    Path(path, "cgroup.procs").write_text(str(os.getpid()))


_SYSTEM_CALLS = {
    "x86_64": {"memfd_create": 319, "fallocate": 285, "socket": 41, "sendmsg": 46, "fcntl": 72},
    "aarch64": {"memfd_create": 279, "fallocate": 47, "socket": 198, "sendmsg": 211, "fcntl": 25},
}


def refuse_system_call(filter_: list[Any]) -> None:
    """A seccomp filter, as containers have them (seccomp(2)): ``[name, errno]``, or ``[name, errno, n, value]`` for
    calls whose n-th argument has that value alone."""
    name, error_number, *only = filter_
    number = _SYSTEM_CALLS[platform.machine()][name]
    load, equal, answer = 0x20, 0x15, 0x06  # BPF_LD|BPF_W|BPF_ABS, BPF_JMP|BPF_JEQ|BPF_K, BPF_RET|BPF_K
    tests = [(0, number), *([(16 + 8 * only[0], only[1])] if only else [])]
    program = []
    for index, (offset, wanted) in enumerate(tests):
        to_allow = 2 * (len(tests) - index) - 1
        program += [struct.pack("HBBI", load, 0, 0, offset), struct.pack("HBBI", equal, 0, to_allow, wanted)]
    program += [struct.pack("HBBI", answer, 0, 0, 0x00050000 | error_number)]  # SECCOMP_RET_ERRNO
    program += [struct.pack("HBBI", answer, 0, 0, 0x7FFF0000)]  # SECCOMP_RET_ALLOW
    code = ctypes.create_string_buffer(b"".join(program))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0, os.strerror(ctypes.get_errno())  # PR_SET_NO_NEW_PRIVS
    assert libc.prctl(22, 2, header, 0, 0) == 0, os.strerror(ctypes.get_errno())  # PR_SET_SECCOMP, a filter


LIMITS: dict[str, Callable[[Any], None]] = {
    "descriptors": limit_descriptors,
    "address space": limit_address_space,
    "file size": limit_file_size,
    "locked memory": limit_locked_memory,
    "memory group": join_memory_group,
    "system call": refuse_system_call,
}


# Any number of reductions.


@contextmanager
def written_by_twelves(path: Path) -> Iterator[Callable[[Any, str], None]]:
    """Gathers digests of tensors, 12 bytes each; a second file says what they were."""
    digests, names = [], []

    def add(tensor: Any, what: str) -> None:
        raw = tensor.flatten().view(torch.uint8).numpy() if tensor.numel() else b""
        digests.append(hashlib.blake2b(raw, digest_size=12).digest())
        names.append(what)

    yield add
    path.write_bytes(b"".join(digests))
    path.with_suffix(".names").write_text("\n".join(names))


def reduce_at_random(folder: str, seed: int, count: int) -> dict[str, Any]:
    """`count` all-reduces of any type, reduction and size, up to 20 in flight; their bits go into a file."""
    rank, _ = me()
    choice = random.Random(seed)
    known = [(dtype, op) for dtype, op in pairs() if dtype not in COMPLEX or op in ("SUM", "AVG")]  # torch's own limit
    pools: dict[Any, Any] = {}  # every all-reduce takes a window of one, so that nothing is made anew for each
    for index, (dtype, op) in enumerate(known):
        length = 1 << (19 if dtype in ("float32", "bfloat16") else 16)
        if op in ("SUM", "PRODUCT"):
            numbers = torch.from_numpy(random_input(dtype, op, length, (seed, rank, index)))
            pools[dtype, op] = numbers.view(getattr(torch, dtype))
    with job(folder, timeout_s=300.0) as story, written_by_twelves(Path(folder, f"bits-{rank}")) as add:
        used = transports()
        flying: list[tuple[Any, Any, str]] = []
        most = 1
        for number in range(count):
            dtype, op = choice.choice(known)
            size = choice.choice((0, 1, choice.randrange(64), choice.randrange(3000), choice.randrange(1 << 15)))
            pool = pools[dtype, op if op == "PRODUCT" else "SUM"]
            size = choice.randrange(len(pool)) if choice.random() < 0.05 else size
            begin = choice.randrange(len(pool) - size)
            x = pool[begin : begin + size].clone()
            work = dist.all_reduce(x, getattr(dist.ReduceOp, op), async_op=True)
            flying.append((work, x, f"all-reduce {number}: {op} of {dtype}[{size}]"))
            if number % 50 == 0:
                most = choice.choice((1, 2, 5, 20))
            while len(flying) >= most:
                done, result, what = flying.pop(0)
                done.wait()
                add(result, what)
        for done, result, what in flying:
            done.wait()
            add(result, what)
    return {"story": asdict(story), "transports": used}
