"""The core's codecs in torch operations: what their codes mean, and that their bits are the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ringdp.compression import Compressor, Info, Int4, Int5, Int6, Int8, NormalFloat4
from ringdp.compression.codecs import native
from ringdp.errors import InvalidArgumentError
from tests.registries import CODEC_COMPRESSORS, CODEC_SPECS

SIZES = (1, 2, 31, 32, 33, 63, 64, 65, 96, 127, 255, 256, 257, 300, 511, 512, 1021, 5000)
OTHER_BLOCKS = [Int8(block=1), Int8(block=100), Int8(block=1024), Int4(block=2), Int4(block=32), Int4(block=256)]
OTHER_BLOCKS += [Int5(block=8), Int6(block=104), NormalFloat4(block=32)]


def gaussian(n: int, scale: float = 1.0) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(n)) * scale


def with_one(n: int, value: float) -> Tensor:
    x = gaussian(n)
    x[n // 2] = value
    return x


def far_apart(n: int) -> Tensor:
    x = gaussian(n, 1e-30)
    x[::7] = 1e30
    return x


KINDS: dict[str, Callable[[int], Tensor]] = {
    "gaussian": lambda n: gaussian(n, 1e-3),
    "zeros": torch.zeros,
    "1e-30 beside 1e30": far_apart,
    "subnormal": lambda n: gaussian(n, 2.0**-70) * 2.0**-70,
    "tiny": lambda n: gaussian(n, 3e-37),
    "huge": lambda n: gaussian(n, 1e38),
    "halves": lambda n: gaussian(n, 40).round() + 0.5,
    "NaN": lambda n: with_one(n, torch.nan),
    "infinity": lambda n: with_one(n, -torch.inf),
    "any bits": lambda n: torch.arange(n).mul(1_000_003 * 65_537).to(torch.int32).view(torch.float32),
}


def info_of(x: Tensor) -> Info:
    return Info(name="layer.weight", shape=tuple(x.shape), numel=x.numel())


@pytest.fixture
def by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "serves", lambda x: False)


def there_and_back(compressor: Compressor, x: Tensor) -> Tensor:
    return compressor.decompress(compressor.compress(x, info_of(x)), info_of(x))


@pytest.mark.parametrize("name", CODEC_COMPRESSORS)
def test_torch_operations_give_the_bits_of_the_core(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from ringdp import _C

    codec = CODEC_COMPRESSORS[name]
    monkeypatch.setattr(native, "serves", lambda x: False)
    for n in SIZES:
        for kind, make in KINDS.items():
            x = make(n)
            (code,) = codec.compress(x, info_of(x))
            assert torch.equal(code, _C.codec_compress(name, x)), (kind, n)
            decoded, expected = codec.decompress((code,), info_of(x)), _C.codec_decompress(name, code, n)
            assert torch.equal(decoded.view(torch.int32), expected.view(torch.int32)), (kind, n)


@pytest.mark.usefixtures("by_torch")
@pytest.mark.parametrize("compressor", [*CODEC_COMPRESSORS.values(), *OTHER_BLOCKS], ids=repr)
def test_the_code_is_as_long_as_it_says_and_what_is_not_finite_stays_so(compressor: Any) -> None:
    for n in SIZES:
        for kind, make in KINDS.items():
            x = make(n)
            (code,) = compressor.compress(x, info_of(x))
            assert code.dtype == torch.uint8
            if hasattr(compressor, "code_bytes"):
                assert code.numel() == compressor.code_bytes(n), (kind, n)
            back = compressor.decompress((code,), info_of(x))
            assert back.dtype == torch.float32
            assert back.shape == (n,)
            assert bool(back.isfinite().logical_not()[x.isfinite().logical_not()].all()), (kind, n)


@pytest.mark.usefixtures("by_torch")
@pytest.mark.parametrize("compressor", [Int8(), Int8(block=100), Int6(), Int5(), Int4(), Int4(block=32)], ids=repr)
def test_off_by_at_most_half_a_step(compressor: Any) -> None:
    levels = {"int8": 127, "int6": 32, "int5": 16, "int4": 8}[compressor.codec]
    x = gaussian(5000, 1e-3)
    for begin in range(0, 5000, compressor.block):
        block = x[begin : begin + compressor.block]
        largest = float(block.abs().max())
        # Scales but int8's are rounded to bfloat16: by half of 2^-8, which is most of a step at its ends.
        bound = torch.full_like(block, largest / levels * (0.5003 if levels == 127 else 0.5 + levels / 512))
        if levels != 127:  # the code of the greatest element has no opposite
            opposite = (block < 0) != (-block.min() == largest)
            bound += opposite * (block.abs() - largest * (1 - 1.5 / levels)).clamp(0)
        assert bool(((there_and_back(compressor, block) - block).abs() <= bound).all())


@pytest.mark.usefixtures("by_torch")
@pytest.mark.parametrize("compressor", [Int8(), Int4(), NormalFloat4()], ids=repr)
def test_a_decoded_tensor_is_coded_without_loss_and_scaling_by_two_changes_no_code(compressor: Any) -> None:
    x = gaussian(1000)
    once = there_and_back(compressor, x)
    if isinstance(compressor, Int8):
        torch.testing.assert_close(there_and_back(compressor, once), once, rtol=2e-7, atol=0)
    (code,), (larger,) = (compressor.compress(it, info_of(it)) for it in (x, x * 2.0**16))
    planes = compressor.code_bytes(1000) - (1000 if isinstance(compressor, Int8) else 500 + 12)
    assert torch.equal(code[planes:], larger[planes:])


@pytest.mark.usefixtures("by_torch")
def test_layout_is_scale_plane_then_code_plane() -> None:
    x = torch.zeros(300)
    x[0], x[1], x[256] = 127.0, -63.5, 2.0
    (code,) = Int8().compress(x, info_of(x))
    assert code[:8].view(torch.float32).tolist() == [1.0, torch.tensor(2.0).div(127).item()]
    assert code[8:].view(torch.int8)[[0, 1, 256]].tolist() == [127, -64, 127]
    y = torch.zeros(70)
    y[0], y[1], y[32], y[64], y[65] = 8.0, -8.0, -3.0, 16.0, 14.0  # of two as large the negative one makes the scale
    (code,) = Int4().compress(y, info_of(y))
    assert code[:4].view(torch.bfloat16).tolist() == [1.0, -2.0]
    assert code[4:].tolist()[:3] == [15 | 5 << 4, 0 | 8 << 4, 0x88]
    assert code[4 + 32 :].tolist() == [0 | 8 << 4, 1 | 8 << 4, *[0x88] * 4]
    y[0], y[1], y[32], y[64], y[65] = -32.0, 31.0, -3.0, 64.0, -62.0
    (code,) = Int6().compress(y, info_of(y))
    assert code[:4].view(torch.bfloat16).tolist() == [1.0, -2.0]
    assert code[4:].tolist()[:3] == [0 | (29 & 15) << 4, 63 & 15, 0]
    assert code[4 + 32 : 4 + 32 + 6].tolist() == [0, 63 & 15, *[0] * 4]
    # Elements 0, 16, 32, 48 of a block; the code of 0 is 32, whose upper bits are 2.
    assert code[4 + 32 + 6 :].tolist()[:3] == [0 | 2 << 2 | 29 >> 4 << 4 | 2 << 6, 63 >> 4 | 0b10101000, 0b10101010]
    assert code[4 + 32 + 6 + 16 :].tolist() == [0 | 0b10101000, 63 >> 4 | 0b10101000, *[0b10101010] * 4]
    zeros = Int5().compress(torch.zeros(64), info_of(torch.zeros(64)))[0]
    assert zeros[:2].tolist() == [0, 0]  # not the scale -0


@pytest.mark.usefixtures("by_torch")
def test_a_payload_of_another_length_is_refused_by_name() -> None:
    for compressor in CODEC_COMPRESSORS.values():
        info = Info(name="head.weight", shape=(10,), numel=10)
        for wrong in (torch.zeros(9, dtype=torch.uint8), torch.zeros(1000, dtype=torch.uint8)):
            with pytest.raises(InvalidArgumentError, match=r"10 elements of head\.weight"):
                compressor.decompress((wrong,), info)
        with pytest.raises(InvalidArgumentError, match="one flat tensor of uint8"):
            compressor.decompress((torch.zeros(10), torch.zeros(3)), info)


def test_the_core_serves_where_it_does_the_very_same() -> None:
    from ringdp.compression import EF21

    assert {codec: one.native for codec, one in CODEC_COMPRESSORS.items()} == {name: name for name in CODEC_SPECS}
    assert (Int8().native, Int8(error_feedback=True).native) == ("int8", "int8")
    assert Int6(block=32).native is None
    assert Int8(block=128).native is None
    assert Int4(error_feedback=EF21()).native is None
