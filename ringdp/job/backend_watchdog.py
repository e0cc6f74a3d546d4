"""What stands beside a backend that moves device tensors (NCCL) where ``ring`` connects the same ranks.

The core does it (csrc/torch/backend/watchdog.h): ranks announce over ``ring`` what they begin, a lost rank or a
disagreement fails the ring's group, and its watchdog then aborts the other backend, whose kernels would wait for ever.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed import distributed_c10d

from ringdp.job.backend import BACKEND, check_extension

if TYPE_CHECKING:
    from ringdp import _C

_log = logging.getLogger("ringdp.device_guard")


def watch_backends(group: dist.ProcessGroup | None = None) -> list[str]:
    """Guard what moves the group's tensors beside ``ring`` until the group ends; calling it again changes nothing.

    Args:
        group: None is the default group.

    Returns:
        The names of the watched backends: none where ``ring`` is not in the group, or moves all of its tensors.
    """
    chosen = dist.group.WORLD if group is None else group
    assert isinstance(chosen, dist.ProcessGroup)
    names = [one.backend for one in _watchdogs(chosen)]
    if names:
        _log.debug("%s is watched by %s", ", ".join(names), BACKEND)
    return names


def leave_groups() -> None:
    """Destroy all process groups, as ``torch.distributed.destroy_process_group()``; without waiting for a backend that
    failed, as ``ring`` beside it said.

    Where torch's watchdog of NCCL has seen a failure before the abort, it sleeps for a minute and then ends the
    process, and NCCL's shutdown waits for it (ProcessGroupNCCL.cpp of torch's c10d, Watchdog::runLoop).
    """
    if any(one.failed for group in list(distributed_c10d._world.pg_map) for one in _watchdogs(group)):
        distributed_c10d._abort_process_group()
    else:
        dist.destroy_process_group()


def _watchdogs(group: dist.ProcessGroup) -> list[_C.BackendWatchdog]:
    """None where ``ring`` is not in the group, or moves all of its tensors."""
    if BACKEND not in str(dist.get_backend_config(group)):
        return []
    check_extension()
    from ringdp import _C

    return _C.watch_group(group)
