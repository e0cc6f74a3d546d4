"""What compression does to gradients and to training.

    python -m benchmarks compression_quality codes
    python -m benchmarks compression_quality gpt --seeds 8 --csv gpt.csv
    python -m benchmarks compression_quality gpt --optimizer sgd --methods 'exact;powersgd' --csv gpt.csv

`codes`: relative squared error |x' - x|^2 / |x|^2 (NMSE) of codes and of all-reduces, on gradients of
examples/char_lm.py (of the parameters that the rules compress) and on a Gaussian; bits are those that a rank's payload
takes. `gpt`: nats per character of a character GPT on text it has not seen, by AdamW or by SGD with momentum.

The ranks are simulated in one process with the bits of the real exchange (exchanged_ranks.py). Each seed is trained
with every method from the same weights on the same data, so differences are paired; their mean is given with its 95 %
interval (Student's t). Rows go to the file of --csv as they come, and what is there already is not run again: a run can
be interrupted, and more seeds added.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.compression import quality_runs
from benchmarks.compression.exchanged_ranks import ExchangedRanks
from benchmarks.compression.quality_runs import METHODS
from benchmarks.lib import session
from benchmarks.lib.measure import interval, table
from ringdp import compression
from ringdp.compression import Int4, Int5, Int6, Int8, PowerSGD, TopK
from ringdp.compression.exchange import Section
from ringdp.compression.exchange.local import there_and_back

_NAMED = ("fp16", "bf16", "int8", "int6", "int5", "int4", "nf4")
_ROTATED: dict[str, Any] = {"int8": Int8, "int6": Int6, "int5": Int5, "int4": Int4}
CODES: dict[str, Any] = {
    **dict(zip(_NAMED, _NAMED, strict=True)),
    **{f"{name} rotated": kind(rotate=True) for name, kind in _ROTATED.items()},
    **{name: name for name in ("qsgd", "terngrad", "sign", "signsgd", "topk", "randomk", "powersgd")},
    "topk 10%": TopK(0.1),
    "powersgd, warm": PowerSGD(error_feedback=False),
}
REPEATED = {"powersgd, warm": 5}  # what it remembers then is of the same gradients
SIGNS_ALONE = ("signsgd",)  # their means have no size: they are compared at the best one
TRAINED = ("exact", "int8", "int4", "int8, overflows")
RANKS = (2, 4, 8)


def choice_of(names: Iterable[str]) -> str:
    return f"semicolons between them; of {'; '.join(names)}".replace("%", "%%")


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=("codes", "gpt"))
    parser.add_argument("--seeds", type=int, default=8, help="how many, from 0 on (default 8)")
    parser.add_argument("--steps", type=int, help="of training (codes: 300, gpt: 1000)")
    parser.add_argument("--width", type=int, help="of the GPT (gpt: 96; codes: 64 and 128)")
    parser.add_argument("--methods", default=";".join(TRAINED), help=choice_of(METHODS))
    parser.add_argument("--codes", default=";".join(CODES), help=choice_of(CODES))
    parser.add_argument("--optimizer", choices=("adamw", "sgd"), help="of gpt (default adamw)")
    parser.add_argument("--sgd-lr", type=float, default=quality_runs.SGD_LR, help="(default %(default)s)")
    parser.add_argument("--against", default="exact", help="the method that differences are taken to (default exact)")
    parser.add_argument("--batch-size", type=int, default=16, help="windows per rank of `codes` (default 16)")
    parser.add_argument(
        "--small-batches",
        action="store_true",
        help="`codes`: one layer, 8 windows of 32 characters, the schedule's end",
    )
    parser.add_argument("--csv", type=Path, metavar="FILE", help="results of each training, added to")


def check(args: argparse.Namespace) -> None:
    args.methods = session.chosen(args.methods, tuple(METHODS), ";")
    args.codes = session.chosen(args.codes, tuple(CODES), ";")
    own = [name for name in args.methods if METHODS[name].momentum_on_ranks]
    if own and args.optimizer != "sgd":
        raise ValueError(f"{own[0]!r} has its momentum on the ranks: use --optimizer sgd, which then has none")
    if args.seeds < 1 or args.against not in args.methods:
        raise ValueError(f"at least one seed, and {args.against!r} among the methods: differences are taken to it")


# Codes and all-reduces.


def nmse(result: Tensor, wanted: Tensor) -> float:
    wanted = wanted.double()
    return float((result.double() - wanted).square().sum() / wanted.square().sum())


def code_once(name: str, gradients: Mapping[str, Tensor]) -> tuple[float, float]:
    """NMSE of one encoding of all parameters, by the names they have, and the bits that it takes an element."""
    if name in REPEATED:
        alone = _ranks(name, [gradients], 1)
        decoded = [alone.average([list(gradients.values())]) for _ in range(REPEATED[name])][-1]
    one, bytes_, parts = compression.get(CODES[name]), 0, list[Tensor]()
    assert one is not None
    for parameter, x in gradients.items():
        section = Section(parameter, tuple(x.shape), 0, x.numel(), one, 1, x.device)
        part, taken = there_and_back(section, x.flatten())
        parts.append(part)
        bytes_ += taken
    wanted = _flat(list(gradients.values()))
    result = _flat(decoded) if name in REPEATED else _flat(parts)
    return _error(name, result, wanted), 8 * bytes_ / wanted.numel()


def all_reduce(name: str, gradients: Sequence[Mapping[str, Tensor]]) -> float:
    """NMSE of the mean of the ranks' gradients, over all parameters, against the mean in float64."""
    ranks = _ranks(name, gradients, len(gradients))
    for _ in range(REPEATED.get(name, 1)):
        means = ranks.average([list(of_rank.values()) for of_rank in gradients])
    wanted = [torch.stack(several).double().mean(0) for several in zip(*(it.values() for it in gradients), strict=True)]
    return _error(name, _flat(means), _flat(wanted))


