"""The backend ``ring`` of torch.distributed: its registration, its process groups, and the log of the extension.

`import torch` loads this file where ringdp is installed (ringdp/_autoload.py), so it imports next to nothing: the
settings and the C++ extension come with the first process group.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import logging
import sys
import traceback
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from ringdp.errors import InvalidArgumentError, InvalidStateError

if TYPE_CHECKING:
    from ringdp import _C
    from ringdp.config import RingConfig

BACKEND = "ring"
_AVERAGING_BACKENDS = frozenset({"ring", "nccl"})  # those with ReduceOp.AVG

_timeouts: dict[str, timedelta] = {}  # of the process groups of ring, by name
# The connections of a rendezvous, until a process group takes them over.
_pending: _C.PendingMesh | None = None


def register_backend() -> None:
    """Register the backend ``ring`` in torch.distributed; calling it again changes nothing."""
    if not hasattr(dist.Backend, BACKEND.upper()):
        # A list: torch 2.13 iterates a plain string by its characters. What asks a group for its device prefers cuda.
        devices = ["cpu", "cuda"] if torch.backends.cuda.is_built() else ["cpu"]
        dist.Backend.register_backend(BACKEND, create_process_group, extended_api=True, devices=devices)


def create_process_group(options: Any, pg_options: RingConfig | None) -> Any:
    """torch's creator: once for the default group and for each new group this rank belongs to."""
    from ringdp import config

    if pg_options is not None and not isinstance(pg_options, config.RingConfig):
        raise InvalidArgumentError(
            f"the backend ring takes ringdp.config.RingConfig as pg_options, not {type(pg_options).__name__}"
        )
    config.apply_log_level(rank=options.group_rank if not options.global_ranks_in_group else None)
    if _pending is None and not dist.is_initialized() and not options.global_ranks_in_group:
        config.refuse_inside_rank(_meeting_point(options.store))
    settings = pg_options or config.RingConfig.from_environment()
    check_extension()
    from ringdp import _C
    from ringdp.job import elastic

    connect_log()
    pending = None if dist.is_initialized() else _pending  # the default group's alone
    _timeouts[options.group_id] = options.timeout
    if getattr(options, "enable_reconfigure", False):  # since torch 2.14
        return _C.create_reconfigurable_process_group(
            rank=options.group_rank,
            size=options.group_size,
            timeout=options.timeout,
            group_id=options.group_id,
            is_default=not options.global_ranks_in_group,
            config=settings.as_dict(),
        )
    return _C.create_process_group(
        store=options.store,
        rank=options.group_rank,
        size=options.group_size,
        timeout=options.timeout,
        group_id=options.group_id,
        global_ranks=list(options.global_ranks_in_group),
        config=settings.as_dict(),
        pending=pending,
        elastic=elastic.making(),
    )


def _meeting_point(store: Any) -> str | None:
    """Where the store is, as in an init_method; None for one that is no TCPStore."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if not isinstance(store, TCPStore):
        return None
    return f"tcp://{f'[{store.host}]' if ':' in store.host else store.host}:{store.port}"


@contextlib.contextmanager
def handing_over(pending: _C.PendingMesh) -> Iterator[None]:
    """Inside the block the default group of ``ring`` takes over the connections of `pending`. Where no group was made
    they are closed at the end; the goodbye to the other ranks has this rank's exception, if it raised one."""
    global _pending
    _pending = pending
    reason = "it was done with them"
    try:
        yield
    except BaseException as error:
        reason = f"its init ended by {traceback.format_exception_only(type(error), error)[-1].strip()}"
        raise
    finally:
        _pending.close(reason)
        _pending = None


@contextlib.contextmanager
def named(name: str, *, bulk: bool = False) -> Iterator[None]:
    """Give the operations this thread issues inside the block a name, which their errors carry.

    Ranks compare it: two all-reduces of equal shape issued in different order on two ranks fail with `MismatchError`
    because their names differ; without names they would add up the wrong tensors.

    Args:
        name: not empty.
        bulk: between two ranks their bytes are sent only while no other operation has bytes to send. On a long path
            they are sent only as fast as the line carries them without a queue before it. For large operations whose
            result is needed late.
    """
    if not name:
        raise InvalidArgumentError("ringdp.named needs a name that is not empty")
    check_extension()
    from ringdp import _C

    scope = _C.NamedScope()
    scope.enter(name, bulk)
    try:
        yield
    finally:
        scope.exit()


def backend_name(group: dist.ProcessGroup) -> str:
    try:
        return str(dist.get_backend(group))
    except ValueError:  # a process group that torch.distributed did not make
        return str(group.name())


def backend_of(group: dist.ProcessGroup, device_type: str) -> str:
    """The name of the group's backend for this kind of device; the group's own name if it has none."""
    try:
        config = dist.get_backend_config(group)
    except (TypeError, ValueError):  # as above
        return backend_name(group)
    backends = dict(part.split(":", 1) for part in config.split(",") if ":" in part)
    return backends.get(device_type, backend_name(group))


