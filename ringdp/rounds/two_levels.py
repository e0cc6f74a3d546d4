"""Two levels of ranks: those of a host or a site, and one rank's counterparts in the others."""

from __future__ import annotations

import torch.distributed as dist

from ringdp import config
from ringdp.errors import InvalidArgumentError
from ringdp.job.backend import named
from ringdp.job.byte_collectives import all_gather_bytes, require_member
from ringdp.job.elastic import is_elastic


def levels() -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """(inside, between): the ranks of this rank's host, and the ranks with its place on the other hosts.

    Ranks that have RINGDP_SITE are grouped by it, the others by their host. A group of one rank is None: wrap nothing
    then, as None in ``process_group=`` means all ranks. All ranks call it, in the same place.

    In an elastic job `between` is all ranks, so that a host that loses one needs no counterpart for it: a host counts
    by its ranks, and their values, which are equal, leave it once. A group of one rank is then one, since it may have
    had more.

    Raises:
        InvalidArgumentError: the hosts (or sites) have different numbers of ranks, and some rank no counterpart. Not in
            an elastic job.
        InvalidStateError: before `ringdp.init`.
    """
    world = require_member(None, "ringdp.levels")
    settings = config.RingConfig.from_environment()
    mine = f"site {settings.site}" if settings.site else f"host {config.host_identity(settings.host_id)}"
    with named("ringdp.levels"):
        gathered = [one.decode() for one in all_gather_bytes(mine.encode(), world)]
    members: dict[str, list[int]] = {}
    for rank, place in enumerate(gathered):
        members.setdefault(place, []).append(rank)
    if is_elastic(world):
        return _one_of([members[place] for place in members]), world if len(members) > 1 else None
    sizes = {place: len(ranks) for place, ranks in members.items()}
    if len(set(sizes.values())) > 1:
        shown = "; ".join(f"ranks {', '.join(map(str, ranks))}" for ranks in members.values())
        raise InvalidArgumentError(
            f"ringdp.levels() needs as many ranks in each host or site, and there are {shown}: give DiLoCo no"
            " process_group, which averages over all ranks, each host's together"
        )
    inside = _one_of([members[place] for place in members])
    between = _one_of([list(peers) for peers in zip(*members.values(), strict=True)])
    return inside, between


def _one_of(groups: list[list[int]]) -> dist.ProcessGroup | None:
    """This rank's one; all ranks make all of them."""
    if all(len(ranks) == 1 for ranks in groups):
        return None
    if len(groups) == 1:
        return dist.group.WORLD
    mine, _ = dist.new_subgroups_by_enumeration(groups)
    return mine
