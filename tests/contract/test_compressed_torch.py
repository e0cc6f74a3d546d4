"""The compressed all-reduce and the codecs as tensors: what a call gives, keeps and refuses."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import pytest

from ringdp.errors import InvalidArgumentError
from tests.contract.compressed_reference import all_reduce
from tests.helpers import need
from tests.registries import CODECS
from tests.train.harness import default_group, ring_is_built, run_ranks

torch: Any = need("torch")
import torch.distributed as dist  # noqa: E402

pytestmark = pytest.mark.skipif(not ring_is_built(), reason="ringdp is not built (make build)")

OFFSETS, COUNTS = [10, 70_100, 70_090], [70_001, 300, 0]  # with gaps, out of order, one empty
NUMEL = 70_500
OWNER_OFFSETS = [zlib.crc32(name) for name in (b"weight", b"bias", b"nothing")]


def drawn(rank: int, scale: float = 1.0) -> Any:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(rank)) * scale


def sections(x: Any) -> list[Any]:
    return [x[begin : begin + count].clone() for begin, count in zip(OFFSETS, COUNTS, strict=True)]


def reduced(codec: str) -> tuple[Any, list[Any], bool, int]:
    """The buffer, new residuals of the first section, and the report."""
    from ringdp import _C

    rank, world = dist.get_rank(), dist.get_world_size()
    buffer, residual = drawn(rank), sections(drawn(rank + 10, 0.01))
    new = [torch.zeros_like(x) for x in residual]
    residuals, news = [residual[0], None, None], [new[0], None, None]
    work, report = _C.all_reduce_compressed(
        default_group(), buffer, OFFSETS, COUNTS, OWNER_OFFSETS, residuals, news, codec, 4.0, world
    )
    del buffer, residual, residuals, news  # the work keeps them alive
    [result] = work.get_future().wait()
    return result.clone(), new, report.finite, report.own


def every_codec() -> list[Any]:
    return [reduced(codec) for codec in CODECS]


@pytest.mark.parametrize("world_size", [2, 4])
def test_sections_of_a_buffer(world_size: int) -> None:
    outcomes = run_ranks(every_codec, world_size=world_size, backend="ring")
    for i, codec in enumerate(CODECS):
        inputs = [[x.numpy() for x in sections(drawn(rank))] for rank in range(world_size)]
        residuals = [[x.numpy() for x in sections(drawn(rank + 10, 0.01))] for rank in range(world_size)]
        both = [
            all_reduce(
                inputs,
                OWNER_OFFSETS,
                codec,
                hosts=[0] * world_size,
                divisor=world_size,
                factor=4.0,
                residuals=residuals if feedback else None,
            )
            for feedback in (True, False)
        ]
        for rank in range(world_size):
            result, new, finite, own = outcomes[rank][i]
            assert (finite, own) == (True, -1)
            wanted = drawn(rank)
            for section, outcome in enumerate((both[0], both[1], both[1])):
                begin = OFFSETS[section]
                wanted[begin : begin + COUNTS[section]] = torch.from_numpy(outcome.means[section])
            assert torch.equal(result, wanted)
            assert np.array_equal(new[0].numpy(), both[0].residuals[rank][0])


def not_finite() -> tuple[bool, int]:
    from ringdp import _C

    buffer = drawn(dist.get_rank())
    if dist.get_rank() == 1:
        buffer[70_123] = float("inf")
    work, report = _C.all_reduce_compressed(
        default_group(), buffer, OFFSETS, COUNTS, OWNER_OFFSETS, [None] * 3, [None] * 3, "int8", 1.0, 2
    )
    work.wait()
    assert torch.isnan(buffer[70_123])
    return report.finite, report.own


def test_a_report_counts_elements_of_the_buffer() -> None:
    assert run_ranks(not_finite, world_size=2, backend="ring") == [(False, -1), (False, 70_123)]


def refusals() -> list[str]:
    from ringdp import _C

    x, none = torch.zeros(20), [None]
    calls: list[dict[str, Any]] = [
        {"buffer": x.double()},
        {"buffer": x[::2]},
        {"offsets": [15]},
        {"offsets": [-1]},
        {"counts": [-1]},
        {
            "offsets": [0, 9],
            "counts": [10, 10],
            "owner_offsets": [0, 0],
            "residuals": none * 2,
            "new_residuals": none * 2,
        },
        {"owner_offsets": []},
        {"residuals": [torch.zeros(10)]},
        {"residuals": [torch.zeros(9)], "new_residuals": [torch.zeros(10)]},
        {"residuals": [torch.zeros(10).double()], "new_residuals": [torch.zeros(10)]},
        {"codec": "int9"},
        {"loss_scale": 0.0},
        {"divisor": 0},
    ]
    said = []
    for change in calls:
        options: dict[str, Any] = {
            "buffer": x,
            "offsets": [0],
            "counts": [10],
            "owner_offsets": [0],
            "residuals": none,
            "new_residuals": none,
            "codec": "int8",
            "loss_scale": 1.0,
            "divisor": 1,
        }
        with pytest.raises(InvalidArgumentError) as caught:
            _C.all_reduce_compressed(default_group(), **(options | change))
        said.append(str(caught.value))
    dist.barrier()
    return said


def test_what_is_refused() -> None:
    [said] = run_ranks(refusals, world_size=1, backend="ring")
    words = ["Double", "not contiguous", "15 to 25", "-1", "-1", "two sections", "as many", "both be given"]
    words += ["9 and 10", "Double", "int9", "loss scale", "divisor"]
    for text, word in zip(said, words, strict=True):
        assert word in text


def on_gloo() -> str:
    from ringdp import _C

    x = torch.zeros(4)
    with pytest.raises(ValueError, match="not ring") as caught:
        _C.all_reduce_compressed(default_group(), x, [0], [4], [0], [None], [None], "int8", 1.0, 1)
    return str(caught.value)


def test_another_backend_is_named() -> None:
    run_ranks(on_gloo, world_size=1, backend="gloo")


@pytest.mark.parametrize("codec", CODECS)
def test_codecs_of_tensors_are_those_of_buffers(codec: str) -> None:
    from ringdp import _C
    from tests.core import _core

    for count in (0, 1, 63, 64, 257, 10_000):
        x = torch.randn(count)
        code = _C.codec_compress(codec, x)
        assert code.dtype == torch.uint8
        assert len(code) == _C.codec_bytes(codec, count) == _core.codec_bytes(codec, count)
        assert code.numpy().tobytes() == _core.codec_compress(codec, x.numpy())
        decoded = _C.codec_decompress(codec, code, count)
        assert decoded.numpy().tobytes() == _core.codec_decompress(codec, code.numpy(), count)
        for wrong in (torch.zeros(len(code) + 1, dtype=torch.uint8), torch.zeros(len(code)).double()):
            with pytest.raises(InvalidArgumentError):
                _C.codec_decompress(codec, wrong, count)
    with pytest.raises(InvalidArgumentError, match="-1 elements"):
        _C.codec_decompress(codec, torch.zeros(0, dtype=torch.uint8), -1)
    with pytest.raises(InvalidArgumentError, match="there is no codec 'int9'"):
        _C.codec_compress("int9", torch.zeros(1))
    with pytest.raises(InvalidArgumentError, match="contiguous"):
        _C.codec_compress(codec, torch.zeros(4, 4).t())
