"""``python -m ringdp top DIR``: a live table of a job's ranks, from their metrics folder."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringdp.diagnosis.metrics_folder import RankState, read
from ringdp.errors import RingError
from ringdp.text import format_time

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

_STRAGGLER = 0.1  # of a step that most other ranks wait for it
_SILENT_S = 30.0  # without a step, beside ten steps' time
_ABOUT = """\
A live table of the ranks of a job that writes metrics: ringrun --metrics-dir DIR, or RINGDP_METRICS_DIR=DIR.

  step     the mean of the last 20 steps
  own      computing: between steps, forward, backward, optimizer
  peer     waiting for a rank that computes longer, with its number
  comm     waiting for communication
  !        a rank that the others wait for; ?: it has not made a step for a while
"""


def add_parsers(commands: Any) -> None:
    """Add the command to the parsers of ``python -m ringdp``."""
    parser = commands.add_parser(
        "top",
        help="a live table of a job's ranks: which are slow, which wait for which",
        description=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", metavar="DIR", type=Path, help="the metrics folder")
    parser.add_argument("--once", action="store_true", help="print the table once, as plain text, and end")
    parser.add_argument("--every", type=float, default=1.0, metavar="SECONDS", help="between two looks (1)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Show it until Ctrl-C; the exit code."""
    try:
        import rich.console
        import rich.live
    except ImportError:
        sys.stderr.write("python -m ringdp top: needs the package rich: pip install rich\n")
        return 2
    if not args.every > 0:
        sys.stderr.write(f"python -m ringdp top: --every must be above 0 seconds, not {args.every:g}\n")
        return 2
    try:
        console = rich.console.Console()
        if args.once:
            console.print(render(read(args.folder), time.time()))
            return 0
        with rich.live.Live(console=console, auto_refresh=False, screen=console.is_terminal) as live:
            while True:
                live.update(_now(args.folder), refresh=True)
                time.sleep(args.every)
    except (RingError, OSError) as error:
        sys.stderr.write(f"python -m ringdp top: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 0


def _now(folder: Path) -> Table | Text:
    """What is to be seen now. A job makes the folder with its first step, which may take a while to come."""
    from rich.text import Text

    if not folder.exists():
        return Text(f"no rank has written a step yet: {folder} is not there")
    return render(read(folder), time.time())


def stragglers(states: list[RankState]) -> set[int]:
    """The ranks for which the others wait a tenth of a step or more."""
    waited: dict[int, float] = {}
    for one in states:
        peer = one.last.get("slow_peer")
        if isinstance(peer, int) and peer != one.rank:
            waited[peer] = waited.get(peer, 0.0) + one.seconds("slow_peer")
    others = max(len(states) - 1, 1)
    step = max((one.seconds("step") for one in states), default=0.0)
    return {rank for rank, seconds in waited.items() if step > 0 and seconds / others >= _STRAGGLER * step}


def _short_size(size_bytes: float) -> str:
    """Three digits: ``346 MiB``, ``1.25 GiB``."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size_bytes >= unit:
            return (
                f"{size_bytes / unit:.{2 if size_bytes < 10 * unit else 1 if size_bytes < 100 * unit else 0}f} {name}"
            )
    return f"{size_bytes:.0f} B"


def render(states: list[RankState], now: float) -> Table | Text:
    """The table, at most 80 columns wide."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    if not states:
        return Text("no rank has written a step yet")
    slow = stragglers(states)
    lead = states[0]
    ranks = lead.last.get("world", len(states))
    loss = f", loss {lead.last['loss']:.4g}" if isinstance(lead.last.get("loss"), int | float) else ""
    title = f"{len(states)} of {ranks} ranks, step {lead.last['step']}, {lead.steps_per_s:.2f} steps/s{loss}"
    table = Table(title=title, title_justify="left", caption_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("rank", "host", "step", "own", "peer", "comm", "sent", "memory"):
        table.add_column(name, justify="left" if name == "host" else "right", no_wrap=True, overflow="ellipsis")
    table.columns[1].max_width = 14
    for one in states:
        step = one.seconds("step")
        peer_wait = min(one.seconds("slow_peer"), one.seconds("exposed", "other_wait"))
        peer = one.last.get("slow_peer")
        silent = now - one.last["time"] > max(_SILENT_S, 10 * step)
        mark = "!" if one.rank in slow else "?" if silent else " "
        waits = f"{format_time(peer_wait)} ({peer})" if peer_wait > 0.01 * step and peer != one.rank else "-"
        style = "bold red" if one.rank in slow else "yellow" if silent else ""
        table.add_row(
            f"{mark}{one.rank}",
            Text(str(one.last.get("host", ""))),
            format_time(step),
            format_time(one.seconds("between", "forward", "backward", "after")),
            waits,
            format_time(max(one.seconds("exposed", "other_wait") - peer_wait, 0.0)),
            _short_size(one.last.get("sent_bytes", 0)),
            _short_size(one.last.get("memory_bytes", 0)),
            style=style,
        )
    if slow:
        table.caption = "the others wait for " + ", ".join(f"rank {rank}" for rank in sorted(slow))
    return table
