"""A function on several real processes with a process group: for notebooks and tests, without a launcher."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import multiprocessing.connection
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ringdp.errors import InvalidArgumentError, RingError

Result = TypeVar("Result")
_AFTER_FAILURE_S = 5.0  # what the other ranks get to end, so that their errors are seen too


class RankError(RingError):
    """A rank raised, died or took too long; the message has every failed rank's story, the first failure first."""


def run_ranks(
    function: Callable[..., Result],
    n: int,
    *args: Any,
    backend: str = "ring",
    timeout_s: float = 120.0,
    **kwargs: Any,
) -> list[Result]:
    """Call ``function(*args, **kwargs)`` on n processes of this host that form one job, and return the n results.

    `ringdp.init` has been called when the function runs, on the CPU and with one thread. Results travel by pickle
    between these processes. A function of a module is imported by fresh processes; one that was defined in a notebook
    or inside another function is reached by forking this process, which must not have used CUDA before.

    Raises:
        RankError: a rank failed; all are ended.
        InvalidArgumentError: n below 1.
    """
    if n < 1:
        raise InvalidArgumentError(f"run_ranks needs at least one rank, not {n}")
    context = multiprocessing.get_context("spawn" if _can_be_imported(function) else "fork")
    with tempfile.TemporaryDirectory(prefix="ringdp-ranks-") as folder:
        call = (function, args, kwargs)
        ranks = [_Rank(context, rank, n, folder, backend, timeout_s, call) for rank in range(n)]
        try:
            return _collect(ranks, time.monotonic() + timeout_s, function)
        finally:
            for rank in ranks:
                rank.end()


class _Rank:
    """One process, and the pipe on which it says what came out."""

    def __init__(
        self, context: Any, number: int, ranks: int, folder: str, backend: str, timeout_s: float, call: Any
    ) -> None:
        self.number = number
        self.pipe, there = context.Pipe(duplex=False)
        self.process = context.Process(
            target=_serve, args=(there, number, ranks, f"file://{folder}/store", backend, timeout_s, call), daemon=True
        )
        self.process.start()
        there.close()

    def outcome(self) -> tuple[bool, Any]:
        """Whether it returned, and what; else its story."""
        try:
            returned, content = pickle.loads(self.pipe.recv_bytes())
        except (EOFError, OSError):
            self.process.join()
            return False, f"died with code {self.process.exitcode}"
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
    stories: dict[int, str] = {}
    waiting = {rank.pipe: rank for rank in ranks}
    while waiting and (left_s := deadline - time.monotonic()) > 0:
        for ready in multiprocessing.connection.wait(list(waiting), timeout=left_s):
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
        stories[rank.number] = "did not end in time"
    if stories:
        told = "\n".join(f"--- rank {number} ---\n{story}" for number, story in stories.items())
        raise RankError(f"{_name(function)} failed on {len(stories)} of {len(ranks)} ranks:\n{told}")
    return [results[number] for number in range(len(ranks))]


def _serve(pipe: Any, rank: int, ranks: int, meet: str, backend: str, timeout_s: float, call: Any) -> None:
    """The process: join, call, tell."""
    try:
        import torch

        import ringdp

        torch.set_num_threads(1)  # as many ranks as cores, and a forked process has no other threads
        function, args, kwargs = call
        ringdp.init(backend, rank=rank, world_size=ranks, init_method=meet, timeout=timeout_s, device="cpu")
        try:
            result = function(*args, **kwargs)
            torch.distributed.barrier()  # no rank leaves while another still works with it
        finally:
            ringdp.shutdown()
        answer = pickle.dumps((True, result))
    except BaseException:
        answer = pickle.dumps((False, traceback.format_exc()))
    with contextlib.suppress(OSError):  # the caller gave up
        pipe.send_bytes(answer)
    pipe.close()


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
