"""Local SGD: ranks step alone, and average their parameters every few steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from ringdp import values
from ringdp.compression import Compression, CompressorLike
from ringdp.job.backend import named
from ringdp.job.byte_collectives import all_gather_where_different
from ringdp.rounds import start
from ringdp.rounds.diloco import DiLoCo
from ringdp.rounds.exchange import Beside
from ringdp.rounds.fragments import Piece
from ringdp.rounds.settings import MOVED, Fragments


class LocalSGD(DiLoCo):
    """Parameters are averaged every so many steps: `DiLoCo` with an outer learning rate of 1 and no momentum.

    Lin, Stich, Patel, Jaggi, "Don't use large mini-batches, use local SGD", arXiv 1808.07217: some steps exactly
    (``compression=Compression(warmup_steps=100)``), then rounds.

    Args:
        model: as `DiLoCo`.
        inner: as `DiLoCo`.
        every: steps of a round.
        average_momenta: after a round, the inner optimizer's state of floating point, such as momentum or Adam's
            moments, is averaged too, exactly; 1 to 2 times the parameters' bytes more.
        fragments: as `DiLoCo`; so are the others.

    Raises:
        InvalidArgumentError, MismatchError, InvalidStateError: as `DiLoCo`; `average_momenta` needs no delay.
    """

    @values.moved("LocalSGD", MOVED)
    def __init__(
        self,
        model: torch.nn.Module,
        inner: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        *,
        every: int | Callable[[int], int] = 8,
        average_momenta: bool = False,
        fragments: int | Fragments = 1,
        compression: CompressorLike | Compression = None,
        unequal: bool = False,
        quorum: float | None = None,
        grace: float = 10.0,
        clip: float | None = None,
        scaler: torch.amp.GradScaler | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        self._average_momenta = average_momenta
        super().__init__(
            model,
            inner,
            every=every,
            outer={"lr": 1.0, "momentum": 0.0},
            fragments=fragments,
            compression=compression,
            unequal=unequal,
            quorum=quorum,
            grace=grace,
            clip=clip,
            scaler=scaler,
            process_group=process_group,
        )

    def _beside(self, number: int) -> Beside | None:
        if not self._average_momenta:
            return None
        own = self._momenta(self._fragments[number].pieces)
        return Beside(list(own.values()), lambda: self._average(own))

    def _average(self, momenta: Mapping[str, torch.Tensor]) -> None:
        """What some rank has not, since no step has made it yet there or it was not finite, stays as it is on all of
        them."""
        found, what = dict(momenta), f"LocalSGD {self._pace.schedule.label()}: momenta"
        if self._members.size() > 1:
            with named(what):
                gathered = all_gather_where_different("\n".join(found).encode(), self._members, what="momenta")
            common = (
                set(found) if gathered is None else set.intersection(*(set(it.decode().split("\n")) for it in gathered))
            )
            found = {name: value for name, value in found.items() if name in common}
        with named(what):
            start.average(list(found.values()), self._members)

    def _momenta(self, pieces: Sequence[Piece]) -> dict[str, torch.Tensor]:
        """This rank's momenta of these, in the same order on all ranks."""
        found: dict[str, torch.Tensor] = {}
        for number, optimizer in enumerate(self._inner):
            for piece in pieces:
                kept = optimizer.state.get(piece.parameter, {})
                for key in sorted(kept):
                    if _is_momentum(kept[key], piece.parameter):
                        found[f"{number} {piece.name} {key}"] = kept[key]
        return found


def _is_momentum(value: object, parameter: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.shape == parameter.shape
