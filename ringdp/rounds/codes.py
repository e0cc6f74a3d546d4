"""How the changes of a fragment are encoded, and the mean of the ranks' is found.

By owners: as gradients are, by the core's operation, where the owner of an element encodes the mean again. Gathered:
each rank's code goes to all, and each rank adds up what they decode to, in rank order. Either way all ranks have the
same bits of the mean.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ringdp.compression import ErrorFeedback, Sparse2
from ringdp.compression.exchange.finite import all_finite
from ringdp.compression.feedback import feedback_of
from ringdp.compression.partition import owner_offset_of
from ringdp.compression.saved import share_of_residual
from ringdp.errors import MismatchError
from ringdp.job.byte_collectives import all_gather_single
from ringdp.job.elastic import is_elastic
from ringdp.rounds.fragments import Fragment, Piece

if TYPE_CHECKING:
    from ringdp import _C

DECAY = 0.95  # arXiv 2603.08163


class NativeCodec(Protocol):
    """A compressor that the core has, by its name there, with standard error feedback or none."""

    @property
    def native(self) -> str | None: ...
    @property
    def error_feedback(self) -> Any: ...


RoundsCodec = NativeCodec | Sparse2


class Codes(Protocol):
    """Of one fragment, one exchange after the other. One thread.

    Attributes:
        residuals: what codes have left out, by piece.
    """

    residuals: _C.Residuals

    def sent_bytes(self) -> float:
        """By this rank, each time the fragment leaves."""
        ...

    def send(self, weight: float) -> dist.Work:
        """Encode the fragment's buffer, and send that. `weight`: of the values, in the unit of `mean`."""
        ...

    def mean(self, weights: Sequence[float]) -> bool:
        """Put the mean into the buffer, when all ranks' codes have come; whether it is finite, the same on all ranks.

        Args:
            weights: of the ranks, in one unit on all of them; not all are 0.
        """
        ...

    def commit(self, *, usable: bool, counts: bool) -> None:
        """The exchange is over.

        Args:
            usable: it counts, with the residuals that it has left; otherwise it is as if it had not been.
            counts: this rank's values are in the mean.
        """
        ...

    def follow_members(self) -> None:
        """The group's members have changed, in an elastic job: a rank's residuals stay with it."""
        ...

    def owed(self, piece: Piece) -> Tensor | None:
        """What a rank alone adds to its change, once."""
        ...

    def share(self, piece: Piece, residual: Tensor) -> Tensor:
        """This rank's term of the residual of the mean over ranks."""
        ...

    def part(self, piece: Piece, residual: Tensor) -> Tensor:
        """What this rank goes on from, of the residual of a mean over ranks."""
        ...


def codes_of(codec: RoundsCodec, fragment: Fragment, group: dist.ProcessGroup | None) -> Codes:
    if isinstance(codec, Sparse2):
        return GatheredCodes(codec, fragment, group)
    return OwnedCodes(codec, fragment, group)


class OwnedCodes:
    """Where a rank owns elements its residual is what their mean lacks; elsewhere what its own changes lack, which the
    mean has divided by the ranks."""

    def __init__(self, codec: NativeCodec, fragment: Fragment, group: dist.ProcessGroup | None) -> None:
        from ringdp import _C

        assert codec.native is not None
        self._native, self._fragment, self._group = codec.native, fragment, group
        self._feedback = feedback_of(codec.error_feedback) is not None
        self.residuals = _C.Residuals()
        self._report: _C.FiniteReport | None = None
        self._sent: Tensor | None = None  # the buffer, or its values as float32
        self._view = 1  # of the residuals: of each piece the elements that this rank owns are those there
        self._owned: dict[str, list[tuple[int, int]]] = {}
        self._owners = 1  # the ranks there
        self.follow_members()

    def sent_bytes(self) -> float:
        from ringdp import _C

        ranks = _ranks(self._group)
        return 2 * (ranks - 1) / ranks * sum(_C.codec_bytes(self._native, it.count) for it in self._fragment.pieces)

    def send(self, weight: float) -> dist.Work:
        from ringdp import _C

        buffer, pieces = self._fragment.buffer, self._fragment.pieces
        assert self._group is not None
        if weight != 1:
            buffer.mul_(weight)
        self._sent = buffer if buffer.dtype == torch.float32 else buffer.float()
        both = [
            self.residuals.write(one.name, one.count, buffer.device) if self._feedback else (None, None)
            for one in pieces
        ]
        work, self._report = _C.all_reduce_compressed(
            self._group,
            self._sent,
            [one.begin for one in pieces],
            [one.count for one in pieces],
            [owner_offset_of(one.name) for one in pieces],
            [current for current, _ in both],
            [following for _, following in both],
            self._native,
            1.0,
            self._group.size(),
        )
        return work

    def mean(self, weights: Sequence[float]) -> bool:
        assert self._report is not None
        buffer, ranks, total = self._fragment.buffer, len(weights), sum(weights)
        if self._sent is not None and self._sent is not buffer:
            buffer.copy_(self._sent)
        self._sent = None
        if self._report.finite and total != ranks:  # the core has divided by the ranks
            buffer.mul_(ranks / total)
        return self._report.finite

    def commit(self, *, usable: bool, counts: bool) -> None:
        del counts  # its values were 0, and its residual was sent
        self.residuals.commit(usable)

    def follow_members(self) -> None:
        from ringdp import _C

        group = self._group
        if group is None or not is_elastic(group) or (self._owned and self._view == _C.view_of(group)):
            return
        ranks = group.size()
        for piece in self._fragment.pieces:
            owned = _C.owned_elements(group, piece.count, owner_offset_of(piece.name))
            current = self.residuals.current(piece.name)
            if current is not None and self._owned:
                own = current.clone()
                for begin, end in self._owned[piece.name]:
                    own[begin:end] *= self._owners
                for begin, end in owned:
                    own[begin:end] *= 1.0 / ranks
                self.residuals.set(piece.name, own)
            self._owned[piece.name] = owned
        self._view, self._owners = _C.view_of(group), ranks

    def owed(self, piece: Piece) -> Tensor | None:
        return self.residuals.current(piece.name)

    def share(self, piece: Piece, residual: Tensor) -> Tensor:
        return share_of_residual(residual, self._owned_mask(piece), _ranks(self._group))

    def part(self, piece: Piece, residual: Tensor) -> Tensor:
        return residual if _ranks(self._group) == 1 else residual * self._owned_mask(piece)

    def _owned_mask(self, piece: Piece) -> Tensor:
        """bool [count]: the elements whose mean this rank computes."""
        from ringdp import _C

        mask = torch.zeros(piece.count, dtype=torch.bool, device="cpu")
        if self._group is not None and self._group.size() > 1:
            for begin, end in _C.owned_elements(self._group, piece.count, owner_offset_of(piece.name)):
                mask[begin:end] = True
        return mask