def _ranks(name: str, gradients: Sequence[Mapping[str, Tensor]], count: int) -> ExchangedRanks:
    shapes = {parameter: tuple(it.shape) for parameter, it in gradients[0].items()}
    return ExchangedRanks(shapes, compression.get(CODES[name]), count)


def _error(name: str, result: Tensor, wanted: Tensor) -> float:
    if name in SIGNS_ALONE:
        result, wanted = result.double(), wanted.double()
        result = result * (torch.dot(result, wanted) / torch.dot(result, result))
    return nmse(result, wanted)


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([it.flatten() for it in tensors])


def measure_codes(args: argparse.Namespace) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(0)
    gaussian = [{"x": torch.randn(1 << 10, 1 << 10, generator=draw)} for _ in RANKS[-1:] * RANKS[-1]]
    sources: dict[str, list[dict[str, Tensor]]] = {"Gaussian": gaussian}
    step = args.steps or 300
    if args.small_batches:
        choices = [quality_runs.small_gpt_options(width=args.width or 256, steps=step)]
    else:
        shapes = ((args.width, 2),) if args.width else ((64, 2), (128, 4))
        common = {"steps": 1000, "batch_size": args.batch_size}
        choices = [quality_runs.gpt_options(width=width, layers=layers, **common) for width, layers in shapes]
    for options in choices:
        gradients = quality_runs.gradients_of_ranks(options, RANKS[-1], step)
        numel = sum(it.numel() for it in gradients[0].values())
        sources[f"GPT, {numel / 1e6:.2f} M, step {step}"] = gradients
    rows = []
    for name in args.codes:
        for source, gradients in sources.items():
            once, bits = code_once(name, gradients[0])
            row = {"code": name, "gradients": source, "bits": bits, "once": once}
            row["all_reduce"] = [all_reduce(name, gradients[:n]) for n in RANKS]
            rows.append(row | {"agreement": agreement(gradients)})
    return {"ranks": RANKS, "rows": rows}


