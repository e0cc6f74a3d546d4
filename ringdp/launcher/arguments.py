"""The command line: torch.distributed.run's own parser, so that every flag and PET_ variable means the same."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import math
import os
import re
import sys
import uuid
from pathlib import Path

from torch.distributed import run as torchrun
from torch.distributed.argparse_util import env
from torch.distributed.elastic.multiprocessing import Std
from torch.distributed.elastic.rendezvous.utils import (
    _matches_machine_hostname,
    _parse_rendezvous_config,
    parse_rendezvous_endpoint,
)

from ringdp import refusals
from ringdp.config import joins, max_ranks, read_secret
from ringdp.errors import RingError
from ringdp.launcher import joining
from ringdp.launcher.host_list import Host, parse_hosts, read_host_file, scheduler_host_file
from ringdp.launcher.views import Views

LOOPBACK = "127.0.0.1"

GRACE_S = 3.0
"""Seconds the ranks have to end after Ctrl-C; torchrun's default is 30."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Meeting:
    """The rendezvous of the launchers of several nodes.

    Attributes:
        backend: the rendezvous backend: static, c10d, or another.
        endpoint, host, port: its address; port is 0 where that is not known.
        flag: the flag that gave the address.
        run_id: the job's name there.
        least, nodes: the least and the largest number of nodes.
        node: this one's number; None where the backend gives one.
        hosted_here: this node keeps the store through which they meet.
        timeout_s: seconds for which they wait.
    """

    backend: str
    endpoint: str
    host: str
    port: int
    flag: str
    run_id: str
    least: int
    nodes: int
    node: int | None
    hosted_here: bool
    timeout_s: float

    @property
    def host_name(self) -> str:
        """The name of the node that hosts it, for messages."""
        return "node 0" if self.node is not None else "the node that hosts the rendezvous"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """The hosts and programs, where this launcher starts others.

    Attributes:
        hosts: each with its number of ranks.
        flags: those for each host's launcher.
        program: the program that each launches: the script, or module or command, and its arguments.
        script: checked to exist on each host; None for a module or a command.
        variables: -x NAME or NAME=VALUE.
        ssh: --ssh; None takes ssh, and no connection for this host itself.
        address, port: the address of the rendezvous, as given; None takes one that the hosts report.
        notice: a line with the source of the hosts, if the user did not name them; or empty.
        elastic: the job goes on without a host that is lost.
    """

    hosts: tuple[Host, ...]
    flags: tuple[str, ...]
    program: tuple[str, ...]
    script: str | None
    variables: tuple[str, ...]
    ssh: str | None
    address: str | None
    port: int | None
    notice: str
    elastic: bool = False

    @property
    def looks_at_hosts(self) -> bool:
        """Whether the program looks at the hosts, and has something to say of those that cannot meet."""
        return self.script is None and self.program[:2] == ("ringdp", "doctor")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """A checked command line.

    Attributes:
        torchrun: torch's own arguments, with the rendezvous resolved as torchrun would.
        secret_file: the secret the user gave; None where there is none.
        views: the streams of each rank that the console shows.
        log_dir: the user's --log-dir; None where it was not given.
        grace_s: seconds the ranks have to end after the first stop signal.
        placement: the hosts whose launchers this one starts; None where it starts ranks itself.
        meeting: the rendezvous with the job's other launchers; None where there are none.
        signals: names of the signals that end the job.
    """

    torchrun: argparse.Namespace
    secret_file: Path | None
    views: Views
    log_dir: Path | None
    grace_s: float
    placement: Placement | None
    meeting: Meeting | None
    signals: tuple[str, ...]

    @property
    def several_hosts(self) -> bool:
        """Whether other launchers take part in the job."""
        return self.meeting is not None


DESCRIPTION = """\
Start a training script on several ranks.

  ringrun -n 4 train.py --lr 0.1                        4 ranks on this host
  ringrun -n 4 --max-restarts 3 train.py                start again after a failure
  ringrun -n 4 --console all train.py                   show what every rank prints
  ringrun -H node1:4,node2:4 train.py                   4 ranks on each of two hosts, over ssh
  ringrun --nnodes 2 --node-rank 0 --master-addr HOST0 --secret-file FILE -n 4 train.py
                                                        the same without ssh: --node-rank 1 on the other host

Each run has a folder with all output of every rank: logs/<date>_<time>_<script>."""


