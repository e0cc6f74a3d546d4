"""The command line: torch.distributed.run's own parser, so that every flag and PET_ variable means the same."""

from __future__ import annotations

import argparse
import dataclasses
import os
import uuid
from pathlib import Path

from torch.distributed import run as torchrun
from torch.distributed.argparse_util import env
from torch.distributed.elastic.multiprocessing import Std

from ringdp.config import read_secret
from ringdp.errors import RingError
from ringdp.launch.views import Views

GRACE_S = 3.0
"""Seconds the ranks have to end after Ctrl-C; torchrun gives 30 unless told otherwise."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """A checked command line.

    Attributes:
        torchrun: torch's own arguments, with the rendezvous resolved as torchrun would.
        secret_file: the secret the user gave; None where there is none.
        views: what of which rank is shown on the console.
        log_dir: the user's --log-dir; None where it was not given.
        grace_s: seconds the ranks have to end after the first stop signal.
        several_hosts: other launchers take part in the job.
        signals: names of the signals that end the job.
    """

    torchrun: argparse.Namespace
    secret_file: Path | None
    views: Views
    log_dir: Path | None
    grace_s: float
    several_hosts: bool
    signals: tuple[str, ...]


def get_parser() -> argparse.ArgumentParser:
    """torch's parser with a group of ours."""
    parser = torchrun.get_args_parser()
    parser.prog = "ringrun"
    parser.description = "Start a training script on several ranks: torchrun's flags, and those under 'ringdp'."
    group = parser.add_argument_group("ringdp")
    group.add_argument(
        "--secret-file",
        "--secret_file",
        action=env,
        default=None,
        metavar="PATH",
        help="The job's secret, the same file contents on every host: 64 hexadecimal characters, mode 0600. On one "
        "host the launcher makes one by itself.",
    )
    group.add_argument(
        "--console",
        action=env,
        default=None,
        choices=("errors", "rank0", "all"),
        help="What the console shows; the logs always have everything. errors (default): rank 0, and the errors and "
        "tracebacks of the others; rank0: rank 0 alone; all: every rank, each line with its rank.",
    )
    return parser


def parse(argv: list[str]) -> Arguments:
    """Check the command line; prints the usage and exits with 2 where it cannot be used."""
    parser = get_parser()
    if parser.get_default("master_port") is not None and "PET_MASTER_PORT" not in os.environ:
        # torch 2.11 puts 29500 here, so that two jobs on one machine collide; later versions None, see below.
        parser.set_defaults(master_port=None)
    args = parser.parse_args(argv)
    try:
        max_nodes = _most_nodes(args)
        _check_counts(args)
        views = _views(args)
        grace_s = _grace(args)
    except (ValueError, RuntimeError) as error:
        parser.error(str(error))
    if args.console is not None and args.console not in ("errors", "rank0", "all"):
        parser.error(f"PET_CONSOLE={args.console} is none of errors, rank0, all")
    _resolve_rendezvous(args, max_nodes)
    secret = args.secret_file or os.environ.get("RINGDP_SECRET_FILE")
    if secret:
        try:
            read_secret(secret)
        except RingError as error:
            given = "--secret-file " if args.secret_file else "RINGDP_SECRET_FILE="
            parser.error(str(error).replace("RINGDP_SECRET_FILE=", given))
    return Arguments(
        torchrun=args,
        secret_file=Path(secret).absolute() if secret else None,
        views=views,
        log_dir=Path(args.log_dir) if args.log_dir else None,
        grace_s=grace_s,
        several_hosts=max_nodes > 1,
        signals=tuple(name.strip() for name in args.signals_to_handle.split(",") if name.strip()),
    )


def _most_nodes(args: argparse.Namespace) -> int:
    """How many launchers there can be."""
    try:
        least, most = torchrun.parse_min_max_nnodes(args.nnodes)
    except ValueError:
        least = most = 0
    if not 1 <= least <= most:
        raise ValueError(f"--nnodes must be a number from 1 on, or MIN:MAX, got {args.nnodes}")
    return most


def _check_counts(args: argparse.Namespace) -> None:
    """Numbers that torchrun asserts, or divides by, only later."""
    try:
        ranks = int(args.nproc_per_node)
    except ValueError:
        ranks = 1  # a word: torchrun counts cores or devices
    if ranks < 1:
        raise ValueError(f"--nproc-per-node must be 1 or more, got {ranks}")
    if args.max_restarts < 0:
        raise ValueError(f"--max-restarts must be 0 or more, got {args.max_restarts}")


def _resolve_rendezvous(args: argparse.Namespace, max_nodes: int) -> None:
    """What torchrun does before it makes its configuration: on one node without explicit flags, a free port."""
    unspecified = args.rdzv_backend == "static" and not args.rdzv_endpoint and args.master_port is None
    if args.standalone or (unspecified and max_nodes == 1):
        args.rdzv_backend = "c10d"
        args.rdzv_endpoint = "localhost:0"
        args.rdzv_id = str(uuid.uuid4())
    if args.master_port is None:
        args.master_port = 29500


def _views(args: argparse.Namespace) -> Views:
    redirects, tee = Std.from_str(args.redirects), Std.from_str(args.tee)
    local_ranks = frozenset(int(part) for part in args.local_ranks_filter.split(",") if part.strip())
    as_torchrun = bool(redirects) or bool(tee) or bool(local_ranks)
    if as_torchrun and args.console is not None:
        raise ValueError("--console does not go with --redirects, --tee or --local-ranks-filter: choose one way")
    return Views(
        console=None if as_torchrun else args.console or "errors",
        redirects=redirects,
        tee=tee,
        local_ranks=local_ranks,
        role=args.role,
        template=os.environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"),
    )


def _grace(args: argparse.Namespace) -> float:
    """--shutdown-timeout (torch 2.12 and later) or its variable where given, else ours."""
    seconds = getattr(args, "shutdown_timeout", None)
    if seconds is None:
        seconds = os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
    if seconds is None:
        return GRACE_S
    if float(seconds) < 0:
        raise ValueError(f"--shutdown-timeout must not be below 0, got {seconds}")
    return float(seconds)
