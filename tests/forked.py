"""Processes that have torch from their first moment: forked from one that took 3 s of CPU to import it and ringdp.

    rank = Forked("tests.train.harness:_be_rank", 0, 2, environ=…, output=log, descriptors=[pipe.fileno()])
    rank.poll(); rank.kill(); rank.wait()           # as subprocess.Popen
    Program("import torch; …", environ=…).communicate()[0]      # as one of [sys.executable, "-c", …]

The process calls `function(*descriptors, *args)` and ends as a program does. What is not as in a fresh one: modules of
torch and ringdp are imported, with the environment of this test run, and every second rank has the same hash seed.
The servers end with the process that started them, and with a server end its processes.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[1]
ORIGINS = 2
# A wrapper imports torch._dynamo, which takes as long as torch itself; the jobs of tests these optimizers and pytest.
PRELOADED = (
    "torch._dynamo",
    "torch.distributed.optim",
    "pytest",
    "torch.testing",
    "ringdp._C",
    "ringdp.ddp.wrapper",
    "ringdp.hooks",
    "ringdp.job.process_group",
    "ringdp.launcher.supervisor",
    "ringdp.testing",
)
ENDS_WITHIN_S = 5.0
LARGEST = 1 << 17  # of a request, with its environment
_PR_SET_PDEATHSIG = 1
_STATUS = struct.Struct("i")


class Forked:
    """One process; `returncode` as of subprocess.Popen."""

    def __init__(
        self,
        function: str,
        *args: Any,
        environ: Mapping[str, str],
        output: IO[Any],
        descriptors: Sequence[int] = (),
        origin: int = 0,
    ) -> None:
        """Start it in the folder of the checkout.

        Args:
            function: ``module:name``; it gets `descriptors`, as they are numbered there, and then `args`.
            output: where its standard output and error go.
            origin: its rank: neighbours come from different servers, so that they do not hash strings alike.
        """
        self.returncode: int | None = None
        server = _server(os.getpid(), origin % ORIGINS)
        self._status, there = os.pipe()
        request = pickle.dumps((function, args, dict(environ)))
        try:
            socket.send_fds(server, [request], [there, output.fileno(), *descriptors])
        finally:
            os.close(there)
        self.pid = int(server.recv(32))

    def poll(self) -> int | None:
        return self._read(0.0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._read(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended; its server says so in a moment
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _read(self, timeout_s: float | None) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], timeout_s)[0]:
            content = os.read(self._status, _STATUS.size)
            os.close(self._status)
            self.returncode = _STATUS.unpack(content)[0] if content else -signal.SIGKILL  # it went with its server
        return self.returncode


class Program(Forked):
    """Python code in such a process; what it writes, both streams, is one text."""

    def __init__(self, code: str, *words: str, environ: Mapping[str, str], origin: int = 0) -> None:
        self._written = tempfile.TemporaryFile("w+")  # noqa: SIM115  (communicate closes it)
        super().__init__("tests.forked:_run", code, words, environ=environ, output=self._written, origin=origin)

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        self.wait(timeout)
        with self._written as written:
            written.seek(0)
            return written.read(), None


def _run(code: str, words: Sequence[str]) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv[:] = ["-c", *words]
    exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})


@functools.cache
def _server(owner: int, origin: int) -> socket.socket:
    """The connection to the process that forks; one for each process that asks."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    unwanted = ("RINGDP_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC_")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(unwanted)}
    environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [environ.get("PYTHONPATH")])])
    with there:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.forked", str(there.fileno())],
            cwd=ROOT,
            env=environ | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            pass_fds=[there.fileno()],
        )

    def end() -> None:
        if os.getpid() == owner:
            here.close()
            try:
                process.wait(ENDS_WITHIN_S)
            except subprocess.TimeoutExpired:  # it is importing torch still
                process.kill()
                process.wait()

    atexit.register(end)
    return here


# In the server, and in the processes it forks.


def _serve(connection: socket.socket) -> tuple[str, Sequence[Any], list[int]] | None:
    """Fork for each request, and say what became of each process. Returns in such a process: what it is to call."""
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    statuses: dict[int, int] = {}
    while True:
        ready = select.select([connection.fileno(), woken], [], [])[0]
        if woken in ready:
            os.read(woken, 512)
            _reap(statuses)
        if connection.fileno() not in ready:
            continue
        request, descriptors, _, _ = socket.recv_fds(connection, LARGEST, 16)
        if not request:
            return None
        status, output, *handed = descriptors
        function, args, environ = pickle.loads(request)
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for descriptor in (woken, wakes, status, *statuses.values()):
                os.close(descriptor)
            connection.close()
            for standard in (1, 2):
                os.dup2(output, standard)
            os.close(output)
            _end_with_the_parent()
            os.environ.clear()
            os.environ.update(environ)
            return function, args, handed
        statuses[pid] = status
        for descriptor in (output, *handed):
            os.close(descriptor)
        connection.send(str(pid).encode())


def _reap(statuses: dict[int, int]) -> None:
    while statuses:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        descriptor = statuses.pop(pid)
        with contextlib.suppress(BrokenPipeError):  # nobody wants to know
            os.write(descriptor, _STATUS.pack(os.waitstatus_to_exitcode(status)))
        os.close(descriptor)


def _end_with_the_parent() -> None:
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _main() -> None:
    _end_with_the_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the test run's to handle
    import torch

    for module in PRELOADED:
        importlib.import_module(module)
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # a collection in a forked process would write to, and so copy, the memory of all objects
    call = _serve(socket.socket(fileno=int(sys.argv[1])))
    if call is not None:
        function, args, descriptors = call
        module, _, name = function.partition(":")
        getattr(importlib.import_module(module), name)(*descriptors, *args)


if __name__ == "__main__":
    _main()
