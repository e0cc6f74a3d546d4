"""Parameters without gradient: the three values of find_unused_parameters, on one rank and on all."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ringdp.parallel import RingDP
from tests.train.harness import backends, run_ranks

pytestmark = pytest.mark.parametrize("backend", backends())


class Branches(nn.Module):
    """`always` is used by everybody, `sometimes` where `use` says so, `never` by nobody."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.always = nn.Linear(4, 4)
        self.sometimes = nn.Linear(4, 4)
        self.never = nn.Linear(4, 4)

    def forward(self, x: Tensor, *, use: bool) -> Tensor:
        hidden: Tensor = self.always(x)
        return self.sometimes(hidden) if use else hidden


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {
        name.removeprefix("module."): None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()
    }


def finish_like_ddp(find_unused: bool | None, hook: bool) -> list[str]:
    """Rank 1 alone uses `sometimes`, for several steps; the result is DDP's. Returns the warnings."""
    rank = dist.get_rank()
    ours = RingDP(Branches(), find_unused_parameters=find_unused, bucket_cap_mb=0.00005)
    ddp = DistributedDataParallel(Branches(), find_unused_parameters=True)
    if hook:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        ours.register_comm_hook(None, allreduce_hook)
        ddp.register_comm_hook(None, allreduce_hook)
    said: list[str] = []
    for step in range(4):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank))
        for model in (ours, ddp):
            model.zero_grad()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                model(x, use=rank == 1).pow(2).sum().backward()
            if model is ours:
                said += [str(warning.message) for warning in caught if "without gradient" in str(warning.message)]
        mine, theirs = gradients(ours), gradients(ddp)
        for name, expected in theirs.items():
            if expected is None:
                assert mine[name] is None, name
            else:
                torch.testing.assert_close(mine[name], expected, rtol=1e-6, atol=0, msg=name)
        assert mine["never.weight"] is None
        assert mine["sometimes.weight"] is not None
    return said


@pytest.mark.parametrize("hook", [False, True])
def test_by_default_it_finishes_as_ddp_and_warns_once(backend: str, hook: bool) -> None:
    first, second = run_ranks(finish_like_ddp, None, hook, backend=backend)
    assert len(first) == 1
    assert len(second) == 1
    assert "sometimes.weight, sometimes.bias" in first[0].split("Used on no rank")[0]
    assert "never.weight, never.bias" in first[0].split("Used on no rank")[1]
    assert "sometimes" not in second[0]
    assert "rank 1" in second[0]


@pytest.mark.parametrize("hook", [False, True])
def test_expected_means_no_warning(backend: str, hook: bool) -> None:
    assert run_ranks(finish_like_ddp, True, hook, backend=backend) == [[], []]


def forbidden_raises() -> str:
    model = RingDP(Branches(), find_unused_parameters=False)
    x = torch.ones(2, 4)
    model(x, use=False).sum().backward()
    with pytest.raises(RuntimeError, match="Expected to have finished reduction in the prior iteration") as caught:
        model(x, use=False)
    with pytest.raises(RuntimeError, match="Expected to have finished reduction"):
        model._check_reducer_finalized()
    return str(caught.value)


def test_forbidden_is_ddps_error_with_names(backend: str) -> None:
    for rank, text in enumerate(run_ranks(forbidden_raises, backend=backend)):
        assert f"Parameter indices which did not receive grad for rank {rank}: 2 3 4 5" in text
        assert "sometimes.weight, sometimes.bias, never.weight, never.bias" in text
    (alone,) = run_ranks(forbidden_raises, world_size=1, backend=backend)
    assert "never.bias" in alone


def forbidden_and_all_used() -> None:
    model = RingDP(nn.Linear(4, 4), find_unused_parameters=False)
    for _ in range(3):
        model.zero_grad()
        model(torch.full((2, 4), float(dist.get_rank()))).sum().backward()
        assert model.module.weight.grad is not None
        torch.testing.assert_close(model.module.weight.grad, torch.full((4, 4), 1.0))
    model._check_reducer_finalized()


def test_forbidden_without_unused_parameters(backend: str) -> None:
    run_ranks(forbidden_and_all_used, backend=backend)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(4, 4)
        self.left = nn.Linear(4, 1)
        self.right = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> dict[str, Any]:
        hidden = self.body(x)
        return {"left": self.left(hidden), "deep": [self.right(hidden)]}


def outputs_that_the_loss_ignores(find_unused: bool | None) -> None:
    rank = dist.get_rank()
    model = RingDP(TwoHeads(), find_unused_parameters=find_unused)
    output = model(torch.ones(2, 4))
    (output["left"] if rank == 0 else output["deep"][0]).sum().backward()
    for head in (model.module.left, model.module.right):
        torch.testing.assert_close(head.bias.grad, torch.tensor([1.0]))  # 2 on one rank, 0 on the other


@pytest.mark.filterwarnings("ignore:.*without gradient")
@pytest.mark.parametrize("find_unused", [None, True])
def test_each_rank_uses_another_output(backend: str, find_unused: bool | None) -> None:
    run_ranks(outputs_that_the_loss_ignores, find_unused, backend=backend)


def no_hook_fires_on_rank_0() -> None:
    """Rank 0's loss depends on the input only: its backward reaches the output and no parameter."""

    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor, *, use: bool) -> Tensor:
            return x * self.weight if use else x * 2

    model = RingDP(Sometimes(), find_unused_parameters=True)
    x = torch.ones(3, requires_grad=True)
    model(x, use=dist.get_rank() == 1).sum().backward()
    torch.testing.assert_close(model.module.weight.grad, torch.full((3,), 0.5))


def test_a_rank_without_any_gradient_takes_part(backend: str) -> None:
    run_ranks(no_hook_fires_on_rank_0, backend=backend)
