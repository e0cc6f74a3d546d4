#!/usr/bin/env python3
"""Draw the plots of docs/compression.md from what was measured.

    python benchmarks/compression_quality.py codes --json docs/plots/quality.json
    python benchmarks/compression_plots.py quality      error of an all-reduce of 8 ranks over bits an element

    sudo python benchmarks/time_to_loss.py --hosts 4 --rate 100mbit --json docs/plots/loss.json
    python benchmarks/compression_plots.py loss         training loss over time

Each reads docs/plots/NAME.json and writes docs/plots/NAME.svg. Needs matplotlib: pip install -r requirements/plots.txt
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from time_to_loss import WINDOW, smooth

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "plots"
COLOURS = ("#c02030", "#3060c0", "#208040", "#808080", "#c08020", "#8040a0")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plot", choices=PLOTS, help="which one")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where results and plots are (docs/plots)")
    return parser.parse_args(argv)


def draw_quality(result: dict[str, Any], plt: Any) -> Any:
    figure, axis = plt.subplots(figsize=(6, 4))
    sources = list(dict.fromkeys(row["gradients"] for row in result["rows"]))
    for source, colour in zip(sources, COLOURS, strict=False):
        rows = sorted((row for row in result["rows"] if row["gradients"] == source), key=lambda row: row["bits"])
        errors = [row["all_reduce"][-1] for row in rows]
        axis.plot([row["bits"] for row in rows], errors, marker="o", linestyle="", color=colour, label=source)
    for row in (row for row in result["rows"] if row["gradients"] == sources[-1]):
        axis.annotate(row["code"], (row["bits"], row["all_reduce"][-1]), xytext=(6, 4), textcoords="offset points")
    axis.set(xscale="log", yscale="log", xlabel="bits an element", ylabel="|mean' - mean|² / |mean|²")
    axis.set_xticks([4, 8, 16], ["4", "8", "16"])
    axis.set_title(f"all-reduce of {result['ranks'][-1]} ranks")
    axis.grid(alpha=0.3)
    axis.legend()
    return figure


def draw_loss(result: dict[str, Any], plt: Any) -> Any:
    figure, axis = plt.subplots(figsize=(6, 4))
    for row, colour in zip(result["rows"], COLOURS, strict=False):
        axis.plot(row["seconds"][WINDOW:], smooth(row["losses"])[WINDOW:], color=colour, label=row["mode"])
    axis.axhline(result["loss"], color="black", linewidth=0.8, linestyle=":")
    axis.set(xlabel="seconds of training", ylabel="training loss, nats", title=result["place"]["words"])
    axis.grid(alpha=0.3)
    axis.legend()
    return figure


PLOTS: dict[str, Callable[[dict[str, Any], Any], Any]] = {"quality": draw_quality, "loss": draw_loss}


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    try:
        import matplotlib
    except ImportError:
        print("compression_plots.py: matplotlib is missing: pip install -r requirements/plots.txt", file=sys.stderr)
        return 2
    matplotlib.use("svg")
    from matplotlib import pyplot

    pyplot.rcParams["svg.hashsalt"] = "ringdp"  # the same picture is the same file
    source = args.folder / f"{args.plot}.json"
    if not source.exists():
        print(f"compression_plots.py: nothing was measured yet: {source} is not there", file=sys.stderr)
        return 2
    figure = PLOTS[args.plot](json.loads(source.read_text(encoding="utf-8")), pyplot)
    figure.tight_layout()
    path = args.folder / f"{args.plot}.svg"
    figure.savefig(path, metadata={"Date": None})
    print(f"{path}: drawn")
    return 0


if __name__ == "__main__":
    sys.exit(main())
