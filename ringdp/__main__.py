"""``python -m ringdp COMMAND``: the tools; ``python -m ringdp --help`` lists them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ringdp.tools import bench, timeline, top

COMMANDS = {"bench": bench, "timeline": timeline, "top": top}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ringdp", description="ringdp's tools.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for tool in COMMANDS.values():
        tool.add_parser(commands)
    args = parser.parse_args(argv)
    return COMMANDS[args.command].run(args)


if __name__ == "__main__":
    sys.exit(main())
