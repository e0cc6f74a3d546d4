"""Majority vote: each element's sign is that of most ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from ringdp.compression.codecs import blocks
from ringdp.compression.codecs.bits import pack, packed_bytes, packed_slice, unpack
from ringdp.compression.protocol import Aggregate, Info, Rounds
from ringdp.compression.registry import register


@register("signsgd")
@dataclasses.dataclass(frozen=True)
class SignSGD:
    """The sign of most ranks, 0 for as many of one as of the other: 1 bit an element and rank.

    Bernstein et al., "signSGD: Compressed Optimisation for Non-Convex Problems", ICML 2018, arXiv 1802.04434, algorithm
    3. The gradient's size is gone: learning rates are those of a sign method, far below SGD's. An element that is zero
    on a rank votes for 1; a rank whose elements are all zero has no vote. Error feedback does not apply, since a vote
    does not estimate the gradient: see `Sign` for that.
    """

    aggregate: ClassVar[Aggregate] = "rounds"
    per_parameter: ClassVar[bool] = True
    error_feedback: ClassVar[None] = None

    def average(self, xs: Sequence[Tensor], infos: Sequence[Info]) -> Rounds:
        means = []
        for x, info in zip(xs, infos, strict=True):
            votes = yield _vote(x)
            means.append(_count(votes, info.numel).mul_(info.loss_scale))
        return means


def _vote(x: Tensor) -> Tensor:
    """uint8: 1 where the rank has a vote, then the bits of it."""
    vote = torch.empty(1 + packed_bytes(x.numel(), 1), dtype=torch.uint8, device=x.device)
    vote[0] = x.any()
    for piece in blocks.pieces(x.numel(), 1, x.device):
        vote[1:][packed_slice(piece, 1)] = pack((x[piece] >= 0).view(torch.uint8), 1)
    return vote


def _count(votes: Tensor, numel: int) -> Tensor:
    """float32 ``[numel]``: 1, -1 or 0, of ``[ranks, bytes]``."""
    majority = torch.empty(numel, device=votes.device, dtype=torch.float32)
    counts = votes[:, 0].to(torch.int32)
    for piece in blocks.pieces(numel, 1, votes.device):
        ballots = torch.zeros(piece.stop - piece.start, dtype=torch.int32, device=votes.device)
        for bits, count in zip(votes[:, 1:], counts, strict=True):
            said = unpack(bits[packed_slice(piece, 1)], 1, ballots.numel())
            ballots += said.to(torch.int32).mul_(2).sub_(1).mul_(count)
        majority[piece] = ballots.sign_()
    return majority
