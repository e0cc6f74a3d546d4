"""Top-k: one wire format whoever encodes it, what is sent and what waits, thresholds that follow, DGC's momentum."""

from __future__ import annotations

import itertools
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from ringdp.compression import DGC, Info, PowerSGD, TopK
from ringdp.compression.codecs import native
from ringdp.compression.exchange import BucketSlice
from ringdp.compression.methods import sparse
from ringdp.testing import check_compressor, simulate

needs_core = pytest.mark.skipif(not native.serves(torch.zeros(1)), reason="ringdp is not built (make build)")


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def heavy(*shape: int, seed: int = 0) -> Tensor:
    """Tails as gradients have them."""
    return gaussian(*shape, seed=seed) * gaussian(*shape, seed=seed + 1000).exp()


def by_torch() -> Any:
    """Without the core's codecs, as on a GPU."""
    return mock.patch.object(native, "serves", return_value=False)


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int32)


CASES = [(count, threshold) for count in (0, 1, 255, 256, 257, 5003) for threshold in (0.0, 1.2, 2.5, 100.0)]


@needs_core
@pytest.mark.parametrize(("count", "threshold"), CASES)
def test_the_core_and_torch_write_the_same_bytes(count: int, threshold: float) -> None:
    x, residual = heavy(count), heavy(count, seed=1)
    for factor in (1.0, 1024.0):
        code, left, found = sparse.select(x, residual, factor, threshold, max(count // 3, 1))
        with by_torch():
            other, its_left, its_found = sparse.select(x, residual, factor, threshold, max(count // 3, 1))
            decoded = sparse.decode(code, count)
        assert left is not None
        assert its_left is not None
        assert torch.equal(code, other)
        assert found == its_found
        assert torch.equal(bits(left), bits(its_left))
        assert torch.equal(sparse.decode(code, count), decoded)
        there = torch.full((count + 2,), 7.0)
        assert sparse.decode(code, count, there[1:-1]).data_ptr() == there[1:-1].data_ptr()
        assert torch.equal(there[1:-1], decoded)
        assert there[0] == there[-1] == 7.0


@needs_core
@pytest.mark.parametrize("count", [1, 256, 5003])
def test_both_merge_alike(count: int) -> None:
    codes = [sparse.select(heavy(count, seed=rank), None, 1.0, 2.0 * (rank != 1), count)[0] for rank in range(4)]
    lost, its_lost = torch.zeros(count), torch.zeros(count)
    merged = sparse.merge(codes, count, 3.0, lost, 2.0)
    with by_torch():
        assert torch.equal(sparse.merge(codes, count, 3.0, its_lost, 2.0), merged)
    assert torch.equal(lost, its_lost)
    mean = sum(sparse.decode(code, count) for code in codes) / 3.0
    torch.testing.assert_close(sparse.decode(merged, count) + lost / 2.0, mean)


@needs_core
def test_both_estimate_alike() -> None:
    for count, wanted in ((1000, 10), (100_000, 1000), (100_000, 30_000)):
        x, residual = heavy(count), heavy(count, seed=1)
        estimate = sparse.threshold_for(x, residual, 2.0, wanted)
        with by_torch():
            assert sparse.threshold_for(x, residual, 2.0, wanted) == pytest.approx(estimate, rel=1e-6)
        found = sparse.select(x, residual, 2.0, estimate, count)[2]
        assert 0.8 < found / wanted < 1.25


@needs_core
@pytest.mark.parametrize("count", [1, 257, 5003])
def test_both_cut_alike_where_many_are_equal(count: int) -> None:
    x, residual = gaussian(count).mul(2).round(), torch.ones(count)
    for wanted in (1, count // 3 + 1, count):
        cut = sparse.exact_cut(x, residual, 2.0, wanted)
        code, left, found = sparse.select(x, residual, 2.0, cut[0], wanted, None, cut[1])
        with by_torch():
            assert sparse.exact_cut(x, residual, 2.0, wanted) == cut
            other, its_left, its_found = sparse.select(x, residual, 2.0, cut[0], wanted, None, cut[1])
        assert left is not None
        assert its_left is not None
        assert torch.equal(code, other)
        assert torch.equal(left, its_left)
        assert found == its_found
        large = (x + 2.0).abs().topk(wanted).values
        assert torch.equal(sparse.decode(code, count).abs().topk(wanted).values, large)
        if cut[0] > 0.0:
            assert sparse.entries(code) == wanted


@pytest.mark.parametrize("core", [pytest.param(True, marks=needs_core), False])
def test_bytes_that_are_no_code_are_refused(core: bool) -> None:
    good = sparse.select(gaussian(1000), None, 1.0, 1.5, 1000)[0]
    assert int(good[16:20].sum()) == sparse.entries(good)
    shorter, beyond, miscounted = good[:-1], good.clone(), good.clone()
    beyond[20 + sparse.entries(good) - 1] = 255  # the last block has 232 elements
    miscounted[16] += 1
    with mock.patch.object(native, "serves", native.serves if core else lambda x: False):
        for wrong, words in ((shorter, "which take"), (beyond, "out of range or order"), (miscounted, "entries|order")):
            with pytest.raises(ValueError, match=words):
                sparse.decode(wrong, 1000)
            with pytest.raises(ValueError, match=words):
                sparse.merge([good, wrong], 1000, 2.0, None, 1.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "compressor",
    ["topk", TopK(0.1), TopK(0.5), TopK(0.1, error_feedback=False), TopK(0.1, error_feedback=DGC(0.9, clip=10.0))],
    ids=str,
)
def test_it_keeps_its_promises(compressor: Any) -> None:
    report = check_compressor(compressor)
    if compressor == "topk":
        assert report.bits < 0.33
    with by_torch():
        check_compressor(compressor)


def test_the_union_of_what_ranks_sent_arrives() -> None:
    gradients = [heavy(30_000, seed=rank) for rank in range(4)]
    mean = simulate(TopK(0.01, error_feedback=False), gradients).mean
    union = int((mean != 0).sum())
    assert 1.5 * 300 < union < 4.4 * 300
    for gradient in gradients:
        largest = gradient.abs().topk(200).indices
        assert bool((mean[largest] != 0).all())


def test_the_threshold_follows_gradients_that_grow_and_shrink() -> None:
    compressor = TopK(0.01)
    state: dict[str, Any] = {}
    left = torch.zeros(100_000)
    for step in range(60):
        x = heavy(100_000, seed=step) * (1.0 if step < 20 else 1.05 ** (step - 20) if step < 40 else 1e-3)
        info = Info(
            name="x", shape=(100_000,), numel=100_000, step=step, state=dict(state), loss_scale=2.0 ** (step % 5)
        )
        (code,), left = compressor.compress_with_residual(x * info.loss_scale, left, info)
        state = info.state
        if step not in (0, 40):
            assert 0.5 * 1000 <= sparse.entries(code) <= 2 * 1000, step


def crowded(count: int, spread: float, step: int) -> Tensor:
    drawn = torch.rand(count, generator=torch.Generator().manual_seed(step))
    return (drawn - 0.5).sign() * (1.0 + spread * drawn)


def hidden(count: int, step: int) -> Tensor:
    """Nothing in the blocks that a sample looks at."""
    return (torch.arange(count) // 256 % 16 != 0).float() * gaussian(count, seed=step)


@pytest.mark.parametrize("core", [pytest.param(True, marks=needs_core), False])
@pytest.mark.parametrize("feedback", [True, False])
@pytest.mark.parametrize(
    "gradient",
    [
        pytest.param(lambda step: crowded(20_000, 0.0, step), id="equal"),
        pytest.param(lambda step: crowded(20_000, 1e-4, step), id="within 1e-4"),
        pytest.param(lambda step: crowded(20_000, 0.1, step), id="within 10 %"),
        pytest.param(lambda step: torch.where(torch.arange(20_000) < 9900, 0.5, 1.0), id="two values"),
        pytest.param(lambda step: hidden(300_000, step), id="not in the sample"),
    ],
)
def test_about_the_fraction_is_sent_however_magnitudes_lie(gradient: Any, feedback: bool, core: bool) -> None:
    compressor = TopK(0.02, error_feedback=feedback)
    state: dict[str, Any] = {}
    left, sent = torch.zeros_like(gradient(0)), []
    with mock.patch.object(native, "serves", native.serves if core else lambda x: False):
        for step in range(12):
            x = gradient(step)
            info = Info(name="x", shape=tuple(x.shape), numel=x.numel(), step=step, state=state)
            if feedback:
                (code,), left = compressor.compress_with_residual(x, left, info)
            else:
                (code,) = compressor.compress(x, info)
            sent.append(sparse.entries(code) / (0.02 * x.numel()))
    assert max(sent) <= 2
    assert 0.8 < sum(sent) / len(sent) < 1.25


def test_equals_wait_for_their_turn() -> None:
    done = simulate(TopK(0.1), [[torch.ones(1000)] * 2] * 8)
    times = torch.stack(done.means).count_nonzero(0)
    assert (int(times.sum()), int(times.max())) == (800, 1)


def test_the_fraction_falls_over_the_ramp() -> None:
    compressor = TopK(0.01, ramp_steps=100)
    fractions = [compressor.fraction_at(step) for step in range(102)]
    assert fractions[0] == 0.25
    assert fractions[100] == fractions[101] == 0.01
    ratios = [after / before for before, after in itertools.pairwise(fractions[:101])]
    assert max(ratios) == pytest.approx(min(ratios))


def test_everything_sent_with_momentum_is_sgd_with_momentum() -> None:
    steps = [[gaussian(3000, seed=10 * step + rank) for rank in range(3)] for step in range(5)]
    done = simulate(TopK(1.0, error_feedback=DGC(0.9, masking=False)), steps)
    velocity = torch.zeros(3000)
    for step, mean in zip(steps, done.means, strict=True):
        velocity = 0.9 * velocity + torch.stack(step).mean(0)
        torch.testing.assert_close(mean, velocity, rtol=2e-3, atol=2e-3)


def test_velocities_of_what_was_sent_begin_anew_and_gradients_are_clipped() -> None:
    plug_in = DGC(0.5, clip=1.0)
    state: dict[str, Any] = {}
    x = torch.tensor([3.0, 4.0])
    fed = plug_in.before(x, state)
    torch.testing.assert_close(fed, torch.tensor([0.6, 0.8]))
    plug_in.after(fed, torch.tensor([0.0, 0.8]), state)
    torch.testing.assert_close(state["velocity"], torch.tensor([0.6, 0.0]))
    torch.testing.assert_close(state["residual"], torch.tensor([0.6, 0.0]))
    fed = plug_in.before(torch.zeros(2), state)
    torch.testing.assert_close(fed, torch.tensor([0.9, 0.0]))  # 0.6 of before, and half of its velocity


def test_the_loss_scale_changes_nothing() -> None:
    for feedback in (True, DGC(0.9, clip=5.0)):
        steps = [[heavy(2000, seed=10 * step + rank) for rank in range(2)] for step in range(4)]
        plain = simulate(TopK(0.05, error_feedback=feedback), steps)
        scaled = simulate(TopK(0.05, error_feedback=feedback), [[g * 1024 for g in s] for s in steps], scale=1024.0)
        for a, b in zip(plain.means, scaled.means, strict=True):
            assert torch.equal(a * 1024, b)


def test_the_loss_scale_changes_nothing_in_rounds_either() -> None:
    compressor = PowerSGD(2, error_feedback=DGC(0.9, clip=5.0))
    steps = [[heavy(2000, seed=10 * step + rank).view(40, 50) for rank in range(2)] for step in range(4)]
    plain = simulate(compressor, steps)
    scaled = simulate(compressor, [[g * 1024 for g in step] for step in steps], scale=1024.0)
    for a, b in zip(plain.means, scaled.means, strict=True):
        assert torch.equal(a * 1024, b)


def test_what_the_owner_rounds_off_is_owed() -> None:
    x = [torch.full((600,), 1 / 3), torch.full((600,), 1e-4)]
    done = simulate(TopK(1.0), x)
    section = BucketSlice("simulated", (600,), 0, 600, TopK(1.0)).section(2, torch.device("cpu"))
    assert section is not None
    owed = torch.zeros(600)
    for states in done.states:
        remembered = states.of("simulated")
        assert remembered.residual is not None
        assert all(key.kind == "compressor" for key in remembered.dicts)
        owed += remembered.residual / 2
    torch.testing.assert_close(done.mean + owed, torch.stack(x).mean(0), rtol=1e-6, atol=0)
    assert bool((owed != 0).any())
