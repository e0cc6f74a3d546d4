"""The ranks of a launcher under test are forked, so that each saves the seconds in which a fresh one imports torch.

A forked launcher (launch_jobs.py) calls `install`. When its agent has been forked, a server is forked from that, while
it has one thread. The server forks twice for a rank, which so becomes a child of the agent, a subreaper: pids, exit
statuses, sessions and output are as of a process that the agent started. A rank whose command is not
``python -u SCRIPT``, or whose environment holds what is read before Python runs, is started in the usual way.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import io
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, NoReturn

LARGEST = 1 << 17  # of a request, with its environment
# Variables that are read before Python runs, or while it imports torch.
READ_BEFORE = (
    "LD_",
    "MALLOC_",
    "PYTHON",
    "GLIBC_",
    "KMP_",
    "GOMP_",
    "MKL_",
    "ASAN_",
    "TSAN_",
    "TORCH_LOGS",
    "TORCHDYNAMO_",
)
_PR_SET_NAME = 15  # prctl(2)


def name_process(name: str) -> None:
    """As comm of proc(5) has it: fifteen characters."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode())


def install(name: str) -> None:
    """Let this launcher's agent start ranks by a server. They have `name` as theirs (comm of proc(5))."""
    from ringdp.launcher import agent

    run = agent.run

    def run_with_server(orders: agent.Orders) -> NoReturn:
        from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

        if _imports_torch(orders.arguments.torchrun.training_script):
            setattr(subprocess_handler, "Popen", _Server(name).popen)  # noqa: B010
        run(orders)

    agent.run = run_with_server


def _imports_torch(path: str) -> bool:
    """A script that does not is started sooner by a fresh interpreter."""
    with contextlib.suppress(OSError):
        return any(word in Path(path).read_text() for word in ("import torch", "import ringdp"))
    return False


class _Server:
    """The agent's end."""

    def __init__(self, name: str) -> None:
        self._connection, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        gc.freeze()
        if os.fork() == 0:
            os.setpgid(0, 0)  # signals to the group of the agent are not for it
            name_process("warm ranks")
            _serve(os.dup2(there.fileno(), 3), name)
        there.close()

    def popen(
        self,
        args: Sequence[str],
        env: Mapping[str, str],
        stdout: IO[str] | None = None,
        stderr: IO[str] | None = None,
        start_new_session: bool = True,
    ) -> subprocess.Popen[bytes]:
        if not _can_fork(args, env):
            return subprocess.Popen(args, env=env, stdout=stdout, stderr=stderr, start_new_session=start_new_session)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        outputs = [1 if stdout is None else stdout.fileno(), 2 if stderr is None else stderr.fileno()]
        request = pickle.dumps((list(args[2:]), dict(env), os.getcwd()))
        socket.send_fds(self._connection, [request], outputs)
        process = subprocess.Popen.__new__(subprocess.Popen)
        process.args, process.returncode = args, None
        process.stdin = process.stdout = process.stderr = None
        process._child_created, process._waitpid_lock = True, threading.Lock()  # type: ignore[attr-defined]
        process._communication_started, process._input = False, None  # type: ignore[attr-defined]
        process._sigint_wait_secs = 0.25  # type: ignore[attr-defined]
        process.pid = int(self._connection.recv(32))
        return process


def _can_fork(args: Sequence[str], env: Mapping[str, str]) -> bool:
    def read_before(variables: Mapping[str, str]) -> dict[str, str]:
        return {name: value for name, value in variables.items() if name.startswith(READ_BEFORE)}

    same = read_before(env) == read_before(os.environ)
    return len(args) > 2 and args[0] == sys.executable and args[1] == "-u" and args[2].endswith(".py") and same


# In the server, and in the ranks.


def _serve(connection: int, name: str) -> NoReturn:
    os.closerange(4, 1 << 16)
    server = socket.socket(fileno=connection)
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    while True:
        request, outputs, _, _ = socket.recv_fds(server, LARGEST, 2)
        if not request:
            os._exit(0)
        words, environ, folder = pickle.loads(request)
        read, write = os.pipe()
        between = os.fork()
        if between == 0:
            parent = os.getpid()
            pid = os.fork()
            if pid == 0:
                while os.getppid() == parent:  # until the agent is
                    time.sleep(0.001)
                for standard, output in enumerate(outputs, 1):
                    os.dup2(output, standard)
                os.closerange(3, 1 << 10)
                _be_rank(words, environ, folder, name)
            os.write(write, str(pid).encode())
            os._exit(0)
        os.waitpid(between, 0)
        server.send(os.read(read, 32))
        for descriptor in (read, write, *outputs):
            os.close(descriptor)


def _be_rank(words: list[str], environ: Mapping[str, str], folder: str, name: str) -> NoReturn:
    """Run the script as Python would, and end the process from within the frames that the launcher left here."""
    import torch

    name_process(name)
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environ)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(io.FileIO(number, "wb", closefd=False), write_through=True, errors=errors)
        for number, errors in ((1, "strict"), (2, "backslashreplace"))
    )
    torch.set_num_threads(int(environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)))
    sys.argv[:], path = words, words[0]
    sys.path[0] = os.path.dirname(os.path.abspath(path))
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    module.__file__ = path
    code = 0
    try:
        with open(path, "rb") as file:
            program = compile(file.read(), path, "exec")
        exec(program, module.__dict__)
    except SystemExit as end:
        if end.code is not None:
            code = end.code if isinstance(end.code, int) else 1
            if not isinstance(end.code, int):
                print(end.code, file=sys.stderr)
    except BaseException as error:
        inside = error.__traceback__
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, inside and inside.tb_next
        sys.excepthook(sys.last_type, error, sys.last_traceback)
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        code = 1
    # As multiprocessing's processes end: to take torch's modules apart needs a second.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
