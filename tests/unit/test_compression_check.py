"""check_compressor: built-in compressors pass, and each broken promise is told in words."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ringdp.compression import Info, MergeCompressor, RoundsCompressor, get
from ringdp.errors import InvalidArgumentError
from ringdp.testing import check_compressor
from tests.registries import CODEC_SPECS, COMPRESSORS
from tests.train.compressed import COMPRESSORS as OF_THE_TESTS
from tests.train.compressed import Steps

# An element's bits; those of a codec are what the core says.
BITS = {"sign": 1.125, "qsgd": 4.0625, "terngrad": 2.0625, "randomk": 0.32, "powersgd": 4.0, "signsgd": 1.0}
BITS |= {
    name: CODEC_SPECS[one.codec]["bits"] + 8 * CODEC_SPECS[one.codec]["scale_bytes"] / CODEC_SPECS[one.codec]["block"]
    for name, one in COMPRESSORS.items()
    if getattr(one, "codec", None) in CODEC_SPECS
}


@pytest.mark.parametrize("name", COMPRESSORS)
def test_what_is_built_in_keeps_its_promises(name: str) -> None:
    compressor, report = COMPRESSORS[name], check_compressor(name)
    in_rounds = isinstance(compressor, RoundsCompressor)
    if not isinstance(compressor, MergeCompressor):
        assert len(report.passed) == 8 + bool(getattr(compressor, "error_feedback", False)) - in_rounds
    if name in BITS:
        assert report.bits == pytest.approx(BITS[name], abs=0.01)
    assert f"{report.bits:.2f} bits an element" in str(report)


@pytest.mark.ci
@pytest.mark.parametrize("name", OF_THE_TESTS)
def test_what_the_tests_use_keeps_its_promises(name: str) -> None:
    check_compressor(OF_THE_TESTS[name])


class Restless(Steps):
    def compress(self, x: Tensor, info: Info) -> tuple[Tensor, ...]:
        return super().compress(x + torch.rand(x.shape), info)


class Careless(Steps):
    """x / 0 where all elements are."""

    def compress(self, x: Tensor, info: Info) -> tuple[Tensor, ...]:
        scale = x.abs().max().reshape(1)
        return x / scale, scale


class Sized(Steps):
    def compress(self, x: Tensor, info: Info) -> tuple[Tensor, ...]:
        return x[x != 0].half(), torch.ones(1)


class Boastful(Steps):
    carries_nan = True

    def compress(self, x: Tensor, info: Info) -> tuple[Tensor, ...]:
        return super().compress(x.nan_to_num(0, 0, 0), info)


class Accumulating(Steps):
    def compress(self, x: Tensor, info: Info) -> tuple[Tensor, ...]:
        info.state.setdefault("sum", torch.zeros_like(x)).add_(x)
        return super().compress(x, info)


class Forgetful:
    owed = ("residual",)

    def before(self, x: Tensor, state: dict[str, Any]) -> Tensor:
        return x + 0.5 * state.get("residual", 0.0)

    def after(self, x: Tensor, decoded: Tensor, state: dict[str, Any]) -> None:
        state["residual"] = x - decoded


class FedBackHalf(Steps):
    error_feedback = Forgetful()

    def compress(self, x: Tensor, info: Info) -> tuple[Tensor, ...]:
        scale = (x.abs().max() / 2).clamp_min(1e-38).reshape(1)
        return (x / scale).round().to(torch.int8), scale


class InPlace(Steps):
    def compress(self, x: Tensor, info: Info) -> tuple[Tensor, ...]:
        return super().compress(x.mul_(2), info)


class Wide(Steps):
    def decompress(self, payload: tuple[Tensor, ...], info: Info) -> Tensor:
        return super().decompress(payload, info).double()


class Untupled(Steps):
    def compress(self, x: Tensor, info: Info) -> Any:
        return x.half()


@pytest.mark.parametrize(
    "compressor, words",
    [
        (Restless(), "two calls gave different payloads; take random numbers from info.generator"),
        (Careless(), "zeros decode to zeros: they decode to infinities or NaN: is there a division by a scale of 0"),
        (Sized(), r"gave float16 \[1\], float32 \[1\] for checked where 1 zeros gave .* set fixed_size = False"),
        (Boastful(), "carries_nan is set, and a inf among 1,000 elements decodes to 0"),
        (Accumulating(), r"rank 0's sum \(compressor, rank, part \d\) was changed in place"),
        (FedBackHalf(), "add up to the gradients .*: after 6 steps on 2 ranks they differ by"),
        (InPlace(), "compress changed its input"),
        (Wide(), r"Wide\(\).decompress must give float32 \[1000\] for checked, not float64 \[1000\]"),
        (Untupled(), r"Untupled\(\).compress must give a tuple of tensors for checked, not float16 \[1000\]"),
    ],
    ids=lambda it: type(it).__name__ if isinstance(it, Steps) else "",
)
def test_a_broken_promise_is_told(compressor: Any, words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        check_compressor(compressor)


def test_exact_is_no_compressor() -> None:
    assert get(None) is None
    with pytest.raises(InvalidArgumentError, match='None means "no compression"'):
        check_compressor(None)
