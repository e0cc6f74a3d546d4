"""TopK on a GPU: the codes, residuals and numbers of the CPU, of which the kernels select."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor

from ringdp import _C
from ringdp.compression.methods import sparse

pytestmark = pytest.mark.gpu

ROOM = 1000


def heavy(count: int, seed: int) -> Tensor:
    """Tails as gradients have them."""
    random = torch.Generator().manual_seed(seed)
    return torch.randn(count, generator=random) * torch.randn(count, generator=random).exp()


def check_select(x: Tensor, residual: Tensor | None, threshold: float, most: int) -> None:
    """The GPU's against the CPU's, by one call of the kernel."""
    code, left, found = sparse.select(x, residual, 1024.0, threshold, most)
    there = None if residual is None else residual.cuda()
    with mock.patch.object(_C, "cuda_select", wraps=_C.cuda_select) as kernel:
        its_code, its_left, its_found = sparse.select(x.cuda(), there, 1024.0, threshold, most)
    assert kernel.call_count == 1
    assert its_found == found
    assert (its_left is None) == (left is None)
    if not bool(x.isfinite().all()):  # then only the header counts
        assert its_code.numel() == code.numel()
        assert torch.equal(its_code[:8].cpu(), code[:8])
        return
    assert torch.equal(its_code.cpu(), code)
    if left is not None and its_left is not None:
        assert torch.equal(its_left.cpu().view(torch.int32), left.view(torch.int32))


@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize("count", [0, 1, 255, 256, 257, 8191, 8193, 20_011])
def test_what_is_selected_is_what_the_cpu_selects(count: int, feedback: bool) -> None:
    x, residual = heavy(count, 0), heavy(count, 1) if feedback else None
    for threshold in (0.0, 1.2, 2500.0):
        for most in (count, max(count // 50, 1)):
            check_select(x, residual, threshold, most)


@pytest.mark.parametrize("at", [3, 19_999])
@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_an_overflow_is_in_the_code_though_it_has_no_room_for_it(value: float, at: int) -> None:
    x = heavy(20_000, 2)
    x[at] = value
    check_select(x, None, 0.5, ROOM)
    code, _, found = sparse.select(x.cuda(), None, 1.0, 0.5, ROOM)
    assert found > ROOM
    assert bool(sparse.decode(code, x.numel()).isnan().all())
