"""ringdp.amp.GradScaler beside torch's, in one process: state, scales, which gradients are looked at, what is said.

What a reducer would know is told by a stand-in; tests/train/test_amp.py has real ones.
"""

from __future__ import annotations

import copy
import logging
import math
import pickle
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ringdp
from ringdp import _C
from ringdp.amp import GradScaler
from ringdp.compression.parameters import model_parameters
from ringdp.ddp.loss_scale import LossScale
from ringdp.ddp.overflow import Overflow, ReducedGradients
from ringdp.errors import GradientOverflowError

CHECK = "aten::_amp_foreach_non_finite_check_and_unscale_"


class Wrapper:
    """What a RingDP has that ReducedGradients asks for; `finite` is what its reducer saw in the backward before."""

    device_type = "cpu"

    def __init__(self, model: nn.Module, *, finite: bool | None = True) -> None:
        self.finite = finite
        self.steps = 0
        next(model.parameters()).register_post_accumulate_grad_hook(lambda _: self._reduced())
        self.reducer = SimpleNamespace(
            report=SimpleNamespace(steps=lambda: self.steps),
            overflow=SimpleNamespace(
                finite=lambda: self.finite,
                watch=lambda watching: None,
                own_non_finite=lambda: 0,
                non_finite=lambda: [0],
            ),
        )
        self.process_group = SimpleNamespace(size=lambda: 2, rank=lambda: 0)
        self._join_config = SimpleNamespace(enable=True)  # nobody to ask
        self.reduced = ReducedGradients(self, model_parameters(model))

    def _reduced(self) -> None:
        self.steps += 1


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def backward(scaler: Any, net: nn.Module, factor: float = 1.0) -> None:
    x = torch.linspace(-1, 1, 20).view(5, 4)
    scaler.scale(net(x).square().sum() * factor).backward()


def gradients(net: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in net.parameters() if parameter.grad is not None]


