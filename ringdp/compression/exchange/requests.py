"""The requests of an exchange to the mover of its bytes: a process group, or a simulation of n ranks in one process."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator
from typing import Any, TypeAlias

from torch import Tensor


@dataclasses.dataclass(frozen=True)
class AllToAll:
    """uint8: ``send_sizes[r]`` bytes to rank r, ``receive_sizes[r]`` from it. The answer is flat, rank by rank."""

    send: Tensor
    send_sizes: list[int]
    receive_sizes: list[int]


@dataclasses.dataclass(frozen=True)
class AllGather:
    """uint8 of one length on all ranks. The answer is ``[ranks, length]``."""

    send: Tensor


@dataclasses.dataclass(frozen=True)
class AllReduce:
    """Flat tensors to be added over the ranks, in place. The answer is None."""

    tensors: list[Tensor]


Request: TypeAlias = AllToAll | AllGather | AllReduce
Exchange: TypeAlias = Generator[Request, Any, None]
"""Runs on every rank in the same way: yields requests, is sent their answers, and ends."""