_MOST_RANKS = 1 << 16


class _Version(argparse.Action):
    """--version; reads them when it is asked."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        import platform

        import torch

        from ringdp import __version__

        versions = f"ringdp {__version__}, torch {torch.__version__}, Python {platform.python_version()}"
        sys.stdout.write(versions + "\n")
        parser.exit()


def _add_hosts(parser: argparse._ActionsContainer) -> None:
    """The flags for the hosts on which launchers are started."""
    parser.add_argument(
        "-H",
        "--hosts",
        metavar="HOST:N,…",
        help="Start N ranks on each of these hosts, over ssh; without :N as many as -n says.",
    )
    parser.add_argument(
        "--hostfile",
        metavar="FILE",
        help="The same from a file, one host a line: 'node1 slots=4' as for mpirun and DeepSpeed, 'node1:4' or "
        "'node1'. In a job of PBS or Sun Grid Engine on several hosts its file is taken (PBS_NODEFILE, PE_HOSTFILE).",
    )
    parser.add_argument(
        "-x",
        dest="variables",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="With -H and --hostfile: a variable for the ranks of all hosts; RINGDP_*, NCCL_* and OMP_* need none.",
    )
    parser.add_argument(
        "--ssh",
        metavar="COMMAND",
        help="The command that connects with a host instead of ssh; a host's name and a command for its shell follow. "
        "With {host} in it only the command follows: 'kubectl exec -i {host} -- sh -c'.",
    )


def get_parser() -> argparse.ArgumentParser:
    """torch's parser with a group of ours."""
    parser = torchrun.get_args_parser()
    parser.prog = "ringrun"
    parser.usage = "ringrun [flags] SCRIPT [arguments of the script]"
    parser.description = DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    group = parser.add_argument_group("ringdp's own flags; all others are torchrun's")
    parser._action_groups.insert(0, parser._action_groups.pop())  # shown first
    group.add_argument(
        "-n",
        dest="nproc_per_node",
        default=argparse.SUPPRESS,
        metavar="N",
        help="Ranks on this host: the same as --nproc-per-node.",
    )
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
        "--tls",
        action="store_true",
        help="Ranks speak TLS 1.3 over TCP, keyed by the job's secret (RINGDP_TLS=1). Without -H several hosts need "
        "--secret-file.",
    )
    group.add_argument(
        "--elastic",
        action="store_true",
        help="Go on without a rank that dies: the others make the step again without it, and the job ends well when "
        "they do. For scripts with RingDP (docs/how-to/elastic.md).",
    )
    group.add_argument(
        "--evict-after",
        "--evict_after",
        action=env,
        type=float,
        default=None,
        metavar="SECONDS",
        help="With --elastic: kill a rank whose process has been stopped (SIGSTOP) for so long, so that the others go "
        "on without it. Without this they wait for it.",
    )
    group.add_argument(
        "--notice-cmd",
        "--notice_cmd",
        action=env,
        default=None,
        metavar="COMMAND",
        help="With --elastic: a shell command that ends with exit code 0 when this host is about to be taken away. The "
        "ranks of this host then leave the job.",
    )
    group.add_argument(
        "--join",
        action=env,
        default=None,
        metavar="HOST:PORT",
        help="Start ranks of the job whose --door this is, with its --secret-file. Or ranks that join the elastic job "
        "whose --rdzv-endpoint this is, and its --rdzv-id where several jobs meet there; the script then has "
        "ringdp.elastic.Job.",
    )
    group.add_argument(
        "--door",
        action=env,
        type=int,
        default=None,
        metavar="PORT",
        help="Open one port of this host to the other --nnodes - 1 hosts, and no other: they start with --join "
        "HOST:PORT and the same --secret-file, and need no open port. 0: any port.",
    )
    group.add_argument(
        "--max-replacements",
        "--max_replacements",
        action=env,
        type=int,
        default=3,
        metavar="N",
        help="With --elastic and a script with ringdp.elastic.Job: start another process in the place of a rank that "
        "died, at most N times in ten minutes; 0: never. Default: 3.",
    )
    group.add_argument(
        "--min-ranks",
        "--min_ranks",
        action=env,
        type=int,
        default=None,
        metavar="N",
        help="With --elastic and a script with ringdp.elastic.Job: with fewer ranks the others keep their state and "
        "wait for newcomers, at most ten minutes. Default: 1.",
    )
    group.add_argument(
        "--max-ranks",
        "--max_ranks",
        action=env,
        type=int,
        default=None,
        metavar="N",
        help="The same: nobody is let in beyond so many ranks.",
    )
    group.add_argument(
        "--console",
        action=env,
        default=None,
        choices=("errors", "rank0", "all"),
        help="What the console shows; the logs always have everything. errors (default): rank 0, and the errors and "
        "tracebacks of the others; rank0: rank 0 alone; all: every rank, each line with its rank.",
    )
    group.add_argument(
        "--rdzv-timeout",
        "--rdzv_timeout",
        action=env,
        type=float,
        default=None,
        metavar="SECONDS",
        help="How long the launchers of several hosts wait for each other (torch's default: 900 with --master-addr, "
        "600 with --rdzv-endpoint); the same as the timeouts of --rdzv-conf.",
    )
    group.add_argument(
        "--metrics-dir",
        "--metrics_dir",
        default=None,
        metavar="DIR",
        help="Each rank writes a line of JSON for each step to DIR/rank_N.jsonl; python -m ringdp top DIR shows them.",
    )
    group.add_argument(
        "--metrics-port",
        "--metrics_port",
        type=int,
        default=None,
        metavar="PORT",
        help="Serve the metrics of this host's ranks to Prometheus, by http://HOST:PORT/metrics (pip install "
        "prometheus_client). Without --metrics-dir they are in the run's folder.",
    )
    group.add_argument(
        "--tensorboard",
        action="store_true",
        help="With --metrics-dir: write them for TensorBoard, too, to DIR/tensorboard (pip install tensorboard).",
    )
    _add_hosts(group)
    group.add_argument("--version", action=_Version, nargs=0, help="Show the versions of ringdp, torch and Python.")
    return parser


