"""What users call on a RingDP and is not as in DistributedDataParallel: nearly each method hands on to a feature."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from ringdp.ddp.batch_weight import BatchWeight
from ringdp.ddp.compression.choice import GradientCompression
from ringdp.ddp.divergence.options import ReplicaGuard
from ringdp.ddp.dtensors import ShardedParameters
from ringdp.ddp.features import FeaturedDDP
from ringdp.ddp.listeners import Listeners
from ringdp.ddp.module_state import SentState
from ringdp.ddp.reduction_stats import Stats
from ringdp.ddp.step_report import StepReport

if TYPE_CHECKING:
    from ringdp.compression import Compression, CompressorLike
    from ringdp.ddp.compression.stats import CompressionStats
    from ringdp.diagnosis.report import Report


class OwnMethods(FeaturedDDP):
    """A part of RingDP without a state of its own."""

    def stats(self) -> Stats:
        """The costs of reducing gradients; keeping them costs two clock readings per step."""
        return Stats(**self.reducer.report.stats())

    def report(self) -> Report:
        """Where the time of the last steps went, on all ranks, the largest cost, and a remedy. Prints as tables.

        The ranks exchange their times after 10 steps and then every 20 (RINGDP_REPORT_EVERY), beside the training; this
        is their last exchange, and does not communicate. Rank 0 logs the verdict when communication costs a fifth of a
        step.
        """
        return self.ringdp_features[StepReport].monitor.report()

    def set_weight(self, weight: float | torch.Tensor) -> None:
        """Set the weight of the next forward's batch: the number of samples or tokens over which its loss is a mean.

        Call it before each forward that trains; with ``weight="samples"`` it takes the place of what is counted. A
        weight of 0 leaves this rank's gradients out, also if they are not finite.

        Args:
            weight: a finite number that is not negative, or a tensor with one.

        Raises:
            InvalidStateError: RingDP was made without ``weight``.
            InvalidArgumentError: not a number. One that is negative or not finite is an error of the forward, where
                the other ranks raise a MismatchError that names this rank.
        """
        self.ringdp_features[BatchWeight].set(weight)

    def guard_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Let the guard look at this optimizer's state, too. All ranks call it; not for one that shards its state.

        Raises:
            InvalidArgumentError: not an optimizer.
        """
        self.ringdp_features[ReplicaGuard].add_optimizer(optimizer)

    def check_replicas(self) -> None:
        """Compare all parameters and buffers between the ranks now, to the bit. All ranks call it, between two steps.

        As the guard it leaves out the tensors of its ``ignore``, and buffers that each forward broadcasts.

        Raises:
            MismatchError: they differ; names the first tensor and the ranks.
        """
        self.ringdp_features[ReplicaGuard].check(self)

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
        self.ringdp_features[GradientCompression].choose(self, compression)

    def compression_state_dict(self, *, consolidated: bool = False) -> dict[str, Any]:
        """The state of compression: residuals and other state by parameter name, and the progress of the warm-up.

        Args:
            consolidated: False: this rank's own, exact to the bit, for as many ranks as there are now; every rank
                saves its own. True: the mean over the ranks, the same on all of them, which loads at any number of
                ranks. All ranks call it then.

        Raises:
            InvalidStateError: nothing is compressed.
        """
        return self.ringdp_features[GradientCompression].state_dict(self.process_group, consolidated=consolidated)

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
        self.ringdp_features[GradientCompression].load_state_dict(state)

    def measure_compression(self, *, every: int) -> None:
        """In every `every`-th step compare the compressed mean with the exact one; `compression_stats` has the results.

        Such a step costs a copy and an exact all-reduce of the compressed gradients. 0 ends it. All ranks call it.
        """
        self.ringdp_features[GradientCompression].measure(every)

    def compression_stats(self) -> CompressionStats:
        """Bytes, times and, where `measure_compression` was called, errors. Costs nothing in the steps.

        Raises:
            InvalidStateError: nothing is compressed.
        """
        return self.ringdp_features[GradientCompression].stats()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As `torch.nn.Module.zero_grad`; with ``set_to_none=False`` whole buckets are zeroed at once."""
        if set_to_none or self.ringdp_features[ShardedParameters].found:
            super().zero_grad(set_to_none=set_to_none)
            return
        self.reducer.zero_gradients()
        for name, parameter in self.module.named_parameters():
            if parameter.grad is not None and (name in self.parameters_to_ignore or not parameter.requires_grad):
                parameter.grad.detach_().zero_()

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As `torch.nn.Module.load_state_dict`; keys without the prefix ``module.`` are taken as the module's own."""
        own = self.state_dict().keys()
        if not any(key in own for key in state_dict) and any(f"module.{key}" in own for key in state_dict):
            return self.module.load_state_dict(state_dict, strict=strict, assign=assign)
        return super().load_state_dict(state_dict, strict=strict, assign=assign)

    # For `ringdp.data.BalancedSampler`.

    @property
    def _before_forward(self) -> list[Callable[[], None]]:
        return self.ringdp_features[Listeners].calls

    @property
    def _weight(self) -> str | None:
        """RingDP's argument ``weight``."""
        return self.ringdp_features[BatchWeight].mode

    def _repeat_batch(self) -> None:
        """Treat the forwards up to the next backward that synchronises as those of the batch whose forward failed. Its
        buffers and weight are not sent again.
        """
        self.ringdp_features[SentState].repeat_batch(self)
        self.reducer.repeat_batch()
