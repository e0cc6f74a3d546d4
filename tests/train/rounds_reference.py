"""Workers in one process: what DiLoCo must come to, in plain loops; and the small models that tests train by it."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ringdp.rounds.fragments import dealt

MOMENTUM = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
Optimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def model(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2)).to(dtype)


def batch(rank: int, step: int, dtype: torch.dtype = torch.float64, samples: int = 8) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1000 * rank + step)
    x = torch.randn(samples, 6, generator=draw, dtype=torch.float64)
    return x.to(dtype), torch.stack([x.sin().sum(1), (x * x).sum(1)], 1).to(dtype) + rank


def loss_of(module: Callable[[Tensor], Tensor], rank: int, step: int, dtype: torch.dtype = torch.float64) -> Tensor:
    x, y = batch(rank, step, dtype)
    return nn.functional.mse_loss(module(x), y)


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.02, momentum=0.9, weight_decay=0.01)


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


@dataclasses.dataclass(frozen=True)
class Rule:
    """As the arguments of DiLoCo."""

    every: int
    fragments: int = 1
    delay: int = 0
    mix: float = 0.0
    lr: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True
    grows: int = 0  # above 0: the momentum of a fragment's n-th landing is n / (n + grows), at most `momentum`

    def momentum_of(self, landing: int) -> float:
        return min(self.momentum, landing / (landing + self.grows)) if self.grows else self.momentum


AUTO = Rule(0, lr=1.0, momentum=0.8, grows=9)


def paper(workers: int, steps: int, rule: Rule, inner: Optimizer = sgd, samples: Sequence[float] = ()) -> list[Tensor]:
    """The global parameters after so many steps and a last round, arXiv 2311.08105, algorithm 1, and streaming."""
    models = [model() for _ in range(workers)]
    optimizers = [inner(list(one.parameters())) for one in models]
    total = [p.detach().clone() for p in models[0].parameters()]
    momenta = [torch.zeros_like(p) for p in total]
    weights = torch.tensor(samples or [1.0] * workers, dtype=torch.float64)
    of_fragment = dealt([p.numel() for p in total], rule.fragments)
    flying: dict[int, tuple[int, dict[int, Tensor]]] = {}
    left, landed = [0] * rule.fragments, [0] * rule.fragments

    def land(fragment: int, mix: float) -> None:
        _, means = flying.pop(fragment)
        landed[fragment] += 1
        momentum = rule.momentum_of(landed[fragment])
        for i, mean in means.items():
            momenta[i] = momentum * momenta[i] + mean
            total[i] = total[i] - rule.lr * (mean + momentum * momenta[i] if rule.nesterov else momenta[i])
            for one in models:
                p = list(one.parameters())[i]
                p.data = mix * p.data + (1 - mix) * total[i]

    def leave(fragment: int, step: int) -> None:
        left[fragment] = step
        means = {}
        for i in of_fragment[fragment]:
            deltas = torch.stack([total[i] - list(one.parameters())[i].detach() for one in models])
            means[i] = torch.tensordot(weights, deltas, 1) / weights.sum()
        flying[fragment] = (step + rule.delay, means)

    for step in range(1, steps + 1):
        for rank, (one, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            loss_of(one, rank, step).backward()
            optimizer.step()
        for fragment in [f for f, (when, _) in flying.items() if when <= step]:
            land(fragment, rule.mix)
        at = (step - 1) % rule.every + 1
        for fragment in range(rule.fragments):
            if -(-(fragment + 1) * rule.every // rule.fragments) == at:
                leave(fragment, step)
                if rule.delay == 0:
                    land(fragment, rule.mix)
    for fragment in list(flying):
        land(fragment, rule.mix)
    for fragment in range(rule.fragments):
        if left[fragment] < steps:
            leave(fragment, steps)
            land(fragment, 0.0)
    return total


def two_bits(v: Tensor, kept: int, chunk: int = 4096) -> Tensor:
    """Of each chunk the largest, as the mean of those below or of those above the mean of their magnitudes."""
    out = torch.zeros_like(v)
    for x, sent in zip(v.flatten().split(chunk), out.view(-1).split(chunk), strict=True):
        places = x.abs().topk(min(kept, x.numel())).indices
        magnitudes = x[places].abs()
        high = magnitudes > magnitudes.mean()
        for group in (high, ~high):
            if group.any():
                sent[places[group]] = x[places[group]].sign() * magnitudes[group].mean().float().bfloat16().double()
    return out


def sparse_paper(
    workers: int, steps: int, every: int, kept: int, decay: float, lr: float = 1.0, samples: Sequence[float] = ()
) -> list[Tensor]:
    """arXiv 2508.15706, algorithm 1: the global parameters after so many steps and a last round."""
    models = [model() for _ in range(workers)]
    optimizers = [sgd(list(one.parameters())) for one in models]
    total = [p.detach().clone() for p in models[0].parameters()]
    errors = [[torch.zeros_like(p) for p in total] for _ in models]
    weights = torch.tensor(samples or [1.0] * workers, dtype=torch.float64)
    for step in range(1, steps + 1):
        for rank, (one, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            loss_of(one, rank, step).backward()
            optimizer.step()
        if step % every and step < steps:
            continue
        for i, p in enumerate(total):
            sent = []
            for one, error in zip(models, errors, strict=True):
                error[i] = decay * error[i] + p - list(one.parameters())[i].detach()
                sent.append(two_bits(error[i], kept))
                error[i] = error[i] - sent[-1]
            total[i] = p - lr * torch.tensordot(weights, torch.stack(sent), 1) / weights.sum()
            for one in models:
                list(one.parameters())[i].data = total[i].clone()
    return total


def averaged_gradients(workers: int, steps: int, inner: Optimizer = sgd) -> list[Tensor]:
    """One model, the mean of all workers' gradients in every step."""
    one = model()
    optimizer = inner(list(one.parameters()))
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        (sum(loss_of(one, rank, step) for rank in range(workers)) / workers).backward()  # type: ignore[union-attr]
        optimizer.step()
    return [p.detach() for p in one.parameters()]


def same_start() -> nn.Module:
    return copy.deepcopy(model())
