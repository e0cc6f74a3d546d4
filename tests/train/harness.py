"""Run a function on several ranks, each a process of its own, and get what every rank returned.

    from tests.train.harness import run_ranks
    results = run_ranks(case, 3.0, world_size=2, backend="gloo")     # [what rank 0 returned, what rank 1 returned]

    @on_ranks(2)
    def test_it() -> None: ...                                       # all of the test is what each rank does

`case` is a module-level function of an importable module (`tests.train.test_x`); it is called on every rank with the
default process group initialised (``backend=None``: without one). Arguments and results are pickled.
The processes stay for the next call; one that failed, died or hung is killed, with its whole group, and the next call
forks fresh ones from processes that have torch already (tests/forked.py), of which there are two, so that neighbours do
not hash strings alike. No rank outlives the process that started it.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import importlib
import multiprocessing.connection as connection
import os
import pickle
import signal
import tempfile
import time
import traceback
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from tests.forked import Forked

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
_START_TIMEOUT_S = 60.0
_AFTER_FAILURE_S = 5.0  # what the other ranks get to end, so that their errors are seen too
_DUMP_S = 0.5


@dataclass(frozen=True)
class Outcome:
    """What one rank came to: `error` and `text` are None where the function returned."""

    rank: int
    value: Any = None
    error: BaseException | None = None
    text: str | None = None  # its traceback, or how it died
    died: bool = False


class RankFailed(AssertionError):
    """A rank raised, died or took too long; the message has every failed rank's story, first failure first."""

    def __init__(self, message: str, outcomes: list[Outcome]) -> None:
        super().__init__(message)
        self.outcomes = outcomes


def run_ranks(
    function: Callable[..., Any],
    *args: Any,
    world_size: int = 2,
    backend: str | None = "gloo",
    timeout_s: float = 60.0,
    **kwargs: Any,
) -> list[Any]:
    """Call `function(*args, **kwargs)` on every rank and return the results in rank order.

    Raises:
        RankFailed: as soon as one rank failed; the others get a few seconds to end.
    """
    outcomes = run_outcomes(function, *args, world_size=world_size, backend=backend, timeout_s=timeout_s, **kwargs)
    failed = [outcome for outcome in outcomes if outcome.text is not None]
    if failed:
        stories = "\n".join(f"--- rank {outcome.rank} ---\n{outcome.text}" for outcome in failed)
        raise RankFailed(f"{function.__qualname__} on {world_size} ranks over {backend}:\n{stories}", outcomes)
    return [outcome.value for outcome in outcomes]


def run_outcomes(
    function: Callable[..., Any],
    *args: Any,
    world_size: int = 2,
    backend: str | None = "gloo",
    timeout_s: float = 60.0,
    others_stay: bool = False,
    **kwargs: Any,
) -> list[Outcome]:
    """As `run_ranks`, but hands out the failures too: for tests in which ranks are meant to raise or die.

    Args:
        others_stay: ranks are meant to die: the others have all of the time, and their processes stay for the next
            such call.
    """
    group = _group(world_size, others_stay=others_stay)
    with tempfile.TemporaryDirectory(prefix="ringdp-test-") as folder:
        at = f"file://{folder}/store"
        call = (function.__module__, function.__qualname__, args, kwargs, backend, at, others_stay)
        outcomes = group.run(pickle.dumps(call), timeout_s, hurry=not others_stay)
    if others_stay and all(outcome.text is None or outcome.died for outcome in outcomes):
        group.replace_dead()
    elif any(outcome.text is not None for outcome in outcomes):
        group.kill()  # what a failed function leaves behind is not worth finding out
    return outcomes


def each(*cases: Callable[..., Any], **kwargs: Any) -> list[Any]:
    """For `run_ranks`: call several functions one after the other on every rank; an error says which one it was."""
    results = []
    for case in cases:
        try:
            results.append(case(**kwargs))
        except Exception as error:
            name = case.func.__name__ if isinstance(case, functools.partial) else case.__qualname__
            raise AssertionError(f"in {name} {getattr(case, 'args', '')}") from error
    return results


