"""One run of a benchmark: its ranks started once, where they were asked for, and their result brought back.

The parent calls `run`; each rank is the same script with `--as-rank FILE`, and calls `join`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import checkout  # noqa: F401
import command
import mpi
from hosts import PORT, Hosts, HostsError
from measure import Quiet
from ranks import Command, RanksFailed, run_commands, signals_unwind, threads_per_rank, torchrun_env

RESULT = "result.json"
SETTINGS = "settings.json"
_QUIET_TORCH = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # the store warns of every address without a name


class Unavailable(RuntimeError):
    """What was asked for cannot be measured here; the message says why and what to do."""


@dataclass(frozen=True)
class Place:
    """Where ranks run: `ranks` processes on this machine, or `ranks` spread evenly over `hosts` namespaces."""

    ranks: int
    hosts: int = 0
    rate: str = "1gbit"

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise ValueError(f"at least one rank is needed, not {self.ranks}")
        if self.hosts and self.ranks % self.hosts:
            raise ValueError(f"{self.ranks} ranks cannot be spread evenly over {self.hosts} hosts")

    @property
    def per_host(self) -> int:
        return self.ranks // self.hosts if self.hosts else self.ranks

    def __str__(self) -> str:
        ranks = f"{self.ranks} rank{'s' if self.ranks > 1 else ''}"
        if not self.hosts:
            return f"{ranks} on one host"
        line = "unshaped links" if self.rate == "none" else f"links of {self.rate}"
        return f"{ranks} on {self.hosts} hosts with {line}"


def add_place_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("where")
    group.add_argument("--ranks", type=int, help="ranks in all (default 2, or one per host)")
    group.add_argument("--hosts", type=int, default=0, help="spread them over N network namespaces (needs root)")
    group.add_argument("--ranks-per-host", type=int, help="instead of --ranks: as many on each host (default 1)")
    group.add_argument("--rate", default="1gbit", help="speed of each host's link, tc's words, or none (default 1gbit)")
    group.add_argument("--timeout", type=float, default=1800.0, help="seconds before the run is given up")
    group.add_argument("--as-rank", metavar="FILE", help=argparse.SUPPRESS)


def place_of(parser: argparse.ArgumentParser, args: argparse.Namespace) -> Place:
    if args.ranks_per_host is not None and (args.ranks is not None or not args.hosts):
        parser.error("--ranks-per-host goes with --hosts, and without --ranks")
    ranks = args.ranks or args.hosts * (args.ranks_per_host or 1) or 2
    return Place(ranks=ranks, hosts=args.hosts, rate=args.rate)


def command_line(
    args: argparse.Namespace,
    measure: Callable[[argparse.Namespace], dict[str, Any]],
    report: Callable[[dict[str, Any]], str],
    *,
    cannot: tuple[type[Exception], ...] = (),
    json_path: str | None = None,
) -> int:
    """`command.run` for what measures on ranks: their errors are known. Figures go to `json_path`, or to --json."""
    return command.run(
        lambda: measure(args),
        report,
        json_path=json_path or args.json,
        cannot=(Unavailable, HostsError, *cannot),
        failed=(RanksFailed,),
    )


def main(
    args: argparse.Namespace,
    run_rank: Callable[[str], None],
    measure: Callable[[argparse.Namespace], dict[str, Any]],
    report: Callable[[dict[str, Any]], str],
) -> int:
    """One rank of a run where `--as-rank` says so, else the whole run. Returns the exit status."""
    if args.as_rank:
        run_rank(args.as_rank)
        return 0
    return command_line(args, measure, report)


def why_no_ringdp() -> str | None:
    """Why the backend `ring` cannot be used here; None when it can."""
    try:
        import ringdp
    except ImportError as error:
        return f"ringdp cannot be imported ({error}): run `make build`, and use the Python it made"
    import torch.distributed

    del ringdp
    if not torch.distributed.is_backend_available("ring"):
        return "ringdp is here but did not register the backend ring"
    return None


@contextlib.contextmanager
def make_hosts(place: Place) -> Iterator[Hosts | None]:
    """The hosts of that place for the time of the `with`; None on loopback. Raises HostsError."""
    with signals_unwind():
        if not place.hosts:
            yield None
            return
        with Hosts(place.hosts, rate=place.rate) as hosts:
            yield hosts


def run(
    script: str,
    settings: dict[str, Any],
    place: Place,
    *,
    hosts: Hosts | None,
    under_mpi: bool = False,
    mpi_only_tcp: bool = False,
    timeout_s: float,
) -> tuple[Any, Quiet]:
    """Start the ranks of `script`, wait, and return what rank 0 handed to `deliver`, and how quiet it was meanwhile.

    Raises RanksFailed.

    Rank 0's output goes to stderr as it comes; the other ranks' only as part of an error.
    """
    with tempfile.TemporaryDirectory(prefix="ringdp-bench-") as folder:
        address, port = (hosts.address(0), PORT) if hosts else ("127.0.0.1", _free_port())
        path = Path(folder) / SETTINGS
        given = {
            "settings": settings,
            "address": address,
            "port": port,
            "per_host": place.per_host,
            "host_env": [hosts.host_env(host) for host in range(hosts.count)] if hosts else [],
        }
        path.write_text(json.dumps(given), encoding="utf-8")
        own = [sys.executable, str(Path(script).resolve()), "--as-rank", str(path)]
        base = {**_QUIET_TORCH, "OMP_NUM_THREADS": str(threads_per_rank(place.ranks)), **os.environ}
        if under_mpi:
            words = mpi.mpirun_words(ranks=place.ranks, hosts=hosts, only_tcp=mpi_only_tcp, folder=Path(folder))
            commands = [Command([*words, *own], base, "mpirun")]
        elif hosts is not None:
            commands = [
                Command(
                    hosts.command(rank // place.per_host, own),
                    _QUIET_TORCH | hosts.rank_env(rank=rank, per_host=place.per_host),
                    f"rank {rank}",
                )
                for rank in range(place.ranks)
            ]
        else:
            commands = [
                Command(own, {**base, **_local_env(rank, place, address, port)}, f"rank {rank}")
                for rank in range(place.ranks)
            ]
        quiet = Quiet.start()
        run_commands(commands, timeout_s=timeout_s, echo=_echo)
        answer = json.loads((Path(folder) / RESULT).read_text(encoding="utf-8"))
        quiet.stop(ranks_s=answer["cpu_s"])
        return answer["result"], quiet


def _local_env(rank: int, place: Place, address: str, port: int) -> dict[str, str]:
    return torchrun_env(
        rank=rank,
        local_rank=rank,
        world_size=place.ranks,
        local_world_size=place.ranks,
        host=0,
        address=address,
        port=port,
    )


def _echo(label: str, line: str) -> None:
    if label in ("rank 0", "mpirun"):
        sys.stderr.write(line)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True)
class Joined:
    """A rank's view of the run. `deliver` ends it: all ranks call it, and rank 0's result goes to the parent."""

    settings: dict[str, Any]
    rank: int
    world_size: int
    local_rank: int
    deliver: Callable[[Any], None]


def join(path: str) -> Joined:
    """Take this process's place among the ranks, with gloo as torch's default group for agreeing on things."""
    given = json.loads(Path(path).read_text(encoding="utf-8"))
    if mpi.started_by_mpirun():
        os.environ.update(
            mpi.torchrun_env_here(per_host=given["per_host"], address=given["address"], port=given["port"])
        )
    if given["host_env"]:
        os.environ.update(given["host_env"][int(os.environ["GROUP_RANK"])])
    else:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=120))

    def deliver(result: Any) -> None:
        used = torch.tensor([sum(resource.getrusage(resource.RUSAGE_SELF)[:2])], dtype=torch.float64)
        dist.all_reduce(used)
        if dist.get_rank() == 0:
            answer = {"result": result, "cpu_s": used.item()}
            (Path(path).parent / RESULT).write_text(json.dumps(answer), encoding="utf-8")
        dist.barrier()
        dist.destroy_process_group()

    return Joined(
        settings=given["settings"],
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        local_rank=int(os.environ["LOCAL_RANK"]),
        deliver=deliver,
    )


def slowest(seconds: float, group: Any = None) -> float:
    """The most of what the ranks give; all of them call it, after `join`. `group`: whose; the default group's."""
    import torch
    import torch.distributed as dist

    most = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    return most.item()
