"""exact_bucket_bytes of RINGDP_TUNING: buckets up to a size are exact where a codec was chosen, and nothing is lost."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ringdp.ddp.wrapper import RingDP
from tests.train.harness import on_ranks, run_ranks

SMALL, LARGE = 64 * 64, 256 * 256  # elements of the two weights, each in a bucket of its own
CAP_MB = [4 * SMALL / 2**20, 4 * LARGE / 2**20]


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.small, self.large = nn.Linear(64, 64, bias=False), nn.Linear(256, 256, bias=False)

    def forward(self, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        small = self.small(torch.randn(4, 64, generator=generator))
        large = self.large(torch.randn(4, 256, generator=generator))
        return small.square().mean() + large.square().mean()


def tuning(folder: Path, limit: int) -> str:
    path = folder / f"{limit}-{os.environ.get('RANK')}.json"  # of each rank its own: they write at once
    path.write_text(json.dumps({"ringdp_tuning": 1, "layouts": {"one_host": {"exact_bucket_bytes": limit}}}))
    return str(path)


def ring(path: str | None) -> dist.ProcessGroup:
    with mock.patch.dict(os.environ, {} if path is None else {"RINGDP_TUNING": path}):
        return dist.new_group(backend="ring")


def wrap(path: str | None, compression: Any, **arguments: Any) -> RingDP:
    return RingDP(Both(), process_group=ring(path), compression=compression, bucket_cap_mb=CAP_MB, **arguments)


def gradients(model: RingDP, step: int, scale: float = 1.0) -> dict[str, Tensor]:
    model.zero_grad()
    (scale * model(step)).backward()
    return {name.split(".")[-2]: it.grad.clone() for name, it in model.named_parameters() if it.grad is not None}


def of_each_kind(path: str, codec: str) -> list[dict[str, Tensor]]:
    """The third step's gradients: exact, as codes, and as codes with the limit."""
    return [
        [gradients(model, step) for step in range(3)][-1]
        for model in (wrap(None, None), wrap(None, codec), wrap(path, codec))
    ]


@pytest.mark.parametrize("codec", ["int8", "int4", "fp16"])
def test_a_small_bucket_is_exact_and_a_large_one_is_not(tmp_path: Path, codec: str) -> None:
    for exact, coded, both in run_ranks(of_each_kind, tuning(tmp_path, 4 * SMALL), codec):
        assert not torch.equal(exact["small"], coded["small"])
        assert torch.equal(both["small"], exact["small"])
        assert torch.equal(both["large"], coded["large"])


@on_ranks(backend="gloo")
def test_statistics_count_it_as_exact(tmp_path: Path) -> None:
    model = wrap(tuning(tmp_path, 4 * SMALL), "int8")
    for step in range(3):
        gradients(model, step)
    found = model.compression_stats()
    assert found.bytes_before == 4 * LARGE
    kinds = {(row["bytes_before"], row["reduction"] >= 0) for row in found.buckets}
    assert kinds == {(4 * SMALL, False), (4 * LARGE, True)}
    assert all(row["bytes_after"] == row["bytes_before"] for row in found.buckets if row["reduction"] < 0)


def owed(state: Any, name: str = "") -> set[str]:
    """The weights of which an exact state has a residual that is not zero."""
    if not isinstance(state, dict):
        return set()
    mine = {name.split(".")[-2]} if state.get("residual", torch.zeros(1)).any() else set[str]()
    return mine.union(*(owed(value, str(key)) for key, value in state.items()))


def paid(path: str, overflow: bool) -> list[dict[str, Tensor]]:
    """An unlimited run's residuals, loaded where small buckets are exact. Gradients of one step: exact, and the first
    and second after loading."""
    model = wrap(None, "int4")
    for step in range(3):
        gradients(model, step)
    state = model.compression_state_dict()
    limited = wrap(path, "int4")
    limited.load_compression_state_dict(state)
    if overflow:
        gradients(limited, 7, scale=float("inf"))
    assert owed(state) == owed(limited.compression_state_dict()) == {"small", "large"}
    first = gradients(limited, 8)
    assert owed(limited.compression_state_dict()) == {"large"}
    return [gradients(wrap(None, None), 8), first, gradients(limited, 8)]


@pytest.mark.parametrize("overflow", [False, True], ids=["", "after_an_overflow"])
def test_what_codes_left_out_is_sent_once_and_gone(tmp_path: Path, overflow: bool) -> None:
    for exact, first, second in run_ranks(paid, tuning(tmp_path, 4 * SMALL), overflow):
        assert not torch.equal(first["small"], exact["small"])
        assert torch.equal(second["small"], exact["small"])


def total(path: str | None) -> Tensor:
    """The sum of six means of the small weight, of which the first three are codes."""
    model = wrap(None, "int4")
    means = [gradients(model, step)["small"] for step in range(3)]
    state = model.compression_state_dict()
    second = wrap(path, "int4" if path else None)
    if path:
        second.load_compression_state_dict(state)
    means += [gradients(second, step)["small"] for step in range(3, 6)]
    return torch.stack(means).double().sum(0)


def exact_total() -> Tensor:
    model = wrap(None, None)
    return torch.stack([gradients(model, step)["small"] for step in range(6)]).double().sum(0)


@on_ranks(3, backend="gloo")
def test_nothing_is_lost(tmp_path: Path) -> None:
    """Codes, then exact with the residual, have the sum of exact steps; without the residual they have not."""
    exact, limited, without = exact_total(), total(tuning(tmp_path, 4 * SMALL)), total(None)
    torch.testing.assert_close(limited, exact, rtol=1e-4, atol=1e-6)
    assert (without - exact).abs().max() > 1e-3 * exact.abs().max()


@on_ranks(backend="gloo")
def test_without_the_setting_a_codec_has_buckets_of_any_size() -> None:
    model, exact = wrap(None, "int8"), wrap(None, None)
    assert any(not torch.equal(gradients(model, step)["small"], gradients(exact, step)["small"]) for step in range(3))


def test_ranks_with_other_limits_refuse_each_other(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="exact_bucket_bytes"):
        run_ranks(other_limits, [tuning(tmp_path, 4096), tuning(tmp_path, 8192)])


def other_limits(paths: list[str]) -> None:
    group = ring(paths[dist.get_rank()])
    dist.all_reduce(torch.zeros(1), group=group)
