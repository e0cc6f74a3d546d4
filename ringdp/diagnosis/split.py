"""Where the time of a window's steps went, rank by rank: computing, waiting for a slow rank, and communication.

No clock has to be compared for this. All ranks leave a step together, since its all-reduces do; so a rank that computes
for less time than the slowest waits for the difference, and what it waits beyond that is communication.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ringdp.diagnosis.window import OWN, Window


@dataclass(frozen=True)
class Split:
    """Means over the steps of a window, in seconds, all ``[ranks]``. A rank's parts add up to its step.

    Attributes:
        step: of the whole step.
        own: computing, in the four phases: ``[ranks, 4]``, as `OWN` names them.
        peer_wait: waiting for a rank that computes longer.
        slowest: the rank that it waited for longest.
        communication: waiting beyond that, `coding` included.
        coding: of it, about, encoding and decoding.
    """

    step: Tensor
    own: Tensor
    peer_wait: Tensor
    slowest: Tensor
    communication: Tensor
    coding: Tensor

    @property
    def cost(self) -> float:
        """The share of a step in which a rank in the middle does not compute."""
        step = float(self.step.mean())
        return 1 - float(self.own.sum(1).median()) / step if step > 0 else 0.0


def split(window: Window) -> Split:
    own_by_phase = torch.stack([window.field(name) for name in OWN], dim=-1)
    own = own_by_phase.sum(-1)
    blocked = window.field("exposed") + window.field("other_wait")
    most, slowest = own.max(0)
    peer_wait = torch.minimum(blocked, most - own)
    communication = blocked - peer_wait
    on_its_way = window.field("on_its_way")
    coding = communication * (window.field("coding") / on_its_way.clamp(min=1e-12)).clamp(max=1.0)
    waited = torch.zeros(window.ranks, window.ranks, dtype=torch.float64, device="cpu")  # by whom, for whom
    waited.index_add_(1, slowest, peer_wait)
    return Split(
        step=(own + blocked).mean(1),
        own=own_by_phase.mean(1),
        peer_wait=peer_wait.mean(1),
        slowest=waited.argmax(1),
        communication=communication.mean(1),
        coding=coding.mean(1),
    )
