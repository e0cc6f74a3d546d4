"""Parameters without gradient: the three values of find_unused_parameters, on one rank and on all."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ringdp.config.console_log import WIDTH
from ringdp.ddp.wrapper import RingDP
from tests.train.harness import backends, on_ranks, require_same_bits, run_outcomes, run_ranks


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


@pytest.mark.parametrize("backend", backends())
@pytest.mark.parametrize("hook", [False, True])
def test_by_default_it_finishes_as_ddp_and_warns_once_with_ranks(backend: str, hook: bool) -> None:
    """The same story on every rank that lacks something."""
    for rank, said in enumerate(run_ranks(finish_like_ddp, None, hook, world_size=3, backend=backend)):
        (text,) = said
        assert f"in step 1 on rank {rank}." in text
        assert all(len(line) <= WIDTH for line in text.splitlines())
        assert "sometimes.weight, sometimes.bias on ranks 0, 2; used on rank 1, and their mean counts zeros" in text
        assert "Used on no rank, so their .grad stays None: never.weight, never.bias." in text


def lacking_later(find_unused: bool | None) -> list[str]:
    """Everything is used in steps 1 and 2; from step 3 on rank 1 lacks `sometimes`. What each rank says."""
    module = Branches()
    del module.never
    model = RingDP(module, find_unused_parameters=find_unused)
    said: list[str] = []
    for step in range(1, 6):
        model.zero_grad()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model(torch.ones(2, 4), use=step < 3 or dist.get_rank() != 1).sum().backward()
        said += [str(warning.message) for warning in caught if "without gradient" in str(warning.message)]
    return said


@pytest.mark.parametrize("backend", backends())
def test_who_lacks_nothing_says_nothing(backend: str) -> None:
    first, second, third = run_ranks(lacking_later, None, world_size=3, backend=backend)
    assert first == third == []
    assert len(second) == 1
    assert "in step 3 on rank 1.\nsometimes.weight, sometimes.bias on rank 1; used on ranks 0, 2" in second[0]
    assert run_ranks(lacking_later, True, world_size=3, backend=backend) == [[], [], []]


@on_ranks(backend=backends())
def test_expected_means_no_warning() -> None:
    for hook in (False, True):
        assert finish_like_ddp(True, hook) == []


@on_ranks((1, 2), backend=backends())
def test_forbidden_is_ddps_error_with_names() -> None:
    model = RingDP(Branches(), find_unused_parameters=False)
    x = torch.ones(2, 4)
    model(x, use=False).sum().backward()
    with pytest.raises(RuntimeError, match="Expected to have finished reduction in the prior iteration") as caught:
        model(x, use=False)
    with pytest.raises(RuntimeError, match="Expected to have finished reduction"):
        model._check_reducer_finalized()
    with pytest.raises(RuntimeError, match="Expected to have finished reduction"):
        model(x, use=False)
    text = str(caught.value)
    assert f"Parameter indices which did not receive grad for rank {dist.get_rank()}: 2 3 4 5" in text
    assert "sometimes.weight, sometimes.bias, never.weight, never.bias" in text
    if dist.get_backend() == "ring" and dist.get_world_size() > 1:
        assert "The other ranks' backwards stopped at the same place" in text


def forbidden_on_one_rank() -> tuple[str, str]:
    """Rank 1 alone leaves `sometimes` out: the others would wait for its bucket until the timeout."""
    model = RingDP(Branches(), find_unused_parameters=False)
    model.module.never.requires_grad_(False)
    try:
        for _ in range(2):
            model(torch.ones(2, 4), use=dist.get_rank() != 1).sum().backward()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def test_forbidden_on_one_rank_is_an_error_on_all() -> None:
    """Of ring's alone: gloo's operations have no names, and the other ranks wait."""
    for rank, outcome in enumerate(run_outcomes(forbidden_on_one_rank, world_size=3, backend="ring")):
        assert outcome.text is None, outcome.text
        kind, text = outcome.value
        assert "rank 1" in text
        assert "did not end: no gradient for sometimes.weight, sometimes.bias" in text
        if rank == 1:
            assert "Expected to have finished reduction in the prior iteration" in text
        else:
            assert kind == "MismatchError"
            assert "bucket 0: " in text


@on_ranks(backend=backends())
def test_forbidden_without_unused_parameters() -> None:
    model = RingDP(nn.Linear(4, 4), find_unused_parameters=False)
    for _ in range(3):
        model.zero_grad()
        model(torch.full((2, 4), float(dist.get_rank()))).sum().backward()
        assert model.module.weight.grad is not None
        torch.testing.assert_close(model.module.weight.grad, torch.full((4, 4), 1.0))
    model._check_reducer_finalized()


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


@pytest.mark.filterwarnings("ignore:.*without gradient")
@pytest.mark.parametrize("find_unused", [None, True])
@on_ranks(backend=backends())
def test_each_rank_uses_another_output(find_unused: bool | None) -> None:
    rank = dist.get_rank()
    model = RingDP(TwoHeads(), find_unused_parameters=find_unused)
    output = model(torch.ones(2, 4))
    (output["left"] if rank == 0 else output["deep"][0]).sum().backward()
    for head in (model.module.left, model.module.right):
        torch.testing.assert_close(head.bias.grad, torch.tensor([1.0]))  # 2 on one rank, 0 on the other


@on_ranks(backend=backends())
def test_a_rank_without_any_gradient_takes_part() -> None:
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


class Mixture(nn.Module):
    """Layer `i` is used where `use` has it; `large` is a bucket by itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(5))
        self.large = nn.Parameter(torch.ones(1 << 20))

    def forward(self, x: Tensor, use: set[int], *, large: bool = False) -> Tensor:
        for index in sorted(use):
            x = self.layers[index](x)
        return x + self.large.sum() if large else x


