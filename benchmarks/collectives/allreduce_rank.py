"""What each rank of `allreduce.py` does."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks.collectives import ceiling
from benchmarks.lib import session
import torch
import torch.distributed as dist
from benchmarks.lib.goodput import interface_bytes
from benchmarks.lib.measure import Summary, format_size, percentile
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

MIN_CALLS, MAX_CALLS = 3, 20_000  # of one backend in one block
GROWTH_BITS = 100  # repeated in place, a sum grows by the number of ranks each time; float32 has 127 bits of exponent

Timed = Callable[[Tensor, int], list[float]]  # so many calls in place, and the seconds of each
LARGEST_ERROR = {"int8": 1e-3, "int6": 5e-3, "int5": 2e-2, "int4": 0.1, "nf4": 0.1}  # NMSE of the mean
LEAST_ERROR = 1e-3  # of codes not named there, fp16 and bf16


def is_mean(name: str) -> bool:
    """Whether the backend averages through a compressor, where the others give the sum."""
    return name.startswith("ring-")


def native_codec(name: str) -> str | None:
    """The core's codec that such a backend means; None: the exchange in Python."""
    from ringdp import compression

    return getattr(compression.get(name.removeprefix("ring-")), "native", None)


class WrongResult(RuntimeError):
    """A backend gave a wrong sum; its times would mean nothing."""


@dataclass
class Measured:
    """Calls of one backend with one size, on this rank."""

    seconds: list[float] = field(default_factory=list)
    block_medians_s: list[float] = field(default_factory=list)
    calls: int = 0  # timed or not
    sent_bytes: int = 0
    received_bytes: int = 0


def run_rank(path: str) -> None:
    joined = session.join(path)
    settings = joined.settings
    calls = {name: _make(name, joined) for name in settings["backends"]}
    rows: list[dict[str, Any]] = []
    for size_bytes in settings["size_bytes"]:
        if joined.rank == 0:
            print(f"… {format_size(size_bytes)}", file=sys.stderr, flush=True)
        for name, measured in _one_size(joined, calls, size_bytes).items():
            about: dict[str, Any] = {"size_bytes": size_bytes, "backend": name}
            if (on_wire := wire_bytes(name, size_bytes)) is not None:
                about["wire_bytes"] = on_wire
            rows.append({**about, **_over_ranks(joined, measured)})
    joined.deliver(rows)


def timed_calls(call: Callable[[Tensor], None]) -> Timed:
    """`call`, each time timed from here."""

    def run(x: Tensor, count: int) -> list[float]:
        seconds = []
        for _ in range(count):
            start = perf_counter()
            call(x)
            seconds.append(perf_counter() - start)
        return seconds

    return run


def _make(name: str, joined: session.Joined) -> Timed:
    asynchronous = joined.settings["asynchronous"]
    if name == "core":
        return _make_core(joined)
    if is_mean(name):
        codec = native_codec(name)
        return _make_exchange(name.removeprefix("ring-"), joined) if codec is None else _make_compressed(name, codec)
    if name == "ceiling":
        paths = joined.settings["ceiling"]
        one = ceiling.Ceiling(Path(paths["library"]), Path(paths["memory"]), rank=joined.rank, ranks=joined.world_size)
        return timed_calls(one.all_reduce)
    if name == "mpi":
        from mpi4py import MPI

        world = MPI.COMM_WORLD

        def call_mpi(x: Tensor) -> None:
            if asynchronous:
                world.Iallreduce(MPI.IN_PLACE, x.numpy()).Wait()
            else:
                world.Allreduce(MPI.IN_PLACE, x.numpy())

        return timed_calls(call_mpi)
    if name == "ring":
        import ringdp  # noqa: F401  # registers the backend
    group = dist.new_group(backend=name)

    def call_torch(x: Tensor) -> None:
        if asynchronous:
            dist.all_reduce(x, group=group, async_op=True).wait()
        else:
            dist.all_reduce(x, group=group)

    return timed_calls(call_torch)