def parse(argv: list[str], *, on_a_node: bool = False) -> Arguments:
    """Check the command line; print the usage and exit with 2 where it cannot be used.

    Args:
        on_a_node: another launcher has started this one: it starts none itself.
    """
    parser = get_parser()
    if parser.get_default("master_port") is not None and "PET_MASTER_PORT" not in os.environ:
        # torch 2.11 puts 29500 here, so that two jobs on one machine collide; later versions None, see below.
        parser.set_defaults(master_port=None)
    parser.set_defaults(node_rank=None if parser.get_default("node_rank") == 0 else parser.get_default("node_rank"))
    args = parser.parse_args(argv)
    args.node_asked, args.node_rank, args.joins_store = args.node_rank, args.node_rank or 0, False
    try:
        max_nodes = _most_nodes(args)
        _check_program(args)
        _check_counts(args)
        placement = None if on_a_node else _placement(args, argv)
        views = _views(args)
        _check_metrics(args)
        _check_elastic(args, max_nodes, placement)
        grace_s = _grace(args)
    except (ValueError, RuntimeError, OSError) as error:
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
    if args.tls and not secret and not on_a_node and (args.join or (max_nodes > 1 and placement is None)):
        parser.error(
            "--tls needs the job's secret on every host: --secret-file FILE, the same file contents on all of them"
        )
    return Arguments(
        torchrun=args,
        secret_file=Path(secret).absolute() if secret else None,
        views=views,
        log_dir=Path(args.log_dir) if args.log_dir else None,
        grace_s=grace_s,
        placement=placement,
        meeting=meeting_of(args) if max_nodes > 1 and placement is None else None,
        signals=tuple(name.strip() for name in args.signals_to_handle.split(",") if name.strip()),
    )


def ranks_variables(args: argparse.Namespace) -> dict[str, str]:
    """Of the environment, for --min-ranks and --max-ranks."""
    asked = {"RINGDP_MIN_RANKS": args.min_ranks, "RINGDP_MAX_RANKS": args.max_ranks}
    return {name: str(number) for name, number in asked.items() if number is not None}


