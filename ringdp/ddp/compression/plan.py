"""How the gradients of one RingDP are compressed: a compressor for each parameter, the same on all ranks."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from ringdp.compression import Auto, Compressor, get
from ringdp.compression.description import describe
from ringdp.compression.exchange import Sparsity
from ringdp.compression.feedback import feedback_of
from ringdp.compression.parameters import ModelParameter
from ringdp.compression.partition import owner_offset_of
from ringdp.compression.rule_use import RuleUse
from ringdp.compression.rules import Rules
from ringdp.ddp.compression.auto import AutoCompression, Decision, crosses_network
from ringdp.ddp.compression.tuner import EXACT
from ringdp.errors import InvalidArgumentError, InvalidStateError
from ringdp.hooks.compressed import CompressedHook, compressed_hook
from ringdp.hooks.parameters import Parameters
from ringdp.job.agreement import Difference, checked_alike
from ringdp.job.backend import traffic
from ringdp.job.elastic import is_elastic
from ringdp.job.placement import Placement
from ringdp.text import number_of_ranks

_log = logging.getLogger("ringdp.model_compression")


class Probe(Protocol):
    """Called in some steps to measure them; see quality.py."""

    rows: list[Any]
    every: int

    def before_forward(self, sync: bool) -> None: ...
    def remove(self) -> None: ...


class ModelCompression:
    """Compressors of a wrapper's parameters, and the reductions its reducer has for them.

    Used by one thread at a time: forward's or backward's. All ranks of the group call `choose` and the methods that
    change a choice in the same place.
    """

    def __init__(
        self, parameters: Sequence[ModelParameter], group: dist.ProcessGroup, reducer: Any, devices: Placement
    ) -> None:
        self.parameters = parameters
        self.group = group
        self._ranks = group.size()  # to which the residuals belong
        self.reducer = reducer
        self.devices = devices
        self.device: torch.device = parameters[0].parameter.device if parameters else torch.device("cpu")
        self.compressors: list[Compressor | None] = [None] * len(parameters)
        self.hook: CompressedHook | None = None  # of what the core does not do
        self._reductions: list[Any] = []
        self._reduction_of = [-1] * len(parameters)
        self._steps_before = 0  # of an earlier process, from its checkpoint
        self.exact_until: int = 0  # the step at which warm-up ends
        self._warming = False
        self.probe: Probe | None = None
        self.scale_of_scaler: float = 1.0  # given to RingDP
        self._sent = 0
        self.auto: AutoCompression | None = None  # where it chooses
        self.idle_reason: str = ""  # why it does not, where it was asked to
        self._crosses_network: bool | None = None  # not asked yet

    def choose(self, asked: Callable[[], Rules], left_out: Iterable[ModelParameter] = ()) -> Rules:
        """Give each parameter its compressor. The state of an equal compressor is kept.

        Args:
            asked: gives the user's rules. An error of it is raised on the other ranks too, so that none waits for this
                one.
            left_out: the model's parameters that are not among `parameters`.

        Raises:
            InvalidArgumentError: a rule that no parameter fits.
            MismatchError: the ranks chose differently (names the first parameter and both choices), or another rank's
                arguments cannot be used (has its reason).
        """

        def check() -> tuple[Rules, list[Compressor | None], Sequence[str]]:
            rules = asked()
            use = RuleUse(rules, self.parameters, left_out)
            use.refuse_unmatched()
            return rules, [self._known(i, rules.of(one)) for i, one in enumerate(self.parameters)], use.warnings

        rules, chosen, warnings = checked_alike(
            check,
            self._lines,
            self.group,
            operation="choosing compression",
            what="compression",
            doing="choose its compression",
            words=_different_compression,
            device=self.device,
        )
        warmup_steps = rules.asked.warmup_steps
        for warning in warnings if self.group.rank() == 0 else ():
            _log.warning("%s", warning)
        self._install(chosen)
        self.exact_until = self.steps + warmup_steps
        self._enable(warmup_steps == 0)
        return rules

    @property
    def steps(self) -> int:
        """Synchronised backwards so far, those before a checkpoint was loaded included."""
        return self._steps_before + int(self.reducer.report.steps())

    def resume(self, steps: int, exact_until: int) -> None:
        """Go on counting from a checkpoint."""
        self._steps_before += steps - self.steps
        self.exact_until = exact_until
        self._enable(self.steps >= exact_until)

    @property
    def compresses_now(self) -> bool:
        return bool(self._reductions) and not self._warming

    def before_forward(self, sync: bool, *, joining: bool = False) -> None:
        """`sync`: whether the backward that follows synchronises; `joining`: some ranks may have run out of input.

        Raises:
            InvalidStateError: the group was reconfigured to another number of ranks.
        """
        if self.group.size() != self._ranks and is_elastic(self.group):
            self._ranks = self.group.size()  # the reducer has made the residuals theirs
        if self.group.size() != self._ranks:
            raise InvalidStateError(
                f"the process group was reconfigured from {self._ranks} to {number_of_ranks(self.group.size())}, and"
                " compression's residuals belong to the old ones: call compression_state_dict(consolidated=True) before"
                " the change, make a new RingDP after it, and load that state"
            )
        if self._warming and self.steps >= self.exact_until:
            self._enable(True)
        if self.auto is not None and sync and not self._warming and not joining and torch.is_grad_enabled():
            self.auto.before_forward()
        if self.probe is not None:
            self.probe.before_forward(sync)
        if sync:
            self._sent = _bytes_sent()

    @property
    def wire_bytes(self) -> int:
        """Bytes sent by this rank since the last forward, all headers included; 0 where the backend does not count
        them."""
        return _bytes_sent() - self._sent

    def describe(self, index: int) -> str:
        """The description of the compressor of parameter `index`."""
        compressor = self.compressors[index]
        return "exact" if compressor is None else describe(compressor)

    def compressor_now(self, index: int) -> Compressor | None:
        """The compressor in use for parameter `index`, as "auto" has chosen it."""
        compressor = self.compressors[index]
        if not isinstance(compressor, Auto):
            return compressor
        level = EXACT if self.auto is None else self.auto.level_of(index)
        return None if level == EXACT else get(level)

    def describe_now(self, index: int) -> str:
        """As `describe`, with what "auto" has chosen."""
        if not isinstance(self.compressors[index], Auto):
            return self.describe(index)
        return f"auto: {EXACT if self.auto is None else self.auto.level_of(index)}"

    @property
    def decisions(self) -> list[Decision]:
        """Of "auto"."""
        if self.idle_reason:
            return [Decision(0, self.idle_reason)]
        return [] if self.auto is None else list(self.auto.decisions)

    def set_loss_scale(self, scale: float) -> None:
        """Of the next backward, where its scaler does not say it itself."""
        self.scale_of_scaler = scale
        self.reducer.compression.set_loss_scale(scale)

    def loss_scale(self) -> float:
        """The loss scale of the backward this is called in; 1 if its loss was not scaled."""
        from ringdp import _C

        noted: float = _C.loss_scale_of_backward()
        return self.scale_of_scaler if noted == 1.0 else noted

    def in_core(self, index: int) -> bool:
        """Whether the C++ core compresses parameter `index` and keeps its residual."""
        from ringdp import _C

        reduction = self._reduction_of[index]
        return reduction >= 0 and isinstance(self._reductions[reduction], _C.CodecReduction | _C.AutoReduction)

    def in_hook(self, index: int) -> bool:
        """Whether parameter `index` is compressed in Python, and always will be."""
        compressor = self.compressors[index]
        return compressor is not None and not isinstance(compressor, Auto) and not self.in_core(index)

    @property
    def exchanges_codes(self) -> bool:
        """See `Placement.exchanges_codes`."""
        return self.devices.exchanges_codes

    def residuals(self) -> dict[int, Tensor]:
        """By index, of all parameters with error feedback in the core: float32 [numel] on the CPU; zeros before the
        first step."""
        known = self.reducer.compression.residuals()
        return {
            index: known[index]
            if index in known
            else torch.zeros(one.parameter.numel(), dtype=torch.float32, device="cpu")
            for index, one in enumerate(self.parameters)
            if self.in_core(index) and self._reductions[self._reduction_of[index]].feedback
        }

    def residual_norm(self) -> dict[int, Tensor]:
        """By index, of all parameters whose error feedback has a residual: |residual|, without the loss scale."""
        lengths = {index: residual.norm() for index, residual in self.residuals().items()}
        for index, one in enumerate(self.parameters):
            length = self.hook.memory.residual_norm(one.name) if self.hook is not None and self.in_hook(index) else None
            if length is not None:
                lengths[index] = length
        return lengths

    def sparsity(self) -> dict[str, Sparsity]:
        """By name, of the last step's sparse codes."""
        return {} if self.hook is None else self.hook.tally.items()

    def _lines(self, choice: tuple[Rules, list[Compressor | None], Sequence[str]]) -> list[str]:
        """The text that all ranks compare."""
        rules, chosen, warnings = choice
        described = ["exact" if one is None else describe(one) for one in chosen]
        of_each = [f"{one.name!r}: {text}" for one, text in zip(self.parameters, described, strict=True)]
        return [f"warmup_steps={rules.asked.warmup_steps}", *of_each, *warnings]

    def _known(self, index: int, compressor: Compressor | None) -> Compressor | None:
        """The one that the parameter has, where that is equal: it goes on."""
        return self.compressors[index] if compressor == self.compressors[index] else compressor

    def _install(self, chosen: Sequence[Compressor | None]) -> None:
        from ringdp import _C

        auto = self._auto_of(chosen)
        if self.auto is not None:
            self.auto.return_residuals()
        fixed = [None if isinstance(one, Auto) else one for one in chosen]
        exchange = self.exchanges_codes
        in_core = exchange or self.devices.core_reduces_codes
        if not in_core and any(one is not None for one in chosen):
            self.devices.warn_no_kernels(self.group.rank())
        codecs = [
            (getattr(one, "native", None), _feeds_back(one))
            if in_core and (self.devices.all_on_cpu or not getattr(one, "cpu_only", False))
            else (None, False)
            for one in fixed
        ]
        kinds = sorted({(codec, feedback) for codec, feedback in codecs if codec is not None})
        reductions: list[Any] = [_C.CodecReduction(codec, feedback) for codec, feedback in kinds]
        by_hook = {
            one.name: compressor
            for one, compressor, (codec, _) in zip(self.parameters, fixed, codecs, strict=True)
            if compressor is not None and codec is None
        }
        free = [auto is not None and self._is_free(i, one) for i, one in enumerate(chosen)]
        levels = {} if auto is None else {level: cast(Compressor, get(level)) for level in auto.levels}
        for compressor in (one for one in levels.values() if getattr(one, "native", None) is None):
            by_hook |= {one.name: compressor for one, it in zip(self.parameters, free, strict=True) if it}
        hook = self._make_hook(by_hook) if by_hook else None
        if hook is not None:
            reductions.append(_C.PythonReduction(hook, compressed_hook, "in Python"))
        reduction_of = [
            -1 if compressor is None else len(kinds) if kind[0] is None else kinds.index(kind)
            for compressor, kind in zip(fixed, codecs, strict=True)
        ]
        of_level = {}
        if any(free):
            reduction_of = [
                len(reductions) if it else reduction for it, reduction in zip(free, reduction_of, strict=True)
            ]
            reductions.append(_C.AutoReduction(any(_feeds_back(one) for one in levels.values())))
            for level, compressor in levels.items():
                of_level[level] = len(reductions)
                codec = getattr(compressor, "native", None)
                if codec is None:
                    of_level[level] = len(kinds)  # the hook
                else:
                    reductions.append(_C.CodecReduction(codec, _feeds_back(compressor)))
        owner_offsets = [owner_offset_of(one.name) for one in self.parameters]
        self.reducer.set_reductions(reductions, reduction_of, owner_offsets, exchange_codes=exchange)
        self.compressors, self.hook = list(chosen), hook
        self._reductions, self._reduction_of = reductions, reduction_of
        names = [one.name for one in self.parameters]
        self.auto = AutoCompression(weakref.proxy(self), levels, of_level, hook, names) if any(free) else None

    def _auto_of(self, chosen: Sequence[Compressor | None]) -> Auto | None:
        """The levels among which "auto" may choose; None where it cannot choose.

        Raises:
            InvalidArgumentError: two different ones, or ranks whose links cannot be measured.
        """
        autos = dict.fromkeys(one for one in chosen if isinstance(one, Auto))
        self.idle_reason = ""
        if not autos:
            return None
        if len(autos) > 1:
            raise InvalidArgumentError(f"one allow= for all parameters, not {' and '.join(map(repr, autos))}")
        [auto] = autos
        if self.group.size() > 1 and not self.devices.core_reduces_codes:
            raise InvalidArgumentError(
                'compression="auto" measures the links of the backend ring between CPUs; this group has '
                f"{self.devices.backend} and {', '.join(sorted(set(self.devices.kinds)))}: name a compressor"
            )
        if self._crosses_network is None:
            self._crosses_network = crosses_network(self.group, self.device)
        if not self._crosses_network:
            self.idle_reason = "exact: all ranks share memory, nothing crosses a network"
        elif not auto.levels:
            self.idle_reason = 'exact: allow="exact"'
        if self.idle_reason and self.group.rank() == 0:
            _log.info("compression auto: %s", self.idle_reason)
        return None if self.idle_reason else auto

    def _is_free(self, index: int, compressor: Compressor | None) -> bool:
        """Whether "auto" may choose for the parameter; of other types exact gradients may be the shorter ones."""
        return isinstance(compressor, Auto) and self.parameters[index].parameter.dtype == torch.float32

    def _make_hook(self, chosen: Mapping[str, Compressor]) -> CompressedHook:
        mine = weakref.proxy(self)  # the reducer keeps the hook
        hook = CompressedHook(
            lambda name, parameter: chosen[name],
            parameters=Parameters(named=[(one.name, one.parameter) for one in self.parameters if one.name in chosen]),
            process_group=self.group,
            scale=lambda: mine.loss_scale(),
            commit_alone=False,
        )
        if self.hook is not None:
            hook.memory = self.hook.memory
            hook.memory.keep_only(chosen)
        hook.expect_all()
        return hook

    def _enable(self, enabled: bool) -> None:
        self._warming = not enabled
        for reduction in self._reductions:
            reduction.enabled = enabled


def _different_compression(one: Difference, *_: str) -> str:
    pairs = zip_longest(*one.lines, fillvalue="all rules count")
    mine, theirs = next(pair for pair in pairs if pair[0] != pair[1])
    return (
        f"the ranks chose different compression: {mine} on rank {one.rank}, {theirs} on rank {one.peer}."
        " Give RingDP and set_compression the same arguments on all ranks."
    )


def _bytes_sent() -> int:
    try:
        return traffic().bytes_sent
    except InvalidStateError:  # another backend
        return 0


def _feeds_back(compressor: Compressor | None) -> bool:
    return feedback_of(getattr(compressor, "error_feedback", None)) is not None
