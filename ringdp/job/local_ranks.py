"""A function on several processes of this host that form one job: for notebooks, scripts and tests, without ringrun."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import io
import math
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from ringdp.errors import InvalidArgumentError, InvalidStateError, RingError
from ringdp.job import arguments, threads

if TYPE_CHECKING:
    import torch

Result = TypeVar("Result")
_PR_SET_PDEATHSIG = 1
_MOST_RANKS = 1 << 16
_AFTER_FAILURE_S = 5.0  # what the other ranks get to end, so that their errors are seen too


class RankError(RingError):
    """A rank raised, died or took too long; the message has every failed rank's story, the first failure first."""


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
            by forking this process, which must not have used CUDA before; a forked rank computes with one thread.
        args: its positional arguments.
        kwargs: its named arguments.
        nprocs: the number of ranks.
        backend: as for `ringdp.init`.
        device: as for `ringdp.init`.
        start_method: ``"spawn"`` or ``"fork"``; None chooses as above.
        timeout: seconds for all of it; None is no limit.

    Raises:
        RankError: a rank raised, died or took too long; the message has the traceback of each, the first failure first,
            and all ranks are ended.
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
    # OpenMP's threads do not survive a fork, and a child that wants them waits for ever.
    own = threads.threads_per_rank(threads.usable_cores(), nprocs, alone=nprocs == 1) if method == "spawn" else 1
    with tempfile.TemporaryDirectory(prefix="ringdp-ranks-") as folder:
        call = _Call(function, tuple(args), dict(kwargs or {}), backend, device, own)
        ranks = [_Rank(context, rank, nprocs, folder, timeout, call) for rank in range(nprocs)]
        try:
            return _collect(ranks, math.inf if timeout is None else time.monotonic() + timeout, function)
        finally:
            for rank in ranks:
                rank.end()


@dataclasses.dataclass(frozen=True)
class _Call:
    """What each rank does."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    backend: str | None
    device: torch.device | str | None
    threads: int


class _Rank:
    """One process, and the pipe on which it says what came out."""

    def __init__(
        self, context: Any, number: int, ranks: int, folder: str, timeout_s: float | None, call: _Call
    ) -> None:
        self.number = number
        self.pipe, there = context.Pipe(duplex=False)
        self.process = context.Process(
            target=_serve, args=(there, number, ranks, f"file://{folder}/store", timeout_s, call)
        )
        # Not daemonic: a rank may have data-loader workers. `end` and the end of the pipe see to it.
        self.process.start()
        there.close()

    def outcome(self) -> tuple[bool, Any]:
        """Whether it returned, and what; else when it failed (time.monotonic) and its story."""
        try:
            returned, content = pickle.loads(self.pipe.recv_bytes())
        except (EOFError, OSError):
            self.process.join()
            # It cannot tell when; the failures of other ranks follow from a death, as a rule.
            return False, (-math.inf, f"died with code {self.process.exitcode}")
        return returned, content

    def end(self) -> None:
        if self.process.is_alive():
            self.process.join(0.5 if self.pipe.closed else 2.0)
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.pipe.close()


def _collect(ranks: Sequence[_Rank], deadline: float, function: Callable[..., Any]) -> list[Any]:
    results: dict[int, Any] = {}
    stories: dict[int, tuple[float, str]] = {}
    waiting = {rank.pipe: rank for rank in ranks}
    while waiting and (left_s := deadline - time.monotonic()) > 0:
        for ready in multiprocessing.connection.wait(list(waiting), timeout=min(left_s, 1e6)):
            rank = waiting.pop(ready)
            returned, content = rank.outcome()
            if returned:
                results[rank.number] = content
                continue
            if not stories:
                deadline = min(deadline, time.monotonic() + _AFTER_FAILURE_S)
            stories[rank.number] = content
    for rank in waiting.values():
        rank.process.kill()
        stories[rank.number] = math.inf, "did not end in time"
    if stories:
        # The first failure first: the others may have heard of it, and told, before that rank had left its groups.
        in_order = sorted(stories.items(), key=lambda item: item[1][0])
        told = "\n".join(f"--- rank {number} ---\n{story}" for number, (_, story) in in_order)
        raise RankError(f"{_name(function)} failed on {len(stories)} of {len(ranks)} ranks:\n{told}")
    return [results[number] for number in range(len(ranks))]


def _serve(pipe: Any, rank: int, ranks: int, meet: str, timeout_s: float | None, call: _Call) -> None:
    """The process: join, call, tell."""
    _end_with_the_caller()
    failed_at = math.inf
    try:
        import torch

        import ringdp

        if call.threads == 1 or not threads.chosen_by_user():
            torch.set_num_threads(call.threads)
        limit = {} if timeout_s is None else {"timeout": timeout_s}
        ringdp.init(call.backend, rank=rank, world_size=ranks, init_method=meet, device=call.device, **limit)
        try:
            result = call.function(*call.args, **call.kwargs)
            torch.distributed.barrier()  # no rank leaves while another still works with it
        except BaseException:
            failed_at = time.monotonic()
            raise
        finally:
            ringdp.shutdown()
        answer = pickle.dumps((True, result))
    except BaseException:
        answer = pickle.dumps((False, (min(failed_at, time.monotonic()), traceback.format_exc())))
    with contextlib.suppress(OSError):  # the caller gave up
        pipe.send_bytes(answer)
    pipe.close()


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
