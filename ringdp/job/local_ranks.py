"""A function on several processes of this host that form one job: for notebooks, scripts and tests, without ringrun."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import faulthandler
import io
import math
import multiprocessing
import multiprocessing.connection
import os
import pickle
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ringdp import stories
from ringdp.config import threads as compute_threads
from ringdp.errors import InvalidArgumentError, InvalidStateError, RankError
from ringdp.job import arguments

if TYPE_CHECKING:
    import torch

Result = TypeVar("Result")
_PR_SET_PDEATHSIG = 1
_STACKS_SIGNAL = signal.SIGRTMAX - 9  # at which a rank writes its stacks, whatever it does
_STACKS_S = 1.0  # for that
_MOST_RANKS = 1 << 16
_LOG = re.compile(r"; look at that rank's own log(: | for the reason)")  # which is not kept here
_AFTER_FAILURE_S = 5.0  # what the other ranks get to end, so that their errors are seen too


def launch(
    function: Callable[..., Result],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    nprocs: int = 2,
    backend: str | None = None,
    device: torch.device | str | None = None,
    start_method: str | None = None,
    timeout: float | None = None,
) -> list[Result]:
    """Call ``function(*args, **kwargs)`` on `nprocs` processes of this host that form one job; their results by rank.

    `ringdp.init` has been called when the function runs, and each rank computes with its share of the cores. What the
    ranks print comes out as it comes. Arguments and results travel by pickle between the processes.

    Args:
        function: a function of a module or script is imported by fresh processes (guard a script's own call by
            ``if __name__ == "__main__":``); one that a notebook cell, a prompt or another function defined is reached
            by forking this process, which must not have used CUDA before.
        args: its positional arguments.
        kwargs: its named arguments.
        nprocs: the number of ranks.
        backend: as for `ringdp.init`.
        device: as for `ringdp.init`.
        start_method: ``"spawn"`` or ``"fork"``; None chooses as above.
        timeout: seconds for all of it; None is no limit.

    Raises:
        RankError: a rank raised, died or took too long; the message begins with what happened and has the traceback of
            each, the first failure last, and of a rank that took too long what its threads did; all ranks are ended.
        InvalidArgumentError: nprocs below 1, a start method that there is not, or an argument of another type.
        InvalidStateError: the function can only be reached by forking, and this process has used CUDA or has called
            `ringdp.init`.
    """
    nprocs = arguments.whole_number("nprocs", nprocs)
    if nprocs < 1:
        raise InvalidArgumentError(f"launch needs at least one rank, not nprocs={nprocs}")
    if nprocs > _MOST_RANKS:
        raise InvalidArgumentError(f"launch starts at most {_MOST_RANKS:,} ranks, not nprocs={nprocs}")
    timeout = None if timeout is None else arguments.duration("timeout", timeout).total_seconds()
    arguments.text_or_none("backend", backend)
    if not callable(function):
        raise InvalidArgumentError(f"launch needs a function to call, not {function!r}")
    if isinstance(args, str | bytes) or not isinstance(args, Iterable):
        raise InvalidArgumentError(f"args must be a list or tuple of the function's arguments, not {args!r}")
    if kwargs is not None and not (isinstance(kwargs, Mapping) and all(isinstance(name, str) for name in kwargs)):
        raise InvalidArgumentError(f"kwargs must be a dict of the function's arguments by name, not {kwargs!r}")
    if start_method not in (None, "spawn", "fork"):
        raise InvalidArgumentError(f"start_method must be 'spawn' or 'fork', not {start_method!r}")
    method = start_method or ("spawn" if _can_be_imported(function) else "fork")
    if method == "fork" and "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized():
        raise InvalidStateError(
            f"{_name(function)} was defined in a notebook or inside another function, so the ranks are forked from this"
            " process, and CUDA cannot be used in both: call launch before anything that uses CUDA here, or put the"
            " function into a module"
        )
    if method == "fork" and _in_a_job():
        raise InvalidStateError(
            f"{_name(function)} is started by forking this process, which is a rank of a job itself: call"
            " ringdp.shutdown() before ringdp.launch, or put the function into a module, from where fresh processes"
            " import it"
        )
    context = multiprocessing.get_context(method)
    own = compute_threads.threads_per_rank(compute_threads.usable_cores(), nprocs, alone=nprocs == 1)
    with tempfile.TemporaryDirectory(prefix="ringdp-ranks-") as folder:
        call = _Call(function, tuple(args), dict(kwargs or {}), backend, device, own)
        ranks = [_Rank(context, rank, nprocs, folder, timeout, call) for rank in range(nprocs)]
        with _started(ranks):
            return _collect(ranks, math.inf if timeout is None else time.monotonic() + timeout, function)


@contextlib.contextmanager
def _started(ranks: Sequence[_Rank]) -> Iterator[None]:
    """The ranks run; at the end they are ended.

    A thread that has computed nothing starts them. GNU OpenMP's threads belong to the one that began to compute with
    them, and after a fork that one waits for ever for threads that are gone; the thread that forks is the child's main
    thread.
    It stays because the kernel ends the ranks with the thread that started them (prctl(2), PR_SET_PDEATHSIG).
    """
    errors: list[BaseException] = []
    began, over = threading.Event(), threading.Event()

    def start() -> None:
        try:
            for rank in ranks:
                rank.start()
        except BaseException as error:
            errors.append(error)
        finally:
            began.set()
        over.wait()

    thread = threading.Thread(target=start, name="ringdp-launch", daemon=True)
    thread.start()
    try:
        began.wait()
        if errors:
            raise errors[0]
        yield
    finally:
        began.wait()
        for rank in ranks:
            rank.end()
        over.set()
        thread.join()


@dataclasses.dataclass(frozen=True)
class _Call:
    """What each rank does."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    backend: str | None
    device: torch.device | str | None
    threads: int


