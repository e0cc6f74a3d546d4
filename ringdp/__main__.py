"""``python -m ringdp COMMAND``: the tools; ``python -m ringdp --help`` lists them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ringdp.tools import bench


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ringdp", description="ringdp's tools.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    bench.add_parser(commands)
    return bench.run(parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
