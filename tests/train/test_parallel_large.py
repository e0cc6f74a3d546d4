"""Parameters of 4 MiB and more: their gradients are reduced where autograd left them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from ringdp.ddp.wrapper import RingDP
from tests.train.harness import backends, on_ranks, run_ranks


class Large(nn.Module):
    """Two large matrices (one of them strided), a small one between them, one that is used only where `use` says so."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Parameter(torch.randn(1024, 1024) * 0.01)
        self.small = nn.Linear(1024, 1024 // 64)
        self.strided = nn.Parameter((torch.randn(70000, 16) * 0.01).t())
        self.sometimes = nn.Parameter(torch.randn(1024, 1025) * 0.01)

    def forward(self, x: Tensor, *, use: bool) -> Tensor:
        hidden = torch.tanh(x @ self.first)
        output: Tensor = self.small(hidden) @ self.strided
        return output.sum(1) + (hidden @ self.sometimes).sum(1) if use else output.sum(1)


def data(step: int) -> Tensor:
    return torch.randn(3, 1024, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))


def same(ours: nn.Module, ddp: nn.Module) -> None:
    for (name, one), other in zip(ours.named_parameters(), ddp.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), name
        if one.grad is not None:
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-5, atol=1e-6, msg=name)
            assert one.grad.stride() == one.stride()


def steps(hook: bool, only_large: bool) -> list[list[int]]:
    """Accumulation, a parameter used on one rank, zeroing in place, gradients that somebody keeps."""

    def build() -> nn.Module:
        if only_large:
            model = Large()
            model.small = nn.Linear(1024, 16, bias=False)
            model.small.weight = nn.Parameter(torch.randn(16, 1024) * 0.01, requires_grad=False)
            return model
        return Large()

    ours = RingDP(build(), find_unused_parameters=True)
    ddp = DistributedDataParallel(build(), find_unused_parameters=True)
    if hook:
        for model in (ours, ddp):
            model.register_comm_hook(None, allreduce_hook)
    kept: list[Tensor] = []
    values: list[Tensor] = []
    for step in range(5):
        for model in (ours, ddp):
            if step != 2:
                model.zero_grad(set_to_none=step != 4)
            with model.no_sync():
                model(data(step), use=False).sum().backward()
            model(data(step + 100), use=dist.get_rank() == 1 and step != 1).sum().backward()
        same(ours, ddp)
        if step == 2:
            kept = [p.grad for p in ours.parameters() if p.grad is not None]
            values = [grad.clone() for grad in kept]
    for grad, value in zip(kept, values, strict=True):
        torch.testing.assert_close(grad, value, rtol=0, atol=0)
    layout: list[list[int]] = ours.reducer.plan.layout()
    return layout


@pytest.mark.parametrize("backend", backends())
@pytest.mark.parametrize("hook", [False, True])
@pytest.mark.parametrize("only_large", [False, True])
def test_same_as_ddp(backend: str, hook: bool, only_large: bool) -> None:
    layout = run_ranks(steps, hook, only_large, backend=backend)[0]
    if only_large:
        assert sorted(layout) == [[0], [1], [2]]
    else:
        assert sorted(map(sorted, layout)) == [[0], [1], [2], [3, 4]]
        assert sorted(layout[-1]) == [3, 4]  # what follows it says who was used


@on_ranks(backend=backends())
def test_no_copy() -> None:
    """.grad is what autograd made, and nothing else takes memory for it."""
    model = RingDP(Large())
    model(data(0), use=True).sum().backward()
    grad = model.module.first.grad
    assert grad.untyped_storage().nbytes() == grad.nbytes
    pointer = grad.data_ptr()
    with model.no_sync():
        model(data(0), use=True).sum().backward()
    model(data(1), use=True).sum().backward()
    assert model.module.first.grad.data_ptr() == pointer


class Aliased(nn.Module):
    """Both gradients are views of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.ones(1024, 1100))
        self.other = nn.Parameter(torch.ones(1024, 1100))

    def forward(self, x: Tensor) -> Tensor:
        return (self.one.view(-1) + self.other.view(-1)) * x


@on_ranks(backend=backends())
def test_shared_memory() -> None:
    model = RingDP(Aliased())
    model(torch.tensor(float(dist.get_rank() + 1))).sum().backward()
    for parameter in model.parameters():
        torch.testing.assert_close(parameter.grad, torch.full_like(parameter, 1.5))


@on_ranks(backend=backends())
def test_graph_of_its_own() -> None:
    ours, ddp = RingDP(Large()), DistributedDataParallel(Large(), find_unused_parameters=True)
    ours(data(0), use=True).pow(2).sum().backward(create_graph=True)
    ddp(data(0), use=True).pow(2).sum().backward()
    same(ours, ddp)
    for parameter in ours.parameters():
        parameter.grad = None
