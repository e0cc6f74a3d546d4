"""Parameters frozen and unfrozen after wrapping: noticed at the next forward on all ranks, or an error with names."""

from __future__ import annotations

import copy
import io
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed import distributed_c10d
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import ringdp
from ringdp.ddp.wrapper import RingDP
from ringdp.hooks import parameter_names
from tests.train import models
from tests.train.harness import backends, on_ranks, run_outcomes

Loss = Callable[[nn.Module, int], Tensor]


def local_loss(model: nn.Module, step: int) -> Tensor:
    x, y = models.batch(step, dist.get_rank())
    return nn.functional.cross_entropy(model(x), y)


def joined_loss(model: nn.Module, step: int) -> Tensor:
    x, y = models.joined_batch(step, dist.get_world_size())
    return nn.functional.cross_entropy(model(x), y)


def train(model: nn.Module, loss: Loss, steps: range, *, frozen: set[str]) -> None:
    """Freezes what `frozen` names (bare names), unfreezes everything else, then trains."""
    for name, parameter in bare(model).named_parameters():
        parameter.requires_grad_(name not in frozen)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in steps:
        optimizer.zero_grad()
        loss(model, step).backward()
        optimizer.step()


def bare(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, RingDP) else model


def same(ours: RingDP, alone: nn.Module) -> None:
    for (name, one), other in zip(ours.module.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6, msg=name)


def named(model: RingDP) -> set[str]:
    """Those in some bucket."""
    listed = (name.split(": ", 1)[1].split(", ") for name in model.reducer.plan.bucket_names())
    return {name for names in listed for name in names}


