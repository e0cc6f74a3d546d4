"""Training with simulated ranks for `compression_quality.py`. Models and data are the examples'."""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.compression.exchanged_ranks import ExchangedRanks
from examples import char_lm
from ringdp import compression
from ringdp.compression import DGC, PowerSGD, RandomK, Sign, TopK

RANKS = 4
OVERFLOW_EVERY = 50
SCALE, GROWTH_INTERVAL = 2.0**16, 20
SGD_LR, SGD_MOMENTUM, SGD_CLIP = 0.5, 0.9, 0.5
SGD_EMBEDDING_STD = 0.2
"""What exact SGD trains the GPT best with, of those tried; from the example's deviation, 0.02, it learns far slower."""


@dataclasses.dataclass(frozen=True)
class Method:
    """How gradients are averaged.

    Attributes:
        compressor: a name or an object; None for exact.
        overflows: under loss scaling, one rank's gradient is infinite in every fiftieth step.
        exact_steps: so many steps at the beginning are exact.
        lr_factor: of the learning rate, for methods that need one of their own.
    """

    compressor: Any
    overflows: bool = False
    exact_steps: int = 0
    lr_factor: float = 1.0

    @property
    def momentum_on_ranks(self) -> bool:
        """The optimizer has none then."""
        return isinstance(getattr(self.compressor, "error_feedback", None), DGC)


def dgc(ramp_steps: int, clip: float | None = None) -> Method:
    """Deep Gradient Compression at 1 %, momentum 0.9 on the ranks: for SGD alone."""
    return Method(TopK(0.01, ramp_steps=ramp_steps, error_feedback=DGC(0.9, clip=clip)))


METHODS = {
    "exact": Method(None),
    "int8": Method("int8"),
    "int4": Method("int4"),
    "exact, overflows": Method(None, overflows=True),
    "int8, overflows": Method("int8", overflows=True),
    **{name: Method(name) for name in ("fp16", "bf16", "int6", "int5", "nf4", "topk", "randomk", "sign", "signsgd")},
    **{name: Method(name) for name in ("qsgd", "terngrad", "powersgd")},
    "topk 10%": Method(TopK(0.1)),
    "topk, ramp 250": Method(TopK(0.01, ramp_steps=250)),
    "topk, ramp 500": Method(TopK(0.01, ramp_steps=500)),
    "topk DGC": dgc(0),
    **{f"topk DGC, ramp {steps}": dgc(steps) for steps in (100, 250, 500)},
    "topk DGC, ramp 500, clip 0.3": dgc(500, clip=0.3),
    **{f"powersgd, {steps} exact": Method("powersgd", exact_steps=steps) for steps in (100, 250, 500)},
    "powersgd rank 8": Method(PowerSGD(8)),
    "randomk 10%": Method(RandomK(0.1)),
    "sign, 100 exact": Method("sign", exact_steps=100),
    "sign, block 32": Method(Sign(block=32)),
    "signsgd, lr/100": Method("signsgd", lr_factor=0.01),
}


def ranks_of(model: nn.Module, method: Method, ranks: int) -> ExchangedRanks | None:
    """Who averages; None for exact."""
    if method.compressor is None:
        return None
    shapes = {name: tuple(it.shape) for name, it in model.named_parameters()}
    return ExchangedRanks(shapes, compression.get(method.compressor), ranks, exact=exact_names(model))