def on_ranks(
    world_size: int | Sequence[int] = 2,
    *,
    backend: str | Sequence[str] | None = "ring",
    timeout_s: float = 60.0,
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Make a test of what every rank does, with each of the world sizes over each of the backends."""

    def decorate(function: Callable[..., Any]) -> Callable[..., None]:
        @functools.wraps(function)
        def test(**arguments: Any) -> None:
            for size in [world_size] if isinstance(world_size, int) else world_size:
                for name in [backend] if backend is None or isinstance(backend, str) else backend:
                    run_ranks(function, world_size=size, backend=name, timeout_s=timeout_s, **arguments)

        test.on_rank = function  # type: ignore[attr-defined]  # by this name the ranks find it
        function.__qualname__ += ".on_rank"
        return test

    return decorate


def errors_of(function: Callable[..., Any], *args: Any, **options: Any) -> list[BaseException]:
    """What `function(*args)` raises on each rank; the processes stay, as leaving the group must be possible then."""
    found: list[BaseException | None] = run_ranks(error_of, function, *args, **options)
    assert all(error is not None for error in found), found
    return [error for error in found if error is not None]


def error_of(function: Callable[..., Any], *args: Any) -> BaseException | None:
    """Of a rank: what that raises."""
    try:
        function(*args)
    except Exception as error:
        return _picklable(error.with_traceback(None))
    return None


def backends() -> list[str]:
    """The process group backends to test: those in RINGDP_TEST_BACKENDS, or gloo and ring once that is built."""
    chosen = os.environ.get("RINGDP_TEST_BACKENDS")
    if chosen:
        return chosen.split(",")
    return ["gloo", "ring"] if ring_is_built() else ["gloo"]


def folder(world_size: int) -> str:
    """For files of the processes that the next call of this many ranks goes to; gone with them."""
    return _group(world_size).folder.name


def ring_is_built() -> bool:
    """Whether the extension has the process group."""
    with contextlib.suppress(ImportError):
        return hasattr(importlib.import_module("ringdp._C"), "create_process_group")
    return False


def same_everywhere(*what: Any) -> bool:
    """Of a rank: whether `what`, which has no tensors in it, is equal on all ranks."""
    import torch.distributed as dist

    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, what)
    return all(one == everybody[0] for one in everybody)


def require_same_bits(tensors: Iterable[torch.Tensor]) -> None:
    """Of a rank: its tensors, on whatever device, must have the bits of every other rank's."""
    import torch.distributed as dist

    mine = [tensor.detach().to("cpu", copy=True) for tensor in tensors]
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, mine)
    for rank, theirs in enumerate(everybody):
        assert len(theirs) == len(mine)
        assert all(one.equal(other) for one, other in zip(mine, theirs, strict=True)), f"not the bits of rank {rank}"


def default_group() -> dist.ProcessGroup:
    """Of a rank: `torch.distributed.group.WORLD`, which is None before there is one."""
    from torch.distributed.distributed_c10d import _get_default_group

    return _get_default_group()


class _Group:
    """The processes of one world size."""

    def __init__(self, world_size: int) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="ringdp-ranks-")
        self.ranks = [_Rank(rank, world_size, Path(self.folder.name)) for rank in range(world_size)]

    def replace_dead(self) -> None:
        for rank in [one for one in self.ranks if one.process.poll() is not None]:
            rank.pipe.close()
            self.ranks[rank.number] = _Rank(rank.number, len(self.ranks), Path(self.folder.name))

    def healthy(self) -> bool:
        return bool(self.ranks) and all(rank.process.poll() is None for rank in self.ranks)

    def run(self, call: bytes, timeout_s: float, *, hurry: bool) -> list[Outcome]:
        """`hurry`: the time ends soon after a rank has died."""
        deadline = time.monotonic() + timeout_s + _START_TIMEOUT_S * (not all(rank.started for rank in self.ranks))
        for rank in self.ranks:
            rank.send(call)
        outcomes: dict[int, Outcome] = {}
        while len(outcomes) < len(self.ranks) and (left_s := deadline - time.monotonic()) > 0:
            waiting = {rank.pipe: rank for rank in self.ranks if rank.number not in outcomes}
            for ready in connection.wait(list(waiting), timeout=left_s):
                rank = waiting[ready]  # type: ignore[index]
                outcome = rank.receive()
                if outcome.text is not None and (hurry or not outcome.died):
                    deadline = min(deadline, time.monotonic() + _AFTER_FAILURE_S)
                    hurry = False  # the first one counts
                outcomes[rank.number] = outcome
        late = [rank for rank in self.ranks if rank.number not in outcomes]
        for rank in late:
            rank.process.send_signal(signal.SIGUSR1)  # its stacks go to its log
        if late:
            time.sleep(_DUMP_S)  # the ranks are stuck: nothing they could send says that the stacks are written
        for rank in late:
            rank.process.kill()
            outcomes[rank.number] = Outcome(rank.number, text=f"did not end in time\n{rank.log_tail()}")
        return sorted(outcomes.values(), key=lambda outcome: outcome.rank)

    def kill(self) -> None:
        for rank in self.ranks:
            rank.process.kill()
        for rank in self.ranks:
            rank.process.wait()
            rank.pipe.close()
        self.ranks = []
        self.folder.cleanup()


