"""A rank's changes that would do harm: infinities and NaNs do not reach the other ranks, and this rank replaces them;
what is far larger than the others' is clipped."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from ringdp.rounds.exchange import Arrival, Flight
from ringdp.rounds.fragments import Fragment, local_part

_log = logging.getLogger("ringdp.rounds")


def start_over(
    fragments: Sequence[Fragment],
    bases: Sequence[torch.Tensor],
    leaving: Fragment,
    inner: Sequence[torch.optim.Optimizer],
) -> None:
    """Parameters that are not finite, and all of `leaving`, become those of `bases`, from which changes count;
    optimizers drop such state."""
    for fragment, base in zip(fragments, bases, strict=True):
        for piece in fragment.pieces:
            mine = local_part(piece.parameter)
            if fragment is leaving or not bool(mine.isfinite().all()):
                mine.copy_(piece.shaped(base))
    for optimizer in inner:
        for parameter, kept in list(optimizer.state.items()):
            values = [it for it in kept.values() if isinstance(it, torch.Tensor)] if isinstance(kept, dict) else []
            if not all(bool(local_part(it).isfinite().all()) for it in values):
                del optimizer.state[parameter]


def log_not_finite(flight: Flight, fragment: Fragment, arrival: Arrival) -> None:
    """Warn of ranks that were left out."""
    for other, piece in arrival.left_out.items():
        whose = "this rank, which goes on from the global parameters," if other == arrival.rank else f"rank {other}"
        _log.warning(
            "%s: %s of %s is not finite, and this fragment of rank %d does not count",
            flight.name,
            fragment.pieces[piece].name,
            whose,
            other,
        )
    if not arrival.usable and not arrival.left_out and any(one.weight > 0 for one in arrival.records):
        _log.warning("%s: the mean is not finite; the global parameters stay as they are", flight.name)


def log_clipped(flight: Flight, arrival: Arrival) -> None:
    """Warn of ranks whose changes were clipped."""
    for rank, one in enumerate(arrival.records):
        if one.norm > flight.most and not flight.exact:
            _log.warning(
                "%s: the change of rank %d, of norm %.3g, counts as one of norm %.3g (clip=)",
                flight.name,
                rank,
                one.norm,
                flight.most,
            )