class Averaged:
    """A model whose gradients are the mean over ranks that are simulated one after the other."""

    def __init__(self, model: nn.Module, method: Method, ranks: int) -> None:
        self.model, self.method, self.ranks = model, method, ranks
        self.named = dict(model.named_parameters())
        self.scaler = torch.amp.GradScaler("cpu", SCALE, growth_interval=GROWTH_INTERVAL, enabled=method.overflows)
        self.step = 0
        self.simulated = ranks_of(model, method, ranks)

    def backward(self, losses: Sequence[Callable[[], Tensor]]) -> float:
        """Set each parameter's grad, loss scale and all, from the ranks' losses; returns their mean."""
        gradients, total = [], 0.0
        for loss in losses:
            self.model.zero_grad()
            value = loss()
            self.scaler.scale(value).backward()
            total += value.item()
            gradients.append([one.grad for one in self.named.values() if one.grad is not None])
        self.step += 1
        if self.method.overflows and self.step % OVERFLOW_EVERY == 0:
            gradients[self.step // OVERFLOW_EVERY % self.ranks][0].view(-1)[0] = torch.inf
        factor = self.scaler.get_scale() if self.method.overflows else 1.0
        for parameter, mean in zip(self.named.values(), self._average(gradients, factor), strict=True):
            parameter.grad = mean
        return total / self.ranks

    def _average(self, gradients: Sequence[Sequence[Tensor]], factor: float) -> list[Tensor]:
        if self.simulated is not None and self.step > self.method.exact_steps:
            return self.simulated.average(gradients, factor)
        if self.simulated is not None:
            self.simulated.step += 1
        return [torch.stack(several).sum(0) / self.ranks for several in zip(*gradients, strict=True)]


def exact_names(model: nn.Module) -> list[str]:
    """The parameters that the rules leave exact unless told otherwise."""
    chosen = compression.assign("int8", dict(model.named_parameters()), dict(model.named_modules()))
    return [name for name, it in chosen.items() if it is None]


@functools.cache
def text() -> tuple[Tensor, Tensor, int]:
    """Text to train on and text that is not, as int64 numbers of characters, and how many characters there are."""
    raw = torch.frombuffer(bytearray(char_lm.read(400_000)), dtype=torch.uint8)
    data, alphabet = char_lm.encode(raw)
    cut = int(len(data) * (1 - char_lm.HELD_OUT))
    return data[:cut], data[cut:], len(alphabet)


def gpt_options(*, optimizer: str = "adamw", sgd_lr: float = SGD_LR, **changes: int) -> argparse.Namespace:
    """Of examples/char_lm.py, and which optimizer."""
    words = [word for name, it in changes.items() for word in (f"--{name.replace('_', '-')}", str(it))]
    options = char_lm.parse(words)
    options.optimizer, options.sgd_lr = optimizer, sgd_lr
    return options


def small_gpt_options(*, optimizer: str = "adamw", sgd_lr: float = SGD_LR, **changes: int) -> argparse.Namespace:
    """For a model of 0.12 M parameters and small batches."""
    return gpt_options(
        optimizer=optimizer, sgd_lr=sgd_lr, **{"width": 96, "layers": 1, "batch_size": 8, "context": 32} | changes
    )


def train_gpt(
    method: Method,
    seed: int,
    options: argparse.Namespace,
    *,
    stop: int | None = None,
    on_step: Callable[[int, Averaged], None] | None = None,
) -> float:
    """Nats per character on the unseen text after `stop` or all of ``options.steps`` steps of `RANKS` ranks."""
    training, unseen, alphabet = text()
    torch.manual_seed(seed)
    model = char_lm.GPT(alphabet, options)
    if options.optimizer == "sgd":
        for table in (model.characters, model.positions):
            nn.init.normal_(table.weight, std=SGD_EMBEDDING_STD)
    averaged = Averaged(model, method, RANKS)
    optimizer = gpt_optimizer(model, method, options)
    lr = optimizer.param_groups[0]["lr"]
    clipped = optimizer.param_groups[-1]["params"] if method.momentum_on_ranks else list(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, lr, total_steps=options.steps, pct_start=0.1, cycle_momentum=isinstance(optimizer, torch.optim.AdamW)
    )
    draws = [torch.Generator().manual_seed(seed * 10_007 + rank) for rank in range(RANKS)]
    for step in range(options.steps if stop is None else stop):
        windows = [windows_of(training, options, draw) for draw in draws]
        averaged.backward([functools.partial(gpt_loss, model, it) for it in windows])
        if on_step is not None:
            on_step(step, averaged)
        averaged.scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(clipped, 1.0 if options.optimizer == "adamw" else SGD_CLIP)
        averaged.scaler.step(optimizer)
        averaged.scaler.update()
        schedule.step()
    return unseen_nats(model, unseen, options.context)


def gpt_optimizer(model: nn.Module, method: Method, options: argparse.Namespace) -> torch.optim.Optimizer:
    """AdamW as in examples/char_lm.py, or SGD with momentum, but not for what has its momentum on the ranks."""
    if options.optimizer == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=options.lr * method.lr_factor, betas=(0.9, 0.95))
    groups = sgd_groups(model, method.momentum_on_ranks, exact_names(model))
    return torch.optim.SGD(groups, lr=options.sgd_lr * method.lr_factor)


def sgd_groups(model: nn.Module, momentum_on_ranks: bool, exact: Sequence[str]) -> list[dict[str, Any]]:
    """Parameters of SGD with momentum. Those with momentum on the ranks come first and have none in the optimizer."""
    named = dict(model.named_parameters())
    if not momentum_on_ranks:
        return [{"params": list(named.values()), "momentum": SGD_MOMENTUM}]
    compressed = [it for name, it in named.items() if name not in exact]
    others = [named[name] for name in named if name in exact]
    return [{"params": compressed, "momentum": 0.0}, {"params": others, "momentum": SGD_MOMENTUM}]


def windows_of(data: Tensor, options: argparse.Namespace, draw: torch.Generator) -> Tensor:
    starts = torch.randint(len(data) - options.context, (options.batch_size, 1), generator=draw)
    return data[starts + torch.arange(options.context + 1)]


def gpt_loss(model: nn.Module, windows: Tensor) -> Tensor:
    return functional.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


@torch.no_grad()
def unseen_nats(model: nn.Module, unseen: Tensor, context: int) -> float:
    windows = unseen[: (len(unseen) - 1) // context * context + 1].unfold(0, context + 1, context)
    total = sum(gpt_loss(model, part).item() * len(part) for part in windows.split(64))
    return total / len(windows)


def gradients_of_ranks(options: argparse.Namespace, ranks: int, step: int) -> list[dict[str, Tensor]]:
    """Of each rank, by name, where they are compressed; after `step` steps of exact training."""
    taken: list[nn.Module] = []
    train_gpt(METHODS["exact"], 0, options, stop=step, on_step=lambda _, averaged: taken.append(averaged.model))
    model, training, result = taken[-1], text()[0], []
    exact = exact_names(model)
    for rank in range(ranks):
        model.zero_grad()
        draw = torch.Generator().manual_seed(1_000_003 + rank)
        gpt_loss(model, windows_of(training, options, draw)).backward()
        named = {name: it.grad for name, it in model.named_parameters() if name not in exact}
        result.append({name: it.clone() for name, it in named.items() if it is not None})
    return result
