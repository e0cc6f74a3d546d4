"""In an elastic job: a lost owner's slices, as its last saved file has them, go to the owners that are left."""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import logging
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ringdp.errors import InvalidArgumentError, MembershipChanged
from ringdp.job.byte_collectives import all_gather_bytes
from ringdp.job.elastic import as_unit, places
from ringdp.kvstore import slices
from ringdp.kvstore.service import Members
from ringdp.text import ranks_by_number

_log = logging.getLogger("ringdp.kvstore")


@dataclasses.dataclass(frozen=True)
class Left:
    """A store's ranks before, as they are numbered for good, and what this one has.

    Attributes:
        places: of the ranks when the store was made.
        members: then.
        clock: this worker's.
        sent: by owner, the pushes that this worker has sent to it.
        content: of this rank's slices; None where it owns none.
        folder: of the last save; None: there was none.
    """

    places: tuple[int, ...]
    members: Members
    clock: int
    sent: Mapping[int, int]
    content: Mapping[str, Any] | None
    folder: str | None


@dataclasses.dataclass(frozen=True)
class Survivors:
    """Attributes:
    places: of the ranks that are left.
    members: of the store, by their new ranks.
    clocks: of the workers.
    contents: of all owners that were, in their order.
    lost_pushes: that workers which are left have sent to lost owners after their file was written.
    name: for new connections.
    """

    places: tuple[int, ...]
    members: Members
    clocks: dict[int, int]
    contents: list[Mapping[str, Any]]
    lost_pushes: int
    name: str


def meet(group: dist.ProcessGroup, left: Left) -> Survivors:
    """On all ranks that are left, when each has nothing on its way to another.

    Raises:
        MembershipChanged: no rank can read the lost owners' files.
    """
    return as_unit(group, "slices of a lost owner", functools.partial(_meet, group, left))


def _meet(group: dist.ProcessGroup, left: Left) -> Survivors:
    before, now = left.members, places(group)
    lost = [it for it in before.owners if left.places[it] not in now]
    files = _files_of(left, lost)
    said = {
        "clock": left.clock,
        "sent": [left.sent.get(it, 0) for it in lost],
        "files": sorted(files),
        "name": secrets.token_hex(8),
    }
    told = [json.loads(line) for line in all_gather_bytes(json.dumps(said).encode(), group)]
    first = {it: next((rank for rank, one in enumerate(told) if it in one["files"]), None) for it in lost}
    if missing := [left.places[it] for it, rank in first.items() if rank is None]:
        raise MembershipChanged(
            f"slices of a dist_async store were lost with {ranks_by_number(missing)}, and no rank that is left has a"
            " file of them: call save(folder) now and then, with a folder that all hosts share",
            rank=group.rank(),
            peer=missing[0],
        )
    mine: dict[str, Any] = {str(it): files[it] for it, rank in first.items() if rank == group.rank()}
    if left.content is not None:
        mine[str(before.rank)] = dict(left.content)
    buffer = io.BytesIO()
    torch.save(mine, buffer)
    contents: dict[int, Mapping[str, Any]] = {}
    for data in all_gather_bytes(buffer.getvalue(), group):
        loaded = torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
        contents |= {int(owner): content for owner, content in loaded.items()}
    new = {rank: now.index(place) for rank, place in enumerate(left.places) if place in now}
    members = Members(
        group,
        group.rank(),
        tuple(new[it] for it in before.workers if it in new),
        tuple(new[it] for it in before.owners if it in new),
    )
    workers = {old: new[old] for old in before.workers if old in new}
    pushed = sum(one["sent"][at] for one in told for at in range(len(lost)))
    kept = sum(contents[it]["pushes"].get(str(old), 0) for it in lost for old in workers)
    lost_pushes = max(0, pushed - kept)
    if members.rank == 0:
        _log.warning(
            "%s of a dist_async store lost with its slices: they are those of clock %d, and %d pushes of the ranks that"
            " are left count nowhere",
            ranks_by_number([left.places[it] for it in lost]),
            min((contents[it]["clock"] for it in lost), default=0),
            lost_pushes,
        )
    return Survivors(
        now,
        members,
        {rank: told[rank]["clock"] for rank in workers.values()},
        [contents[it] for it in before.owners],
        lost_pushes,
        told[0]["name"],
    )


def _files_of(left: Left, lost: Sequence[int]) -> dict[int, Mapping[str, Any]]:
    """Those of lost owners that this rank can read, of the newest clock of which all are there."""
    if left.folder is None or not lost:
        return {}
    try:
        paths = slices.newest(Path(left.folder))
        if len(paths) != len(left.members.owners):
            return {}
        return {it: slices.read([paths[left.members.owners.index(it)]])[0] for it in lost}
    except (InvalidArgumentError, OSError):
        return {}