@dataclasses.dataclass(frozen=True)
class _Failure:
    """The end of a rank that did not return: when (time.monotonic), how in a clause, and its traceback."""

    at_s: float
    how: str
    text: str


def _described(failed: Mapping[int, _Failure], ranks: int, function: Callable[..., Any]) -> str:
    """The message of the error: what happened, and the ranks' tracebacks, the first failure last."""
    # By time: the others' errors may arrive before that rank has left its groups.
    in_order = sorted(failed, key=lambda rank: failed[rank].at_s)
    unequal = stories.unequal_of_all({rank: failed[rank].how for rank in in_order})
    story = f"rank {in_order[0]} {failed[in_order[0]].how}" if unequal is None else unequal.sentence()
    tracebacks = "\n".join(f"--- rank {rank} ---\n{failed[rank].text}" for rank in reversed(in_order))
    return f"{_name(function)} failed on {len(failed)} of {ranks} ranks: {story}\n{tracebacks}"


class _Rank:
    """One process, and the pipe for its result or its error."""

    def __init__(
        self, context: Any, number: int, ranks: int, folder: str, timeout_s: float | None, call: _Call
    ) -> None:
        self.number = number
        self.stacks = Path(folder, f"stacks_{number}")
        self._context = context
        self._arguments = (number, ranks, folder, str(self.stacks), timeout_s, call)
        self.started = False

    def start(self) -> None:
        self.pipe, there = self._context.Pipe(
            duplex=False
        )  # now: a rank that is forked earlier would keep its end open
        self.process = self._context.Process(target=_serve, args=(there, *self._arguments))
        # Not daemonic: a rank may have data-loader workers. `end` and the end of the pipe see to it.
        with warnings.catch_warnings():  # that this process has threads
            warnings.filterwarnings("ignore", category=DeprecationWarning, message=".*fork")
            self.process.start()
        self.started = True
        there.close()

    def outcome(self, oom_kills: int | None) -> tuple[bool, Any]:
        """Whether it returned, and the result, else its `_Failure`. `oom_kills`: of the kernel, when it was started."""
        try:
            returned, content = pickle.loads(self.pipe.recv_bytes())
        except (EOFError, OSError):
            self.process.join()
            code = self.process.exitcode or 0
            why = stories.out_of_memory(oom_kills, stories.oom_kills()) if code == -signal.SIGKILL else ""
            how = stories.ended(code, why) if code else stories.WITHOUT_LEAVING
            # The time of the death is not known; the failures of other ranks follow from a death, as a rule.
            return False, _Failure(-math.inf, how, how)
        return returned, content

    def what_it_does(self) -> str:
        """The stacks of its threads now; empty where it cannot write them: it is stopped, or has just been started."""
        text, end = "", time.monotonic() + _STACKS_S
        if not self.stacks.exists():
            return text
        assert self.process.pid is not None
        os.kill(self.process.pid, _STACKS_SIGNAL)
        while time.monotonic() < end and self.process.is_alive():
            before, text = text, self.stacks.read_text(errors="replace")
            if text and text == before:
                break
            time.sleep(0.05)
        return text

    def end(self) -> None:
        if not self.started:
            return
        if self.process.is_alive():
            self.process.join(0.5 if self.pipe.closed else 2.0)
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.pipe.close()


