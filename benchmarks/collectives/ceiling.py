"""The measured ceilings, compiled when they are first needed and called through ctypes: a loop through shared memory
(ceiling.cpp), and a ring over plain sockets (socket_ring.cpp)."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from benchmarks.lib.ranks import Unavailable, compile_program, compiler

SOURCE = Path(__file__).with_name("ceiling.cpp")
SOCKETS = Path(__file__).with_name("socket_ring.cpp")
FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-shared", "-fPIC")
MAX_RANKS = 16


def why_not(*, ranks: int, hosts: int) -> str | None:
    """Why there is no ceiling in that place; None where there is one."""
    if hosts:
        return "it goes through shared memory: one host only"
    if not 2 <= ranks <= MAX_RANKS:
        return f"for 2 to {MAX_RANKS} ranks"
    if compiler() is None:
        return "no C++ compiler: install g++, or name one in CXX"
    return None


class Ceiling:
    """One rank's side. `memory`: path of a file that all ranks open, sized and zeroed by `prepared`."""

    def __init__(self, library: Path, memory: Path, *, rank: int, ranks: int) -> None:
        self._library = load(library)
        with open(memory, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), self._library.ceiling_bytes())
        self._base = (ctypes.c_char * len(self._map)).from_buffer(self._map)
        cores = len(os.sched_getaffinity(0))
        self._self = self._library.ceiling_join(ctypes.addressof(self._base), rank, ranks, cores)
        if not self._self:
            raise Unavailable(f"for 2 to {MAX_RANKS} ranks, not {ranks}")

    def all_reduce(self, x: Tensor) -> None:
        """Sum of everybody's `x`, float32 and contiguous, in place."""
        self._library.ceiling_all_reduce(self._self, x.data_ptr(), x.numel())


def load(library: Path) -> ctypes.CDLL:
    """The compiled library with the types of its functions."""
    found = ctypes.CDLL(str(library))
    found.ceiling_bytes.restype = ctypes.c_size_t
    found.ceiling_join.restype = ctypes.c_void_p
    found.ceiling_join.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_int]
    found.ceiling_all_reduce.restype = None
    found.ceiling_all_reduce.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    return found


@contextlib.contextmanager
def prepared() -> Iterator[dict[str, str]]:
    """What the ranks need, for as long as the `with` lasts: the paths of the library, for this very processor, and
    of a file for all ranks to share. Raises Unavailable."""
    with tempfile.TemporaryDirectory(prefix="ringdp-ceiling-") as folder:
        library = Path(folder) / "ceiling.so"
        compile_program([SOURCE], library, *FLAGS)
        shm = Path("/dev/shm")
        memory = (shm if shm.is_dir() else Path(folder)) / f"{Path(folder).name}-ceiling"
        try:
            with open(memory, "xb") as file:
                os.posix_fallocate(file.fileno(), 0, load(library).ceiling_bytes())
            yield {"library": str(library), "memory": str(memory)}
        finally:
            memory.unlink(missing_ok=True)


class SocketRing:
    """One rank's side of the ring over sockets, on the address from which it reaches MASTER_ADDR. All ranks of torch's
    default group make it together."""

    def __init__(self, library: Path) -> None:
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self._library = ctypes.CDLL(str(library))
        self._call = self._library.socket_ring_all_reduce
        self._call.restype = None
        self._call.argtypes = [ctypes.c_int] * 4 + [ctypes.c_void_p, ctypes.c_size_t]
        with socket.socket(type=socket.SOCK_DGRAM) as probe:
            probe.connect((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
            own = probe.getsockname()[0]
        with socket.create_server((own, 0)) as listener:
            addresses: list[tuple[str, int]] = [("", 0)] * self._ranks
            dist.all_gather_object(addresses, listener.getsockname())
            self._right = socket.create_connection(addresses[(self._rank + 1) % self._ranks])
            self._left, _ = listener.accept()
        for one in (self._right, self._left):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            one.setblocking(False)

    def all_reduce(self, x: Tensor) -> None:
        """Sum of everybody's `x`, float32 and contiguous, in place."""
        self._call(self._right.fileno(), self._left.fileno(), self._rank, self._ranks, x.data_ptr(), x.numel())


@contextlib.contextmanager
def compiled_sockets() -> Iterator[str]:
    """The path of the compiled ring over sockets, for as long as the `with` lasts. Raises Unavailable."""
    with tempfile.TemporaryDirectory(prefix="ringdp-ceiling-") as folder:
        library = Path(folder) / "socket_ring.so"
        compile_program([SOCKETS], library, *FLAGS)
        yield str(library)
