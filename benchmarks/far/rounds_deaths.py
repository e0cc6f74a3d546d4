"""What ranks that die and are replaced, and slow ones, cost: samples a second that count, in steps and in rounds.

    python -m benchmarks rounds_deaths                                 8 ranks, three minutes of each way
    python -m benchmarks rounds_deaths --ranks 4 --seconds 60 --kill-every 20

Each way is `ringrun --elastic` with a `ringdp.elastic.Job`: `steps` is RingDP, `waits` rounds that wait for all ranks,
`quorum` rounds that end without late ones; `undisturbed` is `quorum` without faults. A step of the GPT of
examples/char_lm.py, 0.12 M parameters, takes --step-ms: the ranks sleep for the rest of it, so that they do not compete
for cores. A random rank is killed each --kill-every seconds, and its launcher replaces it; for a fifth of each --period
a rank's steps take four times as long. Samples are those that are in a mean, of all ranks, from the first mean of all
ranks on; nats per character are of the common parameters at the end, on text that was not trained on.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.compression.quality_runs import small_gpt_options, text, unseen_nats
from benchmarks.lib.measure import machine, table
from benchmarks.lib.ranks import ROOT, Failed, start, stop_all
from examples.char_lm import GPT

WAYS = ("undisturbed", "quorum", "waits", "steps")
PATIENCE_S = 120.0


def counted(folder: Path) -> list[tuple[float, float]]:
    """When samples of a rank were in a mean, and how many; of all ranks, by time."""
    lines = (line.split() for path in folder.glob("counted-*") for line in path.read_text().splitlines())
    return sorted((float(line[0]), float(line[1])) for line in lines if len(line) == 2)


def living(folder: Path) -> list[int]:
    """Ranks that have a part in a mean, by their pids."""
    return [pid for path in folder.glob("counted-*") if Path(f"/proc/{(pid := int(path.name[8:]))}/environ").exists()]


def run(way: str, args: argparse.Namespace, draw: random.Random) -> tuple[float, float]:
    """Samples a second, and nats. Raises Failed."""
    disturbed = way != "undisturbed"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        given = {key: getattr(args, key) for key in ("every", "step_ms", "period", "quorum", "grace", "ranks", "seed")}
        (folder / "settings.json").write_text(json.dumps(given | {"way": way if disturbed else "quorum"}))
        words = [sys.executable, str(ROOT / "launch.py"), "--elastic", "-n", str(args.ranks), "--console", "errors"]
        words += ["--max-replacements", "1000", "-m", "benchmarks.far.rounds_deaths_rank", str(folder)]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        with open(folder / "said", "wb") as said:
            job = start(words, cwd=folder, env=env, stdout=said, stderr=subprocess.STDOUT)
        try:
            _until(lambda: len(living(folder)) == args.ranks, job, folder, "the first mean")
            began = time.time()
            if disturbed:
                (folder / "slow").write_text(str(began))
            for at in [began + one * args.kill_every for one in range(1, int(args.seconds / args.kill_every) + 1)]:
                time.sleep(max(0.0, at - time.time()))
                if disturbed and time.time() < began + args.seconds:
                    os.kill(draw.choice(living(folder)), signal.SIGKILL)
            time.sleep(max(0.0, began + args.seconds - time.time()))
            samples = sum(many for when, many in counted(folder) if began < when <= began + args.seconds)
            (folder / "save").touch()
            _until(lambda: (folder / "model.pt").exists(), job, folder, "the parameters")
            _, unseen, alphabet = text()
            options = small_gpt_options(steps=1)
            module = GPT(alphabet, options)
            module.load_state_dict(torch.load(folder / "model.pt", weights_only=True))
            return samples / args.seconds, unseen_nats(module, unseen, options.context)
        finally:
            stop_all([job])


def _until(condition: Any, job: subprocess.Popen[Any], folder: Path, what: str) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        if job.poll() is not None or time.monotonic() > end:
            raise Failed(f"{what} did not come: {(folder / 'said').read_text(errors='replace')[-3000:]}")
        time.sleep(0.05)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, list[tuple[float, float]]] = {}
    for seed in range(args.seeds):
        args.seed = seed
        for way in args.ways:
            found.setdefault(way, []).append(run(way, args, random.Random(seed)))
            print(f"seed {seed}, {way}: {found[way][-1][0]:.0f} samples/s, {found[way][-1][1]:.4f} nats", flush=True)
    return {"benchmark": "rounds_deaths", "rows": found, "machine": machine(), "settings": vars(args)}


def report(result: dict[str, Any]) -> str:
    usual = statistics.median(speed for speed, _ in result["rows"].get("undisturbed", [(0.0, 0.0)]))
    rows = []
    for way, each in result["rows"].items():
        speed = statistics.median(one for one, _ in each)
        share = f"{speed / usual:.0%}" if usual else "?"
        rows.append([way, f"{speed:.0f}", share, f"{statistics.fmean(nats for _, nats in each):.4f}"])
    return table(["", "samples/s", "of undisturbed", "nats"], rows)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ways", default=",".join(WAYS), help=f"of {', '.join(WAYS)}")
    parser.add_argument("--ranks", type=int, default=8, help="(8)")
    parser.add_argument("--seeds", type=int, default=1, help="how many (1)")
    parser.add_argument("--seconds", type=float, default=180.0, help="of each way (180)")
    parser.add_argument("--kill-every", type=float, default=60.0, help="seconds (60)")
    parser.add_argument("--every", type=int, default=20, help="steps of a round (20)")
    parser.add_argument("--step-ms", type=float, default=250.0, help="of a step (250)")
    parser.add_argument("--period", type=float, default=60.0, help="seconds, in a fifth of which a rank is slow (60)")
    parser.add_argument("--quorum", type=float, default=0.75, help="(0.75)")
    parser.add_argument("--grace", type=float, default=0.3, help="seconds (0.3)")


def check(args: argparse.Namespace) -> None:
    args.ways = [one.strip() for one in args.ways.split(",")]
    if wrong := [one for one in args.ways if one not in WAYS]:
        raise ValueError(f"{wrong[0]} is none of {', '.join(WAYS)}")
    if args.ranks < 2 or min(args.seconds, args.kill_every, args.period) <= 0 or args.every < 1 or args.seeds < 1:
        raise ValueError("at least two ranks, a step of a round and a seed, and times above 0, are needed")
