"""ringdp/metrics.py: the mean is that of all samples together; what cannot be averaged is refused by every rank."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ringdp
from ringdp.errors import InvalidArgumentError, InvalidStateError, MismatchError
from ringdp.metrics import mean
from tests.train.harness import backends, run_ranks

RANKS = 3
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)


def samples() -> list[Tensor]:
    """What each rank has seen: 1, 5 and 0 samples of shape [2, 3]."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(count, 2, 3, generator=generator, dtype=torch.float64) for count in (1, 5, 0)]


def means_of(dtype: torch.dtype) -> Tensor:
    mine = samples()[dist.get_rank()]
    return mean(mine.mean(dim=0).to(dtype), len(mine))  # NaN on rank 2, with weight 0


@pytest.mark.parametrize("backend", backends())
def test_it_is_the_mean_of_all_samples_with_the_same_bits_everywhere(backend: str) -> None:
    together = torch.cat(samples())
    for dtype, tolerance in ((torch.float64, 1e-15), (torch.float32, 1e-7), (torch.bfloat16, 1e-2)):
        results = run_ranks(means_of, dtype, world_size=RANKS, backend=backend)
        assert all(result.dtype == dtype and result.equal(results[0]) for result in results)
        torch.testing.assert_close(results[0].double(), together.mean(dim=0), rtol=tolerance, atol=tolerance)


def various() -> dict[str, Any]:
    rank = dist.get_rank()
    counts = torch.tensor([rank, 10**9])
    kept = torch.full((2,), float(rank), requires_grad=True)
    strided = torch.arange(6.0).reshape(2, 3).t()
    small = dist.new_group([0, 1])
    found: dict[str, Any] = {
        "number": mean(float(rank)),
        "numpy": mean(np.float32(rank), weight=np.int64(2)),  # type: ignore[call-overload]
        "integers": mean(counts),
        "bool": mean(torch.tensor([rank == 0])),
        "tensor weight": mean(rank, torch.tensor([rank])),
        "gradient": mean(kept),
        "strided": mean(strided),
        "empty": mean(torch.empty(0, 4)),
        # float32 would lose the ones beside 2**24
        "exact": mean(torch.tensor(2.0**24 if rank == 0 else 1.0, dtype=torch.float32).double() * RANKS),
        "fractions": mean(rank, 0.1),
        "kept": kept,
    }
    if rank < 2:
        found["group"] = mean(rank + 1.0, group=small)
    else:
        with pytest.raises(InvalidStateError, match="not in the group"):
            mean(rank + 1.0, group=small)
    return {name: value.detach() if isinstance(value, Tensor) else value for name, value in found.items()} | {
        "has gradient": found["gradient"].requires_grad
    }


@pytest.mark.parametrize("backend", backends())
def test_what_goes_in_and_what_comes_out(backend: str) -> None:
    results = run_ranks(various, world_size=RANKS, backend=backend)
    for rank, found in enumerate(results):
        assert found["number"] == 1.0
        assert type(found["number"]) is float
        assert found["numpy"] == 1.0
        assert found["integers"].tolist() == [1.0, 1e9]
        assert found["integers"].dtype == torch.float32
        assert found["bool"].item() == pytest.approx(1 / 3)
        assert found["tensor weight"] == pytest.approx((1 * 1 + 2 * 2) / 3)
        assert found["gradient"].tolist() == [1.0, 1.0]
        assert not found["has gradient"]
        assert found["kept"].tolist() == [rank, rank], "x is not changed"
        assert found["strided"].tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
        assert found["empty"].shape == (0, 4)
        assert found["exact"].item() == 2.0**24 + 2
        assert found["fractions"] == pytest.approx(1.0, abs=1e-15)
        assert rank == 2 or found["group"] == 1.5


def refusals() -> list[tuple[str, str, int | None]]:
    rank = dist.get_rank()
    guilty = rank == 1
    calls = [
        lambda: mean(1.0, 0.0),
        lambda: mean(torch.ones(2, 3) if guilty else torch.ones(3, 2)),
        lambda: mean(1.0, -1.0 if guilty else 1.0),
        lambda: mean(1.0, math.nan if guilty else 1.0),
        lambda: mean(1.0, torch.ones(2) if guilty else 1.0),
        lambda: mean([1.0] if guilty else 1.0),  # type: ignore[arg-type]
        lambda: mean(torch.ones(1, dtype=torch.complex64) if guilty else torch.ones(1)),
        lambda: mean(torch.ones(2).to_sparse() if guilty else torch.ones(2)),
        lambda: mean(1.0, "many" if guilty else 1.0),  # type: ignore[arg-type]
    ]
    told: list[tuple[str, str, int | None]] = []
    for call in calls:
        try:
            call()
            told.append(("nothing", "", None))
        except ringdp.RingError as error:
            told.append((type(error).__name__, str(error), error.peer))
    assert mean(float(rank)) == 1.0, "the group goes on"
    return told


@pytest.mark.parametrize("backend", backends())
def test_what_cannot_be_averaged_is_refused_on_every_rank_and_nothing_hangs(backend: str) -> None:
    words = [
        "weights of all ranks add up to 0",
        r"shape \[3, 2\] on rank 0 and \[2, 3\] on rank 1",
        "at least 0, not -1.0",
        "at least 0, not nan",
        r"weight must be one number, not a tensor of shape \[2\]",
        "x must be a number or a tensor, not list",
        "dense tensor of real numbers, not torch.complex64",
        "dense tensor of real numbers, not torch.float32, torch.sparse_coo",
        "weight must be a number, not str",
    ]
    for rank, told in enumerate(run_ranks(refusals, world_size=RANKS, backend=backend)):
        for number, ((error, message, peer), pattern) in enumerate(zip(told, words, strict=True)):
            assert re.search(pattern, message), (rank, message)
            if number == 0:
                assert error == "InvalidArgumentError"
            elif number == 1:
                assert (error, peer) == ("MismatchError", 1)
            elif rank == 1:
                assert error == "InvalidArgumentError"
            else:
                assert (error, peer) == ("MismatchError", 1)
                assert "rank 1" in message


def other_operation() -> str:
    try:
        if dist.get_rank() == 1:
            dist.barrier()
        else:
            mean(1.0)
    except MismatchError as error:
        return str(error)
    return ""


@pytest.mark.skipif("ring" not in backends(), reason="only ring compares operations")
def test_its_operations_have_a_name() -> None:
    told = run_ranks(other_operation, world_size=2, backend="ring")
    assert any("ringdp.metrics.mean" in message for message in told), told


def test_one_process_needs_no_group() -> None:
    assert not dist.is_initialized()
    assert mean(0.25, 7) == 0.25
    x = torch.tensor([[1.0, 2.0]])
    assert mean(x).equal(x)
    assert mean(x) is not x
    assert not dist.is_initialized()
    with pytest.raises(InvalidArgumentError, match="add up to 0"):
        mean(1.0, 0)
    with pytest.raises(InvalidArgumentError, match="not list"):
        mean([1.0])  # type: ignore[call-overload]


def test_ranks_that_have_not_joined_are_not_averaged_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in zip(LAUNCHER, ("2", "4", "2", "127.0.0.1", "29500"), strict=True):
        monkeypatch.setenv(name, value)
    with pytest.raises(InvalidStateError, match=r"rank 2 of 4 .* call ringdp.init\(\) first"):
        mean(1.0)


def test_it_is_loaded_when_it_is_used() -> None:
    code = "import ringdp, sys; assert 'ringdp.metrics' not in sys.modules; print(ringdp.metrics.mean(3.0))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "3.0\n", done.stderr
