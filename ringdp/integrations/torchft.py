"""torchft: ``Manager(pg=ProcessGroupRing(), …)`` averages the gradients of replica groups over ``ring``.

Replica groups come and go; for each membership, which torchft calls a quorum, there is a new group of ``ring``.
"""

from __future__ import annotations

import dataclasses
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import _DistributedBackendOptions  # type: ignore[attr-defined]

from ringdp.config import RingConfig
from ringdp.integrations.libraries import imported
from ringdp.job import backend as ring

if TYPE_CHECKING:
    from torchft import process_group
else:
    process_group = imported("torchft.process_group", package="torchft-nightly>=2026.10")


class ProcessGroupRing(process_group.ProcessGroupWrapper):
    """torchft's process group over ``ring``, for CPU tensors and, through the host's memory, for CUDA tensors.

    A replica group that dies fails the operation on all others at once, with `PeerLostError`. torchft then drops the
    step and makes a new group of those that are left.

    Args:
        timeout: how long the replica groups have to meet, and each operation to end; seconds or a timedelta.
        config: the settings of ring; None reads the ``RINGDP_*`` variables. They must be the same in all replica
            groups. Its ``epoch`` and ``several_hosts`` are not used: they describe how one replica group was started,
            and the others were not.
    """

    def __init__(self, timeout: timedelta | float = timedelta(seconds=60), config: RingConfig | None = None) -> None:
        super().__init__(timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout))
        self._config = config

    def getBackendName(self) -> str:
        """The name under which torchft registers the group."""
        return "torchft-ring"

    def abort(self, errored: bool = True) -> None:
        """End the group and its operations in flight; its sockets and threads are gone on return."""
        group = self._pg
        super().abort(errored)
        _leave(group)

    def shutdown(self) -> None:
        """Leave the group."""
        group = self._pg
        super().shutdown()
        _leave(group)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time limit of later operations."""
        super().set_timeout(timeout)
        if self._pg is not None:
            self._pg._get_backend(torch.device("cpu"))._set_default_timeout(timeout)

    def _create_pg(self, store: Store, rank: int, world_size: int) -> dist.ProcessGroup:
        """torchft's creator, with a store of this quorum's own. Blocks until all have met."""
        settings = RingConfig.from_environment() if self._config is None else self._config
        options = _DistributedBackendOptions()
        options.store = store
        options.group_rank = rank
        options.group_size = world_size
        options.timeout = self._timeout
        options.group_id = self._group_id()
        # No ranks of the default group: the connections are this group's own, and the default group keeps its own.
        options.global_ranks_in_group = [-1] * world_size
        backend = ring.create_process_group(options, dataclasses.replace(settings, epoch=0, several_hosts=False))
        group = dist.ProcessGroup(store, rank, world_size)
        group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
        for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
            group._register_backend(torch.device(device), dist.ProcessGroup.BackendType.CUSTOM, backend)
        return group

    def _group_id(self) -> str:
        """A name that differs for each quorum, and is the same in all replica groups.

        ring numbers the groups of a name, whose keys in a store must differ. A process that was started again counts
        from 0, so no name may come twice.
        """
        quorum = self._uuid if hasattr(self, "_uuid") else self._quorum_id
        return f"torchft/{quorum}/{self._group_rank}"


def _leave(group: dist.ProcessGroup | None) -> None:
    if isinstance(group, process_group.ProcessGroup) or group is None:
        return
    group._get_backend(torch.device("cpu")).shutdown()
