"""How the gradients of one RingDP are compressed: a compressor for each parameter, the same on all ranks."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ringdp.backend import traffic
from ringdp.compression import Compressor, Rules
from ringdp.compression.feedback import feedback_of
from ringdp.compression.partition import turn_of
from ringdp.errors import InvalidArgumentError, InvalidStateError, MismatchError
from ringdp.exchange import all_gather_where_different
from ringdp.hooks.compressed import CompressedHook, compressed_hook
from ringdp.model_parameters import ModelParameter
from ringdp.rank_devices import RankDevices


class Probe(Protocol):
    """What looks at some steps; see compression_quality.py."""

    rows: list[Any]

    def before_forward(self, sync: bool) -> None: ...
    def remove(self) -> None: ...


class ModelCompression:
    """Compressors of a wrapper's parameters, and the methods its reducer has for them.

    One thread at a time, as forward and backward of a step are. Everything here that takes a choice is called by all
    ranks of the group in the same place.
    """

    def __init__(
        self, parameters: Sequence[ModelParameter], group: dist.ProcessGroup, reducer: Any, devices: RankDevices
    ) -> None:
        self.parameters = parameters
        self.group = group
        self.reducer = reducer
        self.devices = devices
        self.device = parameters[0].parameter.device if parameters else torch.device("cpu")
        self.compressors: list[Compressor | None] = [None] * len(parameters)
        self.hook: CompressedHook | None = None  # of what the core does not do
        self._methods: list[Any] = []
        self._method_of = [-1] * len(parameters)
        self._steps_before = 0  # of an earlier process, from its checkpoint
        self.exact_until = 0  # the step at which warm-up ends
        self._warming = False
        self.probe: Probe | None = None
        self._scale_of_scaler = 1.0  # given to RingDP
        self._sent = 0

    def choose(self, rules: Rules, warmup_steps: int) -> None:
        """Give each parameter its compressor. Where it is the same as before, what it remembers stays.

        Args:
            rules: what the user asked for.
            warmup_steps: how many of the next synchronised steps are still exact.

        Raises:
            InvalidArgumentError: a number of steps below zero.
            MismatchError: the ranks chose differently; names the first parameter and both choices.
        """
        if isinstance(warmup_steps, bool) or not isinstance(warmup_steps, int) or warmup_steps < 0:
            raise InvalidArgumentError(f"warmup_steps must be a number of steps from 0 on, not {warmup_steps!r}")
        chosen = [
            self._known(i, rules.of(one.name, one.parameter, one.owner, sparse=one.sparse))
            for i, one in enumerate(self.parameters)
        ]
        self._agree(chosen, warmup_steps)
        self._install(chosen)
        self.exact_until = self.steps + warmup_steps
        self._enable(warmup_steps == 0)

    @property
    def steps(self) -> int:
        """Synchronised backwards so far, those before a checkpoint was loaded included."""
        return self._steps_before + int(self.reducer.stats()["steps"])

    def resume(self, steps: int, exact_until: int) -> None:
        """Go on counting from a checkpoint."""
        self._steps_before += steps - self.steps
        self.exact_until = exact_until
        self._enable(self.steps >= exact_until)

    @property
    def compresses_now(self) -> bool:
        return bool(self._methods) and not self._warming

    def before_forward(self, sync: bool) -> None:
        """`sync`: whether the backward that follows synchronises."""
        if self._warming and self.steps >= self.exact_until:
            self._enable(True)
        if self.probe is not None:
            self.probe.before_forward(sync)
        if sync:
            self._sent = _bytes_sent()

    @property
    def wire_bytes(self) -> int:
        """Sent by this rank since the last forward, all headers included; 0 where the backend does not say."""
        return _bytes_sent() - self._sent

    def describe(self, index: int) -> str:
        """The compressor of parameter `index` in words."""
        compressor = self.compressors[index]
        return "exact" if compressor is None else describe(compressor)

    def set_loss_scale(self, scale: float) -> None:
        """Of the next backward, where its scaler does not say it itself."""
        self._scale_of_scaler = scale
        self.reducer.set_loss_scale(scale)

    def loss_scale(self) -> float:
        """Of the backward this is called in; 1 where nobody scaled its loss."""
        from ringdp import _C

        noted: float = _C.loss_scale_of_backward()
        return self._scale_of_scaler if noted == 1.0 else noted

    def in_core(self, index: int) -> bool:
        """Whether the C++ core compresses parameter `index` and keeps its residual."""
        from ringdp import _C

        method = self._method_of[index]
        return method >= 0 and isinstance(self._methods[method], _C.NativeMethod)

    def in_hook(self, index: int) -> bool:
        """Whether parameter `index` is compressed in Python."""
        return self.compressors[index] is not None and not self.in_core(index)

    @property
    def exchanges_codes(self) -> bool:
        """See `RankDevices.exchanges_codes`."""
        return self.devices.exchanges_codes

    def residuals(self) -> dict[int, Tensor]:
        """By index, of all parameters with error feedback in the core: float32 [numel] on the CPU; zeros before the
        first step."""
        known = self.reducer.residuals()
        return {
            index: known[index] if index in known else torch.zeros(one.parameter.numel())
            for index, one in enumerate(self.parameters)
            if self.in_core(index) and self._methods[self._method_of[index]].feedback
        }

    # How all ranks come to the same.

    def _agree(self, chosen: Sequence[Compressor | None], warmup_steps: int) -> None:
        if self.group.size() == 1:
            return
        lines = [f"warmup_steps={warmup_steps}"]
        lines += [
            f"{one.name}\t{'exact' if compressor is None else describe(compressor)}"
            for one, compressor in zip(self.parameters, chosen, strict=True)
        ]
        gathered = all_gather_where_different(
            "\n".join(lines).encode(), self.group, what="compression", device=self.device
        )
        if gathered is None:
            return
        me = self.group.rank()
        told = [text.decode().split("\n") for text in gathered]
        other = next((rank for rank, theirs in enumerate(told) if theirs != lines), me)
        mine, theirs = next(pair for pair in zip(lines, told[other], strict=False) if pair[0] != pair[1])
        raise MismatchError(
            f"the ranks chose different compression: {_words(mine)} on rank {me}, {_words(theirs)} on rank {other}."
            " Give RingDP and set_compression the same arguments on all ranks.",
            rank=me,
            peer=other,
        )

    def _known(self, index: int, compressor: Compressor | None) -> Compressor | None:
        """The one that the parameter has, where that is equal: it goes on."""
        return self.compressors[index] if compressor == self.compressors[index] else compressor

    def _install(self, chosen: Sequence[Compressor | None]) -> None:
        from ringdp import _C

        exchange = self.exchanges_codes
        in_core = exchange or self.devices.core_reduces_codes
        if not in_core and any(one is not None for one in chosen):
            self.devices.tell_no_kernels(self.group.rank())
        codecs = [(getattr(one, "native", None), _feeds_back(one)) if in_core else (None, False) for one in chosen]
        kinds = sorted({kind for kind in codecs if kind[0] is not None})
        methods: list[Any] = [_C.NativeMethod(codec, feedback) for codec, feedback in kinds]
        by_hook = {
            one.name: compressor
            for one, compressor, (codec, _) in zip(self.parameters, chosen, codecs, strict=True)
            if compressor is not None and codec is None
        }
        hook = self._make_hook(by_hook) if by_hook else None
        if hook is not None:
            methods.append(_C.PythonMethod(hook, compressed_hook, "in Python"))
        method_of = [
            -1 if compressor is None else len(kinds) if kind[0] is None else kinds.index(kind)
            for compressor, kind in zip(chosen, codecs, strict=True)
        ]
        turns = [turn_of(one.name) for one in self.parameters]
        self.reducer.set_methods(methods, method_of, turns, exchange_codes=exchange)
        self.compressors, self.hook = list(chosen), hook
        self._methods, self._method_of = methods, method_of

    def _make_hook(self, chosen: Mapping[str, Compressor]) -> CompressedHook:
        mine = weakref.proxy(self)  # the reducer keeps the hook
        hook = CompressedHook(
            lambda name, parameter: chosen[name],
            process_group=self.group,
            scale=lambda: mine.loss_scale(),
            commit_alone=False,
        )
        if self.hook is not None:
            hook.memory = self.hook.memory
            hook.memory.keep_only(chosen)
        return hook

    def _enable(self, enabled: bool) -> None:
        self._warming = not enabled
        for method in self._methods:
            method.enabled = enabled


def _bytes_sent() -> int:
    try:
        return traffic().bytes_sent
    except InvalidStateError:  # another backend
        return 0


def _feeds_back(compressor: Compressor | None) -> bool:
    return feedback_of(getattr(compressor, "error_feedback", None)) is not None


def describe(compressor: Compressor) -> str:
    """The compressor in words that are the same on all ranks: its own, or its class and what it was given."""
    if type(compressor).__repr__ is not object.__repr__:
        return repr(compressor)
    plain = (bool, int, float, str, type(None))
    given = (f"{name}={value!r}" for name, value in sorted(vars(compressor).items()) if isinstance(value, plain))
    return f"{type(compressor).__qualname__}({', '.join(given)})"


def _words(line: str) -> str:
    name, _, compressor = line.partition("\t")
    return f"{name!r}: {compressor}" if compressor else name