class _Rank:
    """One process and the pipe to it."""

    def __init__(self, number: int, world_size: int, folder: Path) -> None:
        self.number = number
        self.started = False
        self.log = folder / f"rank{number}.log"
        here, there = _pipe()
        self.pipe = here
        with open(self.log, "wb") as log:
            self.process = Forked(
                "tests.train.harness:_be_rank",
                number,
                world_size,
                environ=_environment(number, world_size),
                output=log,
                descriptors=[there.fileno()],
                origin=number,
            )
        there.close()

    def send(self, call: bytes) -> None:
        with contextlib.suppress(OSError):  # it died: receive() says how
            self.pipe.send_bytes(call)

    def receive(self) -> Outcome:
        try:
            outcome: Outcome = pickle.loads(self.pipe.recv_bytes())
        except (EOFError, OSError):
            self.process.wait()
            text = f"died with code {self.process.returncode}\n{self.log_tail()}"
            return Outcome(self.number, text=text, died=True)
        self.started = True
        return outcome

    def log_tail(self) -> str:
        return self.log.read_text(errors="replace")[-6000:]


def _pipe() -> tuple[connection.Connection, connection.Connection]:
    import multiprocessing

    return multiprocessing.Pipe()


def _environment(rank: int, world_size: int) -> dict[str, str]:
    ours = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "RINGDP_SECRET_FILE")
    environ = {k: v for k, v in os.environ.items() if k not in ours and not k.startswith("TORCHELASTIC_")}
    environ.update(OMP_NUM_THREADS="1", RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return environ


_groups: dict[tuple[int, bool], _Group] = {}


def _group(world_size: int, *, others_stay: bool = False) -> _Group:
    group = _groups.get((world_size, others_stay))
    if group is None or not group.healthy():
        if group is not None:
            group.kill()
        group = _groups[world_size, others_stay] = _Group(world_size)
    return group


@atexit.register
def _end_all() -> None:
    for group in _groups.values():
        group.kill()


# In the ranks.


def _serve(pipe: connection.Connection, rank: int, world_size: int) -> None:
    while True:
        try:
            module, name, args, kwargs, backend, store, others_stay = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            # What a function sets in the environment is not there for the next one.
            if others_stay:
                name_jobs_after(store)
            with mock.patch.dict(os.environ), _process_group(backend, store, rank, world_size):
                function = _placed(_find(module, name))
                outcome = Outcome(rank, value=function(*args, **kwargs))
        except BaseException as error:
            outcome = Outcome(rank, error=_picklable(error), text=traceback.format_exc())
        pipe.send_bytes(pickle.dumps(outcome))


def name_jobs_after(folder: str) -> None:
    """ringdp and torch count the groups of a process, for names in a store: processes that have been in more jobs than
    others can be in one with them."""
    number = zlib.crc32(folder.encode())
    importlib.import_module("ringdp.job.process_group")._generation = number  # type: ignore[attr-defined]
    importlib.import_module("torch.distributed.distributed_c10d")._world.group_count = number


@contextlib.contextmanager
def _process_group(backend: str | None, store: str, rank: int, world_size: int) -> Iterator[None]:
    if backend is None:
        yield
        return
    from datetime import timedelta

    import torch.distributed as dist

    if "ring" in backend:
        import ringdp  # noqa: F401  (registers it)
    timeout = timedelta(seconds=60)
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=world_size, timeout=timeout)
    dist.barrier()  # a rank with nothing to do could leave while another still connects to it
    yield  # where the function raises, the process is killed: leaving the group could wait for the other ranks
    if dist.is_initialized():  # the function may have left it
        dist.destroy_process_group()


def _find(module: str, name: str) -> Callable[..., Any]:
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _placed(function: Callable[..., Any]) -> Callable[..., Any]:
    if os.environ.get("RINGDP_TEST_DEVICE") != "cuda":
        return function
    from tests.fake_cuda.everything import on_the_device

    return on_the_device(function)


def _picklable(error: BaseException) -> BaseException:
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")


def _be_rank(descriptor: int, rank: int, world_size: int) -> None:
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    _serve(connection.Connection(descriptor), rank, world_size)
