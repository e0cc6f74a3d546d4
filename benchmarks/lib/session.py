"""One run of a benchmark: its options, its ranks started once, their result brought back and reported.

A benchmark is a module with `options(parser)` and `report(result)`, and with either

    run_rank(joined)    what each rank does, which ends with `joined.deliver(rows)`; `settings(args)` is what it is told
    measure(args)       what is measured without ranks, or around them

and, where it needs them, `check(args)`, which raises ValueError for options that make no sense, and
`add_derived(rows, place)`, what follows from comparing rows.
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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from benchmarks.lib import mpi
from benchmarks.lib.hosts import PORT, Hosts
from benchmarks.lib.measure import Quiet, machine, table
from benchmarks.lib.ranks import (
    ROOT,
    Command,
    Failed,
    Unavailable,
    run_commands,
    signals_unwind,
    threads_per_rank,
    torchrun_env,
)

RESULT, SETTINGS = "result.json", "settings.json"
_QUIET_TORCH = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # the store warns of every address without a name


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


# The command line.


def parse(module: Any, argv: Sequence[str], name: str = "") -> argparse.Namespace:
    """The options of a benchmark, checked; ends the program with a message where they make no sense."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks {name or module.__name__.rpartition('.')[2]}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.options(parser)
    parser.add_argument("--json", metavar="FILE", help="write everything measured there, too")
    if hasattr(module, "run_rank"):
        group = parser.add_argument_group("where")
        group.add_argument("--ranks", type=int, help="ranks in all (default 2, or one per host)")
        group.add_argument("--hosts", type=int, default=0, help="spread them over N network namespaces (needs root)")
        group.add_argument("--ranks-per-host", type=int, help="instead of --ranks: as many on each host (default 1)")
        group.add_argument("--rate", default="1gbit", help="of each host's link, tc's words, or none (default 1gbit)")
        group.add_argument("--timeout", type=float, default=1800.0, help="seconds before the run is given up")
    args = parser.parse_args(argv)
    try:
        if hasattr(module, "run_rank"):
            if args.ranks_per_host is not None and (args.ranks is not None or not args.hosts):
                raise ValueError("--ranks-per-host goes with --hosts, and without --ranks")
            ranks = args.ranks if args.ranks is not None else args.hosts * (args.ranks_per_host or 1) or 2
            args.place = Place(ranks, args.hosts, args.rate)
        if hasattr(module, "check"):
            module.check(args)
    except ValueError as error:
        parser.error(str(error))
    return args


def chosen(text: str, known: Sequence[str], separator: str = ",") -> list[str]:
    """The names in a list. Raises ValueError where one is not known."""
    names = [word.strip() for word in text.split(separator) if word.strip()]
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"{unknown[0]!r} is not known: choose from {f'{separator} '.join(known)}")
    return names


def at_least(least: int, **numbers: float) -> None:
    """Raises ValueError for the first number below."""
    for name, number in numbers.items():
        if number < least:
            raise ValueError(f"--{name.replace('_', '-')} must be {least} or more, not {number}")


def main(module: Any, name: str, argv: Sequence[str]) -> int:
    """One rank of a run where `--as-rank` says so, else the whole run. Returns the exit status."""
    if list(argv[:1]) == ["--as-rank"]:
        module.run_rank(join(argv[1]))
        return 0
    args = parse(module, argv, name)
    found = module.measure if hasattr(module, "measure") else lambda args: measured(module, name, args)
    return reported(name, lambda: found(args), module.report, json_path=args.json)


def reported(
    name: str,
    measure: Callable[[], dict[str, Any] | Iterator[dict[str, Any]]],
    report: Callable[[dict[str, Any]], str],
    *,
    json_path: str | None,
) -> int:
    """Measure, print the report, write the figures, and return the exit status.

    Args:
        measure: returns the figures, or yields those it has so far, each time there are more. What ends it early, an
            interruption too, leaves the last ones, which are reported. Unavailable is status 2, Failed status 1.
        report: puts them into words.
        json_path: where they go as JSON, each time; or None.
    """
    result, status, reason = None, 0, ""
    try:
        given = measure()
        for result in [given] if isinstance(given, dict) else given:
            if json_path:
                Path(json_path).write_text(json.dumps(result, indent=2), encoding="utf-8")
    except (Unavailable, Failed) as error:
        status, reason = 2 if isinstance(error, Unavailable) else 1, str(error)
    except KeyboardInterrupt:
        status, reason = 130, "interrupted"
    if result is not None:
        if words := report(result):
            print(words, flush=True)
        status = status or int(bool(result.get("failed")))
    if reason:
        print(f"{name}: {reason}", file=sys.stderr)
    return status


# Results.


def measured(module: Any, name: str, args: argparse.Namespace) -> dict[str, Any]:
    """The result of ranks that are given `module.settings(args)`. Raises Unavailable, Failed."""
    need_ringdp()
    settings = module.settings(args)
    with make_hosts(args.place) as hosts:
        rows, quiet = run(name, settings, args.place, hosts=hosts, timeout_s=args.timeout)
    rows = module.add_derived(rows, args.place) if hasattr(module, "add_derived") else rows
    return result_of(name, quiet, args.place, settings=settings, rows=rows)