NAMES = {"0.weight", "0.bias", "2.weight", "2.bias", "4.weight", "4.bias"}
PHASES: list[set[str]] = [{"0.weight"}, set(), {"2.weight", "2.bias"}, {"0.bias", "4.weight"}, set()]


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"find_unused_parameters": True},
        {"find_unused_parameters": False},
        {"static_graph": True},
        {"hook": True},
        {"gradient_as_bucket_view": False},
        {"skip_all_reduce_unused_params": True},
    ],
    ids=str,
)
@on_ranks(backend=backends())
def test_what_is_frozen_is_not_sent_and_what_is_unfrozen_is(arguments: dict[str, Any]) -> None:
    """Frozen from the start, unfrozen, others frozen: after every phase the parameters are those of one process."""
    arguments = dict(arguments)
    hook = arguments.pop("hook", False)
    module = models.build("mlp", seed=dist.get_rank())  # the frozen one, too, becomes rank 0's
    alone = models.build("mlp", seed=0)
    for model in (module, alone):
        model.get_parameter("0.weight").requires_grad_(False)
    ours = RingDP(module, bucket_cap_mb=0.001, **arguments)
    seen: list[set[str]] = []

    def listen(state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        seen[-1].update(parameter_names(bucket))
        return default_hooks.allreduce_hook(state, bucket)  # type: ignore[arg-type]

    if hook:
        ours.register_comm_hook(None, listen)
    for phase, frozen in enumerate(PHASES):
        steps = range(10 * phase, 10 * phase + 3)
        seen.append(set())
        train(ours, local_loss, steps, frozen=frozen)
        train(alone, joined_loss, steps, frozen=frozen)
        same(ours, alone)
        assert named(ours) == NAMES - frozen
        if hook:
            assert seen[-1] == NAMES - frozen


@on_ranks(backend=backends())
def test_between_accumulation_steps() -> None:
    """What a parameter got under no_sync before it was frozen is averaged, once; frozen layers get nothing more."""
    ours, alone = RingDP(models.build("mlp"), bucket_cap_mb=0.001), models.build("mlp")
    train(ours, local_loss, range(2), frozen=set())
    train(alone, joined_loss, range(2), frozen=set())
    for model, loss in ((ours, local_loss), (alone, joined_loss)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.zero_grad()
        with ours.no_sync():
            loss(model, 10).backward()
            loss(model, 11).backward()
        bare(model)[2].requires_grad_(False)  # type: ignore[index]
        loss(model, 12).backward()
        optimizer.step()
    same(ours, alone)
    values = [parameter.grad.clone() for parameter in ours.module[2].parameters() if parameter.grad is not None]
    assert len(values) == 2
    ours.zero_grad(set_to_none=False)
    local_loss(ours, 13).backward()
    assert not any(bool(parameter.grad.any()) for parameter in ours.module[2].parameters())
    # Its own memory: nobody keeps a whole bucket alive for a frozen parameter.
    for parameter in ours.module[2].parameters():
        assert parameter.grad is not None
        assert parameter.grad.untyped_storage().nbytes() == parameter.numel() * parameter.element_size()


@on_ranks(backend=backends())
def test_only_one_rank_has_something_left() -> None:
    """Under no_sync rank 1 alone used the layer: rank 0 has no gradient there, and gets the mean as well."""
    ours = RingDP(nn.ModuleDict({"a": nn.Linear(2, 1, bias=False), "b": nn.Linear(2, 1, bias=False)}))
    ours.module.forward = lambda x, which: sum(ours.module[name](x).sum() for name in which)
    with ours.no_sync():
        ours(torch.ones(1, 2), "ab" if dist.get_rank() == 1 else "a").backward()
    ours.module["b"].requires_grad_(False)
    ours(torch.ones(1, 2), "ab").backward()
    torch.testing.assert_close(ours.module["b"].weight.grad, torch.full((1, 2), 0.5))
    torch.testing.assert_close(ours.module["a"].weight.grad, torch.full((1, 2), 2.0))


@on_ranks(backend=backends())
def test_everything_frozen() -> None:
    ours, alone = RingDP(models.build("mlp"), bucket_cap_mb=0.001), models.build("mlp")
    for phase, frozen in enumerate([set(), NAMES, set()]):
        steps = range(10 * phase, 10 * phase + 2)
        if frozen:
            ours.requires_grad_(False)
            steps_before = ours.stats().steps
            for step in steps:
                assert not local_loss(ours, step).requires_grad
                x = torch.ones(2, 12, requires_grad=True)
                ours(x).sum().backward()  # nothing to average on the way to the input
                assert x.grad is not None
            assert ours.reducer.plan.layout() == []
            assert ours.stats().steps == steps_before
            copy.deepcopy(ours)
        else:
            train(ours, local_loss, steps, frozen=frozen)
            train(alone, joined_loss, steps, frozen=frozen)
            same(ours, alone)


@on_ranks(backend=backends())
def test_copies() -> None:
    ours, alone = RingDP(models.build("mlp")), models.build("mlp")
    train(ours, local_loss, range(2), frozen=set())
    train(alone, joined_loss, range(2), frozen=set())
    train(ours, local_loss, range(2, 4), frozen={"0.weight"})
    train(alone, joined_loss, range(2, 4), frozen={"0.weight"})
    stream = io.BytesIO()
    torch.save(ours, stream)
    stream.seek(0)
    for other in (copy.deepcopy(ours), torch.load(stream, weights_only=False)):
        reference = copy.deepcopy(alone)
        assert named(other) == NAMES - {"0.weight"}
        for phase, frozen in enumerate([{"0.weight"}, set(), {"2.bias"}]):
            steps = range(10 * phase, 10 * phase + 2)
            train(other, local_loss, steps, frozen=frozen)
            train(reference, joined_loss, steps, frozen=frozen)
            same(other, reference)


@on_ranks(backend=backends())
def test_seen_when_it_counts() -> None:
    """Neither evaluation nor a forward under no_sync asks the other ranks; the next forward that synchronises does."""
    ours = RingDP(models.build("mlp"), bucket_cap_mb=0.001)
    local_loss(ours, 0).backward()
    if dist.get_rank() == 0:
        ours.module[0].requires_grad_(False)
        with torch.no_grad():
            local_loss(ours, 1)
        with ours.no_sync():
            local_loss(ours, 1).backward()
    else:
        ours.module[0].requires_grad_(False)
    ours.zero_grad()
    local_loss(ours, 2).backward()
    assert ours.module[0].weight.grad is None
    mine = ours.module[2].weight.grad.clone()
    dist.all_reduce(mine)
    torch.testing.assert_close(mine / dist.get_world_size(), ours.module[2].weight.grad)


@on_ranks(backend=backends())
def test_before_the_backward() -> None:
    """Two forwards before one backward, frozen in between: the old graph's gradient for it is left out."""
    ours, alone = RingDP(models.build("mlp")), models.build("mlp")
    for model, loss in ((ours, local_loss), (alone, joined_loss)):
        first = loss(model, 0)
        bare(model)[0].requires_grad_(False)  # type: ignore[index]
        (first + loss(model, 1)).backward()
    for (name, one), other in zip(ours.module.named_parameters(), alone.parameters(), strict=True):
        if name.startswith("0."):
            assert one.grad is None
            assert other.grad is None
        else:
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-5, atol=1e-6, msg=name)


def all_are_here() -> None:
    """Beside the group: when this returns, no rank has an operation under way."""
    store: Any = distributed_c10d._get_default_store()
    store.set(f"here{dist.get_rank()}", "")
    store.wait([f"here{rank}" for rank in range(dist.get_world_size())])


def disagree(frozen: list[list[str]]) -> tuple[str, str, float]:
    """Each rank freezes its own list; what the step raises, and how long it took."""
    ours = RingDP(models.build("mlp"), bucket_cap_mb=0.001)
    local_loss(ours, 0).backward()
    all_are_here()
    for name in frozen[dist.get_rank()]:
        ours.module.get_parameter(name).requires_grad_(False)
    began = time.monotonic()
    try:
        local_loss(ours, 1).backward()
    except Exception as error:
        took = time.monotonic() - began
        with pytest.raises(ringdp.RingError, match="reducing gradients failed in step"):
            ours(torch.ones(1, 12))
        return type(error).__name__, str(error), took
    return "", "", 0.0


@pytest.mark.parametrize("backend", backends())
def test_ranks_that_disagree_get_the_names(backend: str) -> None:
    lists = [["0.weight"], ["0.weight", "2.bias"], ["0.weight", "2.bias", "4.weight"]]
    for outcome in run_outcomes(disagree, lists, world_size=3, backend=backend):
        assert outcome.text is None, outcome.text
        kind, text, took = outcome.value
        assert kind == "MismatchError"
        assert "2.bias" in text
        assert took < 10
        if backend == "gloo":  # there the flags are compared by the ranks themselves
            assert "2.bias requires grad on rank 0 and not on ranks 1, 2." in text
            assert "4.weight requires grad on ranks 0, 1 and not on rank 2." in text


def test_a_rank_that_froze_alone() -> None:
    """On ring: gloo's operations have no names, and the ranks would wait for each other."""
    for outcome in run_outcomes(disagree, [[], ["2.weight"], []], world_size=3, backend="ring"):
        assert outcome.text is None, outcome.text
        kind, text, took = outcome.value
        assert kind == "MismatchError"
        assert "2.weight requires grad no longer" in text
        assert "rank 1" in text
        assert took < 10