def _check_elastic(args: argparse.Namespace, max_nodes: int, placement: Placement | None) -> None:
    """Check the flags that --elastic excludes, and those that need it."""
    if args.evict_after is not None and not args.elastic:
        raise ValueError("--evict-after needs --elastic")
    if args.evict_after is not None and not 0 < args.evict_after < math.inf:
        raise ValueError(f"--evict-after is a number of seconds above 0, got {args.evict_after:g}")
    if args.max_replacements < 0:
        raise ValueError(f"--max-replacements is a number from 0 on, got {args.max_replacements}")
    if args.join is not None:
        args.elastic = True
        try:
            joins({"RINGDP_JOIN": args.join})
        except RingError as error:
            raise ValueError(str(error).replace("RINGDP_JOIN=", "--join ")) from error
        if max_nodes > 1 or placement is not None or args.rdzv_endpoint or args.rdzv_backend != "static":
            raise ValueError(
                "--join names the job, and this launcher starts the ranks of this host alone: leave out --nnodes,"
                " --rdzv-endpoint, --rdzv-backend, -H and --hostfile"
            )
    if args.door is not None:
        _check_door(args, placement)
    if args.notice_cmd is not None and not args.elastic:
        raise ValueError("--notice-cmd needs --elastic")
    if (args.min_ranks, args.max_ranks) != (None, None) and not args.elastic:
        raise ValueError("--min-ranks and --max-ranks need --elastic")
    if not args.elastic:
        return
    try:
        max_ranks(ranks_variables(args))
    except RingError as error:
        raise ValueError(
            re.sub(r"RINGDP_(MIN|MAX)_RANKS=", lambda it: f"--{it[1].lower()}-ranks ", str(error))
        ) from None
    least = torchrun.parse_min_max_nnodes(args.nnodes)[0]
    if least != max_nodes and args.rdzv_backend != "c10d":
        raise ValueError(
            "--nnodes with a minimum and a maximum needs --rdzv-backend c10d and --rdzv-endpoint HOST:PORT, where hosts"
            " that come later find the job"
        )


def _check_door(args: argparse.Namespace, placement: Placement | None) -> None:
    """Check the flags that --door excludes: all of these say where launchers meet."""
    if not 0 <= args.door <= 65535:
        raise ValueError(f"--door must be a port up to 65535, got {args.door}")
    elsewhere = {"--join": args.join is not None, "-H or --hostfile": placement is not None}
    elsewhere |= {"--rdzv-endpoint": bool(args.rdzv_endpoint), "--rdzv-backend": args.rdzv_backend != "static"}
    elsewhere |= {"--standalone": args.standalone, "--master-port": args.master_port is not None}
    if given := [name for name, one in elsewhere.items() if one]:
        raise ValueError(f"--door is where the launchers meet: leave out {given[0]}")
    if not (args.secret_file or os.environ.get("RINGDP_SECRET_FILE")):
        raise ValueError(
            "--door needs --secret-file, the same file on all hosts, by which they prove that they belong to the job;"
            " make one with: (umask 077; openssl rand -hex 32 > secret)"
        )
    least, most = torchrun.parse_min_max_nnodes(args.nnodes)
    if not 0 <= args.node_rank < most:
        raise ValueError(f"--node-rank {args.node_rank} is none of --nnodes {most}")
    if least != most:
        raise ValueError(
            f"--door needs the number of hosts that start together (--nnodes {most}); with --elastic others may come"
            " later"
        )
    if most == 1 and not args.elastic:
        raise ValueError("--door with one host and without --elastic lets nobody in: give --nnodes, or --elastic")


def _check_metrics(args: argparse.Namespace) -> None:
    """Check that the packages for the requested metrics are installed."""
    if args.metrics_port is not None:
        if not 0 <= args.metrics_port <= 65535:
            raise ValueError(f"--metrics-port must be a port up to 65535, got {args.metrics_port}")
        if importlib.util.find_spec("prometheus_client") is None:
            raise ValueError("--metrics-port needs the package prometheus_client: pip install prometheus_client")
    if args.tensorboard and args.metrics_dir is None:
        raise ValueError("--tensorboard needs --metrics-dir DIR")
    if args.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise ValueError("--tensorboard needs the package tensorboard: pip install tensorboard")


