"""The check of a compressor's promises."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ringdp import compression
from ringdp.compression import saved
from ringdp.compression.description import describe
from ringdp.compression.exchange import BucketSlice, Coder, Layout, States
from ringdp.compression.exchange.local import there_and_back
from ringdp.compression.exchange.packing import check_promise, forms_of
from ringdp.compression.exchange.section import Section
from ringdp.errors import InvalidArgumentError
from ringdp.testing.simulation import Simulation, simulate, together

SIZES = (1, 2, 255, 256, 257, 1000, 4096)
WORLDS = range(1, 9)
_NAME = "checked"


@dataclasses.dataclass(frozen=True)
class Report:
    """The result of `check_compressor`; as text it is a list of sentences.

    Attributes:
        passed: the promises that hold.
        bits: of a payload, by element, at 4,096 elements of a Gaussian.
        nmse: the squared error of decoding one such payload by the squared norm.
    """

    compressor: str
    passed: list[str]
    bits: float
    nmse: float

    def __str__(self) -> str:
        lines = [f"{self.compressor}: {self.bits:.2f} bits an element, NMSE {self.nmse:.1e}"]
        return "\n".join([*lines, *(f"  ok  {promise}" for promise in self.passed)])


def check_compressor(compressor: compression.CompressorLike, *, device: torch.device | str = "cpu") -> Report:
    """Try a compressor on values that gradients can have, alone and on 1 to 8 simulated ranks.

    Args:
        compressor: a registered name or an object.
        device: where to try it.

    Raises:
        InvalidArgumentError: it is not a compressor.
        AssertionError: it breaks a promise; the text has a line for each broken one.
    """
    chosen = compression.get(compressor)
    if chosen is None:
        raise InvalidArgumentError('None means "no compression"; pass a compressor to check')
    passed: list[str] = []
    failed: list[str] = []
    if isinstance(chosen, compression.CCompressor):
        _check_functions(chosen)
        passed.append("its functions do what ringdp/compressor.h says, and write nowhere else")
    bench = _Bench(chosen, torch.device(device))
    for promise, check in bench.checks():
        try:
            check()
            passed.append(promise)
        except AssertionError as broken:
            failed.append(f"{promise}: {broken}")
        except Exception as error:
            failed.append(f"{promise}: it raised {type(error).__name__}: {error}")
    if failed:
        raise AssertionError("\n".join([f"{describe(chosen)} breaks {len(failed)} promise(s):", *failed]))
    return Report(describe(chosen), passed, *bench.quality())


def _check_functions(chosen: compression.CCompressor) -> None:
    """Run first, between fences: a write out of bounds would hit the memory of this process."""
    broken = chosen.broken_promises()
    if broken:
        raise AssertionError("\n".join([f"{describe(chosen)} breaks {len(broken)} promise(s) of its header:", *broken]))


class _Bench:
    def __init__(self, compressor: compression.Compressor, device: torch.device) -> None:
        self.compressor, self.device = compressor, device
        self.feedback = self.section(1).feedback

    def checks(self) -> Iterator[tuple[str, Callable[[], None]]]:
        if self.talks:
            yield "the same elements give the same mean, and are not changed", self.repeats
        else:
            yield "the same elements give the same payload, and are not changed", self.deterministic
            yield "payloads have the promised sizes, and decode to float32 [numel]", self.sizes
        yield "zeros decode to zeros", self.zeros
        yield "subnormal numbers decode to finite ones", lambda: self.finite(self.gaussian(1000) * 2.0**-140)
        yield "1e-30 beside 1e30 decodes to finite numbers", self.range
        yield "infinities and NaN are seen by every rank, in that step only", self.overflow
        yield "1 to 8 ranks end with the same bits", self.worlds
        yield "state is replaced, not changed in place", self.state
        sums = getattr(self.feedback, "sums", True) and not hasattr(self.feedback, "result")
        if hasattr(self.feedback, "owed") and sums:
            yield "the payloads and the residuals add up to the gradients (error feedback)", self.telescoping

    # The parts of the checks.

    def section(self, count: int) -> Section:
        return Section(_NAME, (count,), 0, count, self.compressor, 1, self.device)

    def gaussian(self, count: int, seed: int = 0) -> Tensor:
        return torch.randn(
            count, generator=torch.Generator(device="cpu").manual_seed(seed), dtype=torch.float32, device="cpu"
        ).to(self.device)

    def gradients(self, ranks: int, steps: int, count: int = 3000) -> list[list[Tensor]]:
        shape = _shape(count) if self.talks else (count,)
        return [[self.gaussian(count, 100 * step + r).view(shape) for r in range(ranks)] for step in range(steps)]

    def encode(self, x: Tensor) -> compression.Payload:
        return self.coder.compress(self.section(x.numel()), x, "rank", 0)

    def decode(self, payload: compression.Payload, count: int) -> Tensor:
        return self.coder.decode(self.section(count), payload, "rank", 0)

    @property
    def coder(self) -> Coder:
        return Coder(States(), 0, 1, 0, device=self.device)

    @property
    def talks(self) -> bool:
        return getattr(self.compressor, "aggregate", "owner") == "rounds"

    def there_and_back(self, x: Tensor) -> tuple[Tensor, int]:
        shape = _shape(x.numel()) if self.talks else (x.numel(),)
        return there_and_back(dataclasses.replace(self.section(x.numel()), shape=shape), x)

    def quality(self) -> tuple[float, float]:
        x = self.gaussian(4096)
        decoded, nbytes = self.there_and_back(x)
        return 8 * nbytes / 4096, float((decoded - x).square().sum() / x.square().sum())

    # The promises.

    def deterministic(self) -> None:
        x = self.gaussian(1000)
        before = x.clone()
        first, second = self.encode(x), self.encode(x)
        assert torch.equal(x, before), "compress changed its input"
        same = len(first) == len(second) and all(_same(a, b) for a, b in zip(first, second, strict=True))
        assert same, "two calls gave different payloads; take random numbers from info.generator or private_generator"
        once, again = self.decode(first, 1000), self.decode(first, 1000)
        assert _same(once, again), "two calls of decompress gave different elements"

    def repeats(self) -> None:
        x = self.gaussian(1024)
        before = x.clone()
        first, second = self.there_and_back(x)[0], self.there_and_back(x)[0]
        assert torch.equal(x, before), "average changed its input"
        assert _same(first, second), "two calls gave different means; take random numbers from info.generator"

    def sizes(self) -> None:
        for count in SIZES:
            promised = forms_of(self.encode(torch.zeros(count, device=self.device, dtype=torch.float32)))
            for x in (self.gaussian(count), self.gaussian(count, 1) * 1e-3):
                payload = self.encode(x)
                try:
                    check_promise(self.section(count), promised, payload, count)
                except InvalidArgumentError as broken:
                    raise AssertionError(str(broken)) from None
                self.decode(payload, count)

    def zeros(self) -> None:
        decoded, _ = self.there_and_back(torch.zeros(1000, device=self.device, dtype=torch.float32))
        assert bool(decoded.isfinite().all()), "they decode to infinities or NaN: is there a division by a scale of 0?"
        assert float(decoded.abs().max()) < 1e-20, f"they decode to up to {float(decoded.abs().max()):g}"

    def finite(self, x: Tensor) -> None:
        wrong = int(self.there_and_back(x)[0].isfinite().logical_not().sum())
        assert wrong == 0, f"{wrong} of {x.numel()} elements decode to infinities or NaN"

    def range(self) -> None:
        x = self.gaussian(1000) * 1e-30
        x[::7] = 1e30
        decoded, _ = self.there_and_back(x)
        # float16 cannot hold 1e30: an infinity is right where infinities are carried.
        carried = (decoded == torch.inf) & (x == 1e30) & bool(getattr(self.compressor, "carries_nan", False))
        wrong = int((decoded.isfinite() | carried).logical_not().sum())
        assert wrong == 0, f"{wrong} of 1000 elements decode to infinities or NaN"

    def overflow(self) -> None:
        for value in (torch.inf, -torch.inf, torch.nan):
            if not self.talks and getattr(self.compressor, "carries_nan", False):
                x = self.gaussian(1000)
                x[500] = value
                decoded = self.decode(self.encode(x), 1000)
                assert not bool(decoded[500].isfinite()), (
                    f"carries_nan is set, and a {value} among 1,000 elements decodes to {float(decoded[500]):g}"
                )
            for ranks in (2, 3):
                steps = self.gradients(ranks, 3)
                before = simulate(self.compressor, steps[0], ranks, name=_NAME)
                remembered = _snapshot(before.states)
                steps[1][ranks - 1].view(-1)[1234] = value
                hit = simulate(self.compressor, steps[1], ranks, name=_NAME, after=before)
                assert not bool(hit.mean.isfinite().all()), f"a {value} on rank {ranks - 1} became a finite mean"
                assert _equal(remembered, _snapshot(hit.states)), (
                    f"a {value} changed the states of the compressor or of error feedback"
                )
                clean = simulate(self.compressor, steps[2], ranks, name=_NAME, after=hit)
                assert bool(clean.mean.isfinite().all()), f"the step after a {value} is not finite either"

    def worlds(self) -> None:
        for ranks in WORLDS:
            for count in (1, 300, 3000):
                simulate(self.compressor, self.gradients(ranks, 2, count), ranks, name=_NAME)

    def state(self) -> None:
        first = simulate(self.compressor, self.gradients(2, 1), 2, name=_NAME)
        before = _snapshot(first.states)
        shape = _shape(3000) if self.talks else (3000,)
        layouts = [Layout([BucketSlice(_NAME, shape, 0, 3000, self.compressor)], 2, self.device) for _ in range(2)]
        buckets = [self.gaussian(3000, 7 + r) for r in range(2)]
        coders = [Coder(first.states[r], r, 2, 1, device=self.device) for r in range(2)]
        together([layouts[r].average(buckets[r], coders[r], 2) for r in range(2)])
        changed = _difference(before, _snapshot(first.states))
        assert changed is None, f"{changed} was changed in place: an overflow could not take the step back"

    def telescoping(self) -> None:
        for ranks in (2, 3, 5):
            steps = self.gradients(ranks, 6)
            done = simulate(self.compressor, steps, ranks, name=_NAME)
            sent = torch.stack(done.means).double().sum(0)
            exact = torch.stack([torch.stack(step).double().mean(0) for step in steps]).sum(0)
            off = float(((sent - exact).view(-1) + self.owed(done, ranks)).abs().max() / exact.abs().max())
            assert off < 1e-4, f"after 6 steps on {ranks} ranks they differ by {off:.1e} of the largest sum"

    def owed(self, done: Simulation, ranks: int) -> Tensor:
        """The residual of the mean, from all ranks."""
        section = BucketSlice(_NAME, (3000,), 0, 3000, self.compressor).section(ranks, self.device)
        assert section is not None
        total = torch.zeros(3000, dtype=torch.float64, device=self.device)
        for rank, states in enumerate(done.states):
            for path, value in saved.save(section, states.of(_NAME)).items():
                if path in getattr(self.feedback, "owed", ()):
                    total += saved.share(section, path, value.double(), rank, ranks)
        return total


def _shape(count: int) -> tuple[int, ...]:
    """Of a matrix that is about square."""
    rows = next(rows for rows in range(int(count**0.5), 0, -1) if count % rows == 0)
    return rows, count // rows


def _same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and _bits(a) == _bits(b)


def _bits(x: Tensor) -> list[int]:
    flat: list[int] = x.detach().contiguous().view(-1).view(torch.uint8).tolist()
    return flat


def _snapshot(states: list[States]) -> dict[str, Any]:
    snapshot: dict[str, Any] = {}
    for rank, state in enumerate(states):
        remembered = state.of(_NAME)
        if remembered.residual is not None:
            snapshot[f"rank {rank}'s residual"] = remembered.residual.clone()
        for key, held in remembered.dicts.items():
            for name, value in held.items():
                what = f"rank {rank}'s {name} ({key.kind}, {key.phase}, part {key.part})"
                snapshot[what] = value.clone() if isinstance(value, Tensor) else value
    return snapshot


def _equal(before: dict[str, Any], after: dict[str, Any]) -> bool:
    return before.keys() == after.keys() and _difference(before, after) is None


def _difference(before: dict[str, Any], after: dict[str, Any]) -> str | None:
    for what, value in before.items():
        other = after.get(what)
        same = _same(value, other) if isinstance(value, Tensor) and isinstance(other, Tensor) else value == other
        if not same:
            return what
    return None
