"""A masked language model: the model sees text with holes and fills them, as BERT is trained.

    python launch.py --nproc-per-node 2 examples/masked_lm.py
    python launch.py --nproc-per-node 2 examples/masked_lm.py --model roberta  # Hugging Face's RoBERTa, in RingDP
    python examples/masked_lm.py                                               # one rank, no launcher

The text are the docstrings of this Python's own library, so nothing is downloaded; RoBERTa begins with random weights.
At the end: how many of the hidden characters of unseen text are right, against always the most frequent one. If the
model is not better than that, the exit code is 1.
"""

from __future__ import annotations

import argparse
import ast
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

import ringdp

ALPHABET = 129  # ASCII, and the hole
HOLE = 128
HIDDEN = 0.15  # of the characters
IGNORED = -100  # as cross_entropy and transformers mark what is not to be predicted


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    device = ringdp.init()
    torch.manual_seed(options.seed)
    training, unseen = (TensorDataset(part) for part in read(options))
    loader = DataLoader(training, batch_size=options.batch_size, shuffle=True, drop_last=True)
    network = hugging_face(options) if options.model == "roberta" else Encoder(options)
    look_at_neighbours(network)
    model, loader, test_loader = ringdp.prepare(network, loader, DataLoader(unseen, batch_size=64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.lr, total_steps=options.steps)
    torch.manual_seed(options.seed + 1 + ringdp.rank())  # other holes and dropout on each rank
    bar = tqdm(total=options.steps, desc="training", disable=ringdp.rank() != 0)
    model.train()
    steps = 0
    while steps < options.steps:
        for (text,) in loader:
            seen, wanted = with_holes(text.to(device), None)
            loss = functional.cross_entropy(scores(model, seen).flatten(0, 1), wanted.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            bar.update()
            steps += 1
            if steps == options.steps:
                break
    bar.close()
    right, by_frequency = evaluate(model, test_loader, training.tensors[0], device)
    last, learned = ringdp.metrics.mean(loss.item()), right > by_frequency
    ranks, parameters = ringdp.world_size(), sum(p.numel() for p in model.parameters())
    ringdp.print(f"{ranks} rank{'s' if ranks > 1 else ''}, {options.model}, {parameters:,} parameters")
    ringdp.print(
        f"  {'ok    ' if learned else 'FAILED'} loss at the end {last:.3f}; right of hidden characters of unseen text:"
        f" {right:.3f}, by the most frequent one {by_frequency:.3f}",
        flush=True,
    )
    ringdp.shutdown()
    return 0 if learned else 1


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").strip(), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", choices=("own", "roberta"), default="own", help="roberta: needs transformers (default %(default)s)")
    add("--steps", type=int, default=300, help="steps to train (default %(default)s)")
    add("--batch-size", type=int, default=64, help="pieces of text per rank and step (default %(default)s)")
    add("--length", type=int, default=16, help="characters of a piece (default %(default)s)")
    add("--width", type=int, default=64, help="numbers per character inside (default %(default)s)")
    add("--layers", type=int, default=2, help="layers of the encoder (default %(default)s)")
    add("--lr", type=float, default=3e-3, help="highest learning rate of AdamW (default %(default)s)")
    add("--characters", type=int, default=300_000, help="of text to read, at most (default %(default)s)")
    add("--seed", type=int, default=0, help="of weights, order and holes (default %(default)s)")
    return parser.parse_args(arguments)


def read(options: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """Pieces of docstrings to train with and to test with, int64 ``[pieces, length]``, alike on all ranks."""
    text = b""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("[a-z]*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text += (ast.get_docstring(node) or "").encode("ascii", errors="ignore")
        if len(text) >= options.characters:
            break
    text = text[: min(len(text), options.characters) // options.length * options.length]
    pieces = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().view(-1, options.length)
    order = torch.randperm(len(pieces), generator=torch.Generator().manual_seed(options.seed))
    return pieces[order[len(order) // 10 :]], pieces[order[: len(order) // 10]]


def with_holes(text: Tensor, draw: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """The text with holes, and what was there: IGNORED beside them."""
    hidden = torch.rand(text.shape, generator=draw).to(text.device) < HIDDEN
    return text.masked_fill(hidden, HOLE), text.masked_fill(~hidden, IGNORED)


class Encoder(nn.Module):
    """Characters ``[batch, length]`` to scores ``[batch, length, ALPHABET]``."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.characters = nn.Embedding(ALPHABET, options.width)
        self.positions = nn.Embedding(options.length, options.width)
        layer = nn.TransformerEncoderLayer(options.width, 4, 4 * options.width, 0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, options.layers, enable_nested_tensor=False)
        self.head = nn.Linear(options.width, ALPHABET)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        out: Tensor = self.head(self.layers(self.characters(x) + self.positions(places)))
        return out


def hugging_face(options: argparse.Namespace) -> nn.Module:
    """RoBERTa of that size with its norms in front, and with weights that fit its width: its usual ones, made for
    hundreds of numbers per character, would leave it at the frequencies of the characters for thousands of steps."""
    try:
        from transformers import RobertaPreLayerNormConfig, RobertaPreLayerNormForMaskedLM
    except ImportError as error:
        sys.exit(f"--model roberta needs transformers ({error}): pip install transformers")
    size = {"hidden_size": options.width, "intermediate_size": 4 * options.width, "num_hidden_layers": options.layers}
    config = RobertaPreLayerNormConfig(
        vocab_size=ALPHABET, max_position_embeddings=options.length + 1, pad_token_id=0, num_attention_heads=4,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        initializer_range=options.width**-0.5, **size,
    )  # fmt: skip
    network: nn.Module = RobertaPreLayerNormForMaskedLM(config)
    return network


@torch.no_grad()
def look_at_neighbours(network: nn.Module) -> None:
    """Let attention begin beside each character, where most of what there is to learn stands: positions begin as sines
    (Vaswani et al., Attention Is All You Need, 2017, 3.5), which are alike where they are near, and keys as queries."""
    for module in network.modules():
        if isinstance(module, nn.MultiheadAttention):
            query, key, _ = module.get_parameter("in_proj_weight").chunk(3)
            key.copy_(query)
        elif hasattr(module, "query") and hasattr(module, "key"):
            module.get_parameter("key.weight").copy_(module.get_parameter("query.weight"))
        for name, table in module.named_children():
            if "position" in name and isinstance(table, nn.Embedding):
                places, width = table.weight.shape
                angles = torch.arange(places).unsqueeze(1) / 100 ** (torch.arange(0, width, 2) / width)
                waves = torch.stack((angles.sin(), angles.cos()), dim=2).flatten(1)
                table.weight.copy_(waves * (table.weight.std() * 2**0.5))  # as large as what it replaces


def scores(model: nn.Module, text: Tensor) -> Tensor:
    """Of either model; those of transformers return a bundle."""
    out = model(text)
    return out if isinstance(out, Tensor) else out.logits


@torch.no_grad()
def evaluate(
    model: nn.Module, loader: DataLoader[tuple[Tensor, ...]], training: Tensor, device: torch.device
) -> tuple[float, float]:
    """The share of right characters in the holes of all pieces, by the model and by the most frequent character."""
    model.eval()
    frequent = int(training.flatten().mode().values)
    draw = torch.Generator().manual_seed(ringdp.rank())
    counts = torch.zeros(3, dtype=torch.int64)  # holes, right, right by frequency
    for (text,) in loader:
        seen, wanted = with_holes(text.to(device), draw)
        found = scores(model, seen).argmax(dim=-1)
        for_each_piece = [it.sum(dim=1) for it in (wanted != IGNORED, found == wanted, wanted == frequent)]
        counts += ringdp.gather(torch.stack(for_each_piece, dim=1), loader).sum(dim=0).cpu()
    holes, right, by_frequency = counts.tolist()
    return right / holes, by_frequency / holes


if __name__ == "__main__":
    sys.exit(main())
