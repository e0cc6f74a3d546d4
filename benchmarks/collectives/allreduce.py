"""All-reduce of float32 sums: the backend `ring` against gloo and Open MPI, in the same processes and the same run.

    python -m benchmarks allreduce --ranks 2 --sizes 4k,64k,1m,25m,100m --peers gloo,mpi,ceiling --json out.json
    python -m benchmarks allreduce --ranks 2 --sizes 4k --peers core --percentiles 50,99,99.9 --busy 1
    python -m benchmarks allreduce --sizes 4k,1m,25m --peers core,core-tcp,core-checksums,core-no-healing
    sudo python -m benchmarks allreduce --hosts 4 --rate 1gbit --sizes 25m
    sudo python -m benchmarks allreduce --hosts 4 --rate 1gbit --sizes 102400000 --peers gloo --compressed int8,int4

The engine is that of `python -m ringdp bench` (ringdp/tools/bench), with contenders of other libraries: for each size
every backend must first give the exact sum; then blocks of calls take turns between the backends, so that
whatever the machine does hits them alike, and the result is checked again after every block. A time is that of the
slowest rank, the median of its blocks' medians; percentiles are of all its calls. algbw = size / time; busbw = algbw *
2(n-1)/n, what each rank must send (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md). GB are 10^9
bytes, KiB and MiB powers of 1024. Between hosts it also prints the bytes that left each interface against 2(h-1)/h of
the size, the least that h hosts can send, and the share of iperf3's goodput that was reached. `--compressed` adds the
mean through compressors by their names, of one parameter of that size, with its error.

Peers: gloo; mpi; `ceiling`, a loop through shared memory written for nothing but speed (ceiling.cpp), compiled on the
spot: what the machine can do; `sockets`, a ring over plain TCP sockets, likewise (socket_ring.cpp); `core`, the C++
call alone, without torch around it, `core-tcp`, the same over TCP on one host, and over TCP with checksums
(`core-checksums`) or with connections that do not heal (`core-no-healing`).
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks.collectives import ceiling
from benchmarks.lib import goodput, mpi, session
from benchmarks.lib.hosts import INTERFACE
from benchmarks.lib.measure import busy_processes, format_size, format_time, parse_size, percentile, table
from benchmarks.lib.ranks import Failed, Unavailable

CORES: dict[str, dict[str, Any]] = {
    "core": {},
    "core-tcp": {"transport": "tcp"},
    "core-checksums": {"transport": "tcp", "checksums": True},
    "core-no-healing": {"transport": "tcp", "heal_ms": 0},
}
PEERS = ("gloo", "mpi", "ceiling", "sockets", *CORES)
COUNTED_CALLS = 5  # whose bytes on the interface are counted


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sizes", default="4k,64k,1m,25m,100m", help="bytes to reduce, comma-separated")
    parser.add_argument("--peers", default="gloo,mpi", help=f"to compare with: of {', '.join(PEERS)}; or none")
    parser.add_argument("--compressed", metavar="NAME,NAME", default="", help="also through these: int8, topk, …")
    parser.add_argument("--percentiles", metavar="P,P", default="99", help="more of them beside the median: 90,99.9")
    parser.add_argument("--busy", type=int, default=0, metavar="N", help="N processes compute beside the ranks")
    parser.add_argument("--busy-cores", default="", metavar="C,C", help="pin them to these cores, in turn")
    parser.add_argument("--mpi-tcp", action="store_true", help="let Open MPI use TCP on loopback too, no shared memory")
    parser.add_argument("--rounds", type=int, default=7, help="blocks of calls for each backend and size (default 7)")
    parser.add_argument("--block-seconds", type=float, default=0.25, help="about how long a block lasts")
    parser.add_argument("--iperf-seconds", type=float, default=3.0, help="how long iperf3 measures; 0 leaves it out")


def check(args: argparse.Namespace) -> None:
    args.size_bytes = [parse_size(word) for word in args.sizes.split(",")]
    args.shares = {word: float(word) / 100 for word in args.percentiles.split(",") if word}
    args.core_numbers = [int(word) for word in args.busy_cores.split(",") if word]
    args.peer_names = session.chosen("" if args.peers == "none" else args.peers, PEERS)
    args.compressors = [name for name in args.compressed.split(",") if name]
    session.at_least(0, busy=args.busy)
    session.at_least(1, rounds=args.rounds)
    if any(size < 4 or size % 4 for size in args.size_bytes):
        raise ValueError("a size must be a positive multiple of 4 bytes")
    if any(not 0 <= share <= 1 for share in args.shares.values()):
        raise ValueError("a percentile lies between 0 and 100")


# What each rank does.


class Watched:
    """A contender of the engine whose calls are noted: the seconds of each since `reset`, of the last size's work."""

    def __init__(self, inner: Any) -> None:
        self.name, self._inner = inner.name, inner

    def work(self, collective: Any, size_bytes: int, place: Any) -> Watched:
        self._work = self._inner.work(collective, size_bytes, place)
        self.task, self.verify, self.before = self._work.task, self._work.verify, self._work.before
        self.seconds: list[float] = []
        return self

    def reset(self) -> None:
        self._work.reset()

    def call(self) -> None:
        began = perf_counter()
        self._work.call()
        self.seconds.append(perf_counter() - began)

    def sent_bytes(self, interface: str) -> float:
        """Of a call, by this host's interface, headers included."""
        import torch.distributed as dist

        dist.barrier()
        before = goodput.interface_bytes(interface)[1]
        for _ in range(COUNTED_CALLS):
            self.before()
            self._work.call()
        dist.barrier()
        return (goodput.interface_bytes(interface)[1] - before) / COUNTED_CALLS


