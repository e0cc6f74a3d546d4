"""torch 2.15's manual finalization of a backward, which RingDP refuses."""

from __future__ import annotations

from ringdp.errors import InvalidStateError

_REFUSED = (
    "RingDP averages gradients before backward() returns and cannot leave that to the caller: for manual finalization"
    " (require_manual_backward_finalization, finalize_backward) use DistributedDataParallel on the backend ring"
)


class AutomaticFinalization:
    """The methods of DDP's manual finalization. Owner, thread, caller: the wrapper's."""

    @property
    def require_manual_backward_finalization(self) -> bool:
        """False. Setting True raises InvalidStateError."""
        return False

    @require_manual_backward_finalization.setter
    def require_manual_backward_finalization(self, required: bool) -> None:
        if required:
            raise InvalidStateError(_REFUSED)

    @property
    def should_finalize_after_backward(self) -> bool:
        """False: nothing is left to do after a backward."""
        return False

    def finalize_backward(self) -> None:
        """Raises InvalidStateError: there is nothing to finalize."""
        raise InvalidStateError(_REFUSED)
