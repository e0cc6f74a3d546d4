#!/usr/bin/env python3
"""What compression does to gradients and to training, beside what was measured before the library had it.

    python benchmarks/compression_quality.py codes
    python benchmarks/compression_quality.py gpt --seeds 8 --csv gpt.csv
    python benchmarks/compression_quality.py digits --seeds 12 --csv digits.csv

`codes`: relative squared error |x' - x|^2 / |x|^2 (NMSE) of codes and of all-reduces, on gradients of
examples/char_lm.py (of the parameters that the rules compress) and on a Gaussian. `gpt`: nats per character of a
character GPT on text it has not seen. `digits`: accuracy of examples/digits.py's network.

The ranks are simulated in one process with the bits of the real exchange (simulated_ranks.py). Each seed is trained
with every method from the same weights on the same data, so differences are paired; their mean is given with its 95 %
interval (Student's t). Rows go to the file of --csv as they come, and what is there already is not run again: a run
can be interrupted, and more seeds added.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import quality_runs
import torch
from measure import table
from quality_runs import METHODS
from simulated_ranks import SimulatedRanks
from torch import Tensor

from ringdp import compression
from ringdp.compression import Info

CODES = ("fp16", "bf16", "int8", "int4")
TRAINED = ("exact", "int8", "int4", "int8, overflows")
RANKS = (2, 4, 8)
BEFORE = {  # COMPRESSION.md: one shot on a Gaussian and on a GPT's gradients, then all-reduce of 2, 4, 8 ranks on these
    "fp16": ("4e-8", "4e-8", "8.8e-8", "1.4e-7", "2.0e-7"),
    "bf16": ("2.8e-6", "2.8e-6", "5.7e-6", "9.5e-6", "1.3e-5"),
    "int8": ("4.8e-5", "5.7e-5", "8.6e-5", "9.3e-5", "9.7e-5"),
    "int4": ("1.16e-2", "1.12e-2", "1.7e-2", "1.7e-2", "1.6e-2"),
}
LIMITS = {"int8": 1.0e-4, "int4": 1.7e-2}  # of the all-reduce between 8 ranks, on gradients
T_95 = (
    12.71,
    4.30,
    3.18,
    2.78,
    2.57,
    2.45,
    2.36,
    2.31,
    2.26,
    2.23,
    2.20,
    2.18,
    2.16,
    2.14,
    2.13,
    2.12,
    2.11,
    2.10,
    2.09,
)
"""Two-sided 95 % quantiles of Student's t for 1, 2, … degrees of freedom; beyond the last one that one is taken."""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("codes", "gpt", "digits"))
    parser.add_argument("--seeds", type=int, default=8, help="how many, from 0 on (default 8)")
    parser.add_argument("--steps", type=int, help="of training (codes: 300, gpt: 1000)")
    parser.add_argument("--epochs", type=int, default=20, help="of digits (default 20)")
    parser.add_argument("--width", type=int, help="of the GPT (gpt: 96; codes: 64 and 128)")
    parser.add_argument(
        "--methods", default=";".join(TRAINED), help=f"semicolons between them; of {'; '.join(METHODS)}"
    )
    parser.add_argument("--against", default="exact", help="the method that differences are taken to (default exact)")
    parser.add_argument("--batch-size", type=int, default=16, help="windows per rank of `codes` (default 16)")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="results of each training, added to")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what `codes` measured there, for the plot")
    args = parser.parse_args(argv)
    args.method_names = [word.strip() for word in args.methods.split(";")]
    if unknown := [name for name in args.method_names if name not in METHODS]:
        parser.error(f"{unknown[0]!r} is not known: choose from {'; '.join(METHODS)}")
    if args.seeds < 1 or args.against not in args.method_names:
        parser.error(f"at least one seed, and {args.against!r} among the methods: differences are taken to it")
    return args


# Codes and all-reduces.


def nmse(result: Tensor, wanted: Tensor) -> float:
    wanted = wanted.double()
    return float((result.double() - wanted).square().sum() / wanted.square().sum())


def code_once(name: str, x: Tensor) -> float:
    """NMSE of one encoding of the flat float32 `x`."""
    one = compression.get(name)
    assert one is not None
    info = Info(name="x", shape=tuple(x.shape), numel=x.numel())
    return nmse(one.decompress(one.compress(x, info), info), x)


def all_reduce(name: str, gradients: Sequence[Mapping[str, Tensor]]) -> float:
    """NMSE of the mean of the ranks' gradients, over all parameters, against the mean in float64."""
    one = compression.get(name)
    assert one is not None
    counts = {parameter: it.numel() for parameter, it in gradients[0].items()}
    ranks = SimulatedRanks(counts, one, len(gradients))
    means = ranks.average([list(of_rank.values()) for of_rank in gradients])
    wanted = [torch.stack(several).double().mean(0) for several in zip(*(it.values() for it in gradients), strict=True)]
    return nmse(_flat(means), _flat(wanted))


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([it.flatten() for it in tensors])


