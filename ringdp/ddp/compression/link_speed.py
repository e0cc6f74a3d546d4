"""The present cost of all-reduces of a group, exact and as codes: the input of `tuner`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ringdp.compression import Compressor, TopK
from ringdp.compression.codecs.core_codec import CoreCodec
from ringdp.compression.exchange import Coder, Section, States
from ringdp.compression.feedback import feedback_of
from ringdp.ddp.compression.tuner import EXACT, Line, LinkCosts
from ringdp.job.backend import named
from ringdp.job.byte_collectives import all_gather_single

_SMALL = 16 * 1024  # elements
_LARGE = 256 * 1024
_LARGEST = 1024 * 1024  # where the link is fast
_FAST_S = 5e-3
_UNION = 2.0  # how many more places owners send of a sparse gradient than each rank does
_PYTHON_S = 2e-3  # an exchange that Python leads: its operations, beside what they send


class LinkProbe:
    """Times all-reduces of the group. Every rank calls everything here in the same place, between two steps.

    Args:
        group: over ring, with tensors on the CPU.
        levels: the codes to measure, by name: codecs of the core, and "topk".
        crowded: there are no more cores than threads that compute, so coding slows the computation down.
    """

    def __init__(self, group: dist.ProcessGroup, levels: Mapping[str, Compressor], *, crowded: bool) -> None:
        self._group, self._levels = group, levels
        self._codecs = {level: it.native for level, it in levels.items() if isinstance(it, CoreCodec) and it.native}
        self._coding = {level: coding_s(it) for level, it in levels.items()}
        self._crowded = crowded

    def measure(self) -> tuple[LinkCosts, float]:
        """The present costs of all-reduces, the same numbers on all ranks, and the seconds this took."""
        from ringdp import _C

        began = time.monotonic()
        buffer = torch.zeros(_LARGEST, dtype=torch.float32, device="cpu")
        [large] = self._agreed([self._time(buffer[:_LARGE])])
        fast = large < _FAST_S
        size, times = _LARGEST if fast else _LARGE, list[float]()
        for level in (EXACT, *self._codecs):
            times.append(min(self._time(buffer[:_SMALL], level) for _ in range(2)))
            times.append(min(self._time(buffer[:size], level) for _ in range(2 if fast else 1)))
        times.append(time.monotonic() - began)
        *durations, took = self._agreed(times)
        coding = dict(zip(self._coding, self._agreed(list(self._coding.values()), most=True), strict=True))
        lines = {}
        for i, level in enumerate((EXACT, *self._codecs)):
            lines[level] = Line.through((_SMALL, durations[2 * i]), (size, durations[2 * i + 1]))
        for level, codec in self._codecs.items():  # short codes may go through in a burst that longer ones do not get
            wire_s = lines[EXACT].element_s * _C.codec_bytes(codec, size) / (4 * size)
            lines[level] = Line(lines[level].fixed_s, max(lines[level].element_s, wire_s))
        if "topk" in self._levels:
            lines["topk"] = self._sparse(lines[EXACT], coding["topk"])
        return LinkCosts(lines, coding if self._crowded else {}), took

    def _sparse(self, exact: Line, coding: float) -> Line:
        share = _UNION * TopK().fraction * 27 / 32
        return Line(2 * exact.fixed_s + _PYTHON_S, exact.element_s * share + coding)

    def _time(self, x: Tensor, level: str = EXACT) -> float:
        """Seconds of one all-reduce, from the arrival of the last rank on."""
        with named("measuring links"):
            dist.all_reduce(x[:1], group=self._group)
            began = time.monotonic()
            if level == EXACT:
                dist.all_reduce(x, group=self._group)
            else:
                self._reduce_codes(x, level)
        return time.monotonic() - began

    def _reduce_codes(self, x: Tensor, level: str) -> None:
        feedback = feedback_of(getattr(self._levels[level], "error_feedback", None))
        residuals = [None if feedback is None else torch.zeros_like(x) for _ in range(2)]
        group, codec = self._group, self._codecs[level]
        from ringdp import _C

        work, _ = _C.all_reduce_compressed(
            group, x, [0], [x.numel()], [0], residuals[:1], residuals[1:], codec, 1.0, group.size()
        )
        work.wait()

    def _agreed(self, numbers: Sequence[float], *, most: bool = False) -> list[float]:
        """The minimum over all ranks, since the rank that came last did not wait; or the maximum."""
        gathered = gather_numbers(numbers, self._group)
        values = gathered.amax(0) if most else gathered.amin(0)
        agreed: list[float] = values.tolist()
        return agreed


def gather_numbers(numbers: Sequence[float], group: dist.ProcessGroup) -> Tensor:
    """float64 ``[ranks, len(numbers)]``: what each rank gave."""
    mine = torch.tensor(numbers, dtype=torch.float64, device="cpu")
    gathered = torch.empty((group.size(), len(mine)), dtype=torch.float64, device="cpu")
    with named("measurements of all ranks"):
        all_gather_single(gathered, mine, group=group)
    return gathered


def coding_s(compressor: Compressor, numel: int = 256 * 1024) -> float:
    """Seconds that one element's encodings and decodings take a rank in an all-reduce."""
    x = torch.randn(numel, generator=torch.Generator(device="cpu").manual_seed(0), dtype=torch.float32, device="cpu")
    section, coder = Section("", (numel,), 0, numel, compressor, 1), Coder(States(), 0, 1, 0)
    payload = coder.encode(section, x, "rank", 0)
    coder.states.commit(True)  # there is a residual from now on
    encode = _least(lambda: coder.encode(section, x, "rank", 0))
    return (encode + 2 * _least(lambda: coder.decode(section, payload, "rank", 0))) / numel


def _least(call: Callable[[], object]) -> float:
    times = []
    for _ in range(3):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return min(times)