def same(a: Iterable[Tensor], b: Iterable[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(a, b, strict=True))


def operations(call: Callable[[], Any]) -> set[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    return {event.key for event in profile.key_averages()}


def overflow(net: nn.Module) -> None:
    gradients(net)[0].view(-1)[1] = math.inf


# State.


def test_is_torchs_and_loaded_lazily() -> None:
    assert isinstance(ringdp.amp.GradScaler("cpu"), torch.amp.GradScaler)


def test_state_goes_to_torchs_scaler_and_back() -> None:
    ours, theirs = GradScaler("cpu", init_scale=2.0**9, growth_interval=3), torch.amp.GradScaler("cpu")
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(4):
        backward(ours, net)
        ours.step(optimizer)
        ours.update()
    state = ours.state_dict()
    assert state == {
        "scale": 2.0**10,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 3,
        "_growth_tracker": 1,
    }
    theirs.load_state_dict(state)
    assert theirs.state_dict() == state
    again = GradScaler("cpu")
    again.load_state_dict(theirs.state_dict())
    assert again.state_dict() == state
    assert pickle.loads(pickle.dumps(ours)).state_dict() == copy.deepcopy(ours).state_dict() == state


def test_disabled_does_nothing() -> None:
    scaler, net = GradScaler("cpu", enabled=False), model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    loss = net(torch.ones(2, 4)).sum()
    assert scaler.scale(loss) is loss
    loss.backward()
    before = [parameter.detach().clone() for parameter in net.parameters()]
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert not same(before, net.parameters())
    assert scaler.state_dict() == {}
    assert LossScale(scaler).read() == scaler.get_scale() == 1.0
    with pytest.warns(UserWarning, match="CUDA is not available"):
        assert torch.cuda.is_available() or not GradScaler().is_enabled()


def test_arguments_are_checked_as_torchs() -> None:
    with pytest.raises(AssertionError, match="growth factor"):
        GradScaler("cpu", growth_factor=1.0)


# Scaling.


def test_every_form_of_outputs_is_scaled_and_announced() -> None:
    scaler, weight = GradScaler("cpu", init_scale=8.0), nn.Parameter(torch.ones(3))
    seen: list[float] = []

    def outputs() -> list[Tensor]:
        hidden = weight * 2
        hidden.register_hook(lambda _: seen.append(_C.loss_scale_of_backward()))
        return [hidden.sum(), hidden.square().sum()]

    scaled = scaler.scale(outputs()[0])
    scaled.backward()
    for form in (list, tuple, iter):
        scaled = scaler.scale(form(outputs()))
        assert form is iter or type(scaled) is form
        total = [*scaled]
        assert [float(one.detach()) for one in total] == [48.0, 96.0]
        torch.autograd.backward(total)
    assert seen == [8.0] * 4
    outputs()[0].backward()
    assert seen[-1] == 1.0
    assert scaler.scale(torch.tensor(2.0)) == 16.0
    assert _C.loss_scale_of_backward() == 1.0


def test_two_scales_in_two_backwards_do_not_mix() -> None:
    seen = []
    for scale in (4.0, 32.0, 4.0):
        scaler, weight = GradScaler("cpu", init_scale=scale), nn.Parameter(torch.ones(3))
        hidden = weight * 2
        hidden.register_hook(lambda _: seen.append(_C.loss_scale_of_backward()))
        scaler.scale(hidden.sum()).backward()
    assert seen == [4.0, 32.0, 4.0]


def test_reads_the_scale_of_torchs_scaler() -> None:
    theirs = torch.amp.GradScaler("cpu", init_scale=2.0**7)
    reader = LossScale(theirs)
    reader.prefetch()
    assert reader.read() == 2.0**7
    theirs.scale(torch.ones(()))
    theirs.update(32.0)
    reader.prefetch()
    assert reader.read() == 32.0


# What is looked at.


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_known_gradients_are_multiplied_and_not_looked_at(dtype: torch.dtype) -> None:
    nets = [model().to(dtype), model().to(dtype)]
    scalers = [GradScaler("cpu"), torch.amp.GradScaler("cpu")]
    wrapper = Wrapper(nets[0])
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    for net, scaler in zip(nets, scalers, strict=True):
        x = torch.linspace(-1, 1, 20, dtype=dtype).view(5, 4)
        scaler.scale(net(x).square().sum()).backward()
    assert CHECK not in operations(lambda: scalers[0].unscale_(optimizers[0]))
    assert CHECK in operations(lambda: scalers[1].unscale_(optimizers[1]))
    assert same(gradients(nets[0]), gradients(nets[1]))
    for net, scaler, optimizer in zip(nets, scalers, optimizers, strict=True):
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
    assert same(nets[0].parameters(), nets[1].parameters())
    assert scalers[0].state_dict() == scalers[1].state_dict()
    del wrapper


@pytest.mark.parametrize(
    "change",
    (
        lambda net: gradients(net)[0].mul_(2),
        overflow,
        lambda net: setattr(net[0].weight, "grad", net[0].weight.grad.clone()),
        lambda net: net(torch.ones(1, 4)).sum().backward(),
    ),
    ids=("written to", "made infinite", "replaced", "accumulated into"),
)
def test_gradients_that_are_not_as_the_reducer_left_them_are_checked(change: Callable[[nn.Module], Any]) -> None:
    net, scaler = model(), GradScaler("cpu")
    wrapper = Wrapper(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    backward(scaler, net)
    change(net)
    finite = all(bool(torch.isfinite(gradient).all()) for gradient in gradients(net))
    before = [parameter.detach().clone() for parameter in net.parameters()]
    assert CHECK in operations(lambda: scaler.step(optimizer))
    assert same(before, net.parameters()) is not finite
    del wrapper


@pytest.mark.parametrize("finite", (None, False), ids=("nobody looked", "not finite"))
def test_without_good_news_everything_is_checked(finite: bool | None) -> None:
    net, scaler = model(), GradScaler("cpu")
    wrapper = Wrapper(net, finite=finite)
    backward(scaler, net)
    assert CHECK in operations(lambda: scaler.unscale_(torch.optim.SGD(net.parameters())))
    del wrapper


def test_parameters_without_wrapper_are_checked() -> None:
    net, other, scaler = model(), model(), GradScaler("cpu")
    wrapper = Wrapper(net)
    optimizer = torch.optim.SGD([*net.parameters(), *other.parameters()], lr=0.1)
    scaler.scale(net(torch.ones(2, 4)).sum() + other(torch.ones(2, 4)).sum()).backward()
    overflow(other)
    before = [parameter.detach().clone() for parameter in net.parameters()]
    scaler.step(optimizer)
    assert same(before, net.parameters())
    del wrapper


def test_optimizers_whose_gradients_share_memory() -> None:
    """Unscaling one's writes to the memory of both, and the other's are still known; a write by the script is not."""
    net, scaler = model(), GradScaler("cpu")
    bucket = torch.zeros(sum(parameter.numel() for parameter in net.parameters()))
    start = 0
    for parameter in net.parameters():
        parameter.grad = bucket[start : start + parameter.numel()].view_as(parameter)
        start += parameter.numel()
    wrapper = Wrapper(net)
    first, second = (torch.optim.SGD(net[i].parameters(), lr=0.1) for i in (0, 2))  # type: ignore[index]
    backward(scaler, net)
    assert CHECK not in operations(lambda: scaler.unscale_(first))
    assert CHECK not in operations(lambda: scaler.unscale_(second))
    scaler.update()
    backward(scaler, net)
    scaler.unscale_(first)
    gradients(net)[-1].mul_(2)
    assert CHECK in operations(lambda: scaler.unscale_(second))
    del wrapper


def test_fused_optimizers_unscale_and_nothing_else_does() -> None:
    results = []
    for make in (GradScaler, torch.amp.GradScaler):
        net, scaler = model(), make("cpu")
        wrapper = Wrapper(net) if make is GradScaler else None
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, fused=True)
        backward(scaler, net)
        scaled = [gradient.clone() for gradient in gradients(net)]
        names = operations(lambda s=scaler, o=optimizer: s.step(o))  # type: ignore[misc]
        assert (CHECK in names) is (make is not GradScaler)
        if make is GradScaler:
            assert "aten::_foreach_mul_" not in names
        del scaled
        backward(scaler, net)
        overflow(net)
        scaler.update()
        before = [parameter.detach().clone() for parameter in net.parameters()]
        scaler.step(optimizer)
        assert same(before, net.parameters())
        scaler.update()
        results.append((before, scaler.state_dict()))
        del wrapper
    assert same(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]


def test_float16_gradients_are_refused_as_by_torch() -> None:
    net, scaler = nn.Linear(4, 3).half(), GradScaler("cpu")
    wrapper = Wrapper(net)
    scaler.scale(net(torch.ones(2, 4, dtype=torch.float16)).sum()).backward()
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        scaler.unscale_(torch.optim.SGD(net.parameters()))
    del wrapper


def test_use_at_the_wrong_time_is_refused_as_by_torch() -> None:
    net, scaler = model(), GradScaler("cpu")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(AssertionError, match="_scale is None"):
        scaler.step(optimizer)
    backward(scaler, net)
    with pytest.raises(AssertionError, match="No inf checks"):
        scaler.update()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.unscale_(optimizer)


# Scales.


def test_scale_and_tracker_are_torchs_to_the_bit_whatever_overflows() -> None:
    scalers = [
        make("cpu", init_scale=3e4, growth_factor=1.7, backoff_factor=0.3, growth_interval=3)
        for make in (GradScaler, torch.amp.GradScaler)
    ]
    nets = [model(), model()]
    wrapper = Wrapper(nets[0])
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9) for net in nets]
    random = torch.Generator().manual_seed(3)
    for step in range(60):
        bad = bool(torch.rand((), generator=random) < 0.2)
        wrapper.finite = not bad
        for net, scaler, optimizer in zip(nets, scalers, optimizers, strict=True):
            optimizer.zero_grad()
            backward(scaler, net, math.inf if bad else 1.0)
            if step % 2:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update(128.0 if step == 40 else None)
        assert scalers[0].state_dict() == scalers[1].state_dict()
        assert same(nets[0].parameters(), nets[1].parameters())


