"""``python -m ringdp timeline DIR``: one trace of the files of all ranks, and of torch.profiler."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from ringdp.diagnosis.timeline import beside, merge, write
from ringdp.diagnosis.timeline_session import read_rank
from ringdp.errors import RingError

_ABOUT = """\
Merge the timelines that the ranks of a job have written (RINGDP_TIMELINE=DIR, or a ringdp.timeline that ended with an
exception) into one trace, which ui.perfetto.dev opens. Traces of torch.profiler (export_chrome_trace) go beside
them."""


def add_parsers(commands: Any) -> None:
    """Add the command to the parsers of ``python -m ringdp``."""
    parser = commands.add_parser(
        "timeline",
        help="merge the ranks' timelines into one trace",
        description=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("files", metavar="DIR|FILE", nargs="+", type=Path, help="the ranks' files, or their folder")
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("timeline.json"), metavar="FILE", help="(timeline.json)"
    )
    parser.add_argument("--profile", action="append", type=Path, default=[], metavar="FILE", help="of torch.profiler")
    parser.set_defaults(run=run)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")


def run(args: argparse.Namespace) -> int:
    """Do what was asked for; the exit code. Errors are printed as one sentence."""
    try:
        files = [
            file for given in args.files for file in (sorted(given.glob("rank_*.json")) if given.is_dir() else [given])
        ]
        trace = merge([read_rank(file) for file in files])
        profiles = [(file.name, json.loads(file.read_text(encoding="utf-8"))) for file in args.profile]
        write(args.output, beside(trace, profiles))
    except (OSError, ValueError, RingError) as error:
        sys.stderr.write(f"python -m ringdp timeline: {error}\n")
        return 1
    events, ranks = len(trace["traceEvents"]), len(trace["ringdp"])
    _say(f"{args.output}: {events} events of {ranks} ranks; open it in https://ui.perfetto.dev")
    for rank, about in trace["ringdp"].items():
        if about["error_ns"] is None:
            _say(f"{rank}: its clock could not be compared: it is the host's clock of the day")
        elif about["error_ns"] > 0:
            _say(f"{rank}: its clock is rank 0's within {about['error_ns'] / 1e6:.3f} ms")
    return 0
