"""RingDP's methods about compression: choosing, saving and measuring."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ringdp import values
from ringdp.compression.description import describe
from ringdp.compression.parameters import other_parameters
from ringdp.compression.rules import Rules
from ringdp.errors import InvalidStateError
from ringdp.job.elastic import as_unit, refuse_where_elastic

if TYPE_CHECKING:
    from ringdp.compression import Compression, CompressorLike
    from ringdp.compression.parameters import ModelParameter
    from ringdp.ddp.compression.plan import ModelCompression
    from ringdp.ddp.compression.state import CarriedState
    from ringdp.ddp.compression.stats import CompressionStats
    from ringdp.job.placement import Placement


class CompressedModule:
    """A part of RingDP, which brings the reducer and the group.

    Attributes:
        _chosen: the last choice of the user; None before the first choice.
        _compression: the compression of the model by that choice, made with the reducer.
        _watched: the parameters, as the reducer numbers them.
        _devices: the devices of all ranks.
    """

    module: Any
    reducer: Any
    process_group: dist.ProcessGroup
    _chosen: Rules | None
    _compression: ModelCompression | None
    _watched: list[ModelParameter]
    _devices: Placement

    def set_compression(self, compression: CompressorLike | Compression) -> None:
        """Compress gradients in another way from the next step on. All ranks call it, between two steps.

        The residual of a parameter is kept where its compressor stays the same.

        Args:
            compression: a compressor, a registered name ("int8", "int4", "bf16", "fp16", "auto"), None for exact
                gradients, or a `ringdp.Compression`, which also has rules and a warm-up.

        Raises:
            InvalidArgumentError: an unknown name, a rule or number that cannot be used, a rule that no parameter fits.
            MismatchError: the ranks' choices differ (names the first parameter and both compressors), or another rank's
                choice cannot be used (has its reason).
            InvalidStateError: a backward is under way, or a communication hook is registered.
        """
        self._chosen = self._attach_compression(lambda: Rules(compression))

    def compression_state_dict(self, *, consolidated: bool = False) -> dict[str, Any]:
        """The state of compression: residuals and other state by parameter name, and the progress of the warm-up.

        Args:
            consolidated: False: this rank's own, exact to the bit, for as many ranks as there are now; every rank
                saves its own. True: the mean over the ranks, the same on all of them, which loads at any number of
                ranks. All ranks call it then.

        Raises:
            InvalidStateError: nothing is compressed.
        """
        from ringdp.ddp.compression.state import state_dict

        compression = self._compressed("compression_state_dict")
        if not consolidated:
            return state_dict(compression, consolidated=False)
        return as_unit(
            self.process_group, "the state of compression", lambda: state_dict(compression, consolidated=True)
        )

    def load_compression_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state from `compression_state_dict`; call it between two steps, on all ranks.

        All of them load what was saved after the same step. Where that matters they compare it in the next step, and
        all raise a MismatchError where it differs.

        Raises:
            InvalidArgumentError: it does not fit: another number of ranks, another rank's, a parameter or compressor
                that this model has not, a residual of another shape; or it is not such a state. Says which; nothing has
                changed then.
            InvalidStateError: nothing is compressed.
        """
        from ringdp.ddp.compression.state import load_state_dict

        load_state_dict(self._compressed("load_compression_state_dict"), state)

    def measure_compression(self, *, every: int) -> None:
        """In every `every`-th step compare the compressed mean with the exact one; `compression_stats` has the results.

        Such a step costs a copy and an exact all-reduce of the compressed gradients. 0 ends it. All ranks call it.
        """
        from ringdp.ddp.compression.quality import QualityProbe

        values.whole("measure_compression", "every", every, 0)
        compression = self._compressed("measure_compression")
        refuse_where_elastic(self.process_group, "measure_compression")
        if compression.probe is not None:
            compression.probe.remove()
        compression.probe = QualityProbe(compression, every) if every else None

    def compression_stats(self) -> CompressionStats:
        """Bytes, times and, where `measure_compression` was called, errors. Costs nothing in the steps.

        Raises:
            InvalidStateError: nothing is compressed.
        """
        from ringdp.ddp.compression.stats import collect

        return collect(self._compressed("compression_stats"))

    def _compressed(self, method: str) -> ModelCompression:
        if self._compression is None:
            raise InvalidStateError(
                f"{method}: this RingDP compresses nothing; build it with compression=, or call set_compression"
            )
        return self._compression

    def _compression_to_carry(self) -> CarriedState | None:
        """The state of compression, taken before the reducer renumbers the parameters."""
        from ringdp.ddp.compression.state import CarriedState

        return None if self._compression is None else CarriedState.of(self._compression)

    def _carry_compression(self, carried: CarriedState | None, renamed: Mapping[str, str]) -> None:
        """Compress the module's changed parameters by the last choice.

        Args:
            carried: what `_compression_to_carry` gave before.
            renamed: the earlier names of parameters, by their new ones.
        """
        if carried is None or self._chosen is None:
            return
        probe = carried.compression.probe
        self._compression = None
        # A rule may fit none of the parameters that are left: it fitted some when it was given.
        left = dataclasses.replace(self._chosen.asked, unmatched_rules="warn", warmup_steps=0)
        self._attach_compression(lambda: Rules(left))
        carried.give(self._compressed("forward"), renamed)
        if probe is not None:
            rows = probe.rows
            self.measure_compression(every=probe.every)
            self._compressed("forward").probe.rows = rows  # type: ignore[union-attr]

    @property
    def _describe_choice(self) -> str | None:
        if self._chosen is None:
            return None
        words = describe(self._chosen.compressor)
        return f"{words} but for {len(self._chosen.pairs)} rules" if self._chosen.pairs else words

    def _attach_compression(self, asked: Callable[[], Rules]) -> Rules:
        """Apply and return the result of `asked`, an error of which is raised on all ranks."""
        from ringdp.ddp.compression.plan import ModelCompression

        compression = self._compression
        if compression is None:
            compression = ModelCompression(self._watched, self.process_group, self.reducer, self._devices)
        chosen = compression.choose(asked, other_parameters(self.module, self._watched))
        self._compression = compression
        return chosen
