"""What RingDP offers to those who compress its gradients: choosing, saving and measuring."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ringdp.compression import Rules
from ringdp.compression.auto import with_permission
from ringdp.compression.description import describe
from ringdp.errors import InvalidArgumentError, InvalidStateError

if TYPE_CHECKING:
    from ringdp.compression_stats import CompressionStats
    from ringdp.model_compression import ModelCompression
    from ringdp.model_parameters import ModelParameter
    from ringdp.rank_devices import RankDevices


class CompressedModule:
    """A part of RingDP, which brings the reducer and the group.

    Attributes:
        _chosen: what the user asked for last, with the steps that are exact at first; None where nobody ever did.
        _compression: what came of it, made with the reducer.
        _watched: the parameters, as the reducer numbers them.
        _devices: where all ranks have theirs.
    """

    reducer: Any
    process_group: dist.ProcessGroup
    _chosen: tuple[Rules, int] | None
    _compression: ModelCompression | None
    _watched: list[ModelParameter]
    _devices: RankDevices

    def set_compression(
        self,
        compression: Any,
        rules: Iterable[tuple[Any, Any]] = (),
        *,
        warmup_steps: int = 0,
        allow: str | None = None,
    ) -> None:
        """Compress gradients in another way from the next step on. All ranks call it, between two steps.

        What parameters remember (residuals) stays where their compressor stays the same.

        Args:
            compression: a compressor, a registered name ("int8", "int4", "bf16", "fp16", "auto"), or None for exact
                gradients.
            rules: pairs of a condition and a compressor for parameters that are to be treated otherwise; see
                `ringdp.compression.Rules`.
            warmup_steps: how many steps are still exact.
            allow: what ``"auto"`` may choose among; see `ringdp.compression.Auto`.

        Raises:
            InvalidArgumentError: an unknown name, a rule or number that cannot be used.
            MismatchError: the ranks ask for different things; names the first parameter and both.
            InvalidStateError: a backward is under way, or a communication hook is registered.
        """
        chosen = Rules(with_permission(compression, allow), tuple(rules))
        self._attach_compression(chosen, warmup_steps)
        self._chosen = (chosen, warmup_steps)

    def compression_state_dict(self, *, consolidated: bool = False) -> dict[str, Any]:
        """What compression remembers: residuals and other state by parameter name, and how far warm-up is.

        Args:
            consolidated: False: this rank's own, exact to the bit, for as many ranks as there are now; every rank
                saves its own. True: the mean over the ranks, the same on all of them, which loads at any number of
                ranks. All ranks call it then.

        Raises:
            InvalidStateError: nothing is compressed.
        """
        from ringdp.compression_state import state_dict

        return state_dict(self._compressed("compression_state_dict"), consolidated=consolidated)

    def load_compression_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `compression_state_dict` gave; call it between two steps, on all ranks.

        All of them load what was saved after the same step. Where that matters they compare it in the next step, and
        all raise a MismatchError where it differs.

        Raises:
            InvalidArgumentError: it does not fit: another number of ranks, another rank's, a parameter or compressor
                that this model has not, a residual of another shape; or it is no such state. Says which; nothing has
                changed then.
            InvalidStateError: nothing is compressed.
        """
        from ringdp.compression_state import load_state_dict

        load_state_dict(self._compressed("load_compression_state_dict"), state)

    def measure_compression(self, *, every: int) -> None:
        """In every `every`-th step compare what arrives with the exact mean; `compression_stats` has the results.

        Such a step costs a copy and an exact all-reduce of the compressed gradients. 0 ends it. All ranks call it.
        """
        from ringdp.compression_quality import QualityProbe

        if isinstance(every, bool) or not isinstance(every, int) or every < 0:
            raise InvalidArgumentError(f"every must be a number of steps from 0 on, not {every!r}")
        compression = self._compressed("measure_compression")
        if compression.probe is not None:
            compression.probe.remove()
        compression.probe = QualityProbe(compression, every) if every else None

    def compression_stats(self) -> CompressionStats:
        """Bytes, times and, where `measure_compression` was called, errors. Costs nothing in the steps.

        Raises:
            InvalidStateError: nothing is compressed.
        """
        from ringdp.compression_stats import collect

        return collect(self._compressed("compression_stats"))

    def _compressed(self, method: str) -> ModelCompression:
        if self._compression is None:
            raise InvalidStateError(
                f"{method}: this RingDP compresses nothing; build it with compression=, or call set_compression"
            )
        return self._compression

    @property
    def _choice_in_words(self) -> str | None:
        if self._chosen is None:
            return None
        rules, _ = self._chosen
        words = describe(rules.compression)
        return f"{words} but for {len(rules.rules)} rules" if rules.rules else words

    def _attach_compression(self, chosen: Rules, warmup_steps: int) -> None:
        from ringdp.model_compression import ModelCompression

        if self._compression is None:
            self._compression = ModelCompression(self._watched, self.process_group, self.reducer, self._devices)
        self._compression.choose(chosen, warmup_steps)
