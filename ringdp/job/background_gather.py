"""An all-gather of a few bytes beside the training, by which ranks compare what they have."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ringdp.job.backend import BACKEND, backend_of, named
from ringdp.job.byte_collectives import as_bytes, as_tensor, device_for
from ringdp.job.sibling_group import sibling_groups


class BackgroundGather:
    """Started by all ranks of the group, at the same point between their other operations on it.

    Args:
        data: this rank's bytes; all ranks give equally many.
        name: of the operation, in errors; ring compares it.
    """

    def __init__(self, data: bytes, group: dist.ProcessGroup, name: str) -> None:
        self._name = name
        mine = as_tensor(data).to(device_for(group))
        self._all_ranks = [torch.empty_like(mine) for _ in range(group.size())]
        with named(name):
            self._work = dist.all_gather(self._all_ranks, mine, group=group, async_op=True)

    def wait(self) -> list[bytes]:
        """Every rank's bytes, in rank order. Raises the operation's error."""
        self._work.wait()
        return [as_bytes(tensor) for tensor in self._all_ranks]


def group_for_background(group: dist.ProcessGroup, purpose: str) -> dist.ProcessGroup:
    """The group on which such operations run beside those of `group`. All ranks call it.

    ring compares the names of a group's operations, and says which rank did something else. On other backends a rank
    that runs a backward more than the others would let theirs meet other operations; a group of their own keeps them
    apart.
    """
    if backend_of(group, device_for(group).type) == BACKEND:
        return group
    return sibling_groups(group, device_for(group), 1, purpose=purpose)[0]