class InPlace:
    """A contender that is a function of a flat tensor, which it replaces by the sum."""

    def __init__(self, name: str, call: Callable[[Any], object]) -> None:
        self.name, self._call = name, call

    def work(self, collective: Any, size_bytes: int, place: Any) -> Any:
        from ringdp.tools.bench import contenders

        task = collective.task(size_bytes, place)
        x = task.inputs[0][0]
        task.call = lambda group: self._call(x)
        return contenders.PlainWork(task, None, place.device)  # type: ignore[arg-type]


def contender(name: str, joined: session.Joined) -> Any:
    import torch.distributed as dist

    from ringdp import compression
    from ringdp.tools.bench import contenders

    if name in CORES:
        from benchmarks.collectives.core import make_runtime

        runtime, core = make_runtime(joined.rank, joined.world_size, name, **CORES[name])
        group = core.Group(runtime, name, list(range(joined.world_size)))
        return InPlace(name, lambda x: group.time_all_reduce(x.numpy(), "float32", 1))
    if name == "ceiling":
        paths = joined.settings["ceiling"]
        one = ceiling.Ceiling(Path(paths["library"]), Path(paths["memory"]), rank=joined.rank, ranks=joined.world_size)
        return InPlace(name, one.all_reduce)
    if name == "sockets":
        return InPlace(name, ceiling.SocketRing(Path(joined.settings["sockets"])).all_reduce)
    if name == "mpi":
        from mpi4py import MPI

        return InPlace(name, lambda x: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, x.numpy()))
    if name.startswith("ring+"):
        compressor = compression.get(name.removeprefix("ring+"))
        assert compressor is not None
        return contenders.Compressed(name.removeprefix("ring+"), compressor, session.ring_group())
    made = session.ring_group() if name == "ring" else dist.new_group(backend=name)
    return contenders.Plain(name, made)


def run_rank(joined: session.Joined) -> None:
    import torch
    import torch.distributed as dist

    from ringdp.tools.bench import collectives, measuring

    given = joined.settings
    made = [Watched(contender(name, joined)) for name in given["backends"]]
    place = collectives.Place(joined.rank, joined.world_size, torch.float32, torch.device("cpu"))
    rounds = given["rounds"]
    plan = measuring.Plan(rounds=rounds, seconds=rounds * given["block_s"], check=True)
    rows = []
    for size_bytes in given["size_bytes"]:
        joined.say(format_size(size_bytes))
        for found in measuring.measure("all_reduce", [size_bytes], made, place, plan):
            for row, one in zip(found, made, strict=True):
                if row.why or row.wrong:
                    why = row.why or f"{row.wrong} elements are wrong; nothing is timed"
                    raise Failed(f"{row.contender}, {format_size(size_bytes)}: {why}")
                calls = one.seconds[plan.warm_up :]
                mine: dict[str, Any] = {word: percentile(calls, share) for word, share in given["shares"].items()}
                mine |= {"min": min(calls), "sent": one.sent_bytes(given["interface"]) if given["interface"] else None}
                everyone: list[Any] = [None] * joined.world_size
                dist.all_gather_object(everyone, mine if joined.local_rank == 0 else mine | {"sent": None})
                rows.append(
                    {
                        "size_bytes": row.size_bytes,
                        "backend": row.contender,
                        "time": {"median_s": row.time_s, "min_s": max(each["min"] for each in everyone)},
                        "spread": row.spread,
                        "calls": row.calls,
                        "error": row.error,
                        "percentiles_s": {word: max(each[word] for each in everyone) for word in given["shares"]},
                        "sent_bytes_per_call": [each["sent"] for each in everyone if each["sent"] is not None],
                    }
                )
    joined.deliver(rows)


