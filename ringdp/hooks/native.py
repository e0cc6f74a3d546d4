"""The core's compressed all-reduce: the same mathematics as `compression.exchange.owner`, in C++, by segments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from ringdp.compression.codecs import native
from ringdp.compression.exchange import Key, Section, States
from ringdp.compression.partition import owner_offset_of
from ringdp.job.backend import reaches_core

if TYPE_CHECKING:
    from ringdp import _C


class NativeSections:
    """A bucket's parameters whose compressor the core has. Their residual is one tensor, not one for each part.

    Args:
        sections: of one codec.
    """

    def __init__(self, sections: Sequence[Section]) -> None:
        self._sections = sections
        self._codec: str = sections[0].compressor.native  # type: ignore[attr-defined]
        self._offsets = [section.begin for section in sections]
        self._counts = [section.count for section in sections]
        self._owner_offsets = [owner_offset_of(section.name) for section in sections]
        self._spare: dict[str, tuple[Tensor, Tensor]] = {}  # two residuals by name, the one that counts among them

    def average(
        self, bucket: Tensor, group: dist.ProcessGroup, states: States, loss_scale: float, divisor: float
    ) -> tuple[dist.Work, _C.FiniteReport]:
        """Start it: the Work, and a report whose ``finite`` is known when that is done."""
        old: list[Tensor | None] = []
        new: list[Tensor | None] = []
        for section in self._sections:
            if section.feedback is None:
                old.append(None)
                new.append(None)
                continue
            key = Key(section.name, "feedback", "whole", 0)
            residual = states.copy(key).get("residual")
            if residual is None:
                residual = section.zeros()
            pair = self._spare.get(section.name)
            if pair is None or (residual is not pair[0] and residual is not pair[1]):
                pair = self._spare[section.name] = (residual, torch.zeros_like(residual))
            following = pair[1] if residual is pair[0] else pair[0]
            old.append(residual)
            new.append(following)
            states.keep(key, {"residual": following})
        from ringdp import _C

        work, report = _C.all_reduce_compressed(
            group,
            bucket,
            self._offsets,
            self._counts,
            self._owner_offsets,
            old,
            new,
            self._codec,
            loss_scale,
            int(divisor),
        )
        return work, report


def serves(section: Section, group: dist.ProcessGroup, dtype: torch.dtype) -> bool:
    """Whether the core does all of it: its codec, the group's backend, the device, the gradient's dtype."""
    return (
        getattr(section.compressor, "native", None) is not None
        and dtype == torch.float32
        and section.device.type == "cpu"
        and native.extension() is not None
        and reaches_core(group)
    )
