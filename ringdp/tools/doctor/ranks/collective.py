"""Ring itself, after the plain sockets: the ranks meet as in training, and add something up."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ringdp.errors import RingError
from ringdp.text import format_size, format_time
from ringdp.tools.doctor.finding import Finding, note, ok, problem
from ringdp.tools.doctor.ranks.edges import Matrix, format_rate
from ringdp.tools.doctor.ranks.meeting import describe_ranks

CALLS = 5
LEAST_BYTES, MOST_BYTES = 64 << 10, 25 << 20
SECONDS = 0.2
"""About how long an all-reduce may take."""


def size_for(matrix: Matrix) -> int:
    """Bytes to reduce, which the slowest edge carries in some 0.2 s: the same on all ranks, a multiple of 4 KiB."""
    rates = [edge.bytes_per_s for edge in matrix.edges.values() if edge.bytes_per_s]
    wanted = min(rates, default=0.0) * SECONDS / 2
    return max(LEAST_BYTES, min(MOST_BYTES, int(wanted))) // 4096 * 4096


def measure(size_bytes: int, timeout_s: float) -> dict[str, Any]:
    """This rank's result: seconds to meet, the transport to each rank, the all-reduce; or the text of the error."""
    import torch
    import torch.distributed as dist

    import ringdp

    begin = time.perf_counter()
    try:
        ringdp.init("ring", device="cpu", timeout=timeout_s)
        met_s = time.perf_counter() - begin
        x = torch.ones(size_bytes // 4, dtype=torch.float32, device="cpu")
        dist.all_reduce(x)
        right = bool((x == dist.get_world_size()).all())
        times = []
        for _ in range(CALLS):
            x.zero_()
            dist.barrier()
            begin = time.perf_counter()
            dist.all_reduce(x)
            times.append(time.perf_counter() - begin)
        carried = ringdp.transports()
        ringdp.shutdown()
    except (RingError, RuntimeError) as error:
        return {"error": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
    return {"met_s": met_s, "right": right, "all_reduce_s": statistics.median(times), "transports": carried}


def findings(gathered: Sequence[Mapping[str, Any]], matrix: Matrix, size_bytes: int) -> Iterator[Finding]:
    """The findings from all ranks' results; `gathered` is by rank."""
    failed = {rank: one["error"] for rank, one in enumerate(gathered) if "error" in one}
    if failed:
        first = min(failed)
        sentence = (
            f"ring was not established on {describe_ranks(sorted(failed))}; {matrix.label(first)} says: {failed[first]}"
        )
        yield problem(sentence, "docs/reference/errors.md lists the errors", errors=failed)
        return
    if wrong := [rank for rank, one in enumerate(gathered) if not one["right"]]:
        sentence = f"an all-reduce of ones gave a wrong result on {describe_ranks(wrong)}"
        yield problem(sentence, "please report this", ranks=wrong)
        return
    met_s, took_s = max(one["met_s"] for one in gathered), max(one["all_reduce_s"] for one in gathered)
    busbw = size_bytes / took_s * 2 * (len(gathered) - 1) / len(gathered)
    sentence = (
        f"ring met in {format_time(met_s)}; an all-reduce of {format_size(size_bytes)} takes {format_time(took_s)}, "
    )
    sentence += f"{format_rate(busbw)} on each link"
    yield ok(sentence, met_s=met_s, size_bytes=size_bytes, all_reduce_s=took_s, busbw_bytes_per_s=busbw)
    slow = [
        (rank, int(peer))
        for rank, one in enumerate(gathered)
        for peer, name in one["transports"].items()
        if matrix.host_of[rank] == matrix.host_of[int(peer)] and name == "tcp" and rank < int(peer)
    ]
    if slow:
        rank, peer = slow[0]
        sentence = (
            f"{len(slow)} pairs of ranks on one host use TCP, for example {matrix.label(rank)} and {matrix.label(peer)}"
        )
        remedy = "unset RINGDP_TRANSPORT and RINGDP_HOST_ID; docs/reference/transports.md says what else is in the way"
        yield note(sentence, remedy, pairs=slow)