# Around them.


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Raises Unavailable, HostsError, NoGoodput, RanksFailed."""
    session.need_ringdp()
    place, missing = args.place, {}
    if "mpi" in args.peer_names and (reason := mpi.why_not()):
        missing["mpi"] = reason
    if "ceiling" in args.peer_names and (reason := ceiling.why_not(ranks=place.ranks, hosts=place.hosts)):
        missing["ceiling"] = reason
    _known(args.compressors)
    backends = ["ring", *(f"ring+{name}" for name in args.compressors)]
    backends += [name for name in args.peer_names if name not in missing]
    settings = {name: getattr(args, name) for name in ("size_bytes", "rounds", "shares")}
    settings |= {"backends": backends, "block_s": args.block_seconds, "interface": INTERFACE if place.hosts else None}
    with contextlib.ExitStack() as stack:
        hosts = stack.enter_context(session.make_hosts(place))
        if "ceiling" in backends:
            settings["ceiling"] = stack.enter_context(ceiling.prepared())
        if "sockets" in backends:
            settings["sockets"] = stack.enter_context(ceiling.compiled_sockets())
        line = goodput.measure(hosts, seconds=args.iperf_seconds) if hosts and args.iperf_seconds else None
        stack.enter_context(busy_processes(args.busy, cores=args.core_numbers))
        rows, quiet = session.run(
            "allreduce", settings, place, hosts=hosts,
            under_mpi="mpi" in backends, mpi_only_tcp=args.mpi_tcp, timeout_s=args.timeout,
        )  # fmt: skip
    about = {"busy": args.busy, "busy_cores": args.core_numbers, "missing": missing}
    about["goodput_bytes_per_s"] = None if line is None else {"one_way": line.one_way, "both_ways": line.both_ways}
    rows = [add_bandwidths(row, place, line) for row in rows]
    return session.result_of("allreduce", quiet, place, **about, rows=rows)


def _known(names: list[str]) -> None:
    from ringdp import compression

    if unknown := set(names) - set(compression.names()):
        raise Unavailable(f"{sorted(unknown)[0]!r} is not a compressor: choose from {', '.join(compression.names())}")


def add_bandwidths(row: dict[str, Any], place: session.Place, line: goodput.Goodput | None) -> dict[str, Any]:
    """The row with bandwidths in bytes/s, bytes sent against theory, and the shares of the line's goodput reached."""
    median_s, size = row["time"]["median_s"], row["size_bytes"]
    extra: dict[str, Any] = {"algbw": size / median_s, "busbw": size / median_s * 2 * (place.ranks - 1) / place.ranks}
    if place.hosts > 1:
        least = 2 * (place.hosts - 1) / place.hosts * size
        extra["sent_over_theory"] = max(row["sent_bytes_per_call"]) / least
        if line is not None:
            extra["share_one_way"] = least / median_s / line.one_way
            extra["share_both_ways"] = least / median_s / line.both_ways
    return row | extra


def report(result: dict[str, Any]) -> str:
    line, several = result["goodput_bytes_per_s"], result["place"]["hosts"] > 1
    words = list(result["rows"][0]["percentiles_s"])
    columns = ["size", "backend", "median", "±", "min", *(f"p{word}" for word in words), "algbw GB/s", "busbw GB/s"]
    columns += ["time / ring", "calls", "error"] + (["sent, MB", "sent / theory"] if several else [])
    columns += ["of iperf3", "of iperf3 both ways"] if line else []
    ours = {row["size_bytes"]: row["time"]["median_s"] for row in result["rows"] if row["backend"] == "ring"}
    rows = []
    for row in result["rows"]:
        median_s = row["time"]["median_s"]
        cells = [format_size(row["size_bytes"]), row["backend"], format_time(median_s), f"{row['spread']:.0%}"]
        cells += [format_time(it) for it in (row["time"]["min_s"], *row["percentiles_s"].values())]
        cells += [f"{row['algbw'] / 1e9:.3g}", f"{row['busbw'] / 1e9:.3g}", f"{median_s / ours[row['size_bytes']]:.2f}"]
        cells += [str(row["calls"]), "" if row["error"] is None else f"{row['error']:.2g}"]
        cells += [f"{max(row['sent_bytes_per_call']) / 1e6:.4g}", f"{row['sent_over_theory']:.3f}"] if several else []
        cells += [f"{row[key]:.1%}" for key in ("share_one_way", "share_both_ways")] if line else []
        rows.append(cells)
    for name, reason in result["missing"].items():
        rows.append(["", name, reason, *[""] * (len(columns) - 3)])
    notes = []
    if result["busy"]:
        pinned = f", pinned to cores {result['busy_cores']}" if result["busy_cores"] else ""
        notes.append(f"beside {result['busy']} busy processes{pinned}")
    if line:
        one, both = (f"{line[key] * 8 / 1e6:.0f} Mbit/s" for key in ("one_way", "both_ways"))
        notes.append(f"iperf3: {one} one way, {both} each way both at once")
    return session.text(result, "all-reduce, float32, SUM", *notes, table(columns, rows))