def _make_compressed(name: str, codec: str) -> Timed:
    """The mean as RingDP takes it: with error feedback where the compressor has it."""
    import ringdp  # noqa: F401  # registers the backend
    from ringdp import _C, compression

    group = dist.new_group(backend="ring")
    feeds_back = bool(getattr(compression.get(name.removeprefix("ring-")), "error_feedback", None))
    residuals: dict[int, list[Tensor]] = {}

    def call(x: Tensor) -> None:
        old: list[Tensor | None] = [None]
        new: list[Tensor | None] = [None]
        if feeds_back:
            if x.numel() not in residuals:
                residuals[x.numel()] = [torch.zeros_like(x), torch.zeros_like(x)]
            pair = residuals[x.numel()]
            pair.reverse()
            old, new = [pair[0]], [pair[1]]
        work, _ = _C.all_reduce_compressed(group, x, [0], [x.numel()], [0], old, new, codec, 1.0, group.size())
        work.wait()

    return timed_calls(call)


def _make_exchange(name: str, joined: session.Joined) -> Timed:
    """The mean as RingDP takes it through compressors that the core does not have."""
    from benchmarks.collectives.allreduce_exchange import (
        Exchange,
        check_exchange,
        drawn_gradient,
        model_gradient,
        model_shapes,
        square_shapes,
        timed_exchange,
    )

    import ringdp  # noqa: F401  # registers the backend
    from ringdp import compression

    group = dist.new_group(backend="ring")
    assert isinstance(group, dist.ProcessGroup)
    check_exchange(name, group)
    model = joined.settings["model"]
    exchanges: dict[int, tuple[Exchange, Tensor]] = {}

    def run(x: Tensor, count: int) -> list[float]:
        if x.numel() not in exchanges:
            shapes = model_shapes(model) if model else square_shapes(x.numel())
            gradient = model_gradient(model, joined.rank) if model else drawn_gradient(x.numel(), joined.rank)
            exchanges[x.numel()] = Exchange(compression.get(name), shapes, group), gradient
        exchange, gradient = exchanges[x.numel()]
        return timed_exchange(exchange, gradient, x, count)

    return run


