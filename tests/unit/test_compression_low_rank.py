"""Products with thin matrices: the core and torch agree, to the bit where all ranks must; PowerSGD writes in place."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from ringdp.compression import PowerSGD, TopK
from ringdp.compression.codecs import native
from ringdp.compression.exchange import BucketSlice, Coder, Layout, Section, States
from ringdp.compression.exchange.local import there_and_back
from ringdp.compression.methods import low_rank
from ringdp.testing import check_compressor, simulate
from ringdp.testing.simulation import together

needs_core = pytest.mark.skipif(not native.serves(torch.zeros(1)), reason="ringdp is not built (make build)")
SHAPES = [(2, 3, 1), (5, 1, 1), (16, 16, 4), (33, 17, 2), (64, 130, 3), (7, 257, 5), (100, 48, 9), (300, 1000, 4)]
CORE = pytest.mark.parametrize("core", [pytest.param(True, marks=needs_core), False])


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def serving(core: bool) -> Any:
    return mock.patch.object(native, "serves", native.serves if core else lambda x: False)


def residual_of(states: States, name: str) -> Tensor:
    residual = states.residual(name)
    assert residual is not None
    return residual


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int32)


def close(got: Tensor, a: Tensor, b: Tensor) -> bool:
    """To a @ b, but for what float32 rounds of its terms."""
    return bool(((got - a.double() @ b.double()).abs() <= 1e-6 * (a.double().abs() @ b.double().abs())).all())


@CORE
@pytest.mark.parametrize(("rows", "columns", "rank"), SHAPES)
def test_products_are_what_matmul_says(rows: int, columns: int, rank: int, core: bool) -> None:
    x, residual = gaussian(rows * columns), gaussian(rows * columns, seed=1)
    right = gaussian(rank, columns, seed=2)
    for given, factor in ((residual, 8.0), (None, 8.0)):
        left, v = torch.empty(rank, rows), torch.empty(rows * columns)
        back = torch.empty(rank, columns)
        with serving(core):
            low_rank.project([left], [v], [x], [given], factor, [right])
            low_rank.project_back([back], [v], [left])
        wanted = x if given is None else x + factor * given
        assert torch.equal(v, wanted)
        assert close(left, right, wanted.view(rows, columns).T)
        assert close(back, left, wanted.view(rows, columns))
        matrix, kept = torch.empty(rows * columns), v.clone()
        with serving(core):
            low_rank.expand([matrix], [kept], factor, [left], [back])
        assert close(matrix.view(rows, columns), left.T, back)
        assert torch.equal(kept, (wanted - matrix) * (1 / factor))


@needs_core
@pytest.mark.parametrize(("rows", "columns", "rank"), SHAPES)
def test_what_all_ranks_compute_has_the_same_bits_by_torch(rows: int, columns: int, rank: int) -> None:
    left, right, v = gaussian(rank, rows), gaussian(rank, columns, seed=1), gaussian(rows * columns, seed=2)
    if rank > 1:
        left[1] = left[0] * 2
    if rank > 2:
        left[2] = left[0] + 1e-5 * gaussian(rows, seed=3)
    if rank > 3:
        right[2] = 0
        right[3, 0] = torch.inf
    results = []
    for core in (True, False):
        ends, kept, matrix = [left.clone(), right.clone()], v.clone(), torch.empty_like(v)
        with serving(core):
            low_rank.orthonormalise(ends)
            low_rank.expand([matrix], [kept], 3.0, [left], [right])
        results.append([*ends, kept, matrix])
    for ours, theirs in zip(*results, strict=True):
        numbers = ~ours.isnan()
        assert torch.equal(ours.isnan(), theirs.isnan())
        assert torch.equal(bits(ours)[numbers], bits(theirs)[numbers])


@CORE
def test_vectors_become_orthonormal_also_where_they_nearly_are_one(core: bool) -> None:
    x = gaussian(2, 4, 100)
    x[0, 1] = x[0, 0] + 1e-4 * gaussian(100, seed=1)
    x[1, 2] = 3 * x[1, 0]
    with serving(core):
        low_rank.orthonormalise(list(x))
    wanted = torch.eye(4, dtype=torch.float64).repeat(2, 1, 1)
    wanted[1, 2, 2] = 0
    torch.testing.assert_close(x.double() @ x.double().mT, wanted, atol=1e-6, rtol=0)


@CORE
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_is_not_hidden(value: float, core: bool) -> None:
    for place in (0, 1, 2999):
        x = gaussian(60, 50)
        x.view(-1)[place] = value
        with serving(core):
            mean = simulate(PowerSGD(2), [gaussian(60, 50, seed=1), x]).mean
        assert bool(mean.isnan().all())


@pytest.mark.slow
@CORE
def test_it_keeps_its_promises(core: bool) -> None:
    with serving(core):
        check_compressor(PowerSGD(2))
        check_compressor(PowerSGD(2, error_feedback=False))


@needs_core
@pytest.mark.parametrize("rows", [7, 40])  # 7: exact
def test_residual_and_mean_are_the_gradient(rows: int) -> None:
    """What arrived and what is owed are what was given, whoever computes: the law of error feedback."""
    steps = [[gaussian(rows, 30, seed=10 * step + rank) for rank in range(3)] for step in range(3)]
    for core in (True, False):
        with serving(core):
            after = simulate(PowerSGD(6), steps, scale=4.0)
        owed = torch.stack([residual_of(state, "simulated") for state in after.states]).mean(0)
        sent = torch.stack(after.means).sum(0)
        wanted = torch.stack([torch.stack(step).mean(0) for step in steps]).sum(0)
        torch.testing.assert_close(sent.view(-1) + 4.0 * owed, wanted.view(-1), atol=1e-4, rtol=1e-4)


def test_measuring_changes_no_input() -> None:
    x = gaussian(40, 30)
    before = x.clone()
    compressor: Any = PowerSGD(2)
    there_and_back(Section("x", (40, 30), 0, 1200, compressor, 1), x.view(-1))
    assert torch.equal(x, before)


@needs_core
@pytest.mark.parametrize("compressor", [PowerSGD(2), TopK(0.1)], ids=str)
def test_two_residuals_take_turns_and_an_overflow_keeps_the_one_that_counts(compressor: Any) -> None:
    states = [States(), States()]
    layouts = [Layout([BucketSlice("w", (40, 30), 0, 1200, compressor)], 2, torch.device("cpu")) for _ in range(2)]
    seen = []
    for step, finite in enumerate([True, True, False, True, True]):
        buckets = [gaussian(1200, seed=10 * step + rank) for rank in range(2)]
        before = None if step == 0 else residual_of(states[0], "w").clone()
        coders = [Coder(states[rank], rank, 2, step) for rank in range(2)]
        together([layouts[rank].average(buckets[rank], coders[rank], 2) for rank in range(2)])
        for state in states:
            state.commit(finite)
        residual = residual_of(states[0], "w")
        assert before is None or torch.equal(residual, before) == (not finite)
        seen.append(residual.data_ptr())
    assert seen[1] == seen[2] == seen[4] != seen[0] == seen[3]