def reaches_core(group: dist.ProcessGroup) -> bool:
    """Whether the group's backend for CPU tensors is ``ring``, and not behind another of torch's.

    TORCH_DISTRIBUTED_DEBUG=DETAIL puts one before it that compares shapes, and hides what torch has no call for.
    """
    if backend_of(group, "cpu") != BACKEND:
        return False
    hidden: type = dist.distributed_c10d._ProcessGroupWrapper  # type: ignore[attr-defined]
    return not isinstance(group._get_backend(torch.device("cpu")), hidden)


def timeout_of(group: dist.ProcessGroup, device_type: str) -> timedelta | None:
    """How long the group's operations may take on this kind of device; None if unknown."""
    if backend_of(group, device_type) == BACKEND:
        return _timeouts.get(group.group_name)
    try:
        return group._get_backend(torch.device(device_type)).options._timeout
    except (AttributeError, RuntimeError):  # not every backend has such options
        return None


def has_average(group: dist.ProcessGroup, device_type: str) -> bool:
    """Whether the group's backend for this kind of device has ``ReduceOp.AVG``."""
    return backend_of(group, device_type) in _AVERAGING_BACKENDS


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes that crossed this process's ring connections since it joined, over all groups, frame headers included."""

    bytes_sent: int
    bytes_received: int


def connect_log() -> None:
    """Write the extension's log lines to the loggers of Python until the interpreter ends."""
    from ringdp import _C
    from ringdp.job import stacks

    _C.set_log_sink(log_line)
    stacks.install()
    atexit.unregister(_shut_down_extension)
    atexit.register(_shut_down_extension)  # pending callbacks need a running interpreter


def traffic() -> Traffic:
    """What this rank sent to and received from the others over ``ring`` so far.

    Raises:
        InvalidStateError: before `init`, or the default process group does not use ``ring``.
    """
    require_initialized("traffic")
    if BACKEND not in str(dist.get_backend_config()):
        raise InvalidStateError(f"the backend is {dist.get_backend()}: only {BACKEND} counts its traffic")
    return traffic_of_process()


def traffic_of_process() -> Traffic:
    """What this process sent and received over ``ring`` so far, in groups of any kind."""
    from ringdp import _C

    return Traffic(*_C.traffic())


def transports() -> dict[int, str]:
    """The transport between this rank and each other one: ``{1: "shm", 2: "tcp, TLS 1.3"}``, for example.

    Raises:
        InvalidStateError: before `init`, or the default process group does not use ``ring``.
    """
    require_initialized("transports")
    if BACKEND not in str(dist.get_backend_config()):
        raise InvalidStateError(f"the backend is {dist.get_backend()}: only {BACKEND} knows its transports")
    from ringdp import _C

    return _C.transports()


def inside_host(group: dist.ProcessGroup) -> list[bool]:
    """Whether bytes reach each other rank of the group without a network, by rank; [] where ring does not move them."""
    from ringdp import _C

    local = {it["name"] for it in _C.registered_transports() if it["same_host"]}
    return [name in local for name in _C.group_transports(group).values()]


def require_initialized(what: str) -> None:
    """Raise InvalidStateError where this process has not joined a job; `what` is the function that was called."""
    if not (dist.is_available() and dist.is_initialized()):
        raise InvalidStateError(f"ringdp.{what}() needs ringdp.init(): call that first")


_ENDED = "its program ended"


def say_farewell(how: str = _ENDED) -> None:
    """Give the other ranks the reason for which this process leaves: an exception for example, or the end of its steps.

    Args:
        how: this process leaves.
    """
    from ringdp import _C

    error = sys.exc_info()[1] or getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if error is not None:
        how += (" by " if how == _ENDED else " after ") + traceback.format_exception_only(type(error), error)[
            -1
        ].strip()
    elif steps := _C.most_steps():
        how += f" after {steps} step{'' if steps == 1 else 's'}"
    _C.set_farewell(how)


def cut_off(group: dist.ProcessGroup) -> None:
    """Fail the operation of the group for which a thread waits, as this process ends: a thread that returns from C++
    into a Python that has ended aborts."""
    device: Any = group._device_types[0]
    backend: Any = group._get_backend(device)
    with contextlib.suppress(Exception):  # not every backend can
        if backend_of(group, device.type) == BACKEND:
            say_farewell()
            backend.shutdown()
        else:
            backend.abort()


def log_line(level: int, text: str) -> None:
    """A line of the core; its levels are 0 to 3 for debug to error. Any thread."""
    logging.getLogger("ringdp.core").log(10 * (level + 1), text)


def check_extension() -> None:
    """Raise ImportError with the reason where ``ringdp._C`` cannot be imported."""
    from ringdp import _build

    _build.check()


def _shut_down_extension() -> None:
    say_farewell()
    from ringdp import _C

    _C.shut_down_all()
    _C.forget_stack_source()
