"""torch's DistributedSampler in a job that goes on without lost ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch.utils.data import DistributedSampler, Sampler

from ringdp.errors import InvalidArgumentError
from ringdp.job.byte_collectives import all_gather_bytes, alone, require_member
from ringdp.job.elastic import as_unit, is_elastic

SETTINGS = ("shuffle", "seed", "drop_last")
"""Of a DistributedSampler, beside the dataset and the ranks."""


class Following(Sampler[int]):
    """A DistributedSampler that splits each epoch over the ranks that begin it (`follow`)."""

    def __init__(self, sampler: DistributedSampler[int], group: dist.ProcessGroup) -> None:
        self.sampler, self._group = sampler, group

    def __len__(self) -> int:
        """Samples of this rank in the epoch that was begun last."""
        return len(self.sampler)

    def __iter__(self) -> Iterator[int]:
        divide_again(self.sampler, self._group)
        return iter(self.sampler)

    def set_epoch(self, epoch: int) -> None:
        """As DistributedSampler's."""
        self.sampler.set_epoch(epoch)


def divide_again(sampler: DistributedSampler[Any], group: dist.ProcessGroup) -> None:
    """Divide its samples, from now on, among the ranks that the group has. All ranks call it at the same place, and
    divide alike, also where a rank is lost meanwhile (elastic jobs)."""

    def agreed() -> tuple[int, int]:
        ranks = all_gather_bytes(b"\0", group, room=1)
        return group.rank(), len(ranks)

    rank, ranks = (group.rank(), group.size())
    if is_elastic(group):
        rank, ranks = as_unit(group, "the beginning of an epoch", agreed)
    if (sampler.rank, sampler.num_replicas) != (rank, ranks):
        epoch, settings = sampler.epoch, {name: getattr(sampler, name) for name in SETTINGS}
        DistributedSampler.__init__(sampler, sampler.dataset, ranks, rank, **settings)
        sampler.set_epoch(epoch)


def follow(sampler: DistributedSampler[int], group: dist.ProcessGroup | None = None) -> Sampler[int]:
    """A sampler to give to the DataLoader in place of `sampler`: in an elastic job it splits each epoch over the ranks
    that are left when the epoch begins. What a lost rank would have had of its last epoch, no rank visits.

        sampler = ringdp.data.follow(DistributedSampler(dataset))

    In other jobs it is `sampler` itself. All ranks begin each epoch (``for batch in loader``) at the same place between
    their collectives.

    Args:
        sampler: of the ranks of the group.
        group: the ranks over which it splits; the default process group if None.

    Raises:
        InvalidArgumentError: not a DistributedSampler.
    """
    if type(sampler) is not DistributedSampler:
        raise InvalidArgumentError(
            f"ringdp.data.follow needs a torch DistributedSampler, not a {type(sampler).__name__}: BalancedSampler"
            " follows by itself, and one of your own has to count ringdp.world_size() ranks in each epoch"
        )
    if group is None and alone("ringdp.data.follow"):
        return sampler
    member = require_member(group, "ringdp.data.follow")
    return Following(sampler, member) if is_elastic(member) else sampler