def result_of(name: str, quiet: Quiet | None, place: Place | None = None, **more: Any) -> dict[str, Any]:
    """What `--json` writes: which benchmark, the machine, where, how quiet, and `more`."""
    found: dict[str, Any] = {"benchmark": name, "machine": machine()}
    if place is not None:
        found["place"] = asdict(place) | {"words": str(place)}
    if quiet is not None:
        found["quiet"] = quiet.as_dict()
    return found | more


def text(result: dict[str, Any], title: str, *parts: str) -> str:
    """A report: the title with the place, the machine, the parts, and whether the machine was quiet."""
    about, quiet = result["machine"], result.get("quiet", {})
    lines = [f"{title}, {result['place']['words']}" if "place" in result else title]
    lines += [f"{about['processor']}, {about['cores']} cores, Linux {about['kernel']}, torch {about['torch']}"]
    for part in parts:
        lines += ["", part]
    lines += ["", quiet["words"]] if quiet else []
    return "\n".join(lines + [f"WARNING: {it}" for it in quiet.get("warnings", [])])


def report_table(result: dict[str, Any], title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A report that is one table."""
    return text(result, title, table(columns, rows))


# Ranks.


def need_ringdp() -> None:
    """Raises Unavailable where the backend `ring` cannot be used."""
    try:
        import ringdp  # noqa: F401
    except ImportError as error:
        raise Unavailable(
            f"ringdp cannot be imported ({error}): run `make build`, and use the Python it made"
        ) from error
    import torch.distributed

    if not torch.distributed.is_backend_available("ring"):
        raise Unavailable("ringdp is here but did not register the backend ring")


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
    name: str,
    settings: dict[str, Any],
    place: Place,
    *,
    hosts: Hosts | None,
    under_mpi: bool = False,
    mpi_only_tcp: bool = False,
    timeout_s: float,
) -> tuple[Any, Quiet]:
    """Start the ranks of a benchmark, wait, and return what rank 0 handed to `deliver`, and how quiet it was meanwhile.

    Raises RanksFailed. Rank 0's output goes to stderr as it comes; the other ranks' only as part of an error.
    """
    with tempfile.TemporaryDirectory(prefix="ringdp-bench-") as folder:
        address, port = (hosts.address(0), PORT) if hosts else ("127.0.0.1", free_port())
        path = Path(folder) / SETTINGS
        given = {"settings": settings, "address": address, "port": port, "per_host": place.per_host}
        given["host_env"] = [hosts.host_env(host) for host in range(hosts.count)] if hosts else []
        path.write_text(json.dumps(given), encoding="utf-8")
        own = [sys.executable, "-m", "benchmarks", name, "--as-rank", str(path)]
        base = {**_QUIET_TORCH, "OMP_NUM_THREADS": str(threads_per_rank(place.ranks)), **os.environ}
        base["PYTHONPATH"] = str(ROOT)
        commands = []
        if under_mpi:
            words = mpi.mpirun_words(ranks=place.ranks, hosts=hosts, only_tcp=mpi_only_tcp, folder=Path(folder))
            commands = [Command([*words, *own], base, "mpirun")]
        for rank in range(0 if under_mpi else place.ranks):
            words, env = own, base | torchrun_env(rank=rank, world_size=place.ranks, address=address, port=port)
            if hosts is not None:
                words = hosts.command(rank // place.per_host, own)
                env = _QUIET_TORCH | hosts.rank_env(rank=rank, per_host=place.per_host) | {"PYTHONPATH": str(ROOT)}
            commands.append(Command(words, env, f"rank {rank}"))
        quiet = Quiet.start()
        run_commands(commands, timeout_s=timeout_s, echo=_echo)
        answer = json.loads((Path(folder) / RESULT).read_text(encoding="utf-8"))
        quiet.stop(ranks_s=answer["cpu_s"])
        return answer["result"], quiet


def _echo(label: str, line: str) -> None:
    if label in ("rank 0", "mpirun"):
        sys.stderr.write(line)


def free_port() -> int:
    """Of this host, now."""
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

    def say(self, words: str) -> None:
        """How far it is, on rank 0."""
        if self.rank == 0:
            print(f"… {words}", file=sys.stderr, flush=True)


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

    local_rank = int(os.environ["LOCAL_RANK"])
    return Joined(given["settings"], dist.get_rank(), dist.get_world_size(), local_rank, deliver)


def ring_group() -> Any:
    """A group of all ranks over ring; all of them call it."""
    import torch.distributed as dist

    import ringdp  # noqa: F401  # registers the backend

    return dist.new_group(backend="ring")


def slowest(seconds: float, group: Any = None) -> float:
    """The most of what the ranks give; all of them call it, after `join`. `group`: whose; the default group's."""
    import torch
    import torch.distributed as dist

    most = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    return most.item()


def block(call: Callable[[], object], repeats: int, group: Any = None) -> float:
    """Seconds of one of `repeats` calls that follow each other, on the slowest rank; all ranks begin together."""
    from time import perf_counter

    import torch.distributed as dist

    dist.barrier(group)
    began = perf_counter()
    for _ in range(repeats):
        call()
    return slowest((perf_counter() - began) / repeats, group)


def alternate(
    calls: dict[str, Callable[[], object]], rounds: int, repeats: int, *, warm_up: int = 3
) -> dict[str, list[float]]:
    """Seconds of a call in each of `rounds` blocks of each, which take turns, on the slowest rank."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        block(call, warm_up)
    for turn in range(rounds):
        for name in calls if turn % 2 else reversed(calls):
            seconds[name].append(block(calls[name], repeats))
    return seconds
