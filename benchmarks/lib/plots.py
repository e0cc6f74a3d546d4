"""Draw the pictures of docs/lab from what was measured.

    python -m benchmarks plots busbw            measures, a few minutes: bus bandwidth over size; 2, 4, 8 ranks
    sudo python -m benchmarks plots hosts       measures: time over the number of hosts at 1 Gbit
    python -m benchmarks plots model            both measured against the cost model

    python -m benchmarks compression_quality codes --json docs/lab/plots/quality.json
    python -m benchmarks plots quality          error of an all-reduce of 8 ranks over bits an element
    sudo python -m benchmarks time_to_loss --hosts 4 --rate 100mbit --json docs/lab/plots/loss.json
    python -m benchmarks plots loss             training loss over time; `resnet`: the same of the ResNet-18
    python -m benchmarks plots curves           measures: examples/n_processes.py with other batches and learning rates
    python -m benchmarks plots gains            the table "In short" of docs/lab/benchmarks.md
    python -m benchmarks plots far              time to a loss between two sites, from what far_loss has kept
    python -m benchmarks rounds_loss --ranks 4 --json docs/lab/plots/rounds.json
    python -m benchmarks plots rounds           loss over bytes, and over the time that lines of three rates would take

Results are in docs/lab/plots/NAME.json, a picture goes to docs/lab/plots/NAME.svg; `--draw` only draws again.
Needs matplotlib: pip install -r requirements/plots.txt
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.lib import session
from benchmarks.lib.measure import format_size
from benchmarks.lib.ranks import ROOT, Unavailable

FOLDER = ROOT / "docs" / "lab" / "plots"
COUNTS = {"busbw": "2,4,8", "hosts": "2,3,4,6,8"}
SIZES = {"busbw": "4k,16k,64k,256k,1m,4m,25m,100m", "hosts": "25m"}
COLOURS = ("#c02030", "#3060c0", "#208040", "#808080", "#c08020", "#8040a0")
BENCHMARKS = ROOT / "docs" / "lab" / "benchmarks.md"
CURVES = {  # of examples/n_processes.py: ranks and arguments
    "1 process, batch 32": (1, ["--batch-size", "32"]),
    "4 ranks, 8 each (the same 32)": (4, ["--batch-size", "8"]),
    "4 ranks, 32 each (128)": (4, ["--batch-size", "32"]),
    "4 ranks, 32 each, learning rate x 4": (4, ["--batch-size", "32", "--lr", "0.2"]),
    "the same, warm-up of 22 steps": (4, ["--batch-size", "32", "--lr", "0.2", "--warm-up", "22"]),
}
PARAMETERS = 124_320  # of rounds_loss's GPT
LINE_RATES, ROUND_TRIP_S, STEP_S = (20e6, 100e6, 500e6), 0.05, 0.04
LOOKS: dict[str, dict[str, Any]] = {  # of each backend, the same in every plot
    "ring": {"label": "ringdp", "color": "#c02030", "marker": "o", "linewidth": 2.0},
    "gloo": {"label": "gloo", "color": "#3060c0", "marker": "s"},
    "mpi": {"label": "Open MPI", "color": "#208040", "marker": "^"},
    "ceiling": {"label": "hand-written loop", "color": "#808080", "linestyle": "--"},
}


def pyplot() -> Any:
    """matplotlib's, so that the same picture is the same file. Raises Unavailable where it is missing."""
    try:
        import matplotlib
    except ImportError as error:
        raise Unavailable("matplotlib is missing: pip install -r requirements/plots.txt") from error
    matplotlib.use("svg")
    from matplotlib import pyplot

    pyplot.rcParams["svg.hashsalt"] = "ringdp"
    return pyplot


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plot", choices=PLOTS, help="which one")
    parser.add_argument("--draw", action="store_true", help="measure nothing, draw what was measured before")
    parser.add_argument("--counts", help=f"how many ranks ({COUNTS['busbw']}) or hosts ({COUNTS['hosts']})")
    parser.add_argument("--sizes", help=f"bytes to reduce (busbw: {SIZES['busbw']}; hosts: {SIZES['hosts']})")
    parser.add_argument("--rounds", type=int, default=5, help="blocks of calls for each backend and size (default 5)")
    parser.add_argument("--block-seconds", type=float, default=0.15, help="about how long a block lasts (default 0.15)")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where results and plots are (docs/lab/plots)")


