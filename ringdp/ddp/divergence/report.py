"""The tensors that differ, and their ranks: a comparison of every tensor's hash, once some hash is known to differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from ringdp.ddp.divergence.replica import Replica
from ringdp.job.byte_collectives import all_gather_where_different
from ringdp.text import count


@dataclass(frozen=True)
class Difference:
    """One tensor that is not equal on all ranks.

    Attributes:
        name: as `Replica.names` has it.
        hashes: by rank; "" on one that has no such tensor.
    """

    name: str
    hashes: tuple[str, ...]

    @property
    def majority(self) -> tuple[int, ...]:
        """The ranks that most others agree with; of two equally large groups that with the lowest rank."""
        sizes = Counter(self.hashes)
        most = max(sizes.values())
        chosen = next(one for one in self.hashes if sizes[one] == most)
        return tuple(rank for rank, one in enumerate(self.hashes) if one == chosen)

    @property
    def minority(self) -> tuple[int, ...]:
        majority = self.majority
        return tuple(rank for rank in range(len(self.hashes)) if rank not in majority)

    def __str__(self) -> str:
        missing = [rank for rank, one in enumerate(self.hashes) if not one]
        if missing:
            return f"{self.name} is missing on {describe_ranks(missing)}"
        if 2 * len(self.majority) == len(self.hashes):
            return f"{self.name} differs between {describe_ranks(self.majority)} and {describe_ranks(self.minority)}"
        return f"{self.name} on {describe_ranks(self.minority)} differs from that on {describe_ranks(self.majority)}"


def compare(replica: Replica, hashes: Sequence[int], group: dist.ProcessGroup) -> list[Difference]:
    """The tensors that differ, in the order of the module; all ranks of the group call it and get the same."""
    lines = [f"{name}\t{hash:016x}" for name, hash in zip(replica.names, hashes, strict=True)]
    gathered = all_gather_where_different("\n".join(lines).encode(), group, what="replica")
    if gathered is None:
        return []
    by_rank = [dict(line.rsplit("\t", 1) for line in text.decode().split("\n") if line) for text in gathered]
    names = dict.fromkeys(name for known in by_rank for name in known)
    found = [Difference(name, tuple(known.get(name, "") for known in by_rank)) for name in names]
    return [one for one in found if len(set(one.hashes)) > 1]


def describe_ranks(ranks: Sequence[int]) -> str:
    """``rank 2``, ``ranks 0, 1, 3``."""
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks))}"


def summary(differences: Sequence[Difference], compared: int) -> str:
    """The first difference, and how many there are."""
    more = len(differences) - 1
    others = f", and so do {more} more of {count(compared, 'tensor')}" if more else f" (of {count(compared, 'tensor')})"
    return f"{differences[0]}{others}"
