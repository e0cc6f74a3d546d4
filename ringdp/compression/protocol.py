"""The interface of a compressor, and the facts about its tensor that it is given."""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Sequence
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

Aggregate: TypeAlias = Literal["owner", "merge", "gather", "sum", "rounds"]
AGGREGATES: tuple[Aggregate, ...] = ("owner", "merge", "gather", "sum", "rounds")
Payload: TypeAlias = tuple[Tensor, ...]
Rounds: TypeAlias = Generator[list[Tensor] | Tensor, Any, Sequence[Tensor]]


class Info:
    """About the elements that a compressor is given.

    Attributes:
        name: the parameter's.
        shape: the parameter's; the elements may be a part of it.
        numel: how many elements there are.
        step: backwards that synchronised before this one, the same on all ranks.
        rank, world_size: this process and how many there are. Results must not depend on `rank` in `decompress`.
        device: where the elements are.
        loss_scale: by how much the gradients are larger than without loss scaling.
        phase: ``rank`` while this rank's gradient is encoded, ``owner`` while the owner encodes the mean.
        part: which part of the parameter this is, 0 for all of it.
        state: a dict of this parameter's, part's and phase's own. Values that `compress` puts into it are there in the
            next step and in checkpoints, unless a gradient overflowed: then the step's are dropped. Replace tensors in
            it, never change them in place. Empty in `decompress`.
    """

    __slots__ = (
        "_seeds",
        "device",
        "loss_scale",
        "name",
        "numel",
        "part",
        "phase",
        "rank",
        "shape",
        "state",
        "step",
        "world_size",
    )

    def __init__(
        self,
        *,
        name: str,
        shape: tuple[int, ...],
        numel: int,
        step: int = 0,
        rank: int = 0,
        world_size: int = 1,
        device: torch.device | str = "cpu",
        phase: Literal["rank", "owner"] = "rank",
        part: int = 0,
        state: dict[str, Any] | None = None,
        loss_scale: float = 1.0,
    ) -> None:
        self.name: str = name
        self.shape: tuple[int, ...] = shape
        self.numel: int = numel
        self.step: int = step
        self.rank: int = rank
        self.world_size: int = world_size
        self.device: torch.device = torch.device(device)
        self.phase: Literal["rank", "owner"] = phase
        self.part: int = part
        self.loss_scale: float = loss_scale
        self.state: dict[str, Any] = {} if state is None else state
        self._seeds: dict[int, torch.Generator] = {}

    @property
    def generator(self) -> torch.Generator:
        """Random numbers that are the same on all ranks, and in `compress` and `decompress` of the same elements.

        Seeded with name, step, phase and part; it starts anew in each of the two.
        """
        return self._generator(-1)

    @property
    def private_generator(self) -> torch.Generator:
        """Random numbers of this rank's own, for stochastic rounding; the same in the same run."""
        return self._generator(self.rank)

    def _generator(self, rank: int) -> torch.Generator:
        if rank not in self._seeds:
            text = f"{self.name}\0{self.step}\0{self.phase}\0{self.part}\0{rank}"
            seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
            self._seeds[rank] = torch.Generator(self.device).manual_seed(seed)
        return self._seeds[rank]


@runtime_checkable
class Compressor(Protocol):
    """Turns elements into fewer bytes and back; two methods are all that is needed.

    Optional attributes, with their defaults:
        aggregate: how the ranks' payloads become one mean: ``owner`` (the default) encodes twice and moves as few bytes
            as an all-reduce; ``merge``: the same for payloads that the compressor can add up by itself, see
            `MergeCompressor`; ``gather``: each rank decodes all payloads; ``sum``: payload tensors are added up,
            for linear methods; ``rounds``: see `RoundsCompressor`.
        fixed_size: payloads of equally many elements have the same dtypes and sizes (True); False costs an exchange of
            sizes before each exchange of payloads.
        carries_nan: an infinity or NaN in the elements decodes to one (False): the framework then looks for them
            itself, and reports them to the other ranks.
        error_feedback: True for `ErrorFeedback`, or an object with its methods (None).
        entries: of sparse codes: a method ``entries(payload) -> int``, how many elements a payload holds; then
            `CompressionStats` has densities (None).
        repeatable: False where `compress` changes state outside of ``info.state``: an elastic job, which may call it
            again for the same step, then refuses it (True).
        native: name of the core's codec that does the same, in C++ (None).
    """

    def compress(self, x: Tensor, info: Info) -> Payload:
        """A tuple of tensors of any dtype that stand for `x`, which is float32 ``[numel]``, not to be changed."""
        ...

    def decompress(self, payload: Payload, info: Info) -> Tensor:
        """float32 ``[numel]`` from a result of `compress` on any rank; new, or at least not changed later."""
        ...


@runtime_checkable
class RoundsCompressor(Protocol):
    """A compressor that communicates more than once, with ``aggregate = "rounds"``: one method, a generator.

    `average` gets all parameters of a bucket that it compresses: `xs`, float32 ``[numel]`` each, not to be changed, and
    their `infos`. It may yield, as often as it likes and on all ranks in the same order and shapes,

    - a list of tensors of any dtype: they are added over the ranks, in place, and divided by the number of ranks that
      have input where they are of floating point;
    - one tensor: it is sent ``[ranks, *shape]``, the tensors of all ranks, in rank order.

    It returns the means, float32 ``[numel]`` each. They must depend only on the tensors that came back and on
    `Info.generator`, so that all ranks have the same bits. Error feedback adds what this rank's gradient had more than
    the mean to the next. ``error_feedback`` and ``carries_nan`` count; ``fixed_size`` and ``native`` do not.
    ``per_parameter`` (False) is True where each parameter's mean depends on that parameter alone, which
    ``RingDP(reproducible=True)`` requires.
    """

    @property
    def aggregate(self) -> str:
        """``"rounds"``."""
        ...

    def average(self, xs: Sequence[Tensor], infos: Sequence[Info]) -> Rounds:
        """Yield the tensors to be exchanged; return the means."""
        ...


@runtime_checkable
class MergeCompressor(Compressor, Protocol):
    """A compressor with ``aggregate = "merge"``: its payloads add up to one, as those of sparse codes do."""

    def merge(
        self, payloads: Sequence[Payload], info: Info, divisor: float, residual: Tensor | None, back: float
    ) -> Payload:
        """One payload of the sum of `payloads`, added in their order, by `divisor`.

        Its error, times `back`, is added to `residual` (float32 ``[numel]``) in place, where there is one.
        """
        ...


CompressorLike: TypeAlias = str | Compressor | RoundsCompressor | None
"""The choice of a compressor: a registered name, an object, or None for exact gradients."""
