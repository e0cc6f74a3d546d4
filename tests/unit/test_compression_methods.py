"""What the methods of the literature promise, beyond what every compressor does."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from ringdp.compression import (
    EF21,
    QSGD,
    Info,
    Int4,
    Int5,
    Int6,
    NormalFloat4,
    PowerSGD,
    RandomK,
    Sign,
    SignSGD,
    TernGrad,
    get,
)
from ringdp.compression.codecs import blocks
from ringdp.compression.codecs.bits import pack, packed_bytes, unpack
from ringdp.compression.exchange import Section
from ringdp.compression.exchange.local import there_and_back
from ringdp.errors import InvalidArgumentError, RingError
from ringdp.testing import simulate
from ringdp.testing.simulation import Simulation


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def nmse(got: Tensor, wanted: Tensor) -> float:
    return float((got - wanted).square().sum() / wanted.square().sum())


def once(compressor: Any, x: Tensor, step: int = 0) -> Tensor:
    section = Section("x", tuple(x.shape), 0, x.numel(), compressor, 1)
    return there_and_back(section, x, step=step)[0]


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 1000])
def test_packed_numbers_come_back(bits: int, count: int) -> None:
    numbers = torch.randint(0, 2**bits, (count,), dtype=torch.uint8)
    packed = pack(numbers, bits)
    assert packed.numel() == packed_bytes(count, bits)
    assert torch.equal(unpack(packed, bits, count), numbers)


@pytest.mark.parametrize(("name", "bound"), [("int6", 5.7e-4), ("int5", 2.3e-3), ("nf4", 0.82e-2), ("int4", 0.93e-2)])
def test_the_error_of_a_gaussian_is_what_the_width_allows(name: str, bound: float) -> None:
    error = nmse(once(get(name), gaussian(64 * 1000 + 17)), gaussian(64 * 1000 + 17))
    assert 0.85 * bound < error < bound


@pytest.mark.parametrize("compressor", [Int5(), Int6(), Int6(block=24), NormalFloat4(), Int4()], ids=repr)
def test_codes_are_the_nearest_of_their_block(compressor: Any) -> None:
    for count in (1, 7, 63, 64, 65, 1000):
        for size in (1.0, 1e-36, 1e36):
            x = gaussian(count, seed=count) * size
            decoded = once(compressor, x)
            for block, exact in zip(decoded.split(compressor.block), x.split(compressor.block), strict=True):
                largest, error = float(exact.abs().max()), (block - exact).abs()
                step = {4: 1 / 8, 5: 1 / 16, 6: 1 / 32}[getattr(compressor, "bits", 4)]
                if isinstance(compressor, NormalFloat4):
                    step = (127 - 92) / 127
                # Half a step, and what bfloat16 rounds off the scale at the ends.
                bound = torch.full_like(exact, largest * (step / 2 + 2**-8))
                if not isinstance(compressor, NormalFloat4):  # there is one code less opposite the greatest element
                    bound = bound.maximum(exact * (1 if -exact.min() == largest else -1) - largest * (1 - step - 2**-8))
                assert bool((error <= bound).all())


def test_a_sign_keeps_the_mean_magnitude_of_its_block() -> None:
    x = gaussian(1000)
    x[::500] = 0.0  # sent as what is not negative
    decoded = once(Sign(), x)
    assert torch.equal(decoded >= 0, x >= 0)
    for block, exact in zip(decoded.split(256), x.split(256), strict=True):
        torch.testing.assert_close(block.abs(), exact.abs().mean().expand_as(block))
    assert nmse(decoded, x) == pytest.approx(1 - 2 / torch.pi, abs=0.02)  # of a Gaussian


@pytest.mark.parametrize("compressor", [QSGD(), QSGD(bits=2, block=64), TernGrad(clip=None, block=64)], ids=repr)
def test_rounding_at_random_is_right_on_average(compressor: Any) -> None:
    x = gaussian(4096) * torch.logspace(-1, 1, 4096)
    draws = 100
    decoded = torch.stack([once(compressor, x, step) for step in range(draws)])
    one = sum(nmse(it, x) for it in decoded) / draws
    assert nmse(decoded.mean(0), x) == pytest.approx(one / draws, rel=0.2)


def test_qsgd_adds_no_more_variance_than_its_bound() -> None:
    for bits in (4, 8):
        x = gaussian(512)
        levels = 2 ** (bits - 1) - 1
        added = sum(nmse(once(QSGD(bits=bits), x, step), x) for step in range(50)) / 50
        assert added < min(512 / levels**2, 512**0.5 / levels)


@pytest.mark.parametrize(
    "compressor",
    [
        QSGD(error_feedback=True),
        QSGD(bits=2, error_feedback=EF21()),
        QSGD(bits=8, block=10_000, error_feedback=True),
        TernGrad(error_feedback=True),
        TernGrad(clip=None, error_feedback=True),
    ],
    ids=str,
)
def test_with_error_feedback_no_draw_leaves_more_than_there_was(compressor: Any) -> None:
    x = gaussian(5000) * torch.logspace(-1, 1, 5000)
    variance = min(compressor.block / compressor.levels**2, compressor.block**0.5 / compressor.levels)
    errors = []
    for step in range(20):
        decoded = once(compressor, x, step)
        for block, exact in zip(decoded.split(compressor.block), x.split(compressor.block), strict=True):
            errors.append(nmse(block, exact))
    assert max(errors) <= 1
    assert sum(errors) / len(errors) < 1 - 1 / (1 + variance)


def test_terngrad_has_three_values_and_cuts_at_its_clip() -> None:
    x = gaussian(612)
    x[7] = 100.0
    for block, exact in zip(once(TernGrad(), x).split(512), x.split(512), strict=True):
        assert len(block.unique()) == 3
        clip = min(2.5 * float(exact.square().mean().sqrt()), float(exact.abs().max()))
        assert float(block.max()) == pytest.approx(clip, rel=1e-5)
    assert float(once(TernGrad(clip=None), x).max()) == 100.0


def test_random_k_sends_one_of_each_run_and_over_the_steps_all() -> None:
    x = gaussian(1003)
    compressor = RandomK(0.1)
    seen = torch.zeros(1003, dtype=torch.bool)
    for step in range(200):
        sent = once(compressor, x, step) != 0
        assert [int(run.sum()) for run in sent.split(10)] == [1] * 101
        seen |= sent
    assert bool(seen.all())
    average = torch.stack([once(RandomK(0.1, error_feedback=False), x, step) for step in range(2000)]).mean(0)
    assert nmse(average[:1000], x[:1000]) < 0.01
    assert nmse(average[1000:], x[1000:]) < 0.01  # a shorter run


def test_a_majority_decides_each_sign() -> None:
    gradients = [gaussian(1000, seed=rank) for rank in range(5)]
    votes = torch.stack(gradients).sign().sum(0)
    assert torch.equal(simulate("signsgd", gradients).mean, votes.sign())
    tied = simulate(SignSGD(), gradients[:2]).mean
    assert torch.equal(tied == 0, gradients[0].sign() != gradients[1].sign())
    # A rank without input has no vote; the loss scale is in the gradient, for unscale_ to take away.
    assert torch.equal(simulate("signsgd", [gradients[0], torch.zeros(1000)]).mean, gradients[0].sign())
    assert torch.equal(simulate("signsgd", gradients, scale=1024.0).mean, votes.sign() * 1024)


# PowerSGD.


def test_a_mean_of_low_rank_is_found() -> None:
    left, right = gaussian(60, 3), gaussian(3, 50, seed=1)
    noise = [gaussian(60, 50, seed=10 + rank) for rank in range(3)]
    gradients = [left @ right + it - torch.stack(noise).mean(0) for it in noise]  # only their mean is of rank 3
    mean = torch.stack(gradients).mean(0)
    after = simulate(PowerSGD(3, error_feedback=False), gradients)
    assert nmse(after.mean, mean) < 1e-8


def test_steps_of_power_iteration_come_near_the_best_approximation() -> None:
    gradient = gaussian(40, 30) @ torch.diag(torch.logspace(0, -3, 30)) @ gaussian(30, 30, seed=1)
    u, s, v = torch.linalg.svd(gradient)
    best = nmse(u[:, :4] * s[:4] @ v[:4], gradient)
    after: Simulation | None = None
    errors = []
    for _ in range(6):
        after = simulate(PowerSGD(4, error_feedback=False), [gradient, gradient], after=after)
        errors.append(nmse(after.mean, gradient))
    assert errors[-1] < 1.02 * best < errors[0]
    cold = simulate(PowerSGD(4, warm_start=False, error_feedback=False), [gradient, gradient])
    assert nmse(cold.mean, gradient) == errors[0]


def test_what_was_zero_begins_anew() -> None:
    zeros, gradient = torch.zeros(40, 30), gaussian(40, 30)
    after = simulate(PowerSGD(4), [zeros, zeros])
    assert not bool(after.mean.any())
    later = simulate(PowerSGD(4), [gradient, gradient], after=after)
    assert nmse(later.mean, gradient) < 0.95
    one = torch.zeros(40, 30)
    one[3] = 1.0  # rank 1: three columns have nothing to say
    after = simulate(PowerSGD(4), [one, one])
    torch.testing.assert_close(after.mean, one)
    assert nmse(simulate(PowerSGD(4), [gradient, gradient], after=after).mean, gradient) < 0.95


def test_an_overflow_poisons_no_later_step() -> None:
    steps = [[gaussian(40, 30, seed=10 * step + rank) for rank in range(2)] for step in range(4)]
    clean = simulate(PowerSGD(2), [steps[0], steps[2], steps[3]])
    hit = simulate(PowerSGD(2), steps[0])
    for value in (torch.inf, torch.nan):
        spoilt = [steps[1][0], steps[1][1].clone()]
        spoilt[1][5, 5] = value
        hit = dataclasses.replace(simulate(PowerSGD(2), spoilt, after=hit), steps=1)
        assert bool(hit.mean.isnan().all())
    after = simulate(PowerSGD(2), steps[2:], after=hit)
    assert torch.equal(after.mean, clean.mean)


def test_what_would_not_get_smaller_is_exact() -> None:
    gradients = [gaussian(8, 8, seed=rank) for rank in range(3)]
    mean = simulate(PowerSGD(4), gradients).mean
    torch.testing.assert_close(mean, torch.stack(gradients).mean(0))
    vectors = [gaussian(1000, seed=rank) for rank in range(3)]
    torch.testing.assert_close(simulate(PowerSGD(4), vectors).mean, torch.stack(vectors).mean(0))


def run_alone(compressor: PowerSGD, xs: list[Tensor], names: list[str]) -> list[Tensor]:
    infos = [Info(name=n, shape=tuple(x.shape), numel=x.numel()) for n, x in zip(names, xs, strict=True)]
    rounds = compressor.average([x.view(-1) for x in xs], infos)
    try:
        tensors = next(rounds)
        while True:
            tensors = rounds.send(tensors)
    except StopIteration as end:
        return list(end.value)


def test_matrices_of_one_shape_together_are_what_each_is_alone() -> None:
    xs = [gaussian(40, 30), gaussian(40, 30, seed=1), gaussian(50, 20, seed=2), gaussian(40, 30, seed=3)]
    names = ["a", "b", "c", "d"]
    together = run_alone(PowerSGD(2), xs, names)
    for name, x, mean in zip(names, xs, together, strict=True):
        torch.testing.assert_close(run_alone(PowerSGD(2), [x], [name])[0], mean)


# Rounds.


class Restless:
    """Exchanges what depends on the elements."""

    aggregate = "rounds"

    def average(self, xs: Any, infos: Any) -> Any:
        yield [xs[0][: 1 + int(xs[0].any())].clone()]
        return xs


class Failing:
    """Breaks down on one rank, in its second round."""

    aggregate = "rounds"

    def average(self, xs: Any, infos: Any) -> Any:
        yield [xs[0].clone()]
        if infos[0].rank == 1:
            raise ZeroDivisionError("nothing to divide by")
        yield [xs[0].clone()]
        return xs


def test_rounds_that_depend_on_the_elements_are_told() -> None:
    gradients = [gaussian(10, seed=rank) for rank in range(2)]
    with pytest.raises(
        InvalidArgumentError, match=r"round 0 of simulated exchanges a sum of float32 \[2\] where zeros"
    ):
        simulate(Restless(), gradients)


def test_a_rank_that_breaks_down_between_rounds_ends_the_step_on_all() -> None:
    gradients = [gaussian(10, seed=rank) for rank in range(3)]
    with pytest.raises((ZeroDivisionError, RingError), match="nothing to divide by"):
        simulate(Failing(), gradients)


def test_rounds_need_a_method() -> None:
    with pytest.raises(InvalidArgumentError, match="no method average"):
        get(type("Half", (), {"aggregate": "rounds"})())


@pytest.mark.parametrize("count", [blocks.PIECE - 1, blocks.PIECE, 2 * blocks.PIECE + 333])
@pytest.mark.parametrize(
    "compressor",
    [Sign(), Sign(block=8), QSGD(), QSGD(bits=2, block=37), QSGD(bits=8, block=1000, error_feedback=True), TernGrad()],
    ids=str,
)
def test_pieces_change_no_bit(compressor: Any, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(count, generator=torch.Generator().manual_seed(3))
    x[count // 2] = torch.inf
    info = functools.partial(Info, name="w", shape=(count,), numel=count, step=4, rank=1, world_size=2)
    (code,) = compressor.compress(x, info())
    decoded = compressor.decompress((code,), info())
    monkeypatch.setattr(blocks, "PIECE", 1 << 30)
    (whole,) = compressor.compress(x, info())
    assert torch.equal(code, whole)
    assert torch.equal(decoded.view(torch.int32), compressor.decompress((code,), info()).view(torch.int32))


def test_votes_in_pieces_are_those_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    count = 2 * blocks.PIECE + 333
    gradients = [torch.randn(count, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    mean = simulate("signsgd", gradients).mean
    monkeypatch.setattr(blocks, "PIECE", 1 << 30)
    assert torch.equal(mean, simulate("signsgd", gradients).mean)
