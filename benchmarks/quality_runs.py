"""Training with simulated ranks for `compression_quality.py`. Models and data are the examples'."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from simulated_ranks import SimulatedRanks
from torch import Tensor, nn
from torch.nn import functional

from ringdp import compression

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from examples import char_lm, digits

RANKS = 4
OVERFLOW_EVERY = 50
SCALE, GROWTH_INTERVAL = 2.0**16, 20


@dataclasses.dataclass(frozen=True)
class Method:
    """How gradients are averaged: a registered compressor's name, None for exact; with loss scaling or without."""

    compressor: str | None
    overflows: bool = False  # one rank's gradient is infinite in every fiftieth step


METHODS = {
    "exact": Method(None),
    "int8": Method("int8"),
    "int4": Method("int4"),
    "exact, overflows": Method(None, overflows=True),
    "int8, overflows": Method("int8", overflows=True),
    "fp16": Method("fp16"),
    "bf16": Method("bf16"),
}


class Averaged:
    """A model whose gradients are the mean over ranks that are simulated one after the other."""

    def __init__(self, model: nn.Module, method: Method, ranks: int) -> None:
        self.model, self.method, self.ranks = model, method, ranks
        self.named = dict(model.named_parameters())
        self.scaler = torch.amp.GradScaler("cpu", SCALE, growth_interval=GROWTH_INTERVAL, enabled=method.overflows)
        self.step = 0
        self.simulated: SimulatedRanks | None = None
        if method.compressor is not None:
            one = compression.get(method.compressor)
            assert one is not None
            counts = {name: it.numel() for name, it in self.named.items()}
            self.simulated = SimulatedRanks(counts, one, ranks, exact=exact_names(model))

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
        if self.simulated is not None:
            return self.simulated.average(gradients, factor)
        return [torch.stack(several).sum(0) / self.ranks for several in zip(*gradients, strict=True)]


def exact_names(model: nn.Module) -> list[str]:
    """The parameters that the rules leave exact unless told otherwise."""
    chosen = compression.assign("int8", (), dict(model.named_parameters()), dict(model.named_modules()))
    return [name for name, it in chosen.items() if it is None]


@functools.cache
def text() -> tuple[Tensor, Tensor, int]:
    """Text to train on and text that is not, as int64 numbers of characters, and how many characters there are."""
    raw = torch.frombuffer(bytearray(char_lm.read(400_000)), dtype=torch.uint8)
    data, alphabet = char_lm.encode(raw)
    cut = int(len(data) * (1 - char_lm.HELD_OUT))
    return data[:cut], data[cut:], len(alphabet)


def gpt_options(**changes: int) -> argparse.Namespace:
    """Of examples/char_lm.py."""
    return char_lm.parse([word for name, it in changes.items() for word in (f"--{name.replace('_', '-')}", str(it))])


def small_gpt_options(**changes: int) -> argparse.Namespace:
    """For a model of 0.12 M parameters and small batches."""
    return gpt_options(**{"width": 96, "layers": 1, "batch_size": 8, "context": 32} | changes)


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
    averaged = Averaged(model, method, RANKS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.lr, total_steps=options.steps, pct_start=0.1)
    draws = [torch.Generator().manual_seed(seed * 10_007 + rank) for rank in range(RANKS)]
    for step in range(options.steps if stop is None else stop):
        windows = [windows_of(training, options, draw) for draw in draws]
        averaged.backward([functools.partial(gpt_loss, model, it) for it in windows])
        if on_step is not None:
            on_step(step, averaged)
        averaged.scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        averaged.scaler.step(optimizer)
        averaged.scaler.update()
        schedule.step()
    return unseen_nats(model, unseen, options.context)


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


def digits_options(epochs: int) -> argparse.Namespace:
    """Of examples/digits.py."""
    return digits.parse(["--epochs", str(epochs)])


def train_digits(method: Method, seed: int, options: argparse.Namespace) -> float:
    """Accuracy of examples/digits.py's network on its test images, in percent."""
    training, test = digits.load_digits(seed)
    model = digits.build(seed)
    averaged = Averaged(model, method, RANKS)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)
    for batches in digits_batches(len(training), seed, options):
        parts = [(training.tensors[0][rows], training.tensors[1][rows]) for rows in batches]
        averaged.backward([functools.partial(_digits_loss, model, *part) for part in parts])
        averaged.scaler.step(optimizer)
        averaged.scaler.update()
    with torch.no_grad():
        images, labels = test.tensors
        return 100 * (model(images).argmax(dim=1) == labels).float().mean().item()


def digits_batches(images: int, seed: int, options: argparse.Namespace) -> Iterator[list[Tensor]]:
    """Which images each rank takes, step by step."""
    draw = torch.Generator().manual_seed(seed)
    each = options.batch_size * RANKS
    for _ in range(options.epochs):
        order = torch.randperm(images, generator=draw)
        for begin in range(0, images - each + 1, each):
            yield list(order[begin : begin + each].split(options.batch_size))


def _digits_loss(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(model(images), labels)


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