def measure_allreduce(args: argparse.Namespace) -> list[dict[str, Any]]:
    from benchmarks.collectives import allreduce

    place = ["--ranks"] if args.plot == "busbw" else ["--rate", "1gbit", "--hosts"]
    peers = "gloo,mpi,ceiling" if args.plot == "busbw" else "gloo"
    words = ["--rounds", str(args.rounds), "--block-seconds", str(args.block_seconds), "--peers", peers]
    words += ["--sizes", args.sizes or SIZES[args.plot]]
    found = []
    for count in (args.counts or COUNTS[args.plot]).split(","):
        found.append(allreduce.measure(session.parse(allreduce, [*words, *place, count])))
        for warning in found[-1]["quiet"]["warnings"]:
            print(f"WARNING: {found[-1]['place']['words']}: {warning}", file=sys.stderr)
    return found


def draw_busbw(results: Sequence[dict[str, Any]], plt: Any) -> Any:
    figure, axes = plt.subplots(1, len(results), figsize=(4.2 * len(results), 4), sharey=True, squeeze=False)
    for axis, result in zip(axes[0], results, strict=True):
        for name, look in LOOKS.items():
            rows = [row for row in result["rows"] if row["backend"] == name]
            if rows:
                axis.plot([row["size_bytes"] for row in rows], [row["busbw"] / 1e9 for row in rows], **look)
        axis.set(xscale="log", yscale="log", xlabel="size", title=result["place"]["words"])
        ticks = sorted({row["size_bytes"] for row in result["rows"]})[::2]
        axis.set_xticks(ticks, [format_size(size) for size in ticks], fontsize=7)
        axis.set_xticks([], minor=True)
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("bus bandwidth, GB/s")
    axes[0][0].legend()
    return figure


def draw_hosts(results: Sequence[dict[str, Any]], plt: Any) -> Any:
    figure, axis = plt.subplots(figsize=(6, 4))
    hosts = [result["place"]["hosts"] for result in results]
    size = max(row["size_bytes"] for row in results[0]["rows"])
    every = [row for result in results for row in result["rows"] if row["size_bytes"] == size]
    for name, look in LOOKS.items():
        rows = [row for row in every if row["backend"] == name]
        if rows:
            axis.plot(hosts, [row["time"]["median_s"] * 1e3 for row in rows], **look)
    rates = [it["one_way"] if (it := result["goodput_bytes_per_s"]) else 1e9 / 8 for result in results]
    limits = [2 * (n - 1) / n * size / rate * 1e3 for n, rate in zip(hosts, rates, strict=True)]
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
        rows = [row for row in result["rows"] if row["backend"] == "ring"]
        names = [algorithm(place, "float32", row["size_bytes"], Tuning()) for row in rows]
        works = [work(name, place, row["size_bytes"]) for name, row in zip(names, rows, strict=True)]
        measured = [row["time"]["median_s"] for row in rows]
        predicted = [it.seconds(AlgorithmCosts(), place) for it in works]
        every += measured + predicted
        axis.plot(measured, predicted, marker="o", linestyle="", label=result["place"]["words"])
    axis.plot([min(every), max(every)], [min(every), max(every)], color="black", linewidth=0.8)
    axis.set(xscale="log", yscale="log", xlabel="measured, s", ylabel="predicted, s", title="all-reduce and cost model")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    return figure


