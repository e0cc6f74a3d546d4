"""Codes of rotated blocks: the core and torch turn alike, heavy tails lose their price, nothing else changes."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from ringdp.compression import Info, Int4, Int6, Int8
from ringdp.compression.codecs import native, rotation
from ringdp.compression.exchange import Section
from ringdp.compression.exchange.local import there_and_back
from ringdp.testing import check_compressor, simulate

CODES: list[Any] = [Int8, Int4, Int6]
needs_core = pytest.mark.skipif(not native.serves(torch.zeros(1)), reason="ringdp is not built (make build)")


def gaussian(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def heavy(count: int, seed: int = 0) -> Tensor:
    """Tails far heavier than those of most gradients."""
    return gaussian(count, seed) * (gaussian(count, seed + 1000)).exp()


def nmse(got: Tensor, wanted: Tensor) -> float:
    return float((got - wanted).square().sum() / wanted.square().sum())


def once(compressor: Any, x: Tensor, step: int = 0) -> Tensor:
    return there_and_back(Section("x", tuple(x.shape), 0, x.numel(), compressor, 1), x, step=step)[0]


def info(count: int, **more: Any) -> Info:
    return Info(name="x", shape=(count,), numel=count, **more)


@needs_core
@pytest.mark.parametrize("count", [0, 1, 255, 256, 257, 1000, 5120])
def test_the_core_and_torch_turn_alike(count: int) -> None:
    x = heavy(count)
    there, back = rotation.rotate(x, info(count)), rotation.rotate_back(x, info(count))
    with mock.patch.object(native, "serves", return_value=False):
        assert torch.equal(rotation.rotate(x, info(count)).view(torch.int32), there.view(torch.int32))
        assert torch.equal(rotation.rotate_back(x, info(count)).view(torch.int32), back.view(torch.int32))


def test_it_keeps_lengths_and_comes_back() -> None:
    x = heavy(256 * 20 + 100)
    turned = rotation.rotate(x, info(len(x)))
    for before, after in zip(x.split(256), turned.split(256), strict=True):
        torch.testing.assert_close(after.norm(), before.norm())
    assert torch.equal(turned[256 * 20 :], x[256 * 20 :])
    torch.testing.assert_close(rotation.rotate_back(turned, info(len(x))), x)


def test_signs_are_of_the_step_the_part_and_the_parameter_and_not_of_the_rank() -> None:
    x = gaussian(256)
    first = rotation.rotate(x, info(256))
    assert torch.equal(rotation.rotate(x, info(256, rank=3, world_size=4)), first)
    others = [info(256, step=1), info(256, part=1), info(256, phase="owner"), Info(name="y", shape=(256,), numel=256)]
    assert not any(torch.equal(rotation.rotate(x, other), first) for other in others)


@pytest.mark.parametrize("make", CODES)
def test_heavy_tails_cost_what_a_gaussian_does(make: Any) -> None:
    x, of_gaussian = heavy(256 * 300 + 7), gaussian(256 * 300 + 7)
    plain = nmse(once(make(), of_gaussian), of_gaussian)
    assert nmse(once(make(rotate=True), of_gaussian), of_gaussian) < 1.05 * plain
    assert nmse(once(make(rotate=True), x), x) < 1.05 * plain < 0.4 * nmse(once(make(), x), x)


@pytest.mark.parametrize("make", CODES)
def test_errors_of_steps_average_out(make: Any) -> None:
    """Errors over the steps are new: their mean is nearer than each."""
    x = heavy(2560)
    each = [once(make(rotate=True), x, step) for step in range(16)]
    assert nmse(torch.stack(each).mean(0), x) < 0.2 * nmse(each[0], x)


@pytest.mark.parametrize("make", CODES)
@pytest.mark.parametrize("feedback", [True, False])
def test_it_keeps_its_promises(make: Any, feedback: bool) -> None:
    report = check_compressor(make(rotate=True, error_feedback=feedback))
    assert report.bits == check_compressor(make(error_feedback=feedback)).bits


@pytest.mark.parametrize("make", CODES)
def test_what_is_not_finite_spoils_its_block(make: Any) -> None:
    for value in (torch.inf, -torch.inf, torch.nan):
        x = gaussian(1000)
        x[300] = value
        decoded = once(make(rotate=True), x)
        assert bool(decoded[256:512].isfinite().logical_not().any())
        assert not bool(decoded[300].isfinite())
        assert bool(decoded[:256].isfinite().all())
        gradients = [gaussian(1000, 1), x]
        assert not bool(simulate(make(rotate=True), gradients).mean[300].isfinite())


@pytest.mark.parametrize("make", CODES)
def test_the_core_leaves_it_to_python(make: Any) -> None:
    assert make().native == make.codec
    assert make(rotate=True).native is None
