"""SyncBatchNorm on CPU tensors under RingDP: several ranks against one process with the batch of all."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ringdp.ddp.sync_batch_norm import SyncBatchNorm
from ringdp.ddp.wrapper import RingDP
from tests.train.harness import backends, on_ranks, require_same_bits, run_ranks


def batch(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Another mean on every rank, so that local statistics would be wrong."""
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * (rank + 1) + 3 * rank).to(dtype)


def layer_like_one_process(
    sizes: tuple[int, ...], inner: tuple[int, ...], dtype: torch.dtype, options: dict[str, Any], channels_last: bool
) -> None:
    """Output, gradients and running statistics of one layer; rank r has sizes[r] samples of [5, *inner]."""
    torch.manual_seed(0)
    alone = nn.SyncBatchNorm(5, **options).to(dtype if dtype == torch.float64 else torch.float32)
    if alone.affine:
        nn.init.normal_(alone.weight)
        nn.init.normal_(alone.bias)
    model = RingDP(nn.Sequential(nn.Identity(), nn.Conv1d(1, 1, 1), copy.deepcopy(alone))).module[2]
    assert isinstance(model, SyncBatchNorm)
    reference = nn.modules.batchnorm._BatchNorm.forward
    rank = dist.get_rank()
    start = sum(sizes[:rank])
    for _ in range(3):
        batches = [batch(r, (size, 5, *inner), dtype) for r, size in enumerate(sizes)]
        joined = torch.cat(batches).requires_grad_()
        mine = batches[rank].clone()
        if channels_last:
            mine = mine.contiguous(memory_format=torch.channels_last)
        mine.requires_grad_()
        expected = reference(alone, joined)
        output = model(mine)
        half = dtype == torch.bfloat16
        rtol, atol = (0.03, 0.05) if half else (1e-4, 2e-5)
        torch.testing.assert_close(output, expected[start : start + sizes[rank]], rtol=rtol, atol=atol)
        assert output.dtype == dtype
        upstream = torch.cos(torch.arange(joined.numel(), dtype=torch.float64)).view(joined.shape).to(dtype)
        expected.backward(upstream)
        output.backward(upstream[start : start + sizes[rank]])
        assert joined.grad is not None
        assert mine.grad is not None
        torch.testing.assert_close(mine.grad, joined.grad[start : start + sizes[rank]], rtol=rtol, atol=atol)
        for own, all_of_it in zip(model.parameters(), alone.parameters(), strict=True):
            assert own.grad is not None
            total = own.grad.clone()
            dist.all_reduce(total)
            torch.testing.assert_close(total, all_of_it.grad, rtol=1e-3, atol=0.3 if half else 1e-4)
    for one, joint in zip(model.buffers(), alone.buffers(), strict=True):
        torch.testing.assert_close(one, joint, rtol=1e-3, atol=1e-4)
        everybody = [torch.empty_like(one) for _ in sizes]
        dist.all_gather(everybody, one)
        assert all(torch.equal(other, one) for other in everybody)
    model.eval()
    alone.eval()
    shown = batch(7, (2, 5, *inner), dtype)
    torch.testing.assert_close(model(shown), reference(alone, shown), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("backend", backends())
@pytest.mark.parametrize(
    "sizes, inner, dtype, options, channels_last",
    [
        ((3, 5), (4, 2), torch.float32, {}, False),
        ((3, 5), (4, 2), torch.float32, {"momentum": None}, True),
        ((4, 0, 2), (), torch.float32, {"affine": False}, False),
        ((1, 1), (), torch.float64, {"eps": 1e-3, "momentum": 0.3}, False),
        ((2, 3), (2, 3, 2), torch.float32, {"track_running_stats": False}, False),
        ((4, 3), (6,), torch.bfloat16, {}, False),
    ],
)
def test_a_layer_is_the_one_of_the_joined_batch(
    backend: str,
    sizes: tuple[int, ...],
    inner: tuple[int, ...],
    dtype: torch.dtype,
    options: dict[str, Any],
    channels_last: bool,
) -> None:
    run_ranks(
        layer_like_one_process, sizes, inner, dtype, options, channels_last, world_size=len(sizes), backend=backend
    )


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(96, 8),
        nn.BatchNorm1d(8),
        nn.Linear(8, 3),
    )


@on_ranks(backend=backends())
def test_training_is_one_process_with_the_joined_batch() -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = RingDP(nn.SyncBatchNorm.convert_sync_batchnorm(network()))
    alone = network()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, alone)]
    for step in range(6):
        x = torch.randn(4 * ranks, 3, 6, 6, generator=torch.Generator().manual_seed(step))
        y = torch.arange(4 * ranks) % 3
        mine = slice(4 * rank, 4 * rank + 4)
        nn.functional.cross_entropy(model(x[mine]), y[mine]).backward()
        nn.functional.cross_entropy(alone(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, tensor in alone.state_dict().items():
        torch.testing.assert_close(model.module.state_dict()[name], tensor, rtol=1e-4, atol=1e-5, msg=name)
    require_same_bits(model.state_dict().values())


@on_ranks(backend=backends())
def test_copies_groups_and_refusals() -> None:
    """Copies and saved models keep working; a layer may have a group of its own; one value per channel is refused."""
    rank = dist.get_rank()
    model = RingDP(nn.SyncBatchNorm.convert_sync_batchnorm(network()))
    assert isinstance(model.module[1], nn.SyncBatchNorm)
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    x = batch(rank, (2, 3, 6, 6), torch.float32)
    expected = copy.deepcopy(model)(x)
    torch.testing.assert_close(torch.load(saved, weights_only=False)(x), expected, rtol=0, atol=0)

    groups = [dist.new_group([0]), dist.new_group([1])]
    local = RingDP(nn.SyncBatchNorm.convert_sync_batchnorm(network(), groups[rank]))
    torch.testing.assert_close(local(x), network()(x))

    layer = RingDP(nn.Sequential(nn.Linear(3, 3), nn.SyncBatchNorm(3)))
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        layer(torch.ones(1 - rank, 3))
    with pytest.raises(ValueError, match="expected at least 2D input"):
        model.module[1](torch.ones(3))


@on_ranks(backend=backends())
def test_a_half_module() -> None:
    """Parameters, statistics and inputs in half precision; computed in float32 inside."""
    for dtype in (torch.float16, torch.bfloat16):
        layer = nn.BatchNorm1d(5)
        model = RingDP(nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(layer).to(dtype)))
        batches = [batch(rank, (4, 5), dtype) for rank in range(dist.get_world_size())]
        output = model(batches[dist.get_rank()])
        assert output.dtype == dtype
        expected = nn.functional.batch_norm(torch.cat(batches).float(), None, None, training=True)
        mine = expected[4 * dist.get_rank() : 4 * dist.get_rank() + 4]
        torch.testing.assert_close(output.float(), mine, rtol=0.02, atol=0.02)
        output.pow(2).sum().backward()
        for tensor in (*[p.grad for p in model.parameters()], *[b for b in model.buffers() if b.is_floating_point()]):
            assert tensor is not None
            assert tensor.dtype == dtype
            assert tensor.isfinite().all()


@on_ranks(1, backend=backends())
def test_a_world_of_one() -> None:
    model = RingDP(nn.SyncBatchNorm.convert_sync_batchnorm(network()))
    x = batch(0, (2, 3, 6, 6), torch.float32)
    torch.testing.assert_close(model(x), network()(x))