class GatheredCodes:
    """A residual is what a rank's own changes lack. Codes are of values without weights, so it does not depend on the
    other ranks; it decays from one exchange that counts this rank to the next."""

    def __init__(self, codec: Sparse2, fragment: Fragment, group: dist.ProcessGroup | None) -> None:
        from ringdp import _C

        self._codec, self._fragment, self._group = codec, fragment, group
        feedback = ErrorFeedback(DECAY) if codec.error_feedback is True else feedback_of(codec.error_feedback)
        assert feedback is None or isinstance(feedback, ErrorFeedback)
        self._feedback = feedback
        self.residuals = _C.Residuals()
        self._gathered: Tensor | None = None  # uint8 [ranks * code]
        ends = [0]
        for piece in fragment.pieces:
            ends.append(ends[-1] + _C.sparse2_bytes(piece.count, codec.kept))
        self._places = [slice(begin, end) for begin, end in itertools.pairwise(ends)]
        self._bytes = ends[-1]  # of the codes of all pieces

    def sent_bytes(self) -> float:
        return (_ranks(self._group) - 1) * self._bytes

    def send(self, weight: float) -> dist.Work:
        del weight
        assert self._group is not None
        values = self._fragment.buffer.float()
        code = torch.empty(self._bytes, dtype=torch.uint8, device="cpu")
        for piece, place in zip(self._fragment.pieces, self._places, strict=True):
            if self._feedback is None:
                self._codec.encode(code[place], piece.of(values), None, None)
            else:
                current, following = self.residuals.write(piece.name, piece.count, values.device)
                decay = self._feedback.decay
                self._codec.encode(code[place], piece.of(values), current, following, decay=decay)
        self._gathered = code.new_empty(self._group.size() * self._bytes)
        work: dist.Work = all_gather_single(self._gathered, code, group=self._group, async_op=True)
        return work

    def mean(self, weights: Sequence[float]) -> bool:
        assert self._gathered is not None
        buffer, total = self._fragment.buffer, sum(weights)
        mean = buffer if buffer.dtype == torch.float32 else torch.empty_like(buffer, dtype=torch.float32)
        mean.zero_()
        finite = True
        for rank, (code, weight) in enumerate(zip(self._gathered.view(len(weights), -1), weights, strict=True)):
            for piece, place in zip(self._fragment.pieces, self._places, strict=True):
                try:
                    finite &= weight <= 0 or self._codec.add(piece.of(mean), code[place], weight / total)
                except ValueError as error:
                    raise MismatchError(f"the code of {piece.name} by rank {rank}: {error}", peer=rank) from error
        self._gathered = None
        if mean is not buffer:
            buffer.copy_(mean)
        return finite and bool(all_finite(mean))

    def commit(self, *, usable: bool, counts: bool) -> None:
        self.residuals.commit(usable and counts)
        if usable and not counts and self._feedback is not None:  # all ranks have residuals, or none has
            for piece in self._fragment.pieces:
                if self.residuals.current(piece.name) is None:
                    self.residuals.set(piece.name, torch.zeros(piece.count, dtype=torch.float32, device="cpu"))

    def follow_members(self) -> None:
        """Nothing of it depends on them."""

    def owed(self, piece: Piece) -> Tensor | None:
        residual = self.residuals.current(piece.name)
        return residual if residual is None or self._feedback is None else self._feedback.decayed(residual)

    def share(self, piece: Piece, residual: Tensor) -> Tensor:
        return residual / _ranks(self._group)

    def part(self, piece: Piece, residual: Tensor) -> Tensor:
        return residual


def _ranks(group: dist.ProcessGroup | None) -> int:
    return 1 if group is None else group.size()