def agreement(gradients: Sequence[Mapping[str, Tensor]]) -> float:
    """|mean|^2 over the mean |g|^2 of the ranks: 1 where their gradients are the same, 1/n where they are noise."""
    flat = torch.stack([_flat(list(of_rank.values())) for of_rank in gradients]).double()
    return float(flat.mean(0).square().sum() / flat.square().sum(1).mean())


def report_codes(result: dict[str, Any]) -> str:
    rows = result["rows"]
    cells = []
    for name in dict.fromkeys(row["code"] for row in rows):
        for row in (it for it in rows if it["code"] == name):
            errors = (f"{value:.2g}" for value in (row["once"], *row["all_reduce"]))
            cells.append([name, row["gradients"], f"{row['bits']:.3g}", *errors])
    columns = ["code", "gradients", "bits", "one shot", *(f"all-reduce, n = {n}" for n in RANKS)]
    agree = {row["gradients"]: row["agreement"] for row in rows}
    words = [f"{source}: |mean|^2 is {value:.2f} of the mean |g|^2 of 8 ranks" for source, value in agree.items()]
    return "\n".join([table(columns, cells), "", *words])


# Training.


def train(args: argparse.Namespace) -> dict[str, Any]:
    """All methods of each seed, then what they differ by."""
    optimizer, unit = args.optimizer or "adamw", "nats per character"
    options = quality_runs.small_gpt_options(
        steps=args.steps or 1000, width=args.width or 96, optimizer=optimizer, sgd_lr=args.sgd_lr
    )
    setting = f"{options.steps} steps, width {options.width}"
    setting += f", SGD {options.sgd_lr:g}" if optimizer == "sgd" else ""
    known = dict(_read(args.csv, args.what, setting))
    for seed in range(args.seeds):
        for name in args.methods:
            if (name, seed) not in known:
                known[name, seed] = quality_runs.train_gpt(METHODS[name], seed, options)
                _add(args.csv, [args.what, setting, name, seed, known[name, seed]])
                print(f"seed {seed}, {name}: {known[name, seed]:.5f} {unit}", file=sys.stderr, flush=True)
    title = f"{args.what}, 4 ranks, {setting}: {unit}"
    found = {name: [known[name, seed] for seed in range(args.seeds)] for name in args.methods}
    return {"what": args.what, "title": title, "against": args.against, "found": found}


def report_trained(result: dict[str, Any]) -> str:
    """A line for each method: its mean, and by how much it differs from the method `against`, seed by seed."""
    found, against = result["found"], result["against"]
    rows = []
    for name, values in found.items():
        cells = [name, f"{statistics.fmean(values):.4f}"]
        if name != against:
            mean, half = interval([a - b for a, b in zip(values, found[against], strict=True)])
            cells += [f"{mean:+.4f}", f"{mean - half:+.4f} to {mean + half:+.4f}"]
        rows.append(cells + [""] * (4 - len(cells)))
    columns = ["method", "mean", f"minus {against}", "95 % interval"]
    return f"{result['title']}, {len(found[against])} paired seeds\n\n{table(columns, rows)}"


def _read(path: Path | None, what: str, setting: str) -> Iterator[tuple[tuple[str, int], float]]:
    if path is None or not path.exists():
        return
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if (row["what"], row["setting"]) == (what, setting):
                yield (row["method"], int(row["seed"])), float(row["result"])


def _add(path: Path | None, row: Sequence[object]) -> None:
    if path is None:
        return
    new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        if new:
            writer.writerow(["what", "setting", "method", "seed", "result"])
        writer.writerow(row)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    return measure_codes(args) if args.what == "codes" else train(args)


def report(result: dict[str, Any]) -> str:
    return report_codes(result) if "rows" in result else report_trained(result)
