"""sparse2: its bytes against a plain encoder, its place in an exchange, and error feedback that decays."""

from __future__ import annotations

import contextlib
import math
import struct
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ringdp.compression import ErrorFeedback, Info, Int4, Sparse2, get
from ringdp.compression.codecs import native
from ringdp.compression.description import describe
from ringdp.errors import InvalidArgumentError
from ringdp.testing import check_compressor, simulate
from tests.helpers import need

need("ringdp._C", "ringdp's extension, built with `make build`,")


def numbers(count: int, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(count, generator=draw) * torch.randn(count, generator=draw).exp()


def info(numel: int, **others: Any) -> Info:
    return Info(name="x", shape=(numel,), numel=numel, **others)


def bfloat16(x: float) -> int:
    return int(torch.tensor(x, dtype=torch.float64).float().bfloat16().view(torch.int16))


def encoded(x: list[float], kept: int) -> bytes:
    """By docs/reference/wire_format.md."""
    code = b""
    for at in range(0, len(x), 4096):
        chunk = x[at : at + 4096]
        largest = sorted(range(len(chunk)), key=lambda i: (-abs(chunk[i]), i))
        places = sorted(largest[:kept])
        mean = sum(abs(chunk[i]) for i in places) / len(places)
        groups = [[abs(chunk[i]) for i in places if (abs(chunk[i]) > mean) == high] for high in (False, True)]
        levels = [bfloat16(sum(it) / len(it)) if it else 0 for it in groups]
        bits = [len([i for i in places if i // 64 == block]) for block in range(-(-len(chunk) // 64))]
        ones = sum(1 << (sum(bits[:block]) + block + i) for block, n in enumerate(bits) for i in range(n))
        code += struct.pack("<2H", *levels) + ones.to_bytes(-(-(len(places) + len(bits)) // 8), "little")
        signs = [math.copysign(1, chunk[i]) < 0 for i in places]
        code += bytes(i % 64 + 64 * sign + 128 * (abs(chunk[i]) > mean) for i, sign in zip(places, signs, strict=True))
    return code


@settings(max_examples=60, deadline=None)
@given(
    st.one_of(st.integers(0, 300), st.sampled_from([4095, 4096, 4097, 9000])),
    st.integers(1, 4096),
    st.integers(0, 2**31),
    st.sampled_from([0.0, 1.0, 8.0]),
)
def test_its_bytes_are_those_of_a_plain_encoder(count: int, kept: int, seed: int, steps: float) -> None:
    x = numbers(count, seed)
    if steps:  # many are equal, or zero
        x = (x * steps).round() / steps
    sparse = Sparse2(kept / 4096)
    (code,) = sparse.compress(x, info(count))
    assert bytes(code.tolist()) == encoded(x.tolist(), kept)
    decoded = sparse.decompress((code,), info(count))
    assert int((decoded != 0).sum()) <= sum(min(kept, count - at) for at in range(0, count, 4096))
    assert torch.equal(decoded, torch.where(decoded != 0, decoded.abs().copysign(x), 0.0))


def test_the_default_is_a_195th_of_float32() -> None:
    (code,) = Sparse2().compress(numbers(4096 * 100), info(4096 * 100))
    assert 4096 * 100 * 4 / code.numel() > 195
    assert Sparse2().entries((code,)) == 6400


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=4))
def test_bytes_of_a_peer_are_refused_or_decode(changes: list[tuple[int, int]]) -> None:
    count = 4096 + 1000
    (code,) = Sparse2().compress(numbers(count), info(count))
    for at, value in changes:
        code[at % code.numel()] = value
    with contextlib.suppress(InvalidArgumentError):
        decoded = Sparse2().decompress((code,), info(count))
        assert int((decoded != 0).sum()) <= 128 or bool(decoded.isnan().all())


def test_a_code_of_another_length_is_refused() -> None:
    (code,) = Sparse2().compress(numbers(500), info(500))
    for wrong in (code[:-1], torch.cat([code, code[:1]])):
        with pytest.raises(InvalidArgumentError, match="which take"):
            Sparse2().decompress((wrong,), info(500))


@pytest.mark.slow
@pytest.mark.parametrize("chosen", ["sparse2", Sparse2(0.2), Sparse2(error_feedback=False)], ids=str)
def test_it_keeps_its_promises(chosen: Any) -> None:
    report = check_compressor(chosen)
    if chosen == "sparse2":
        assert report.bits < 1


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_is_not_finite_reaches_all_elements(value: float) -> None:
    x = numbers(9000)
    x[8000] = value
    assert bool(Sparse2().decompress(Sparse2().compress(x, info(9000)), info(9000)).isnan().all())


def test_the_mean_is_that_of_what_ranks_sent() -> None:
    sparse = Sparse2(error_feedback=False)
    gradients = [numbers(9000, rank) for rank in range(3)]
    sent = [sparse.decompress(sparse.compress(it, info(9000)), info(9000)) for it in gradients]
    assert torch.equal(simulate(sparse, gradients).mean, (sent[0] + sent[1] + sent[2]) / 3)


def test_codes_of_other_devices_are_the_same() -> None:
    """As on a GPU: the elements go to the host, and codes come back."""
    x, residual = numbers(5000), numbers(5000, 1)
    (code,), left = Sparse2().compress_with_residual(x, residual, info(5000, loss_scale=4.0))
    with mock.patch.object(native, "serves", return_value=False):
        (other,), its_left = Sparse2().compress_with_residual(x, residual, info(5000, loss_scale=4.0))
        assert torch.equal(Sparse2().decompress((code,), info(5000)), Sparse2().decompress((other,), info(5000)))
    assert torch.equal(code, other)
    assert torch.equal(left, its_left)
    assert torch.equal((x + 4 * residual - Sparse2().decompress((code,), info(5000))) / 4, left)


class Rounded:
    """Whole numbers, by torch operations: no pass of its own that adds the residual."""

    aggregate = "gather"

    def __init__(self, error_feedback: Any) -> None:
        self.error_feedback = error_feedback

    def compress(self, x: Tensor, info: Info) -> tuple[Tensor]:
        return (x.round(),)

    def decompress(self, payload: tuple[Tensor], info: Info) -> Tensor:
        return payload[0]


@pytest.mark.parametrize("scale", [1.0, 8.0])
@pytest.mark.parametrize("kind", [Sparse2, Rounded])
def test_error_feedback_decays(kind: Any, scale: float) -> None:
    gradients = [numbers(9000, rank) for rank in range(2)]
    made = simulate(kind(error_feedback=ErrorFeedback(0.5)), [[scale * it for it in gradients]] * 3, scale=scale)
    plain, residuals = kind(error_feedback=False), [torch.zeros(9000) for _ in gradients]
    for mean in made.means:
        wanted = [scale * x + scale * (0.5 * it) for x, it in zip(gradients, residuals, strict=True)]
        sent = [plain.decompress(plain.compress(it, info(9000)), info(9000)) for it in wanted]
        residuals = [(a - b) / scale for a, b in zip(wanted, sent, strict=True)]
        assert torch.equal(mean, (sent[0] + sent[1]) / 2)
    for states, residual in zip(made.states, residuals, strict=True):
        kept = states.residual("simulated")
        assert kept is not None
        assert torch.equal(kept, residual)


def test_a_decay_is_told_and_checked() -> None:
    assert repr(ErrorFeedback()) == "ErrorFeedback()"
    assert describe(Sparse2(error_feedback=ErrorFeedback(0.9))).endswith("error_feedback=ErrorFeedback(decay=0.9))")
    assert Int4(error_feedback=ErrorFeedback()).native == "int4"
    assert Int4(error_feedback=ErrorFeedback(0.9)).native is None
    for wrong in (0, 1.5, math.nan, "1"):
        with pytest.raises(InvalidArgumentError, match="decay must be"):
            ErrorFeedback(wrong)  # type: ignore[arg-type]
    for wrong in (0, 1.5, -1):
        with pytest.raises(InvalidArgumentError, match="density must be"):
            get("sparse2", density=wrong)