def measure_codes(args: argparse.Namespace) -> str:
    draw = torch.Generator().manual_seed(0)
    gaussian = [{"x": torch.randn(1 << 20, generator=draw)} for _ in RANKS[-1:] * RANKS[-1]]
    sources: dict[str, list[dict[str, Tensor]]] = {"Gaussian": gaussian}
    for width, layers in ((args.width, 2),) if args.width else ((64, 2), (128, 4)):
        step = args.steps or 300
        options = quality_runs.gpt_options(width=width, layers=layers, steps=1000, batch_size=args.batch_size)
        gradients = quality_runs.gradients_of_ranks(options, RANKS[-1], step)
        numel = sum(it.numel() for it in gradients[0].values())
        sources[f"GPT, {numel / 1e6:.2f} M, step {step}"] = gradients
    rows = []
    for name in CODES:
        for source, gradients in sources.items():
            once = code_once(name, _flat(list(gradients[0].values())))
            row = {"code": name, "gradients": source, "bits": bits(name), "once": once}
            row["all_reduce"] = [all_reduce(name, gradients[:n]) for n in RANKS]
            rows.append(row | {"agreement": agreement(gradients)})
    if args.json is not None:
        args.json.write_text(json.dumps({"ranks": RANKS, "rows": rows}, indent=1), encoding="utf-8")
    return report_codes(rows)


def agreement(gradients: Sequence[Mapping[str, Tensor]]) -> float:
    """|mean|^2 over the mean |g|^2 of the ranks: 1 where their gradients are the same, 1/n where they are noise."""
    flat = torch.stack([_flat(list(of_rank.values())) for of_rank in gradients]).double()
    return float(flat.mean(0).square().sum() / flat.square().sum(1).mean())


def bits(name: str) -> float:
    """Of an element's code, its share of scales included."""
    one, numel = compression.get(name), 1 << 16
    assert one is not None
    payload = one.compress(torch.zeros(numel), Info(name="x", shape=(numel,), numel=numel))
    return 8 * sum(it.numel() * it.element_size() for it in payload) / numel


def report_codes(rows: Sequence[dict[str, Any]]) -> str:
    cells, held = [], list[str]()
    for name in CODES:
        for row in (it for it in rows if it["code"] == name):
            cells.append([name, row["gradients"], *(f"{value:.2g}" for value in (row["once"], *row["all_reduce"]))])
            if name in LIMITS and row["gradients"] != "Gaussian":
                verdict = _verdict(row["all_reduce"][-1] <= LIMITS[name])
                held.append(f"{name}, {row['gradients']}: {verdict}, at most {LIMITS[name]:.2g}")
        gauss, gpt, *reduced_before = BEFORE[name]
        cells.append(["", "before: Gaussian", gauss, "", "", ""])
        cells.append(["", "before: GPT, 0.8 M, step 300", gpt, *reduced_before])
    columns = ["code", "gradients", "one shot", *(f"all-reduce, n = {n}" for n in RANKS)]
    agree = {row["gradients"]: row["agreement"] for row in rows}
    words = [f"{source}: |mean|^2 is {value:.2f} of the mean |g|^2 of 8 ranks" for source, value in agree.items()]
    return "\n".join([table(columns, cells), "", *words, "", "all-reduce, n = 8:", *held])


def _verdict(good: bool) -> str:
    return "holds" if good else "MISSED"


# Training.


def train(args: argparse.Namespace) -> str:
    """All methods of each seed, then what they differ by."""
    run: Callable[[quality_runs.Method, int, argparse.Namespace], float]
    if args.what == "gpt":
        options = quality_runs.small_gpt_options(steps=args.steps or 1000, width=args.width or 96)
        run, limit, unit = quality_runs.train_gpt, 0.01, "nats per character"
        setting = f"{options.steps} steps, width {options.width}"
    else:
        options = quality_runs.digits_options(args.epochs)
        run, limit, unit = quality_runs.train_digits, 0.5, "% of the test images"
        setting = f"{options.epochs} epochs"
    known = dict(_read(args.csv, args.what, setting))
    for seed in range(args.seeds):
        for name in args.method_names:
            if (name, seed) not in known:
                known[name, seed] = run(METHODS[name], seed, options)
                _add(args.csv, [args.what, setting, name, seed, known[name, seed]])
                print(f"seed {seed}, {name}: {known[name, seed]:.5f} {unit}", file=sys.stderr, flush=True)
    title = f"{args.what}, 4 ranks, {setting}: {unit}"
    return report(known, args.method_names, args.seeds, limit, title, against=args.against)


def report(
    known: Mapping[tuple[str, int], float],
    names: Sequence[str],
    seeds: int,
    limit: float,
    title: str,
    *,
    against: str = "exact",
) -> str:
    """A line for each method: its mean, and by how much it differs from the method `against`, seed by seed."""
    base = [known[against, seed] for seed in range(seeds)]
    rows = []
    for name in names:
        values = [known[name, seed] for seed in range(seeds)]
        cells = [name, f"{statistics.fmean(values):.4f}"]
        if name != against:
            mean, half = interval([a - b for a, b in zip(values, base, strict=True)])
            cells += [f"{mean:+.4f}", f"{mean - half:+.4f} to {mean + half:+.4f}"]
            cells += [_verdict(abs(mean) + half <= limit)]
        rows.append(cells + [""] * (5 - len(cells)))
    columns = ["method", "mean", f"minus {against}", "95 % interval", f"within {limit:g}"]
    return "\n".join([f"{title}, {seeds} paired seeds", "", table(columns, rows)])


def interval(differences: Sequence[float]) -> tuple[float, float]:
    """Their mean, and half the width of its 95 % interval."""
    count = len(differences)
    if count < 2:
        return differences[0], math.inf
    quantile = T_95[min(count - 1, len(T_95)) - 1]
    return statistics.fmean(differences), quantile * statistics.stdev(differences) / math.sqrt(count)


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


PARTS: dict[str, Callable[[argparse.Namespace], str]] = {"codes": measure_codes, "gpt": train, "digits": train}


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    torch.set_num_threads(1)
    print(PARTS[args.what](args))
    return 0


if __name__ == "__main__":
    sys.exit(main())
