"""What happens to .grad: accumulation, no_sync, zeroing, kept and foreign gradients, several forwards and backwards."""

from __future__ import annotations

import gc
import re
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ringdp.ddp.wrapper import RingDP
from tests.train import models
from tests.train.harness import backends, on_ranks


def grads(model: nn.Module) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def pair(name: str = "mlp") -> tuple[RingDP, DistributedDataParallel]:
    return RingDP(models.build(name), bucket_cap_mb=0.001), DistributedDataParallel(models.build(name))


def loss(model: nn.Module, step: int) -> Tensor:
    x, y = models.batch(step, dist.get_rank())
    return nn.functional.cross_entropy(model(x), y)


def same(ours: RingDP, ddp: DistributedDataParallel) -> None:
    assert len(grads(ours)) == len(list(ours.parameters()))
    for one, other in zip(grads(ours), grads(ddp), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("set_to_none", [True, False])
@on_ranks(backend=backends())
def test_no_sync(set_to_none: bool) -> None:
    ours, ddp = pair()
    for window in range(3):
        for model in (ours, ddp):
            model.zero_grad(set_to_none=set_to_none)
            with model.no_sync():
                for micro in range(2):
                    loss(model, 10 * window + micro).backward()
            local = grads(model)
            loss(model, 10 * window + 5).backward()
            assert not torch.equal(local[0], grads(model)[0])
        same(ours, ddp)
    # Local until it is synchronised.
    ours.zero_grad()
    with ours.no_sync():
        loss(ours, 99).backward()
    gathered = [torch.zeros_like(grads(ours)[0]) for _ in range(2)]
    dist.all_gather(gathered, grads(ours)[0])
    assert not torch.equal(gathered[0], gathered[1])
    assert ours.stats().steps == 3


@on_ranks(backend=backends())
def test_backward_repeatedly() -> None:
    """Every backward averages; the sum of averages is the average of sums."""
    ours, _ = pair()
    total: list[Tensor] = []
    for step in range(3):
        other, _ = pair()
        loss(other, step).backward()
        total = [a + b for a, b in zip(total, grads(other), strict=True)] if total else grads(other)
        loss(ours, step).backward()
    for one, expected in zip(grads(ours), total, strict=True):
        torch.testing.assert_close(one, expected, rtol=1e-5, atol=1e-7)


@on_ranks(backend=backends())
def test_several_forwards_one_backward() -> None:
    ours, ddp = pair()
    for model in (ours, ddp):
        (loss(model, 0) + loss(model, 1)).backward()
    same(ours, ddp)


@on_ranks(backend=backends())
def test_several_forwards_several_backwards() -> None:
    """DDP forgets to average the second one; ours gives the sum of both averages."""
    ours, _ = pair()
    first, second = loss(ours, 0), loss(ours, 1)
    first.backward()
    second.backward()
    other, _ = pair()
    (loss(other, 0) + loss(other, 1)).backward()
    for one, expected in zip(grads(ours), grads(other), strict=True):
        torch.testing.assert_close(one, expected, rtol=1e-5, atol=1e-7)


@on_ranks(backend=backends())
def test_retain_graph() -> None:
    ours, _ = pair()
    value = loss(ours, 0)
    value.backward(retain_graph=True)
    once = grads(ours)
    value.backward()
    for one, expected in zip(grads(ours), once, strict=True):
        torch.testing.assert_close(one, 2 * expected)


@on_ranks(backend=backends())
def test_forward_without_backward() -> None:
    ours, _ = pair()
    loss(ours, 0)
    assert all(parameter.grad is None for parameter in ours.parameters())
    ours.eval()
    with torch.no_grad():
        loss(ours, 1)
    ours.train()
    loss(ours, 2)
    assert all(parameter.grad is None for parameter in ours.parameters())
    assert ours.stats().steps == 0
    loss(ours, 3).backward()
    assert ours.stats().steps == 1


@on_ranks(backend=backends())
def test_zeroing_both_ways() -> None:
    for set_to_none in (True, False):
        for by_optimizer in (True, False):
            ours, ddp = pair("convolutional")
            for step in range(4):
                for model in (ours, ddp):
                    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                    (optimizer if by_optimizer else model).zero_grad(set_to_none=set_to_none)
                    for parameter in model.parameters():
                        if step > 0 and not set_to_none:
                            assert parameter.grad is not None
                            assert not parameter.grad.any()
                        else:
                            assert parameter.grad is None
                    loss(model, step).backward()
                    optimizer.step()
                same(ours, ddp)


@on_ranks(backend=backends())
def test_keep_gradients() -> None:
    """A .grad that somebody still has keeps its values when the bucket is used again."""
    ours, _ = pair()
    loss(ours, 0).backward()
    kept = [parameter.grad for parameter in ours.parameters()]
    values = grads(ours)
    assert all(grad is not None for grad in kept)
    pointers = [grad.data_ptr() for grad in kept if grad is not None]
    for step in (1, 2):
        ours.zero_grad()
        loss(ours, step).backward()
    for grad, value in zip(kept, values, strict=True):
        torch.testing.assert_close(grad, value, rtol=0, atol=0)
    # Nobody has them: the same memory serves again.
    del kept, grad, value, values
    now = [p.grad.data_ptr() for p in ours.parameters() if p.grad is not None]
    ours.zero_grad()
    loss(ours, 3).backward()
    assert [p.grad.data_ptr() for p in ours.parameters() if p.grad is not None] == now
    assert pointers


@on_ranks(backend=backends())
def test_foreign_gradients() -> None:
    """Gradients that the user put there are added to, averaged and become parts of the bucket."""
    ours, ddp = pair("convolutional")
    for model in (ours, ddp):
        for parameter in model.parameters():
            parameter.grad = torch.full(parameter.shape, float(dist.get_rank() + 1))
        loss(model, 0).backward()
    same(ours, ddp)
    assert all(p.grad.stride() == p.stride() for p in ours.parameters() if p.grad is not None)


@on_ranks(backend=backends())
def test_detach_and_in_place() -> None:
    ours, _ = pair()
    loss(ours, 0).backward()
    for parameter in ours.parameters():
        assert parameter.grad is not None
        parameter.grad.detach_()
        parameter.grad.mul_(0.5)
        assert not parameter.grad.requires_grad
    nn.utils.clip_grad_norm_(ours.parameters(), 0.1)


@pytest.mark.filterwarnings("ignore:.*without gradient", "ignore:Using backward.. with create_graph=True")
@on_ranks(backend=backends())
def test_autograd_grad_does_not_reduce() -> None:
    ours, _ = pair()
    local = torch.autograd.grad(loss(ours, 0), list(ours.parameters()))
    assert all(parameter.grad is None for parameter in ours.parameters())
    assert ours.stats().steps == 0
    loss(ours, 0).backward()
    assert not torch.equal(local[0], grads(ours)[0])


@pytest.mark.filterwarnings("ignore:.*without gradient", "ignore:Using backward.. with create_graph=True")
@on_ranks(backend=backends())
def test_chosen_inputs() -> None:
    ours, _ = pair()
    chosen = [ours.module[0].weight, ours.module[0].bias]
    loss(ours, 0).backward(inputs=chosen)
    full, _ = pair()
    loss(full, 0).backward()
    for position, parameter in enumerate(ours.parameters()):
        if position < 2:
            torch.testing.assert_close(parameter.grad, list(full.parameters())[position].grad)
        else:
            assert parameter.grad is None


@pytest.mark.filterwarnings("ignore:.*without gradient", "ignore:Using backward.. with create_graph=True")
@on_ranks(backend=backends())
def test_double_backward() -> None:
    ours, ddp = pair()
    for model in (ours, ddp):
        x, y = models.batch(0, dist.get_rank())
        x.requires_grad_()
        value = nn.functional.cross_entropy(model(x), y)
        (slope,) = torch.autograd.grad(value, x, create_graph=True)
        (value + slope.pow(2).sum()).backward()
    # The last bias does not influence the slope; all get a gradient from the value.
    same(ours, ddp)


@pytest.mark.filterwarnings("ignore:.*without gradient", "ignore:Using backward.. with create_graph=True")
@on_ranks(backend=backends())
def test_create_graph() -> None:
    """DDP raises here; ours averages, and the gradients keep their graph."""
    ours, ddp = pair()
    loss(ours, 0).backward(create_graph=True)
    loss(ddp, 0).backward()
    same(ours, ddp)
    first = next(iter(ours.parameters())).grad
    assert first is not None
    assert first.requires_grad  # and its graph is still there
    for parameter in ours.parameters():
        parameter.grad = None


@pytest.mark.filterwarnings("ignore:.*without gradient", "ignore:Using backward.. with create_graph=True")
@on_ranks(backend=backends())
def test_tensor_hooks() -> None:
    ours, ddp = pair()
    after: list[str] = []
    for model in (ours, ddp):
        weight = model.module[0].weight
        weight.register_hook(lambda grad: grad * 3)
        model.module[2].weight.register_post_accumulate_grad_hook(lambda p: after.append(str(tuple(p.grad.shape))))
        loss(model, 0).backward()
    same(ours, ddp)
    assert len(after) == 2


@pytest.mark.filterwarnings("ignore:.*without gradient", "ignore:Using backward.. with create_graph=True")
@on_ranks(backend=backends())
def test_used_outside_forward() -> None:
    """A penalty on the weights themselves: their gradient comes from outside the wrapped forward as well."""
    ours, ddp = pair()
    for model in (ours, ddp):
        (loss(model, 0) + sum(parameter.pow(2).sum() for parameter in model.parameters())).backward()
    same(ours, ddp)


@on_ranks(backend="gloo")
def test_sparse_gradients() -> None:
    torch.manual_seed(0)
    results = []
    for kind in (RingDP, DistributedDataParallel):
        torch.manual_seed(0)
        model = kind(nn.Sequential(nn.Embedding(20, 4, sparse=True), nn.Linear(4, 2)))
        for step in range(2):
            model.zero_grad()
            model(torch.tensor([1, 3, 3 + dist.get_rank() + step])).sum().backward()
        grad = next(iter(model.parameters())).grad
        assert grad is not None
        assert grad.is_sparse
        results.append(grad.to_dense())
    torch.testing.assert_close(*results)


class Twice(nn.Module):
    """The same layer under two reentrant checkpoints: its hooks fire twice in one backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(12, 12)
        self.shared = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        from torch.utils.checkpoint import checkpoint

        hidden = self.first(x)
        for _ in range(2):
            hidden = checkpoint(self.shared, hidden, use_reentrant=True)
        result: Tensor = hidden
        return result


class TwiceTied(Twice):
    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(12, 12)
        self.again.weight, self.again.bias = self.shared.weight, self.shared.bias


def marked_twice(kind: type[Twice]) -> str:
    model = RingDP(kind())
    with pytest.raises(RuntimeError, match="Expected to mark a variable ready only once") as caught:
        model(torch.ones(2, 12)).sum().backward()
    return str(caught.value)


@on_ranks(backend=backends())
def test_hooks_that_fire_twice_are_an_error_with_the_layers_names() -> None:
    assert "It is used in shared (Linear)." in marked_twice(Twice)
    text = marked_twice(TwiceTied)
    (name,) = re.findall(r"with name shared\.(\w+)", text)
    assert f"It is used in shared (Linear), again (Linear), under the names shared.{name}, again.{name}." in text


@on_ranks(backend=backends())
def test_a_static_graph_counts_hooks_that_fire_twice() -> None:
    ours = RingDP(Twice(), static_graph=True, bucket_cap_mb=0.0001)
    ddp = DistributedDataParallel(Twice(), static_graph=True)
    for step in range(4):
        for model in (ours, ddp):
            model.zero_grad()
            model(models.batch(step, dist.get_rank())[0]).pow(2).sum().backward()
        same(ours, ddp)


@on_ranks(backend=backends())
def test_a_wrapper_that_is_gone_leaves_nothing() -> None:
    ours, _ = pair()
    value = loss(ours, 0)
    value.backward()
    module = ours.module
    gone = weakref.ref(ours)
    value = loss(ours, 1)  # a graph that still has the sink's hook
    del ours
    gc.collect()
    assert gone() is None
    module.zero_grad()
    value.backward()
    assert next(iter(module.parameters())).grad is not None
