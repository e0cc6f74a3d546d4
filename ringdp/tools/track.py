"""``python -m ringdp track DIR``: gives the metrics of a job to wandb or MLflow, while it runs or afterwards."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ringdp.diagnosis.records import OWN_NAMES, earlier
from ringdp.text import count

_ABOUT = """\
Give the metrics of one rank to a tracker: its times as ringdp/step_s and so on, and what the script has given to
ringdp.metrics.log by its own names. The job writes them by ringrun --metrics-dir DIR; the script needs no line.

  python -m ringdp track metrics/ --to wandb --name digits        until Ctrl-C
  python -m ringdp track metrics/ --to mlflow --name digits --once
"""
_LEFT_OUT = frozenset({"time", "rank", "world", "model", "step", "host", "verdict"})
Write = Callable[[dict[str, float], int], None]
End = Callable[[], None]


def add_parsers(commands: Any) -> None:
    """Add the command to the parsers of ``python -m ringdp``."""
    parser = commands.add_parser(
        "track",
        help="give a job's metrics to wandb or MLflow",
        description=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", metavar="DIR", type=Path, help="the metrics folder")
    parser.add_argument("--to", choices=tuple(TRACKERS), required=True, help="which tracker; it must be installed")
    parser.add_argument("--name", default="ringdp", help="wandb's project, MLflow's experiment (%(default)s)")
    parser.add_argument("--rank", type=int, default=0, help="whose metrics (%(default)s)")
    parser.add_argument("--once", action="store_true", help="give what is there, and end")
    parser.add_argument("--every", type=float, default=5.0, metavar="SECONDS", help="between two looks (5)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Follow the rank's file; the exit code."""
    try:
        write, end = TRACKERS[args.to](args.name)
    except ImportError:
        sys.stderr.write(f"python -m ringdp track: {args.to} is not installed: pip install {args.to}\n")
        return 2
    except Exception as error:  # of the tracker's own kinds: no key, no network
        sys.stderr.write(f"python -m ringdp track: {args.to} does not begin: {error or type(error).__name__}\n")
        return 2
    file = args.folder / f"rank_{args.rank:05d}.jsonl"
    lines = _Lines(file)
    given = steps = 0
    try:
        while True:
            for step, values in _after(lines.new(), given):
                write(values, step)
                given = step
                steps += 1
            if args.once:
                break
            time.sleep(args.every)
    except OSError as error:
        sys.stderr.write(f"python -m ringdp track: {error}\n")
        return 1
    except KeyboardInterrupt:
        pass
    finally:
        end()
    if steps == 0:
        sys.stderr.write(f"python -m ringdp track: {file} has no step\n")
        return 1
    sys.stderr.write(f"ringdp: gave {count(steps, 'step')} up to step {given} to {args.to}, as {args.name!r}\n")
    return 0


class _Lines:
    """The whole lines of a metrics file up to `_position` were given. Where the file has begun anew, the ones that were
    not given are in `earlier(file)`."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._position = 0
        self._begun = False

    def new(self) -> Iterator[bytes]:
        """Those since the last call."""
        size = self._file.stat().st_size if self._file.exists() else 0
        before = earlier(self._file)
        if (size < self._position or not self._begun) and before.exists():
            yield from self._rest(before)
            self._position = 0
        self._begun = True
        if size:
            yield from self._rest(self._file)

    def _rest(self, file: Path) -> Iterator[bytes]:
        with open(file, "rb") as opened:
            opened.seek(self._position)
            for line in opened:
                if line.endswith(b"\n"):
                    self._position += len(line)
                    yield line


def _after(lines: Iterator[bytes], given: int) -> Iterator[tuple[int, dict[str, float]]]:
    """The steps after that one, with their numbers; of several models the first one's."""
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:  # a disk was full
            continue
        if record.get("model") == 0 and record["step"] > given:
            numbers = {name: value for name, value in record.items() if isinstance(value, int | float)}
            yield record["step"], {_named(name): numbers[name] for name in numbers if name not in _LEFT_OUT}


def _named(name: str) -> str:
    return f"ringdp/{name}" if name in OWN_NAMES else name


def _wandb(name: str) -> tuple[Write, End]:
    run = importlib.import_module("wandb").init(project=name)
    return lambda values, step: run.log(values, step=step), run.finish


def _mlflow(name: str) -> tuple[Write, End]:
    mlflow = importlib.import_module("mlflow")
    mlflow.set_experiment(name)
    mlflow.start_run()
    return lambda values, step: mlflow.log_metrics(values, step=step), mlflow.end_run


TRACKERS: dict[str, Callable[[str], tuple[Write, End]]] = {"wandb": _wandb, "mlflow": _mlflow}
"""By its name, which is its package's: begins a run of that name, and returns what writes a step and what ends it."""
