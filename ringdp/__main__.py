"""``python -m ringdp COMMAND``: the tools; ``python -m ringdp --help`` lists them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ringdp.tools import bench
from ringdp.tools.hang import commands as hang

_EXAMPLES = """\
  python -m ringdp bench --ranks 4          how fast all-reduce is here
  python -m ringdp bench --explain          which algorithm runs for which size, and why
  python -m ringdp dump logs/RUN            let the ranks of a job that hangs write what they do
  python -m ringdp explain logs/RUN         why a job hangs or failed
"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m ringdp",
        description="ringdp's tools.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    bench.add_parser(commands)
    hang.add_parsers(commands)
    args = parser.parse_args(argv)
    return int(args.run(args))


if __name__ == "__main__":
    sys.exit(main())