def wire_bytes(name: str, size_bytes: int) -> int | None:
    """What a buffer takes on the wire: its code's length where it is compressed; None where that differs."""
    if not is_mean(name):
        return size_bytes
    from ringdp import _C

    codec = native_codec(name)
    return int(_C.codec_bytes(codec, size_bytes // 4)) if codec is not None else None


def _make_core(joined: session.Joined) -> Timed:
    """The C++ call itself, over connections of its own, and a loop in C++."""
    runtime, core = make_core_runtime(joined, "core")
    group = core.Group(runtime, "core", list(range(joined.world_size)))

    def run(x: Tensor, count: int) -> list[float]:
        seconds: list[float] = group.time_all_reduce(x.numpy(), "float32", count)
        return seconds

    return run


def make_core_runtime(joined: session.Joined, name: str, **given: Any) -> tuple[Any, Any]:
    """A Runtime of tests.core._core that meets the other ranks' in torch's store under that name, and the module.

    Its options are `given`, and else what the environment says.
    """
    from ringdp import config

    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from tests.core import _core

    store = PrefixStore(name, dist.distributed_c10d._get_default_store())

    def find(key: str) -> str | None:
        return store.get(key).decode() if store.check([key]) else None

    settings = config.RingConfig.from_environment()
    options: dict[str, Any] = {"host_id": settings.host_id, "spin_us": settings.spin_us}
    options["table"] = dict(settings.tuning.limits)
    options |= {"checksums": settings.checksum, "heal_ms": settings.heal_ms, **given}
    return _core.Runtime(_core.CallbackStore(store.set, find), joined.rank, joined.world_size, **options), _core


def _one_size(joined: session.Joined, calls: dict[str, Timed], size_bytes: int) -> dict[str, Measured]:
    settings = joined.settings
    source = values(joined.rank, size_bytes // 4)
    total = torch.zeros_like(source)
    for rank in range(joined.world_size):
        total += values(rank, size_bytes // 4)
    x = torch.empty_like(source)
    if settings["huge_pages"]:
        ceiling.load(Path(settings["ceiling"]["library"])).ceiling_huge_pages(x.data_ptr(), size_bytes)
    counts = {}
    for name, call in calls.items():
        x.copy_(source)
        call(x, 1)
        check(name, x, total, rank=joined.rank, exact=True, ranks=joined.world_size)
        trial = Measured()
        timed_block(call, x, source, MIN_CALLS, joined.world_size, trial)
        counts[name] = agree_on_calls(min(trial.seconds), settings["block_s"])
    measured = {name: Measured() for name in calls}
    names = list(calls)
    for turn in range(settings["rounds"]):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            one = measured[name]
            dist.barrier()
            before = _counters(settings["interface"])
            growth = timed_block(calls[name], x, source, counts[name], joined.world_size, one)
            dist.barrier()
            after = _counters(settings["interface"])
            one.received_bytes += after[0] - before[0]
            one.sent_bytes += after[1] - before[1]
            total_now = total if is_mean(name) else total * growth
            check(name, x, total_now, rank=joined.rank, exact=False, ranks=joined.world_size)
    return measured


def timed_block(call: Timed, x: Tensor, source: Tensor, count: int, world_size: int, into: Measured) -> float:
    """`count` timed calls in place, back to back; returns what the last result is over the sum of one call."""
    most = int(GROWTH_BITS / math.log2(world_size)) if world_size > 1 else count
    seconds: list[float] = []
    growth = 1.0
    while len(seconds) < count:
        timed = min(count - len(seconds), most - 1)
        x.copy_(source)
        call(x, 1)  # not counted: the ranks do not come out of the copy at the same moment
        seconds += call(x, timed)
        into.calls += timed + 1
        growth = float(world_size) ** timed
    into.seconds += seconds
    into.block_medians_s.append(Summary.of(seconds).median_s)
    return growth


def values(rank: int, numel: int) -> Tensor:
    """Whole numbers between -48 and 48 that differ between ranks and positions: their sums are exact in float32."""
    return ((torch.arange(numel, dtype=torch.int32) * 31 + rank * 17) % 97 - 48).to(torch.float32)


def check(name: str, x: Tensor, expected: Tensor, *, rank: int, exact: bool, ranks: int = 1) -> None:
    """Raise WrongResult unless `x` is `expected`, to the bit or nearly so, or about its mean through codes; [numel]."""
    if is_mean(name):
        if native_codec(name) is None:
            return  # compared with its simulation before, at another size and with other numbers
        mean = expected / ranks
        error = float((x - mean).square().sum() / mean.square().sum().clamp_min(1e-30))
        if not error <= LARGEST_ERROR.get(name.removeprefix("ring-"), LEAST_ERROR):
            raise WrongResult(f"{name} gave a mean with NMSE {error:.2g} on rank {rank}; nothing is timed")
        return
    # Further rounds may round: three ranks make numbers that are not whole times a power of two.
    good = x == expected if exact else (x - expected).abs() <= 1e-5 * expected.abs()
    if not bool(good.all()):
        place = int((~good).nonzero()[0])
        raise WrongResult(
            f"{name} gave a wrong sum on rank {rank}: element {place} of {x.numel()} is {x[place].item()}, "
            f"not {expected[place].item()}; nothing is timed"
        )


def agree_on_calls(seconds: float, block_s: float) -> int:
    return max(MIN_CALLS, min(MAX_CALLS, int(block_s / session.slowest(seconds))))


def _counters(interface: str | None) -> tuple[int, int]:
    return interface_bytes(interface) if interface else (0, 0)


def _over_ranks(joined: session.Joined, measured: Measured) -> dict[str, Any]:
    mine: dict[str, Any] = {
        "time": asdict(Summary.of(measured.seconds)),
        "percentiles_s": {
            word: percentile(measured.seconds, share) for word, share in joined.settings["shares"].items()
        },
        "block_medians_s": measured.block_medians_s,
        "sent": measured.sent_bytes / measured.calls,
        "received": measured.received_bytes / measured.calls,
        "reports": joined.local_rank == 0 and joined.settings["interface"] is not None,
    }
    everyone: list[Any] = [None] * joined.world_size
    dist.all_gather_object(everyone, mine)
    return {
        "percentiles_s": {word: max(one["percentiles_s"][word] for one in everyone) for word in mine["percentiles_s"]},
        "time": asdict(Summary.slowest([Summary(**one["time"]) for one in everyone])),
        "block_medians_s": [max(values) for values in zip(*(one["block_medians_s"] for one in everyone), strict=True)],
        "sent_bytes_per_call": [one["sent"] for one in everyone if one["reports"]],
        "received_bytes_per_call": [one["received"] for one in everyone if one["reports"]],
    }
