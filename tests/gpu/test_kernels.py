"""The CUDA kernels give the bits of the CPU's codecs, at full size and at any alignment."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from ringdp import _C  # noqa: E402
from tests.core import _core  # noqa: E402
from tests.registries import CODECS  # noqa: E402

pytestmark = pytest.mark.gpu

# On the device of tests/fake_cuda one thread runs what thousands run elsewhere.
FAKE = "FAKE_CUDA" in os.environ
COUNTS = (1, 255, 4097, 30_011) if FAKE else (1, 255, 4097, 1_000_003, 25_000_000)
MILLIONS = 30_011 if FAKE else 3_000_001
FACTOR = 8.0


@cache
def mixture(count: int, seed: int, *, finite: bool = True) -> Any:
    """float32 [count] on the CPU: stretches of 64 elements of any magnitude, zeros, and few infinities and NaNs."""
    random = torch.Generator().manual_seed(seed)
    stretches = (count + 63) // 64
    exponents = torch.randint(-140, 126, (stretches, 1), generator=random).double()
    exponents[torch.rand(stretches, generator=random) < 0.5] = -8.0
    x = (torch.randn(stretches, 64, generator=random).clamp(-3.0, 3.0).double() * 2.0**exponents).float()
    x[torch.rand(stretches, generator=random) < 0.1] = 0.0
    x = x.flatten()[:count].contiguous()
    if not finite:
        places = torch.randint(count, (1 + count // 5000,), generator=random)
        x[places] = torch.tensor([torch.inf, -torch.inf, torch.nan])[places % 3]
    return x


def at(offset: int, values: Any) -> Any:
    """`values` on the device, `offset` elements behind an aligned address."""
    room = torch.empty(offset + values.numel(), dtype=values.dtype, device="cuda")
    room[offset:] = values.cuda()
    return room[offset:]


def code_like(codec: str, count: int, offset: int = 0) -> Any:
    return at(offset, torch.full((_C.codec_bytes(codec, count),), 0xA5, dtype=torch.uint8))


def fed_back(codec: str, x: Any, residual: Any, factor: float) -> tuple[Any, Any]:
    """The CPU's code of ``x + factor * residual``, and what that leaves out."""
    code, left = _core.codec_compress_with_feedback(codec, x.numpy(), residual.numpy(), factor)
    return torch.frombuffer(bytearray(code), dtype=torch.uint8), torch.frombuffer(bytearray(left), dtype=torch.float32)


def same_bits(ours: Any, wanted: Any) -> bool:
    return torch.equal(ours.cpu().view(torch.uint8), wanted.view(torch.uint8))


def flag(dtype: Any = torch.int32) -> Any:
    return torch.zeros(1, dtype=dtype, device="cuda")


@pytest.mark.parametrize("finite", [True, False])
@pytest.mark.parametrize("codec", CODECS)
def test_codes_are_those_of_the_cpu(codec: str, finite: bool) -> None:
    for count in COUNTS:
        for offset in (0, 1, 2) if count < 10**6 else (0,):
            x = mixture(count, count, finite=finite)
            wanted = _C.codec_compress(codec, x)
            code, seen, out = code_like(codec, count, offset), flag(), at(offset, torch.empty(count))
            _C.cuda_encode(codec, [at(offset, x)], [code], non_finite=seen)
            assert same_bits(code, wanted), (count, offset)
            assert bool(seen) or finite
            _C.cuda_decode_set(codec, [out], [code])
            assert same_bits(out, _C.codec_decompress(codec, wanted, count)), (count, offset)


@pytest.mark.parametrize("finite", [True, False])
@pytest.mark.parametrize("codec", CODECS)
def test_residuals_are_those_of_the_cpu(codec: str, finite: bool) -> None:
    counts = (*COUNTS[:-1], MILLIONS)
    xs = [mixture(count, count, finite=finite) for count in counts]
    old = [mixture(count, count + 1) for count in counts]
    both = [[at(i % 3, torch.zeros(count)), at(i % 3, torch.zeros(count))] for i, count in enumerate(counts)]
    which = [torch.tensor([i % 2], dtype=torch.int32, device="cuda") for i in range(len(counts))]
    for i, residual in enumerate(old):
        both[i][i % 2].copy_(residual)
    codes = [code_like(codec, count) for count in counts]
    feedback = [(*pair, turn) for pair, turn in zip(both, which, strict=True)]
    _C.cuda_encode(codec, [x.cuda() for x in xs], codes, feedback, FACTOR)
    for i, x in enumerate(xs):
        code, left = fed_back(codec, x, old[i], FACTOR)
        assert same_bits(codes[i], code), counts[i]
        assert same_bits(both[i][1 - i % 2], left), counts[i]
        assert same_bits(both[i][i % 2], old[i]), counts[i]
    _C.cuda_commit(which)
    assert [int(it) for it in which] == [1 - i % 2 for i in range(len(counts))]


