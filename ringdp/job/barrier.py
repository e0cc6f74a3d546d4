"""A barrier that names the ranks that did not come."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from ringdp.errors import InvalidArgumentError, InvalidStateError
from ringdp.job.elastic import as_unit


def monitored_barrier(
    group: dist.ProcessGroup | None = None, timeout: timedelta | float | None = None, wait_all_ranks: bool = True
) -> None:
    """Wait until every rank of ``group`` has come here; at the timeout say which ranks have not.

    The counterpart of `torch.distributed.monitored_barrier`, which serves gloo only. Every rank waits for every other,
    so the error of each rank that came names all missing ones, with host and pid. After a timeout the group has failed,
    as after any operation that timed out.

    Args:
        group: a process group on ``ring``; the default group if None.
        timeout: seconds or a timedelta; the group's own if None.
        wait_all_ranks: accepted for torch's signature. False changes nothing: all missing ranks are always named.

    Raises:
        RingTimeoutError: some ranks did not come in time; ``peer`` is the first of them.
        MismatchError: another rank called something else instead.
        PeerLostError: a rank died; an elastic job waits for those that are left.
        InvalidStateError: the process group does not exist, or this process is not in ``group``.
        InvalidArgumentError: ``group`` is on another backend, or ``timeout`` is not above 0.
    """
    del wait_all_ranks
    if not dist.is_initialized():
        raise InvalidStateError("ringdp.monitored_barrier() needs a process group: call ringdp.init() first")
    chosen = dist.group.WORLD if group is None else group
    if not isinstance(chosen, dist.ProcessGroup):  # torch's mark for a group this process is not in
        raise InvalidStateError("ringdp.monitored_barrier(): this process is not in the group")
    backend = chosen._get_backend(torch.device("cpu"))
    if (name := backend.name()) != "ring":
        raise InvalidArgumentError(
            f"ringdp.monitored_barrier() works on the backend ring, this group's for cpu is {name};"
            " torch.distributed.monitored_barrier() serves gloo"
        )
    if timeout is not None and not isinstance(timeout, timedelta):
        timeout = timedelta(seconds=timeout)
    if timeout is not None and timeout <= timedelta(0):
        raise InvalidArgumentError(f"timeout must be above 0, not {timeout.total_seconds()} s")
    limit = timeout or timedelta(milliseconds=-1)
    as_unit(chosen, "monitored_barrier()", lambda: chosen.monitored_barrier(limit, True))  # type: ignore[attr-defined]