def draw_quality(result: dict[str, Any], plt: Any) -> Any:
    figure, axis = plt.subplots(figsize=(8, 5))
    sources = list(dict.fromkeys(row["gradients"] for row in result["rows"]))
    of = {it: sorted((r for r in result["rows"] if r["gradients"] == it), key=lambda r: r["bits"]) for it in sources}
    for source, colour in zip(sources, COLOURS, strict=False):
        errors = [row["all_reduce"][-1] for row in of[source]]
        axis.plot([row["bits"] for row in of[source]], errors, marker="o", linestyle="", color=colour, label=source)
    for turn, row in enumerate(of[sources[-1]]):  # neighbours' names stand above and below, or they would overlap
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
    from benchmarks.compression.time_to_loss import seconds_until, smooth

    window = result["settings"]["window"]
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
    axis.set_xscale("linear" if few else "log")
    axis.grid(alpha=0.3)
    axis.legend(fontsize="medium" if few else "x-small")
    return figure


def draw_far(kept: dict[str, Any], plt: Any) -> Any:
    figure, axis = plt.subplots(figsize=(7, 4.5))
    rates = sorted(kept["pace"], key=float)
    for (way, its), colour in zip(kept["steps"].items(), COLOURS[::-1], strict=False):
        steps, last = its["seen"][-1]
        if last > its["loss"]:
            raise Unavailable(f"{way} has not reached {its['loss']}")
        minutes = [kept["pace"][rate][way] * steps / 60 for rate in rates]
        axis.plot([float(it) for it in rates], minutes, marker="o", color=colour, label=f"{way} ({steps:,} steps)")
    axis.set(xscale="log", yscale="log", xlabel="Mbit/s of each site's line, 50 ms there and back")
    loss = next(iter(kept["steps"].values()))["loss"]
    axis.set(ylabel=f"minutes to {loss:g} nats", title="GPT of 0.12 M parameters, 2 sites")
    axis.set_xticks([float(it) for it in rates], rates)
    axis.minorticks_off()
    axis.grid(alpha=0.3)
    axis.legend()
    return figure


def draw_rounds(result: dict[str, Any], plt: Any) -> Any:
    """The time is computed: steps of STEP_S, and for each exchange its bytes at the line's rate and a round trip."""
    losses, fewer = result["rows"]["losses"], result["rows"]["fewer"]
    ranks, steps = result["place"]["ranks"], result["settings"]["steps"]
    warm_up = result["settings"]["warm_up"]
    whole = 4 * PARAMETERS * 2 * (ranks - 1) / ranks
    figure, axes = plt.subplots(1, 2, figsize=(10, 4.5), sharey=True)
    for number, (name, each) in enumerate(losses.items()):
        every = int(found[1]) if (found := re.match(r"every (\d+)", name)) else 1
        loss = sum(each) / len(each)
        looks = {"color": plt.get_cmap("tab10")(number % 10), "marker": "osD^vP*XH<"[number % 10], "label": name}
        axes[0].plot([whole / fewer[name] / 1e3], [loss], linestyle="", **looks)
        minutes = []
        for rate in LINE_RATES:
            exact_s = whole * 8 / rate + ROUND_TRIP_S
            in_rounds_s = whole / fewer[name] * 8 / rate + ROUND_TRIP_S / every
            minutes.append((steps * STEP_S + warm_up * exact_s + (steps - warm_up) * in_rounds_s) / 60)
        axes[1].plot(minutes, [loss] * len(minutes), **looks)
    axes[0].set(xscale="log", xlabel="kB that a rank sends for each step", ylabel="nats per character, unseen text")
    shown = ", ".join(f"{rate / 1e6:g}" for rate in LINE_RATES)
    axes[1].set(xscale="log", xlabel=f"minutes with lines of {shown} Mbit/s (right to left), computed")
    axes[0].legend(fontsize="small")
    for axis in axes:
        axis.grid(alpha=0.3)
    figure.suptitle(f"GPT of 0.12 M parameters, {steps:,} steps of {ranks} ranks, the first {warm_up} exact")
    return figure


