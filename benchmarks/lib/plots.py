#!/usr/bin/env python3
"""Measure and draw the plots of docs/lab/benchmarks.md; each command takes a few minutes.

    python benchmarks/plots.py busbw          bus bandwidth over size: ring, gloo, Open MPI, ceiling; 2, 4, 8 ranks
    sudo python benchmarks/plots.py hosts     time over the number of hosts at 1 Gbit, beside the line's limit
    python benchmarks/plots.py model          both measured against the cost model; draws what the others have measured

What was measured goes to docs/lab/plots/NAME.json, the plot to docs/lab/plots/NAME.svg; `--draw` only draws again.
Needs matplotlib: pip install -r requirements/plots.txt
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.collectives import allreduce
from benchmarks.lib import session
from benchmarks.collectives.ceiling import CeilingUnavailable
from benchmarks.lib.goodput import NoGoodput
from benchmarks.lib.hosts import HostsError
from benchmarks.lib.measure import format_size
from benchmarks.pictures.pictures import pyplot
from benchmarks.lib.ranks import RanksFailed

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "lab" / "plots"
RANKS = "2,4,8"
HOSTS = "2,3,4,6,8"
SIZES = "4k,16k,64k,256k,1m,4m,25m,100m"
HOST_SIZE = "25m"
LOOKS: dict[str, dict[str, Any]] = {  # of each backend, the same in every plot
    "ring": {"label": "ringdp", "color": "#c02030", "marker": "o", "linewidth": 2.0},
    "gloo": {"label": "gloo", "color": "#3060c0", "marker": "s"},
    "mpi": {"label": "Open MPI", "color": "#208040", "marker": "^"},
    "ceiling": {"label": "hand-written loop", "color": "#808080", "linestyle": "--"},
}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plot", choices=PLOTS, help="which one")
    parser.add_argument("--draw", action="store_true", help="measure nothing, draw what was measured before")
    parser.add_argument("--counts", help="how many ranks (busbw, default 2,4,8) or hosts (hosts, default 2,3,4,6,8)")
    parser.add_argument("--sizes", help=f"bytes to reduce (busbw: {SIZES}; hosts: {HOST_SIZE})")
    parser.add_argument("--rounds", type=int, default=5, help="blocks of calls for each backend and size (default 5)")
    parser.add_argument("--block-seconds", type=float, default=0.15, help="about how long a block lasts (default 0.15)")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where results and plots are (docs/lab/plots)")
    return parser.parse_args(argv)


def _measure(args: argparse.Namespace, *options: str) -> dict[str, Any]:
    words = ["--rounds", str(args.rounds), "--block-seconds", str(args.block_seconds), *options]
    print(f"allreduce.py {' '.join(words)}", file=sys.stderr)
    return allreduce.measure(allreduce.parse(words))


def measure_busbw(args: argparse.Namespace) -> list[dict[str, Any]]:
    options = ["--sizes", args.sizes or SIZES, "--peers", "gloo,mpi,ceiling"]
    return [_measure(args, "--ranks", n, *options) for n in (args.counts or RANKS).split(",")]


def measure_hosts(args: argparse.Namespace) -> list[dict[str, Any]]:
    options = ["--rate", "1gbit", "--sizes", args.sizes or HOST_SIZE, "--peers", "gloo"]
    return [_measure(args, "--hosts", n, *options) for n in (args.counts or HOSTS).split(",")]


def draw_busbw(results: Sequence[dict[str, Any]], plt: Any) -> Any:
    figure, axes = plt.subplots(1, len(results), figsize=(4.2 * len(results), 4), sharey=True, squeeze=False)
    for axis, result in zip(axes[0], results, strict=True):
        for name, look in LOOKS.items():
            rows = [row for row in result["rows"] if row["backend"] == name]
            if rows:
                axis.plot([row["size_bytes"] for row in rows], [row["busbw"] / 1e9 for row in rows], **look)
        axis.set(xscale="log", yscale="log", xlabel="size", title=result["place"]["words"])
        _size_ticks(axis, [row["size_bytes"] for row in result["rows"]])
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("bus bandwidth, GB/s")
    axes[0][0].legend()
    return figure


def draw_hosts(results: Sequence[dict[str, Any]], plt: Any) -> Any:
    figure, axis = plt.subplots(figsize=(6, 4))
    hosts = [result["place"]["hosts"] for result in results]
    size = max(row["size_bytes"] for row in results[0]["rows"])
    for name, look in LOOKS.items():
        rows = [
            row for result in results for row in result["rows"] if (row["backend"], row["size_bytes"]) == (name, size)
        ]
        if rows:
            axis.plot(hosts, [row["time"]["median_s"] * 1e3 for row in rows], **look)
    limits = []
    for result in results:
        line = result["goodput_bytes_per_s"]
        rate = line["one_way"] if line else 1e9 / 8
        limits.append(2 * (result["place"]["hosts"] - 1) / result["place"]["hosts"] * size / rate * 1e3)
    axis.plot(hosts, limits, color="black", linestyle=":", label="the line: 2(h-1)/h of the size at iperf3's goodput")
    axis.set(xlabel="hosts, one rank on each, 1 Gbit", ylabel="ms", title=f"all-reduce of {format_size(size)}")
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
    axis.legend(loc="lower right")
    return figure


def draw_model(results: Sequence[dict[str, Any]], plt: Any) -> Any:
    """Predicted over measured time of every row of `ring`: on the diagonal the model is right."""
    from ringdp.config.tuning import Tuning
    from ringdp.costs import AlgorithmCosts, HostLayout, work
    from ringdp.tools.algorithm_table import algorithm

    figure, axis = plt.subplots(figsize=(6, 5))
    every: list[float] = []
    for result in results:
        ranks, hosts = result["place"]["ranks"], max(1, result["place"]["hosts"])
        place = HostLayout.spread(ranks=ranks, hosts=hosts, cores=result["machine"]["cores"])
        measured, predicted = [], []
        for row in result["rows"]:
            if row["backend"] == "ring":
                name = algorithm(place, "float32", row["size_bytes"], Tuning())
                measured.append(row["time"]["median_s"])
                predicted.append(work(name, place, row["size_bytes"]).seconds(AlgorithmCosts(), place))
        every += measured + predicted
        axis.plot(measured, predicted, marker="o", linestyle="", label=result["place"]["words"])
    ends = [min(every), max(every)]
    axis.plot(ends, ends, color="black", linewidth=0.8)
    axis.set(xscale="log", yscale="log", xlabel="measured, s", ylabel="predicted, s", title="all-reduce and cost model")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    return figure


def _size_ticks(axis: Any, sizes: Sequence[int]) -> None:
    ticks = sorted(set(sizes))[::2]
    axis.set_xticks(ticks, [format_size(size) for size in ticks], fontsize=7)
    axis.set_xticks([], minor=True)


PLOTS: dict[str, tuple[Callable[..., Any] | None, Callable[..., Any]]] = {
    "busbw": (measure_busbw, draw_busbw),
    "hosts": (measure_hosts, draw_hosts),
    "model": (None, draw_model),
}


def results_for(args: argparse.Namespace) -> list[dict[str, Any]]:
    """What is to be drawn, measured now or read. Raises FileNotFoundError where nothing was measured."""
    measure = PLOTS[args.plot][0]
    names = [args.plot] if measure else [name for name, (measures, _) in PLOTS.items() if measures]
    files = [args.folder / f"{name}.json" for name in names]
    if measure and not args.draw:
        results = measure(args)
        args.folder.mkdir(parents=True, exist_ok=True)
        files[0].write_text(json.dumps(results, indent=1), encoding="utf-8")
        for result in results:
            for warning in result["quiet"]["warnings"]:
                print(f"WARNING: {result['place']['words']}: {warning}", file=sys.stderr)
        return results
    return [result for file in files if file.exists() or measure for result in json.loads(file.read_text("utf-8"))]


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    plt = pyplot("plots.py")
    if plt is None:
        return 2
    try:
        results = results_for(args)
    except (session.Unavailable, HostsError, NoGoodput, CeilingUnavailable) as error:
        print(f"plots.py: {error}", file=sys.stderr)
        return 2
    except FileNotFoundError as error:
        print(f"plots.py: nothing was measured yet: {error.filename} is not there", file=sys.stderr)
        return 2
    except RanksFailed as error:
        print(f"plots.py: {error}", file=sys.stderr)
        return 1
    if not results:
        print("plots.py: nothing was measured yet: run `plots.py busbw` and `plots.py hosts` first", file=sys.stderr)
        return 2
    figure = PLOTS[args.plot][1](results, plt)
    figure.tight_layout()
    path = args.folder / f"{args.plot}.svg"
    figure.savefig(path, metadata={"Date": None})
    print(f"{path}: drawn")
    return 0


if __name__ == "__main__":
    sys.exit(main())
