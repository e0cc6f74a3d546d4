"""The measured ceiling: ceiling.cpp, compiled when it is first needed and called through ctypes."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from benchmarks.lib.ranks import Unavailable, compile_program, compiler

SOURCE = Path(__file__).with_name("ceiling.cpp")
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
        compile_program([SOURCE], library, "-O3", "-march=native", "-ffp-contract=off", "-shared", "-fPIC")
        shm = Path("/dev/shm")
        memory = (shm if shm.is_dir() else Path(folder)) / f"{Path(folder).name}-ceiling"
        try:
            with open(memory, "xb") as file:
                os.posix_fallocate(file.fileno(), 0, load(library).ceiling_bytes())
            yield {"library": str(library), "memory": str(memory)}
        finally:
            memory.unlink(missing_ok=True)
