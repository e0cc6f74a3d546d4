"""``python -m ringdp timeline DIR``: one trace of the files of all ranks, and of torch.profiler."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ringdp.diagnosis.timeline import beside, merge, write
from ringdp.diagnosis.timeline_session import files_of_ranks, read_json, read_rank
from ringdp.errors import InvalidArgumentError, RingError

_ABOUT = """\
Merge the timelines that the ranks of a job have written (RINGDP_TIMELINE=DIR, or a ringdp.timeline that ended without
the other ranks) into one trace, which ui.perfetto.dev opens. Traces of torch.profiler (export_chrome_trace) go beside
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


def _read(given: Sequence[Path]) -> list[dict[str, Any]]:
    files = [file for one in given for file in (files_of_ranks(one) if one.is_dir() else [one])]
    if not files:
        raise InvalidArgumentError(f"no file of a rank (rank_*.json, *.rank_*) lies in {', '.join(map(str, given))}")
    found: dict[int, Path] = {}
    ranks = []
    for file in files:
        ranks.append(read_rank(file))
        rank = ranks[-1]["ringdp"]["rank"]
        if rank in found:
            raise InvalidArgumentError(f"{found[rank]} and {file} are both of rank {rank}: give one file of each rank")
        found[rank] = file
    return ranks


def _read_profile(file: Path) -> dict[str, Any]:
    content = read_json(file)
    if not isinstance(content, dict) or not isinstance(content.get("traceEvents"), list):
        raise InvalidArgumentError(f"{file} is not a trace of torch.profiler (export_chrome_trace)")
    return content


def run(args: argparse.Namespace) -> int:
    """Run the command; the exit code. Errors are printed as one sentence."""
    try:
        trace = merge(_read(args.files))
        profiles = [(file.name, _read_profile(file)) for file in args.profile]
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