@pytest.mark.parametrize("own", [0, 1, 3])
@pytest.mark.parametrize("codec", CODECS)
def test_a_fold_is_a_sum_in_order_of_rank(codec: str, own: int) -> None:
    ranks = 4
    for count in (65, 20_001 if FAKE else 100_001, MILLIONS):
        parts = [mixture(count, 10 * count + rank) for rank in range(ranks)]
        stride = (_C.codec_bytes(codec, count) + 15) // 16 * 16
        sources = torch.zeros(ranks, stride, dtype=torch.uint8)
        total = torch.zeros(())
        for rank, part in enumerate(parts):
            code = _C.codec_compress(codec, part)
            if rank != own:
                sources[rank, : code.numel()] = code
            term = part if rank == own else _C.codec_decompress(codec, code, count)
            total = term if rank == 0 else total + term
        mean = torch.where(total.isnan(), torch.nan, total / ranks)
        residual, code = mixture(count, count + 9), code_like(codec, count)
        wanted, left = fed_back(codec, mean, residual, 1.0)
        both = [residual.cuda(), torch.zeros(count, device="cuda")]
        _C.cuda_reduce_codes(codec, [parts[own].cuda()], [sources.cuda()], [code], own, float(ranks), [(*both, flag())])
        assert same_bits(code, wanted), count
        assert same_bits(both[1], left), count


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_what_is_not_finite_is_found(dtype: Any) -> None:
    for count in (1, 4097, MILLIONS):
        found, x = flag(), at(3, torch.randn(count).to(dtype))
        _C.cuda_find_non_finite(x, found)
        assert int(found) == 0
        x[count // 2] = -torch.inf
        _C.cuda_find_non_finite(x, found)
        assert int(found) == 1


def test_select_finds_in_ascending_order_all_that_is_large_enough() -> None:
    for count in (1, 8193, COUNTS[-1]):
        x = torch.randn(count, device="cuda")
        for threshold in (0.0, 2.576, 10.0):
            wanted = (x.abs() >= threshold).nonzero().flatten()
            for capacity in (wanted.numel(), wanted.numel() // 2):
                index, value, selected = _C.cuda_select(x, threshold, capacity)
                assert int(selected) == wanted.numel()
                assert torch.equal(index.long(), wanted[:capacity])
                assert torch.equal(value, x[wanted[:capacity]])


def test_kernels_run_on_the_stream_that_is_current() -> None:
    x, stream = torch.randn(MILLIONS), torch.cuda.Stream()
    code = code_like("int8", x.numel())
    there = x.pin_memory()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        late = torch.empty(x.numel(), device="cuda")
        torch.cuda._sleep(10**8)
        late.copy_(there, non_blocking=True)
        _C.cuda_encode("int8", [late], [code])
    stream.synchronize()
    assert same_bits(code, _C.codec_compress("int8", x))


REFUSED: list[tuple[str, Callable[[], None], str]] = [
    ("device", lambda: _C.cuda_encode("int8", [torch.ones(1)], [code_like("int8", 1)]), "x is Float on cpu"),
    ("bytes", lambda: _C.cuda_encode("int8", [torch.ones(2).cuda()], [code_like("int8", 1)]), "5 elements, not 6"),
    ("lists", lambda: _C.cuda_decode_set("int8", [torch.ones(1).cuda()], []), "lists of 1 and of 0"),
    ("codec", lambda: _C.cuda_encode("int3", [], []), "no codec 'int3'"),
]


@pytest.mark.parametrize(("call", "words"), [it[1:] for it in REFUSED], ids=[it[0] for it in REFUSED])
def test_wrong_arguments_are_refused_in_words(call: Callable[[], None], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()
