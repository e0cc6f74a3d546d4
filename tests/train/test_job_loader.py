"""Job.loader where a batch has fewer samples than there are ranks, in a job that is not elastic."""

from __future__ import annotations

import torch

import ringdp
from tests.train.harness import run_ranks


def last_gradient(weight: str) -> tuple[int, list[float]]:
    torch.manual_seed(0)
    model = ringdp.RingDP(torch.nn.Linear(3, 1), weight=weight)
    job = ringdp.elastic.Job(model, torch.optim.SGD(model.parameters(), 0.1))
    data = torch.utils.data.TensorDataset(torch.arange(21.0).reshape(7, 3))
    loader = job.loader(data, 3, shuffle=False)
    rows = 0
    for _ in job.epochs(1):
        for (x,) in loader:
            if weight == "call":
                model.set_weight(len(x))
            model.zero_grad()
            model(x).square().mean().backward()
            rows += len(x)
    assert model.module.weight.grad is not None
    return rows, model.module.weight.grad.flatten().tolist()


def gradient_where_one_rank_has_validated() -> list[float]:
    model = ringdp.RingDP(torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)))
    # As after a forward without gradients, which a newcomer has not run: then no buffers are sent.
    model.require_forward_param_sync = ringdp.rank() == 1
    model.begin_again(7)
    model(torch.arange(12.0).reshape(4, 3)).square().mean().backward()
    gradient = model.module[0].weight.grad
    assert gradient is not None
    return gradient.flatten().tolist()


def test_ranks_that_begin_again_send_the_same_buffers() -> None:
    first, second = run_ranks(gradient_where_one_rank_has_validated, world_size=2, backend="ring")
    assert first == second


def test_a_rank_without_a_sample_counts_nothing_in_the_mean() -> None:
    torch.manual_seed(0)
    alone = torch.nn.Linear(3, 1)
    alone(torch.arange(21.0).reshape(7, 3)[6:]).square().mean().backward()
    assert alone.weight.grad is not None
    expected = alone.weight.grad.flatten().tolist()
    for weight in ("samples", "call"):
        for rows, gradient in run_ranks(last_gradient, weight, world_size=3, backend="ring"):
            assert (rows, gradient) == (3, expected)
