"""Majority vote: each element's sign is what most ranks say."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from ringdp.compression.bits import pack, unpack
from ringdp.compression.protocol import Aggregate, Info, Rounds
from ringdp.compression.registry import register


@register("signsgd")
@dataclasses.dataclass(frozen=True)
class SignSGD:
    """1, -1, or 0 where as many ranks say the one as the other: 1 bit an element and rank.

    Bernstein et al., "signSGD: Compressed Optimisation for Non-Convex Problems", ICML 2018, arXiv 1802.04434, algorithm
    3. The gradient's size is gone: learning rates are those of a sign method, far below SGD's. An element that is zero
    on a rank votes for 1; a rank whose elements are all zero has no vote. Error feedback does not fit, there being
    nothing that a vote is an estimate of: see `Sign` for that.
    """

    aggregate: ClassVar[Aggregate] = "rounds"
    error_feedback: ClassVar[None] = None

    def average(self, xs: Sequence[Tensor], infos: Sequence[Info]) -> Rounds:
        means = []
        for x, info in zip(xs, infos, strict=True):
            votes = x.any().to(torch.uint8).view(1)
            told = yield torch.cat((votes, pack((x >= 0).to(torch.uint8), 1)))
            ranks = told[:, 0].to(torch.int32)
            ballots = torch.zeros(info.numel, dtype=torch.int32, device=x.device)
            for said, counts in zip(told, ranks, strict=True):
                ballots += unpack(said[1:], 1, info.numel).to(torch.int32).mul_(2).sub_(1).mul_(counts)
            means.append(ballots.sign().to(torch.float32).mul_(info.loss_scale))
        return means