def _most_nodes(args: argparse.Namespace) -> int:
    """The largest number of launchers."""
    try:
        least, most = torchrun.parse_min_max_nnodes(args.nnodes)
    except ValueError:
        least = most = 0
    if not 1 <= least <= most:
        raise ValueError(f"--nnodes must be a number from 1 on, or MIN:MAX, got {args.nnodes}")
    return most


def _check_program(args: argparse.Namespace) -> None:
    """Refuse empty texts, which an unset variable of the shell leaves: torch or the ranks would fail later."""
    texts = {
        "the name of the script" if not args.module else "the name of the module": args.training_script,
        "--metrics-dir": args.metrics_dir,
        "--hostfile": args.hostfile,
        "--ssh": args.ssh,
        "-x": next((one for one in args.variables if not one.partition("=")[0].strip()), None),
    }
    for what, text in texts.items():
        if text is not None and not text.partition("=" if what == "-x" else "\n")[0].strip():
            raise ValueError(f"{what} is empty: {text!r}")


def _check_counts(args: argparse.Namespace) -> None:
    """Check numbers that torchrun asserts, or divides by, only later."""
    try:
        ranks = int(args.nproc_per_node)
    except ValueError:
        ranks = 1  # a word: torchrun counts cores or devices
        if not args.nproc_per_node.isalpha():
            raise ValueError(
                f"--nproc-per-node must be a number, or auto, cpu or gpu, got {args.nproc_per_node!r}"
            ) from None
    if ranks < 1:
        raise ValueError(f"--nproc-per-node must be 1 or more, got {ranks}")
    if ranks > _MOST_RANKS:
        raise ValueError(f"--nproc-per-node must be at most {_MOST_RANKS:,}, got {ranks}")
    if args.master_port is not None and not 0 <= args.master_port <= 65535:
        raise ValueError(f"--master-port must be a port up to 65535, got {args.master_port}")
    if args.rdzv_timeout is not None and not args.rdzv_timeout > 0:
        raise ValueError(f"--rdzv-timeout must be more than 0 seconds, got {args.rdzv_timeout:g}")
    if args.max_restarts < 0:
        raise ValueError(f"--max-restarts must be 0 or more, got {args.max_restarts}")


def _resolve_rendezvous(args: argparse.Namespace, max_nodes: int) -> None:
    """Resolve the rendezvous as torchrun does: on one node without explicit flags, a free port."""
    unspecified = args.rdzv_backend == "static" and not args.rdzv_endpoint and args.master_port is None
    args.join_id = args.rdzv_id if args.join is not None and args.rdzv_id != "none" else ""
    if args.standalone or (unspecified and max_nodes == 1):
        args.rdzv_backend = "c10d"
        # Addresses, not names: where a bare container has no /etc/hosts, "localhost" and its own name mean nothing.
        args.rdzv_endpoint = f"{LOOPBACK}:0"
        args.local_addr = args.local_addr or LOOPBACK
        args.rdzv_id = str(uuid.uuid4())
    if args.master_port is None:
        args.master_port = 29500


def join_running(arguments: Arguments) -> Arguments:
    """Of a host of an elastic job that comes later, perhaps again: where the job runs already, those that join it.

    Raises:
        ValueError: the job is one of a single host, and another one of its name runs there.
    """
    args = arguments.torchrun
    if not args.elastic or args.rdzv_backend != "c10d" or arguments.placement is not None:
        return arguments
    meeting = arguments.meeting or meeting_of(args)
    if meeting.port == 0 or not joining.running(meeting.host, meeting.port, meeting.run_id):
        return arguments
    if meeting.nodes == 1:
        raise ValueError(
            f"an elastic job with --rdzv-id {meeting.run_id} runs at {meeting.endpoint} already: give this one another"
            f" --rdzv-id, or let it join that one by --join {meeting.endpoint} --rdzv-id {meeting.run_id}"
        )
    args.join, args.join_id, args.joins_store = f"[{meeting.host}]:{meeting.port}", meeting.run_id, True
    args.nnodes, args.rdzv_endpoint, args.rdzv_backend, args.rdzv_conf = "1:1", "", "static", ""
    args.standalone = True
    _resolve_rendezvous(args, 1)
    return dataclasses.replace(arguments, meeting=None)


