"""Starts a tool's ranks: those of ``-n`` on this host, or of ``-H`` over ssh, by ringrun."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence


def add_options(parser: argparse._ActionsContainer) -> None:
    """The flags that start ranks, with the meaning that they have for ringrun."""
    parser.add_argument("-n", "--ranks", type=int, metavar="N", help="start N ranks on this host (with -H: on each)")
    parser.add_argument(
        "-H", dest="host_list", metavar="HOST:N,…", help="start N ranks on each of these hosts, over ssh"
    )
    parser.add_argument("--hostfile", metavar="FILE", help="the same from a file, as ringrun reads it")
    parser.add_argument(
        "--ssh", metavar="COMMAND", help="with -H: the command that connects with a host instead of ssh"
    )
    what = "with -H: a variable for the ranks of all hosts"
    parser.add_argument("-x", dest="variables", action="append", default=[], metavar="NAME[=VALUE]", help=what)


def wanted(args: argparse.Namespace) -> bool:
    """Whether the command line asks for ranks to be started."""
    return args.ranks is not None or args.host_list is not None or args.hostfile is not None


def problem(args: argparse.Namespace) -> str | None:
    """The problem with these flags; None without one."""
    if args.ranks is not None and args.ranks < 1:
        return f"-n must be 1 or more, not {args.ranks}"
    if args.host_list is not None and args.hostfile is not None:
        return "-H and --hostfile both name hosts: give one of them"
    if (args.ssh is not None or args.variables) and args.host_list is None and args.hostfile is None:
        return f"{'--ssh' if args.ssh is not None else '-x'} goes with -H or --hostfile, which name the hosts"
    return None


def launch(command: str, argv: Sequence[str]) -> int:
    """Run ``python -m ringdp COMMAND`` on the ranks that `argv` asks for, with the rest of `argv`; the exit code.

    No logs are kept: rank 0 prints all results.
    """
    from ringdp.launcher import supervisor

    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_options(own)
    args, rest = own.parse_known_args(list(argv))
    words = ["--log-dir", os.devnull, "--console", "rank0"]
    if args.ranks is not None:
        words += ["-n", str(args.ranks)]
    for flag, value in (("-H", args.host_list), ("--hostfile", args.hostfile), ("--ssh", args.ssh)):
        words += [] if value is None else [flag, value]
    for name in args.variables:
        words += ["-x", name]
    return supervisor.launch([*words, "-m", "ringdp", command, *rest])
