"""A small GPT learns to write like the documentation of Python's standard library, character by character.

    python launch.py --nproc-per-node 2 examples/char_lm.py
    python examples/char_lm.py --steps 200                      # one rank, no launcher

The text are the docstrings of this Python's own library, so nothing is downloaded. At the end: bits per
character on text it has not seen, before and after, and a sample. If it has not learned more than how frequent each
character is, the exit code is 1.
"""

from __future__ import annotations

import argparse
import ast
import math
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm

import ringdp

HELD_OUT = 0.1  # of the text, its end


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    ringdp.init()
    data, alphabet = encode(same_on_all_ranks(options.characters))
    cut = int(len(data) * (1 - HELD_OUT))
    training, unseen = data[:cut], data[cut:]
    torch.manual_seed(options.seed)
    model = ringdp.RingDP(GPT(len(alphabet), options).to(ringdp.device()))
    before = bits_per_character(model.module, unseen, options)
    train(model, training, options)
    after = bits_per_character(model.module, unseen, options)
    by_frequency = entropy(training, unseen, len(alphabet))
    learned = after < by_frequency
    if ringdp.rank() == 0:
        ranks, parameters = ringdp.world_size(), sum(p.numel() for p in model.parameters())
        print(f"{ranks} rank{'s' if ranks > 1 else ''}, {parameters:,} parameters, {len(data):,} characters of text")
        print(f"  {'ok    ' if learned else 'FAILED'} bits per character on {len(unseen):,} unseen ones:", end=" ")
        print(f"{before:.3f} before, {after:.3f} after, {by_frequency:.3f} by their frequencies alone")
        print(f"sample:\n{sample(model.module, alphabet, options)}", flush=True)
    ringdp.shutdown()
    return 0 if learned else 1


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").strip(), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--steps", type=positive, default=500, help="steps to train (default %(default)s)")
    add("--batch-size", type=positive, default=16, help="windows of text per rank and step (default %(default)s)")
    add("--context", type=positive, default=64, help="characters the model looks back (default %(default)s)")
    add("--width", type=positive, default=96, help="numbers per character inside (default %(default)s)")
    add("--layers", type=positive, default=3, help="transformer blocks (default %(default)s)")
    add("--heads", type=positive, default=4, help="attention heads, a divisor of the width (default %(default)s)")
    add("--lr", type=float, default=3e-3, help="highest learning rate of AdamW (default %(default)s)")
    add("--characters", type=positive, default=400_000, help="of text to read, at most (default %(default)s)")
    add("--sample", type=positive, default=300, help="characters to write at the end (default %(default)s)")
    add("--seed", type=int, default=0, help="seed of weights, order and sample (default %(default)s)")
    options = parser.parse_args(arguments)
    if options.width % options.heads:
        parser.error(f"--width {options.width} is not divisible by --heads {options.heads}")
    return options


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return number


# The text.


def docstrings(folder: Path) -> Iterator[str]:
    """Of every module in the folder by name, then its classes and functions in their order; nothing is imported."""
    for path in sorted(folder.glob("[a-z]*.py")):
        tree = ast.parse(path.read_bytes())
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                text = ast.get_docstring(node)
                if text:
                    yield text


def read(characters: int) -> bytes:
    """At most so many ASCII characters of the standard library's docstrings."""
    parts, length = [], 0
    for text in docstrings(Path(sysconfig.get_path("stdlib"))):
        parts.append(text.encode("ascii", errors="ignore") + b"\n\n")
        length += len(parts[-1])
        if length >= characters:
            break
    return b"".join(parts)[:characters]


def same_on_all_ranks(characters: int) -> Tensor:
    """The text as rank 0's Python has it, uint8: the others may run another version."""
    text = torch.frombuffer(bytearray(read(characters)), dtype=torch.uint8) if ringdp.rank() == 0 else None
    length = torch.tensor([0 if text is None else len(text)], device=ringdp.device())
    dist.broadcast(length, 0)
    shared = torch.empty(int(length), dtype=torch.uint8) if text is None else text
    shared = shared.to(ringdp.device())
    dist.broadcast(shared, 0)
    return shared.cpu()