def _placement(args: argparse.Namespace, argv: list[str]) -> Placement | None:
    """From -H, --hostfile, or the file of the scheduler whose job this is."""
    notice = ""
    elsewhere = {"--nnodes": args.nnodes != "1:1", "--node-rank": args.node_rank != 0, "--standalone": args.standalone}
    elsewhere |= {"--rdzv-endpoint": bool(args.rdzv_endpoint), "--rdzv-backend": args.rdzv_backend != "static"}
    if args.hosts is not None and args.hostfile is not None:
        raise ValueError("-H and --hostfile both name hosts: give one of them")
    if args.hosts is not None:
        hosts = parse_hosts(args.hosts)
    elif args.hostfile is not None:
        hosts = read_host_file(Path(args.hostfile))
    elif (found := scheduler_host_file(os.environ)) and not any(elsewhere.values()):
        hosts = read_host_file(found[1])
        notice = f"{found[0]} names {len(hosts)} hosts ({found[1]}): starting on all of them; -H says otherwise"
        if len(hosts) == 1:
            return None
    else:
        if args.variables or args.ssh is not None:
            raise ValueError(f"{'-x' if args.variables else '--ssh'} goes with -H or --hostfile, which name the hosts")
        return None
    if given := [name for name, one in elsewhere.items() if one]:
        raise ValueError(f"the list of hosts sets nodes and rendezvous: leave out {given[0]}")
    begin = len(argv) - len(args.training_script_args) - 1
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    _add_hosts(own)
    own.add_argument("--secret-file", "--secret_file")
    _, flags = own.parse_known_args(argv[:begin])
    slots = args.nproc_per_node
    named = not (args.module or args.no_python or args.run_path)
    return Placement(
        hosts=tuple(Host(host.name, host.slots or (int(slots) if slots.isdecimal() else None)) for host in hosts),
        flags=tuple(flags),
        program=tuple(argv[begin:]),
        script=args.training_script if named else None,
        variables=tuple(args.variables),
        ssh=args.ssh,
        address=args.master_addr if args.master_addr != "127.0.0.1" else None,
        port=args.master_port,
        notice=notice,
        elastic=args.elastic,
    )


def meeting_of(args: argparse.Namespace) -> Meeting:
    """The rendezvous of the nodes, as torch is going to see it."""
    least, most = torchrun.parse_min_max_nnodes(args.nnodes)
    settings = _parse_rendezvous_config(args.rdzv_conf or "")
    static = args.rdzv_backend == "static"
    if args.rdzv_timeout is not None:
        names = ("timeout",) if static else ("timeout", "join_timeout", "read_timeout")
        added = [f"{name}={args.rdzv_timeout:g}" for name in names if name not in settings]
        args.rdzv_conf = ",".join([*filter(None, [args.rdzv_conf]), *added])
        settings = _parse_rendezvous_config(args.rdzv_conf)
    endpoint = torchrun.get_rdzv_endpoint(args)
    try:
        host, port = parse_rendezvous_endpoint(endpoint, default_port=29400)
    except ValueError:  # torch says what is wrong with it
        host, port = endpoint, 0
    usual = {"timeout": 900.0} if static else {"join_timeout": 600.0}
    [(name, default)] = usual.items()
    return Meeting(
        backend=args.rdzv_backend,
        endpoint=f"{host}:{port}" if port else endpoint,
        host=host,
        port=port,
        flag="--rdzv-endpoint" if args.rdzv_endpoint else "--master-addr",
        run_id=args.rdzv_id,
        least=least,
        nodes=most,
        node=args.node_rank if static else None,
        hosted_here=args.node_rank == 0 if static else bool(_matches_machine_hostname(host)),
        timeout_s=float(settings.get(name, default)),
    )


def _views(args: argparse.Namespace) -> Views:
    redirects, tee = Std.from_str(args.redirects), Std.from_str(args.tee)
    local_ranks = frozenset(int(part) for part in args.local_ranks_filter.split(",") if part.strip())
    if args.logs_specs is not None:
        return Views(console="none")
    as_torchrun = bool(redirects) or bool(tee) or bool(local_ranks)
    if as_torchrun and args.console is not None:
        raise ValueError(refusals.explain("console", "redirects"))
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