def skipping(hook: bool, find_unused: bool | None, arguments: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Layers 1 and 3 and `large` are unused at first, later used on some ranks: DDP's result, fewer bytes."""
    rank = dist.get_rank()
    ours = RingDP(Mixture(), find_unused_parameters=find_unused, skip_all_reduce_unused_params=True, **arguments)
    ddp = DistributedDataParallel(Mixture(), find_unused_parameters=True)
    if hook:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        ours.register_comm_hook(None, allreduce_hook)
        ddp.register_comm_hook(None, allreduce_hook)
    sent, buckets = [], []
    for step in range(6):
        use = {0, 2, 4} if step != 3 or rank != 1 else {0, 1, 2, 4}
        for model in (ours, ddp):
            model.zero_grad()
            x = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank))
            model(x, use, large=step == 4 and rank == 0).pow(2).sum().backward()
        sent.append(ours.stats().bytes)
        buckets.append(ours.stats().buckets)
        mine, theirs = gradients(ours), gradients(ddp)
        for name, expected in theirs.items():
            if expected is None:
                assert mine[name] is None, (step, name)
            else:
                torch.testing.assert_close(mine[name], expected, rtol=1e-5, atol=1e-6, msg=name)
    return sent, buckets


@pytest.mark.parametrize("backend", backends())
@pytest.mark.filterwarnings("ignore:.*without gradient")
@pytest.mark.parametrize(
    ("hook", "find_unused", "arguments"),
    [
        (False, True, {}),
        (True, True, {}),
        (False, None, {}),
        (False, True, {"bucket_cap_mb": 0.00005}),
        (False, True, {"gradient_as_bucket_view": False}),
    ],
)
def test_skipped_buckets(backend: str, hook: bool, find_unused: bool | None, arguments: dict[str, Any]) -> None:
    """What nobody uses is not sent, from the second layout on; what somebody uses after all is, in the same step."""
    layer, large = 20 * 4, 4 << 20
    for sent, buckets in run_ranks(skipping, hook, find_unused, arguments, world_size=3, backend=backend):
        assert sent[0] == 5 * layer + large
        assert sent[1] == sent[2] == sent[5] == 3 * layer
        assert sent[4] == 3 * layer + large
        assert 3 * layer < sent[3] <= 5 * layer
        assert buckets[1] < buckets[0]


@on_ranks(3, backend=backends())
def test_skipped_buckets_and_uneven_inputs() -> None:
    model = RingDP(Mixture(), find_unused_parameters=True, skip_all_reduce_unused_params=True)
    with model.join():
        for step in range(2 + 2 * dist.get_rank()):
            model.zero_grad()
            model(torch.full((1, 4), float(step + 1)), {0, 2, 4}).sum().backward()
            with torch.no_grad():
                for parameter in model.module.parameters():
                    if parameter.grad is not None:
                        parameter -= 0.1 * parameter.grad
    require_same_bits(model.module.parameters())
    name = "layers.0.weight"
    assert not torch.equal(model.module.get_parameter(name), Mixture().get_parameter(name))
