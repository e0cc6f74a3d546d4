"""A process group of the same ranks as another, whose operations keep an order of their own."""

from __future__ import annotations

import secrets
from typing import Any

import torch
import torch.distributed as dist

from ringdp.job.backend import BACKEND, backend_of, timeout_of
from ringdp.job.byte_collectives import all_gather_bytes
from ringdp.job.elastic import plain_groups

_NAME_BYTES = 32


def sibling_groups(
    group: dist.ProcessGroup, device: torch.device, count: int, *, purpose: str
) -> list[dist.ProcessGroup]:
    """New groups of the same ranks, in the same order, for tensors on this kind of device. All ranks call it.

    They add in rank order where `group` does.

    Their name is made by rank 0. ``torch.distributed.new_group`` would take it from how many groups this process is in,
    which is another number on a rank that is in a group without the others.
    """
    name = all_gather_bytes(secrets.token_hex(_NAME_BYTES // 2).encode(), group, room=_NAME_BYTES, device=device)[0]
    return [
        _sibling(group, device, f"ringdp {purpose} {name.decode()} {number}", f"ringdp {purpose}")
        for number in range(count)
    ]


def _sibling(group: dist.ProcessGroup, device: torch.device, name: str, description: str) -> dist.ProcessGroup:
    torchs: Any = dist.distributed_c10d  # only its own functions take a name
    ranks = dist.get_process_group_ranks(group)
    backend = backend_of(group, device.type)
    with plain_groups():
        made, _ = torchs._new_process_group_helper(
            len(ranks),
            group.rank(),
            ranks,
            dist.Backend(f"{device.type}:{backend}"),
            torchs._get_default_store(),
            name,
            timeout=timeout_of(group, device.type) or torchs._get_default_timeout(backend),
            group_desc=description,
        )
    if backend == BACKEND:
        from ringdp import _C

        if _C.adds_in_rank_order(group):
            _C.add_in_rank_order(made)
    torchs._world.pg_group_ranks[made] = {rank: place for place, rank in enumerate(ranks)}
    assert isinstance(made, dist.ProcessGroup)
    return made
