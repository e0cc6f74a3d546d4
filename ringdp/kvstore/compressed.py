"""Pushes as codes: the mean of all ranks' gradients by a compressor, as RingDP makes it, bit for bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringdp import compression, refusals
from ringdp.compression import Auto, Compression, CompressorLike, saved
from ringdp.compression.description import describe
from ringdp.compression.exchange import BucketSlice, Coder, Layout, Section
from ringdp.compression.parameters import ModelParameter
from ringdp.compression.rules import Rules
from ringdp.errors import InvalidArgumentError
from ringdp.hooks.checkpoint import Memory
from ringdp.hooks.exchange_runner import CodecSections, run_exchange
from ringdp.kvstore.keys import Key, flat
from ringdp.kvstore.threshold import Threshold


def compressor_of(spec: CompressorLike | Compression | Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    """The compressor of a name, an object, a `Compression` or MXNet's dictionary; None is exact.

    Raises:
        InvalidArgumentError: it is not known, or chooses by itself ("auto"), which needs RingDP's steps.
    """
    if isinstance(spec, Mapping):
        given = dict(spec) | dict(options)
        kind = given.pop("type", None)
        if kind in ("1bit", "2bit"):
            return Threshold(bits=int(kind[0]), **_only(given, "threshold"))
        if not isinstance(kind, str):
            raise InvalidArgumentError(f"gradient compression {dict(spec)} has no 'type'")
        spec, options = kind, given
    if isinstance(spec, Compression):
        rules = Rules(spec)
        if rules.pairs:
            refusals.refuse("rules", "compressed kvstore")
        if rules.asked.warmup_steps:
            refusals.refuse("warmup_steps", "compressed kvstore")
        spec = rules.compressor
    try:
        chosen = compression.get(spec, **options)
    except TypeError as error:
        raise InvalidArgumentError(f"compression {spec!r}: {error}") from error
    if isinstance(chosen, Auto):
        refusals.refuse("auto", "compressed kvstore")
    return chosen


def _only(given: dict[str, Any], name: str) -> dict[str, Any]:
    if unknown := given.keys() - {name}:
        raise InvalidArgumentError(f"gradient compression has no {', '.join(map(repr, sorted(unknown)))}")
    return given


@dataclasses.dataclass(frozen=True)
class _Content:
    """Keys that are exchanged together: those by codecs of the core, and those by other compressors."""

    codecs: Sequence[CodecSections]
    layout: Layout


class CompressedPushes:
    """Of one store, by one compressor. Keys that RingDP would not compress either (of one dimension, under 1,024
    elements, not floating point) stay exact. The states of a push count from `commit` on: until then it can be made
    again, also by other ranks.

    Args:
        compressor: of all keys that are compressed.
        group: of several ranks.
    """

    def __init__(self, compressor: Any, group: dist.ProcessGroup) -> None:
        self.compressor = compressor
        self._rules = Rules(compressor)
        self._group = group
        self._finite = True
        self.memory = Memory()
        self._contents: dict[tuple[str, ...], _Content] = {}

    @property
    def ranks(self) -> int:
        """Those whose inputs are in the last mean."""
        return self.memory.members[1]

    def describe(self) -> str:
        return describe(self.compressor)

    def serves(self, key: Key) -> bool:
        """Whether the key is compressed."""
        like = torch.empty(key.shape, dtype=key.dtype, device="meta")
        return key.dtype != torch.float64 and self._rules.of(ModelParameter(like, (key.name,))) is not None

    def average(self, keys: Sequence[Key], inputs: Sequence[Tensor]) -> list[Tensor]:
        """The mean of all ranks' `inputs` (flat) of each key, float32 and flat: the same bits on all ranks. What a call
        that was not committed has left in the states is dropped.

        Raises:
            MismatchError: the ranks do not encode the same.
            Exception: the compressor's; a RingError on the other ranks.
        """
        numels = [key.numel for key in keys]
        bucket = torch.cat([it.float() for it in inputs])
        self.memory.states.commit(False)
        if self.memory.follow(self._group):
            self._contents.clear()
        self.know(keys)
        self._finite = True
        rank, ranks = self.memory.members
        if ranks == 1:
            return list(bucket.split(numels))
        content, memory = self._content(keys, numels, bucket), self.memory
        for codec in content.codecs:
            report = codec.average(bucket, self._group, memory.states, 1.0, float(ranks))
            self._finite = self._finite and report.finite
        if content.layout.plans:
            coder = Coder(memory.states, rank, ranks, memory.step, 1.0, bucket.device)
            run_exchange(content.layout.average(bucket, coder, float(ranks)), self._group)
            self._finite = self._finite and bool(bucket.isfinite().all())
        return list(bucket.split(numels))

    def commit(self) -> None:
        """The last `average` counts; where a mean was not finite its states are dropped."""
        self.memory.states.commit(self._finite)
        self.memory.step += 1

    def _content(self, keys: Sequence[Key], numels: Sequence[int], bucket: Tensor) -> _Content:
        names = tuple(key.name for key in keys)
        if names not in self._contents:
            by_codec: dict[str, list[Section]] = {}
            rest, begin = [], 0
            for key, numel in zip(keys, numels, strict=True):
                place = BucketSlice(key.name, key.shape, begin, numel, self.compressor)
                section = place.section(self._group.size(), bucket.device)
                if section is not None and CodecSections.serve(section):
                    by_codec.setdefault(self.compressor.native, []).append(section)
                else:
                    rest.append(place)
                begin += numel
            codecs = [CodecSections(sections, self._group, bucket.dtype) for sections in by_codec.values()]
            self.know(keys)
            self._contents[names] = _Content(codecs, Layout(rest, self._group.size(), bucket.device))
        return self._contents[names]

    # The residuals of error feedback.

    def state_dict(self) -> dict[str, Any]:
        """The mean over the ranks, which loads at any world size; all ranks must call."""
        entries = self.memory.entries(self._group, consolidated=True)
        return saved.State(self._group.size(), None, entries, self.memory.step, 0, self.memory.step).as_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        rank = self._group.rank()
        self.memory.take(self.memory.read(saved.State.read(dict(state), rank, self._group.size()), rank))

    def know(self, keys: Sequence[Key]) -> None:
        """Give these keys their loaded residuals."""
        ranks = self._group.size()
        known = []
        for key in keys:
            section = BucketSlice(key.name, key.shape, 0, key.numel, self.compressor).section(ranks, key.device)
            if section is not None:
                known.append((section, torch.empty(key.shape, device=key.device, dtype=torch.float32)))
        self.memory.know(known, self._group.rank())


def means_to_slices(keys: Sequence[Key], means: Sequence[Tensor], rank: int, factor: float) -> dict[str, Tensor]:
    """This rank's slices of the means, times `factor`, in the keys' types."""
    slices = {}
    for key, mean in zip(keys, means, strict=True):
        mine = key.cut.slice_of(flat(mean), rank)
        slices[key.name] = (mine.mul_(factor) if factor != 1.0 else mine).to(key.dtype)
    return slices
