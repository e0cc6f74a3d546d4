"""``python -m ringdp COMMAND``: the tools; ``python -m ringdp --help`` lists them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ringdp.tools import env, store, timeline, top, track
from ringdp.tools.bench import command as bench
from ringdp.tools.doctor import command as doctor
from ringdp.tools.hang import dump, explain
from ringdp.tools.simulate import command as simulate

TOOLS = (bench, doctor, dump, env, explain, simulate, store, timeline, top, track)
"""Modules with ``add_parsers(commands)``: a parser for each command, whose default ``run`` returns the exit code."""

EXAMPLES = """\
examples:
  python -m ringdp doctor                         what this host has, and what would make ringdp faster here
  python -m ringdp doctor -H node1:2,node2:2      which ranks reach which others, and how fast
  python -m ringdp bench -n 4 --backend ring,gloo all-reduce on four ranks of this host, side by side
  ringrun -H node1:4,node2:4 -m ringdp bench --collective all
  python -m ringdp dump logs/RUN                  let the ranks of a job that hangs write what they do
  python -m ringdp explain logs/RUN               why a job hangs or failed
  python -m ringdp simulate --hosts 100 --per-host 8 --link 25gbit   what an all-reduce would take on hosts not here
  python -m ringdp env                            versions and settings, for a report of a fault
  python -m ringdp store --port 29400             the store of an elastic job, on a host that outlives the job's
  python -m ringdp track metrics/ --to wandb      the metrics to wandb or MLflow
  python -m ringdp top metrics/                   which ranks wait for which others, while the job runs
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit code. `argv` is without the program's name; None takes ``sys.argv``."""
    parser = argparse.ArgumentParser(
        prog="python -m ringdp",
        description="ringdp's tools; each has --help.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="show the versions of ringdp, torch and Python")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for tool in TOOLS:
        tool.add_parsers(commands)
    words = list(sys.argv[1:] if argv is None else argv)
    args = parser.parse_args(words)
    if args.version:
        sys.stdout.write(f"{env.versions()}\n")
        return 0
    if args.command is None:
        parser.print_help()
        return 0
    args.argv = words[1:]  # of the command alone, for ranks that it starts
    return int(args.run(args))


if __name__ == "__main__":
    sys.exit(main())