# What is said.


def steps(scaler: GradScaler, net: nn.Module, wrapper: Wrapper | None, bad: Iterable[bool]) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for one in bad:
        if wrapper is not None:
            wrapper.finite = not one
        optimizer.zero_grad()
        backward(scaler, net, math.inf if one else 1.0)
        scaler.step(optimizer)
        scaler.update()


def test_a_skipped_step_is_told_once_per_change(caplog: pytest.LogCaptureFixture) -> None:
    net, scaler = model(), GradScaler("cpu", init_scale=64.0)
    wrapper = Wrapper(net)
    with caplog.at_level(logging.DEBUG, logger="ringdp.amp"):
        steps(scaler, net, wrapper, [False, False, True, True, False, True])
        assert caplog.messages == [
            "step skipped: the gradient of '0.weight' is not finite; 1 of the last 3 steps were skipped; "
            "the loss scale is now 32"
        ]
        wrapper.reducer.overflow.own_non_finite = lambda: 3
        steps(scaler, net, wrapper, [True])
        assert "'2.bias'" in caplog.messages[-1]
        assert "4 of the last 7 steps" in caplog.messages[-1]
        assert len(caplog.messages) == 2


def test_without_wrapper_the_parameter_is_found(caplog: pytest.LogCaptureFixture) -> None:
    net, scaler = model(), GradScaler("cpu")
    steps(scaler, net, None, [True])
    assert "the gradient of 'SGD's parameter 0' is not finite" in caplog.messages[-1]


def test_fifty_in_a_row_raise() -> None:
    net, scaler = model(), GradScaler("cpu")
    wrapper = Wrapper(net)
    steps(scaler, net, wrapper, [True] * 49 + [False] + [True] * 49)
    with pytest.raises(GradientOverflowError, match=r"50 steps in a row were skipped: .*'0\.weight'") as raised:
        steps(scaler, net, wrapper, [True])
    assert raised.value.name == "0.weight"
    assert raised.value.rank == 0
    assert "99 of the last 100 steps" in str(raised.value)
    assert str(raised.value.advice) in str(raised.value)


@pytest.mark.parametrize(
    ("ranks", "text"),
    (
        ((2,), "the gradient of 'w' was not finite on rank 2 of 4"),
        ((0, 3), "the gradient of 'w' was not finite on ranks 0, 3 of 4"),
        ((), "the gradient of 'w' was finite on each of 4 ranks, but their sum is not"),
        (None, "the gradient of 'w' is not finite"),
    ),
)
def test_overflow_in_words(ranks: tuple[int, ...] | None, text: str) -> None:
    assert str(Overflow("w", ranks, 4)) == text
