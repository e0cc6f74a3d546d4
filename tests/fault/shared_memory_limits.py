"""Ranks as threads of a process that has a limit: python -m tests.fault.shared_memory_limits WHAT VALUE [TRANSPORT].

Prints what came of it as JSON: the transports of every rank, the sum they made, the log lines, the error's text.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import struct
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from tests.core import _core as core

PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
WORLD = 3


def forbid(number: int, error_number: int) -> None:
    """Let a system call of this thread, and of those it starts, fail: seccomp(2)."""

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]

    steps = [
        struct.pack("HBBI", 0x20, 0, 0, 0),  # load the call's number
        struct.pack("HBBI", 0x15, 0, 1, number),  # skip one where it is another
        struct.pack("HBBI", 0x06, 0, 0, 0x00050000 | error_number),
        struct.pack("HBBI", 0x06, 0, 0, 0x7FFF0000),  # allowed
    ]
    code = ctypes.create_string_buffer(b"".join(steps))
    program = Program(len(steps), ctypes.cast(code, ctypes.c_void_p))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    assert libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program)) == 0, os.strerror(ctypes.get_errno())


def limit(what: int, value: int) -> None:
    resource.setrlimit(what, (value, value))


def descriptors_left(count: int) -> None:
    limit(resource.RLIMIT_NOFILE, len(os.listdir("/proc/self/fd")) - 1 + count)


def address_space_left(count: int) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit(resource.RLIMIT_AS, pages * resource.getpagesize() + count)


def control_group(limit_bytes: int) -> None:
    """Enter a new control group with this limit; whoever started this process removes it."""
    group = Path(os.environ["CONTROL_GROUP"])
    (group / os.environ["CONTROL_GROUP_LIMIT"]).write_text(str(limit_bytes))
    (group / "cgroup.procs").write_text(str(os.getpid()))


LIMITS: dict[str, Callable[[int], None]] = {
    "none": lambda _: None,
    "file size": lambda value: limit(resource.RLIMIT_FSIZE, value),
    "descriptors": descriptors_left,
    "address space": address_space_left,
    "control group": control_group,
}


def main(what: str, value: int, transport: str = "auto") -> dict[str, Any]:
    lines: list[str] = []
    core.set_log_sink(lambda level, text: lines.append(f"{'diwe'[level]} {text}"))
    store = core.MemoryStore()

    def rank(me: int) -> tuple[dict[int, str], float]:
        # Rings that need more address space than everything else together.
        ring_bytes = 2**24 if what == "address space" else 0
        runtime = core.Runtime(
            store, me, WORLD, timeout_ms=20_000, transport=transport, shm_ring_bytes=ring_bytes, heal_ms=0
        )
        ones = np.full(100_000, me + 1.0, np.float32)
        group = core.Group(runtime, "all", list(range(WORLD)))
        group.all_reduce(ones, "float32").wait()
        group.close()
        found = runtime.transports()
        runtime.shut_down()
        return found, float(ones[-1])

    with ThreadPoolExecutor(WORLD) as pool:
        start = threading.Barrier(WORLD)
        list(pool.map(lambda _: start.wait(10), range(WORLD)))  # its threads are there
        LIMITS[what](value)
        found = [pool.submit(rank, me) for me in range(WORLD)]
        errors = [type(it.exception()).__name__ + ": " + str(it.exception()) for it in found if it.exception()]
    results = [it.result() for it in found] if not errors else []
    core.set_log_sink(None)
    return {"transports": [it[0] for it in results], "sums": [it[1] for it in results], "errors": errors, "log": lines}


if __name__ == "__main__":
    json.dump(main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:]), sys.stdout)
