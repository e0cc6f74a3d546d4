#!/usr/bin/env python3
"""Draw the plots of docs/lab/compression_measured.md from what was measured.

    python benchmarks/compression_quality.py codes --json docs/lab/plots/quality.json
    python benchmarks/compression_plots.py quality      error of an all-reduce of 8 ranks over bits an element

    sudo python benchmarks/time_to_loss.py --hosts 4 --rate 100mbit --json docs/lab/plots/loss.json
    python benchmarks/compression_plots.py loss         training loss over time
    sudo python benchmarks/time_to_loss.py --model resnet --modes all … --json docs/lab/plots/resnet.json
    python benchmarks/compression_plots.py resnet       the same of the ResNet-18

Each reads docs/lab/plots/NAME.json and writes docs/lab/plots/NAME.svg.
Needs matplotlib: pip install -r requirements/plots.txt
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.pictures.pictures import pyplot
from benchmarks.compression.time_to_loss import WINDOW, seconds_until, smooth

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "lab" / "plots"
COLOURS = ("#c02030", "#3060c0", "#208040", "#808080", "#c08020", "#8040a0")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plot", choices=PLOTS, help="which one")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where results and plots are (docs/lab/plots)")
    return parser.parse_args(argv)


def draw_quality(result: dict[str, Any], plt: Any) -> Any:
    figure, axis = plt.subplots(figsize=(8, 5))
    sources = list(dict.fromkeys(row["gradients"] for row in result["rows"]))
    for source, colour in zip(sources, COLOURS, strict=False):
        rows = sorted((row for row in result["rows"] if row["gradients"] == source), key=lambda row: row["bits"])
        errors = [row["all_reduce"][-1] for row in rows]
        axis.plot([row["bits"] for row in rows], errors, marker="o", linestyle="", color=colour, label=source)
    named = sorted((row for row in result["rows"] if row["gradients"] == sources[-1]), key=lambda row: row["bits"])
    for turn, row in enumerate(named):  # neighbours' names stand above and below, or they would cover each other
        place = {"xytext": (0, -14 if turn % 2 else 10), "textcoords": "offset points", "ha": "center"}
        axis.annotate(row["code"], (row["bits"], row["all_reduce"][-1]), fontsize="x-small", **place)
    axis.set(xscale="log", yscale="log", xlabel="bits an element", ylabel="|mean' - mean|² / |mean|²")
    axis.set_xticks([0.25, 1, 4, 16], ["0.25", "1", "4", "16"])
    axis.set_title(f"all-reduce of {result['ranks'][-1]} ranks")
    axis.grid(alpha=0.3)
    axis.legend()
    return figure


def draw_loss(result: dict[str, Any], plt: Any) -> Any:
    """Modes in the order in which they reached the loss; those that never did come last, in dashes."""
    window = result["settings"].get("window", WINDOW)
    reached = {row["mode"]: seconds_until(row, result["loss"], window) for row in result["rows"]}
    rows = sorted(result["rows"], key=lambda row: (reached[row["mode"]] is None, reached[row["mode"]] or 0.0))
    few = len(rows) <= len(COLOURS)
    colours = COLOURS if few else [plt.get_cmap("tab20")(k % 20) for k in range(len(rows))]
    figure, axis = plt.subplots(figsize=(6, 4) if few else (8, 5))
    for row, colour in zip(rows, colours, strict=False):
        style = "--" if reached[row["mode"]] is None else "-"
        seconds, losses = row["seconds"][window:], smooth(row["losses"], window)[window:]
        axis.plot(seconds, losses, color=colour, linestyle=style, label=row["mode"])
    axis.axhline(result["loss"], color="black", linewidth=0.8, linestyle=":")
    axis.set(xlabel="seconds of training", ylabel="training loss, nats", title=result["place"]["words"])
    if not few:
        axis.set_xscale("log")
    axis.grid(alpha=0.3)
    axis.legend(fontsize="medium" if few else "x-small")
    return figure


PLOTS: dict[str, Callable[[dict[str, Any], Any], Any]] = {
    "quality": draw_quality,
    "loss": draw_loss,
    "resnet": draw_loss,
}


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    plt = pyplot("compression_plots.py")
    if plt is None:
        return 2
    source = args.folder / f"{args.plot}.json"
    if not source.exists():
        print(f"compression_plots.py: nothing was measured yet: {source} is not there", file=sys.stderr)
        return 2
    figure = PLOTS[args.plot](json.loads(source.read_text(encoding="utf-8")), plt)
    figure.tight_layout()
    path = args.folder / f"{args.plot}.svg"
    figure.savefig(path, metadata={"Date": None})
    print(f"{path}: drawn")
    return 0


if __name__ == "__main__":
    sys.exit(main())
