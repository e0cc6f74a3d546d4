"""The messages of all ranks about their last steps (csrc/torch/reducer/step_report.h packs them)."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ringdp.diagnosis.rank_facts import Facts

FIELDS = (
    *("between", "forward", "backward", "after", "other_wait", "exposed"),
    *("coding", "on_its_way", "off_core", "probe"),
)
"""The columns of a step's row, in seconds; csrc/torch/reducer/step_report.h explains each."""

REPORT_FORM = 5
"""The format of the ranks' messages; another number whenever a field is added."""

OWN = FIELDS[:4]
_WARM_UP = 2  # steps at the beginning that are left out
_HEAD = struct.Struct("<5q")


def step_of(message: bytes) -> int:
    """The last step in a rank's message."""
    step: int = _HEAD.unpack_from(message)[1]
    return step


@dataclass(frozen=True)
class Stamps:
    """A rank's times of the events by which clocks are compared, ns of its own clock; 0 where there was none.

    Attributes:
        issued_ns: when it issued its part of the exchange before.
        ended_ns: when that exchange ended.
        now_ns: when it wrote this message.
    """

    issued_ns: int
    ended_ns: int
    now_ns: int


@dataclass(frozen=True)
class Window:
    """Some steps of all ranks.

    Attributes:
        step: the last of them.
        rows: float64 ``[ranks, steps, len(FIELDS)]``, seconds.
        facts: by rank.
        stamps: by rank.
    """

    step: int
    rows: Tensor
    facts: tuple[Facts, ...]
    stamps: tuple[Stamps, ...]

    @classmethod
    def unpacked(cls, messages: Sequence[bytes], facts_bytes: int) -> Window:
        heads = [_HEAD.unpack(one[: _HEAD.size]) for one in messages]
        steps = min(head[0] for head in heads)
        end = len(messages[0]) - facts_bytes
        rows = torch.stack(
            [
                torch.frombuffer(bytearray(one[_HEAD.size : end]), dtype=torch.float32).view(-1, len(FIELDS))[
                    head[0] - steps : head[0]
                ]
                for one, head in zip(messages, heads, strict=True)
            ]
        )
        # The first steps make connections and buckets.
        rows = rows[:, min(max(_WARM_UP - (heads[0][1] - steps), 0), steps) :]
        facts = tuple(Facts.unpacked(one[end:]) for one in messages)
        return cls(heads[0][1], rows.double(), facts, tuple(Stamps(*head[2:]) for head in heads))

    @property
    def ranks(self) -> int:
        return len(self.facts)

    def field(self, name: str) -> Tensor:
        """``[ranks, steps]``."""
        return self.rows[:, :, FIELDS.index(name)]
