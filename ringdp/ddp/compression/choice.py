"""How a RingDP compresses its gradients: what the user chose, and the compression of the model by that choice."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ringdp import refusals, values
from ringdp.compression.description import describe
from ringdp.compression.parameters import other_parameters
from ringdp.compression.rules import Rules
from ringdp.ddp import in_use
from ringdp.ddp.features import Feature, FeaturedDDP
from ringdp.ddp.loss_scale import LossScale
from ringdp.ddp.parameter_changes import ReducedParameters
from ringdp.errors import InvalidStateError
from ringdp.job.elastic import as_unit

if TYPE_CHECKING:
    from ringdp.compression import Compression, CompressorLike
    from ringdp.ddp.compression.plan import ModelCompression
    from ringdp.ddp.compression.state import CarriedState
    from ringdp.ddp.compression.stats import CompressionStats


class GradientCompression(Feature):
    """Of one RingDP.

    Args:
        compression, scaler: RingDP's arguments.

    Attributes:
        model: the compression of the model by the last choice, made with the reducer; None before the first choice.
    """

    made_with_reducer = ("model", "_carried")
    model: ModelCompression | None = None
    _carried: CarriedState | None = None  # while the reducer renumbers the parameters

    def __init__(self, compression: CompressorLike | Compression, scaler: torch.amp.GradScaler | None) -> None:
        chosen = Rules(compression)
        self._chosen = chosen if chosen.compressor is not None or chosen.pairs else None
        self._loss_scale = None if scaler is None else LossScale(scaler)

    @property
    def chosen(self) -> str | None:
        """The user's last choice, in a few words."""
        if self._chosen is None:
            return None
        words = describe(self._chosen.compressor)
        return f"{words} but for {len(self._chosen.pairs)} rules" if self._chosen.pairs else words

    def in_use(self, ddp: FeaturedDDP) -> dict[str, str]:
        return {"compression": ""} if self.model is not None and any(self.model.compressors) else {}

    def reducer_made(self, ddp: FeaturedDDP) -> None:
        if (chosen := self._chosen) is not None:
            self._attach(ddp, lambda: chosen)

    def before_forward(self, ddp: FeaturedDDP) -> None:
        if self.model is None:
            return
        self.model.before_forward(ddp.require_backward_grad_sync, joining=bool(ddp._join_config.enable))
        if self._loss_scale is not None:
            self._loss_scale.prefetch()

    def before_backward(self, ddp: FeaturedDDP) -> None:
        if self.model is not None and self._loss_scale is not None and ddp.require_backward_grad_sync:
            self.model.set_loss_scale(self._loss_scale.read())

    def before_renumbering(self, ddp: FeaturedDDP) -> None:
        from ringdp.ddp.compression.state import CarriedState

        self._carried = None if self.model is None else CarriedState.of(self.model)

    def renumbered(self, ddp: FeaturedDDP, renamed: Mapping[str, str]) -> None:
        """Compress the module's changed parameters by the last choice."""
        carried, self._carried = self._carried, None
        if carried is None or self._chosen is None:
            return
        probe = carried.compression.probe
        self.model = None
        # A rule may fit none of the parameters that are left: it fitted some when it was given.
        left = dataclasses.replace(self._chosen.asked, unmatched_rules="warn", warmup_steps=0)
        self._attach(ddp, lambda: Rules(left))
        carried.give(self.attached("forward"), renamed)
        if probe is not None:
            rows = probe.rows
            self.measure(probe.every)
            self.attached("forward").probe.rows = rows  # type: ignore[union-attr]

    # What users call on RingDP.

    def choose(self, ddp: FeaturedDDP, compression: CompressorLike | Compression) -> None:
        self._chosen = self._attach(ddp, lambda: Rules(compression))

    def state_dict(self, group: dist.ProcessGroup, *, consolidated: bool) -> dict[str, Any]:
        from ringdp.ddp.compression.state import state_dict

        model = self.attached("compression_state_dict")
        if not consolidated:
            return state_dict(model, consolidated=False)
        return as_unit(group, "the state of compression", lambda: state_dict(model, consolidated=True))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        from ringdp.ddp.compression.state import load_state_dict

        load_state_dict(self.attached("load_compression_state_dict"), state)

    def measure(self, every: int) -> None:
        from ringdp.ddp.compression.quality import QualityProbe

        values.whole("measure_compression", "every", every, 0)
        model = self.attached("measure_compression")
        if model.probe is not None:
            model.probe.remove()
        model.probe = QualityProbe(model, every) if every else None

    def stats(self) -> CompressionStats:
        from ringdp.ddp.compression.stats import collect

        return collect(self.attached("compression_stats"))

    def attached(self, method: str) -> ModelCompression:
        """`model`. Raises InvalidStateError of that method of RingDP where there is none."""
        if self.model is None:
            raise InvalidStateError(
                f"{method}: this RingDP compresses nothing; build it with compression=, or call set_compression"
            )
        return self.model

    def _attach(self, ddp: FeaturedDDP, asked: Callable[[], Rules]) -> Rules:
        """Apply and return the result of `asked`, an error of which is raised on all ranks."""
        from ringdp.ddp.compression.plan import ModelCompression

        def possible() -> Rules:
            rules = asked()
            refusals.check(ddp.ringdp_features.in_use(ddp) | in_use.of_rules(rules))
            return rules

        watched = ddp.ringdp_features[ReducedParameters].watched
        model = self.model
        if model is None:
            model = ModelCompression(watched, ddp.process_group, ddp.reducer, ddp.placement)
        chosen = model.choose(possible, other_parameters(ddp.module, watched))
        self.model = model
        return chosen
