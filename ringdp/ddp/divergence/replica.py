"""The tensors that must be equal on all ranks: parameters, buffers and optimizer state, by their names.

Where a hash differs, a comparison of every tensor's hash finds the tensors and the ranks.
"""

from __future__ import annotations

import fnmatch
import logging
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.modules.batchnorm import _NormBase

from ringdp.compression.parameters import clean_name
from ringdp.compression.tensor_parts import held, is_dtensor, is_plain
from ringdp.errors import InvalidArgumentError
from ringdp.job.byte_collectives import all_gather_where_different
from ringdp.text import count

_log = logging.getLogger("ringdp.divergence")


@dataclass(frozen=True)
class Replica:
    """This rank's tensors that are compared.

    Attributes:
        names: ``parameter 'layer.weight'``, ``buffer 'steps'``, ``optimizer state 'exp_avg' of 'layer.weight'``.
        tensors: strided, on the CPU; tied ones once.
        left_out: names of tensors that cannot be compared: they are spread over ranks, on a device, or not held by
            plain memory (`compression.tensor_parts`).
    """

    names: tuple[str, ...]
    tensors: tuple[Tensor, ...]
    left_out: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        module: torch.nn.Module,
        *,
        with_buffers: bool,
        optimizers: Sequence[torch.optim.Optimizer] = (),
        ignored: Collection[str] = (),
        patterns: Sequence[str] = (),
        known_different: Collection[str] = (),
    ) -> Replica:
        """The tensors that there are now.

        Args:
            module: what is wrapped.
            with_buffers: False: they become rank 0's in every forward.
            ignored: raw names that RingDP leaves alone.
            patterns: of names to leave out.
            known_different: of `names`, those that were reported already.
        """
        found = _Found(patterns, known_different)
        owners: dict[int, str] = {}
        for raw, parameter in module.named_parameters():
            name = clean_name(raw)
            owners[id(parameter)] = name
            if raw not in ignored:
                found.add(f"parameter '{name}'", name, parameter)
        if with_buffers:
            statistics = {
                id(buffer)
                for layer in module.modules()
                if isinstance(layer, _NormBase)
                for buffer in layer.buffers(recurse=False)
            }
            for raw, buffer in module.named_buffers():
                if raw not in ignored and id(buffer) not in statistics:
                    found.add(f"buffer '{clean_name(raw)}'", clean_name(raw), buffer)
        for optimizer in optimizers:
            for owned, state in optimizer.state.items():
                owner = owners.get(id(owned), "a parameter of another module")
                for key, value in state.items() if isinstance(state, dict) else ():
                    if isinstance(value, Tensor):
                        found.add(f"optimizer state '{key}' of '{owner}'", owner, value)
        return cls(tuple(found.names), tuple(found.tensors), tuple(found.left_out))


@dataclass
class _Found:
    """The tensors that are to be compared, each once."""

    patterns: Sequence[str]
    known_different: Collection[str]
    names: list[str] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    seen: set[int] = field(default_factory=set)

    def add(self, name: str, short: str, tensor: Tensor) -> None:
        if matches(short, self.patterns) or name in self.known_different or id(tensor) in self.seen:
            return
        self.seen.add(id(tensor))
        if is_plain(tensor) and tensor.is_cpu:
            self.names.append(name)
            self.tensors.append(tensor)
            return
        # A DTensor's parts are not compared: which ranks have the same part is not known here.
        parts = () if is_dtensor(tensor) else held("", name, tensor).parts
        if not parts or not all(part.is_cpu for _, part in parts):
            self.left_out.append(name)
            return
        for part, values in parts:
            self.names.append(f"{part} of {name}" if part else name)
            self.tensors.append(values)


def matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def check_patterns(module: torch.nn.Module, patterns: Sequence[str]) -> None:
    """Raise InvalidArgumentError where a pattern of a guard's `ignore` fits no name of `module`."""
    names = [clean_name(name) for kind in (module.named_parameters(), module.named_buffers()) for name, _ in kind]
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            raise InvalidArgumentError(
                f"Guard: ignore has {pattern!r}, which fits no parameter and no buffer of the module"
            )


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