def encode(text: Tensor) -> tuple[Tensor, str]:
    """Each character's number in the alphabet, int64, and the alphabet."""
    used, numbers = torch.unique(text, return_inverse=True)
    return numbers, bytes(used.tolist()).decode("ascii")


# The model.


class GPT(nn.Module):
    """Characters ``[batch, length]`` to logits ``[batch, length, alphabet]``."""

    def __init__(self, alphabet: int, options: argparse.Namespace) -> None:
        super().__init__()
        self.characters = nn.Embedding(alphabet, options.width)
        self.positions = nn.Embedding(options.context, options.width)
        self.blocks = nn.Sequential(*(Block(options.width, options.heads) for _ in range(options.layers)))
        self.norm = nn.LayerNorm(options.width)
        self.head = nn.Linear(options.width, alphabet, bias=False)
        self.head.weight = self.characters.weight  # tied
        for table in (self.characters, self.positions):  # equal, or the place would outweigh the character
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        out: Tensor = self.head(self.norm(self.blocks(self.characters(x) + self.positions(places))))
        return out


class Block(nn.Module):
    """Attention to earlier characters, then a small network at each place; both are added to their input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.network = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.query_key_value(self.norm_1(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        heads = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(heads.transpose(1, 2).reshape(batch, length, width))
        return x + self.network(self.norm_2(x))


# Training and evaluation.


def train(model: ringdp.RingDP, data: Tensor, options: argparse.Namespace) -> None:
    device, length = ringdp.device(), options.context
    draw = torch.Generator().manual_seed(options.seed * 10_007 + ringdp.rank())  # every rank its own windows
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.lr, total_steps=options.steps, pct_start=0.1)
    bar = tqdm(range(options.steps), desc="training", disable=ringdp.rank() != 0)
    for step in bar:
        starts = torch.randint(len(data) - length, (options.batch_size, 1), generator=draw)
        windows = data[starts + torch.arange(length + 1)].to(device)
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 20 == 0:
            bar.set_postfix(bits=f"{loss.item() / math.log(2):.2f}")


@torch.no_grad()
def bits_per_character(model: nn.Module, data: Tensor, options: argparse.Namespace) -> float:
    """Over all of `data`, whose windows the ranks share; some may have one more than others, or none."""
    windows = data[: (len(data) - 1) // options.context * options.context + 1].unfold(
        0, options.context + 1, options.context
    )
    mine = windows[ringdp.rank() :: ringdp.world_size()]
    total = 0.0
    for part in mine.split(64):
        window = part.to(ringdp.device())
        logits = model(window[:, :-1]).flatten(0, 1)
        total += functional.cross_entropy(logits, window[:, 1:].flatten(), reduction="sum").item()
    count = mine.shape[0] * options.context
    return ringdp.metrics.mean(total / max(count, 1), count) / math.log(2)


def entropy(training: Tensor, unseen: Tensor, alphabet: int) -> float:
    """Bits per character of a model that has only the frequencies of the training text."""
    counts = torch.bincount(training, minlength=alphabet).double() + 1
    return -(counts / counts.sum()).log2()[unseen].mean().item()


@torch.no_grad()
def sample(model: nn.Module, alphabet: str, options: argparse.Namespace) -> str:
    draw = torch.Generator().manual_seed(options.seed)
    written = [alphabet.index("\n")]
    for _ in range(options.sample):
        window = torch.tensor([written[-options.context :]], device=ringdp.device())
        chances = functional.softmax(model(window)[0, -1] / 0.8, dim=0).cpu()
        written.append(int(torch.multinomial(chances, 1, generator=draw)))
    return "".join(alphabet[number] for number in written).strip()


if __name__ == "__main__":
    sys.exit(main())