def measure_curves() -> dict[str, list[float]]:
    """The accuracy after each of eight epochs."""
    found = {}
    for label, (ranks, words) in CURVES.items():
        command = [sys.executable, "-m", "ringdp.launch", "--log-dir", os.devnull, "-n", str(ranks)]
        script = [str(ROOT / "examples/n_processes.py"), "--epochs", "8", "--save", str(ROOT / "build/curves"), *words]
        done = subprocess.run([*command, *script], capture_output=True, text=True, check=True, cwd=ROOT)
        found[label] = [float(it) for it in re.findall(r"accuracy (0\.\d+)", done.stdout)]
    return found


def draw_curves(result: dict[str, list[float]], plt: Any) -> Any:
    figure, axis = plt.subplots(figsize=(7, 4))
    for (label, accuracies), colour in zip(result.items(), COLOURS, strict=False):
        axis.plot(range(1, len(accuracies) + 1), accuracies, marker="o", color=colour, label=label)
    axis.set(xlabel="epochs", ylabel="accuracy on unseen digits", title="examples/n_processes.py")
    axis.grid(alpha=0.3)
    axis.legend(loc="lower right")
    return figure


def rows_in_short() -> list[tuple[str, str, str, float]]:
    """Of docs/lab/benchmarks.md: the question, both times as they are written, ours as a part of gloo's."""
    rows = re.findall(
        r"^\| ([^|]*) \| ([\d.]+ .s) \| (?:DDP on )?gloo ([\d.]+ .s)", BENCHMARKS.read_text("utf-8"), re.M
    )
    parts = [float(ours.split()[0]) / float(theirs.split()[0]) for _, ours, theirs in rows]
    return [(*row, part) for row, part in zip(rows, parts, strict=True)]


def draw_gains(result: Sequence[tuple[str, str, str, float]], plt: Any) -> Any:
    figure, axis = plt.subplots(figsize=(8, 0.62 * len(result) + 0.6))
    for place, (question, ours, theirs, part) in enumerate(reversed(result)):
        axis.barh(place + 0.18, part, height=0.34, color=LOOKS["ring"]["color"])
        axis.barh(place - 0.18, 1, height=0.34, color=LOOKS["gloo"]["color"])
        axis.text(part + 0.01, place + 0.18, f"ringdp {ours}", va="center", fontsize=8)
        axis.text(1.01, place - 0.18, f"gloo {theirs}", va="center", fontsize=8)
        axis.text(-0.01, place, question, va="center", ha="right", fontsize=8)
    axis.set(xlim=(0, 1.18), title="shorter is faster")
    axis.axis("off")
    return figure


PLOTS: dict[str, Callable[..., Any]] = {
    "busbw": draw_busbw, "hosts": draw_hosts, "model": draw_model, "quality": draw_quality, "loss": draw_loss,
    "resnet": draw_loss, "far": draw_far, "curves": draw_curves, "gains": draw_gains,
    "rounds": draw_rounds,
}  # fmt: skip


def results_for(args: argparse.Namespace) -> Any:
    """What is to be drawn, measured now or read. Raises Unavailable where nothing was measured."""
    if args.plot in COUNTS and not args.draw:
        results = measure_allreduce(args)
        args.folder.mkdir(parents=True, exist_ok=True)
        (args.folder / f"{args.plot}.json").write_text(json.dumps(results, indent=1), encoding="utf-8")
        return results
    if args.plot == "gains":
        return rows_in_short()
    if args.plot == "curves" and not args.draw:
        (args.folder / "curves.json").write_text(json.dumps(measure_curves(), indent=1), encoding="utf-8")
    files = [args.folder / f"{name}.json" for name in (COUNTS if args.plot == "model" else [args.plot])]
    found = [json.loads(file.read_text("utf-8")) for file in files if file.exists()]
    if not found:
        raise Unavailable(f"nothing was measured yet: {', '.join(map(str, files))} is not there")
    return [result for results in found for result in results] if args.plot == "model" else found[0]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    plt = pyplot()
    figure = PLOTS[args.plot](results_for(args), plt)
    figure.tight_layout()
    path = args.folder / f"{args.plot}.svg"
    figure.savefig(path, metadata={"Date": None})
    return {"benchmark": "plots", "path": str(path)}


def report(result: dict[str, Any]) -> str:
    return f"{result['path']}: drawn"
