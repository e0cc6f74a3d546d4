"""The errors of compressed gradients, measured in some steps of a run: `RingDP.measure_compression`."""

from __future__ import annotations

import dataclasses
import logging
import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable

from ringdp.compression.exchange import Section, Sparsity
from ringdp.compression.exchange.local import there_and_back
from ringdp.ddp.compression.plan import ModelCompression
from ringdp.job.backend import named
from ringdp.job.elastic import as_unit

_log = logging.getLogger("ringdp.compression")
_GROWTH = 2.0  # of the residual between two warnings about a parameter
_WORTH_LOGGING = 1.0  # residuals shorter than this many gradients are usual with error feedback


@dataclasses.dataclass(frozen=True)
class Quality:
    """One compressed parameter in one step. Vectors are its gradients; errors are taken over all elements.

    Attributes:
        step: synchronised backwards before this one.
        name, compressor: the parameter and how it is compressed.
        own_nmse: |decode(encode(x)) - x|² / |x|², x this rank's gradient.
        mean_nmse: |g - m|² / |m|², g what all ranks got, m the exact mean of their gradients.
        cosine: of the angle between g and m.
        residual_ratio: |residual| / |this rank's gradient|, after the step; None without error feedback, or with one
            that names no residual.
        density: of sparse codes, the share of the elements that this rank sent; None for other codes.
        union_density: the share of the elements that any rank sent: what the mean has.
        union_over_chosen: union_density / density: 1 where all ranks choose the same, about their number where none do.
        dropped_mass: the share of the squared norm of gradient and residual that was not sent.
    """

    step: int
    name: str
    compressor: str
    own_nmse: float
    mean_nmse: float
    cosine: float
    residual_ratio: float | None
    density: float | None = None
    union_density: float | None = None
    union_over_chosen: float | None = None
    dropped_mass: float | None = None


class QualityProbe:
    """Watches the backward of every k-th step. Each of those costs a copy and an exact all-reduce of the gradients."""

    def __init__(self, compression: ModelCompression, every: int) -> None:
        self.rows: list[Quality] = []
        self._compression = compression
        self.every = every
        self._handles: list[Any] = []
        self._own: dict[int, Tensor] = {}
        self._step = 0
        self._ranks = 0  # in the step that is measured
        self._queued = False
        self._last_ratio: dict[str, float] = {}

    def before_forward(self, sync: bool) -> None:
        """Watch the backward that follows, if it is its turn and it synchronises."""
        self.remove()
        step = self._compression.steps
        if not sync or step % self.every or not torch.is_grad_enabled() or not self._compression.compresses_now:
            return
        self._step, self._own, self._queued = step, {}, False
        self._ranks = self._compression.group.size()
        for index, parameter in self._compressed():
            self._handles.append(
                parameter.register_post_accumulate_grad_hook(lambda p, index=index: self._arrived(index, p))
            )
        self._weigh(True)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._weigh(False)

    def _weigh(self, wanted: bool) -> None:
        if self._compression.hook is not None:
            self._compression.hook.tally.measures = wanted

    def _compressed(self) -> list[tuple[int, Tensor]]:
        now = self._compression.compressor_now
        return [
            (i, one.parameter) for i, one in enumerate(self._compression.parameters)
            if one.parameter.requires_grad and now(i) is not None
        ]  # fmt: skip

    def _arrived(self, index: int, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._own[index] = _flat(parameter.grad)
        if not self._queued:
            self._queued = True
            Variable._execution_engine.queue_callback(self._finish)  # after the reducer's, which was queued before

    @torch.no_grad()
    def _finish(self) -> None:
        self.remove()
        compressed = self._compressed()
        exact = [
            self._own[index].clone()
            if index in self._own
            else torch.zeros(p.numel(), device=p.device, dtype=torch.float32)
            for index, p in compressed
        ]
        group = self._compression.group

        def average() -> Tensor:
            mean = torch.cat(exact).div_(group.size())
            with named("compression quality"):
                dist.all_reduce(mean, group=group)
            return mean

        mean = as_unit(group, "the measurement of compression", average)
        if group.size() != self._ranks:  # a rank was lost: what the step has averaged is not what these have
            self._own = {}
            return
        parts = mean.split([len(one) for one in exact])
        residuals = self._compression.residual_norm()
        sparsity = self._compression.sparsity()
        for (index, parameter), wanted in zip(compressed, parts, strict=True):
            if index in self._own and parameter.grad is not None:
                name = self._compression.parameters[index].name
                self._note(index, _flat(parameter.grad), wanted, residuals.get(index), sparsity.get(name))
        self._own = {}

    def _note(
        self, index: int, got: Tensor, wanted: Tensor, residual: Tensor | None, sparsity: Sparsity | None
    ) -> None:
        compressor = self._compression.compressor_now(index)
        one = self._compression.parameters[index]
        assert compressor is not None
        own = self._own[index]
        group = self._compression.group
        shape = tuple(one.parameter.shape)
        section = Section(one.name, shape, 0, own.numel(), compressor, 1, own.device)
        decoded, _ = there_and_back(section, own, rank=group.rank(), ranks=group.size(), step=self._step)
        own_nmse = _ratio((decoded - own).norm(), own.norm()) ** 2
        ratio = None
        if residual is not None:
            ratio = _ratio(residual * self._compression.loss_scale(), own.norm())
            self._warn_growth(one.name, ratio, expected_residual(own_nmse))
        self.rows.append(
            Quality(
                step=self._step,
                name=one.name,
                compressor=self._compression.describe_now(index),
                own_nmse=own_nmse,
                mean_nmse=_ratio((got - wanted).norm(), wanted.norm()) ** 2,
                cosine=_ratio(torch.dot(got, wanted), got.norm() * wanted.norm()),
                residual_ratio=ratio,
                density=None if sparsity is None else sparsity.density,
                union_density=None if sparsity is None else sparsity.union_density,
                union_over_chosen=None if sparsity is None else sparsity.union_over_chosen,
                dropped_mass=None if sparsity is None else sparsity.dropped_mass,
            )
        )

    def _warn_growth(self, name: str, ratio: float, expected: float) -> None:
        before = max(self._last_ratio.setdefault(name, ratio), expected, _WORTH_LOGGING)
        if not math.isfinite(ratio) or ratio < _GROWTH * before:
            return
        self._last_ratio[name] = ratio
        _log.warning(
            "step %d: the residual of %r (which compression has not sent yet) is %.1f times its gradient, it was %.1f."
            " Give this parameter more bits by a rule, or lower the learning rate.",
            self._step,
            name,
            ratio,
            before,
        )


def expected_residual(nmse: float) -> float:
    """How many gradients long error feedback's residual may become with a code of that error, without a fault.

    2·√(1 - δ)/δ for a code that keeps a share δ of the squared norm: Karimireddy et al., arXiv 1901.09847, lemma 3.
    """
    return 2 * math.sqrt(nmse) / (1 - nmse) if nmse < 1 else math.inf


def _flat(gradient: Tensor) -> Tensor:
    """float32 [numel], a copy, in the order of the memory."""
    order = sorted(range(gradient.dim()), key=gradient.stride, reverse=True)
    return gradient.detach().permute(order).to(torch.float32, copy=True).reshape(-1)


def _ratio(above: Tensor, below: Tensor) -> float:
    a, b = float(above), float(below)
    return a / b if b else (0.0 if a == 0 else math.inf)