def _collect(ranks: Sequence[_Rank], deadline: float, function: Callable[..., Any]) -> list[Any]:
    results: dict[int, Any] = {}
    failed: dict[int, _Failure] = {}
    oom_kills = stories.oom_kills()
    waiting = {rank.pipe: rank for rank in ranks}
    while waiting and (left_s := deadline - time.monotonic()) > 0:
        for ready in multiprocessing.connection.wait(list(waiting), timeout=min(left_s, 1e6)):
            rank = waiting.pop(ready)
            returned, content = rank.outcome(oom_kills)
            if returned:
                results[rank.number] = content
                continue
            if not failed:
                deadline = min(deadline, time.monotonic() + _AFTER_FAILURE_S)
            failed[rank.number] = content
    for rank in waiting.values():
        does = rank.what_it_does()
        late = "did not end in time"
        failed[rank.number] = _Failure(math.inf, late, late + (f"; its threads then:\n{does}" if does else ""))
    for rank in waiting.values():
        rank.process.kill()
    if failed:
        raise RankError(_described(failed, len(ranks), function))
    return [results[number] for number in range(len(ranks))]


def _serve(pipe: Any, rank: int, ranks: int, folder: str, stacks: str, timeout_s: float | None, call: _Call) -> None:
    """The process of a rank: joins the job, calls the function, sends its result."""
    _end_with_the_caller()
    written = os.open(stacks, os.O_CREAT | os.O_WRONLY)  # faulthandler writes there for as long as the process lives
    faulthandler.register(_STACKS_SIGNAL, file=written, all_threads=True)
    failed_at = math.inf
    try:
        import torch

        import ringdp

        if not compute_threads.chosen_by_user():
            torch.set_num_threads(call.threads)
        limit = {} if timeout_s is None else {"timeout": timeout_s}
        ringdp.init(
            call.backend, rank=rank, world_size=ranks, init_method=f"file://{folder}/store", device=call.device, **limit
        )
        try:
            result = call.function(*call.args, **call.kwargs)
            with ringdp.named(stories.RETURNED):
                torch.distributed.barrier()  # no rank leaves while another still works with it
        except BaseException:
            failed_at = time.monotonic()
            raise
        finally:
            ringdp.shutdown()
        answer = pickle.dumps((True, result))
    except BaseException as error:
        what = traceback.format_exception_only(type(error), error)[-1].strip()
        how, text = (_LOG.sub(_without_log, one) for one in (f"raised {what}", traceback.format_exc()))
        answer = pickle.dumps((False, _Failure(min(failed_at, time.monotonic()), how, text)))
    with contextlib.suppress(OSError):  # the caller gave up
        pipe.send_bytes(answer)
    pipe.close()


def _without_log(found: re.Match[str]) -> str:
    return "; " if found[1] == ": " else ""


def _end_with_the_caller() -> None:
    """SIGKILL when the process that called `launch` ends (prctl(2))."""
    caller = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != caller:
        os._exit(1)


def _in_a_job() -> bool:
    """Whether this process has joined one; asked without importing torch."""
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and bool(distributed.is_available() and distributed.is_initialized())


def _can_be_imported(function: Callable[..., Any]) -> bool:
    """Whether a fresh process finds it: not what a notebook, a prompt or another function defined."""
    main = sys.modules.get("__main__")
    from_prompt = getattr(function, "__module__", None) == "__main__" and not os.path.isfile(
        getattr(main, "__file__", None) or ""
    )
    if from_prompt:
        return False
    try:
        pickle.dump(function, io.BytesIO())
    except (pickle.PicklingError, AttributeError, TypeError):
        return False
    return True


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", repr(function))
