"""What a job's start, its agreement after a loss and its commit of a step would take: ``simulate --what``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from ringdp import _C
from ringdp.errors import InvalidArgumentError
from ringdp.text import count, format_size, format_time, table
from ringdp.tools.simulate.place import Place

STORE_REQUESTS_PER_S = 45_000.0
"""Of torch's TCPStore with four clients on a virtual machine with 2 cores (AMD EPYC): docs/lab/simulation.md."""

_KEY_S = 1e-6  # the store's time for each key of a request, and for each byte of a value, as measured there
_BYTE_S = 1 / 550e6
_CONNECTION_S = 0.7e-3  # what making one costs a rank, as measured there
_LISTEN_S = 0.02  # ranks wait so long for the report of an earlier cause (csrc/engine/engine_options.h)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """What was simulated.

    Attributes:
        title: in words.
        numbers: by name, for programs; seconds and bytes.
        rows: for people.
    """

    title: str
    numbers: Mapping[str, Any]
    rows: tuple[tuple[str, str], ...]


def start(place: Place, costs: Mapping[str, float], full_mesh_ranks: int) -> Found:
    """Until all ranks have met: the store's part by the core's own reads of it, connections by their number."""
    found = _C.simulate_start(_ranks(place), full_mesh_ranks, dict(costs))
    return Found(
        title="the start",
        numbers=found,
        rows=(
            ("until the last rank has the records of all", format_time(found["records_s"])),
            ("until all are connected, and know it", format_time(found["seconds"])),
            ("reads of the store, one after another", f"{found['rounds']}"),
            ("requests of a rank to the store", _most_and_mean(found)),
            ("bytes through the store", format_size(found["store_bytes"])),
            ("connections of a rank", f"{found['connections']}"),
        ),
    )


def agreement(place: Place, costs: Mapping[str, float], full_mesh_ranks: int) -> Found:
    """How the ranks hear of a loss, and how an elastic job agrees on who goes on."""
    loss = _C.simulate_loss(_ranks(place), full_mesh_ranks, dict(costs))
    numbers: dict[str, Any] = {"loss": loss, "raised_s": loss["seconds"] + _LISTEN_S, "change": None}
    rows = [
        ("until the last rank hears of a loss that others noticed", format_time(loss["seconds"])),
        ("until all raise it", format_time(numbers["raised_s"])),
        ("messages, one after another", f"{loss['hops']}"),
        ("messages of a rank", f"{loss['messages']}"),
    ]
    try:
        change = _C.simulate_change(place.ranks, dict(costs))
    except InvalidArgumentError as error:
        rows.append(("an elastic job", f"not simulated: {str(error).removeprefix('simulation: ')}"))
    else:
        numbers["change"] = change
        rows += [
            ("until an elastic job's survivors have agreed", format_time(change["seconds"])),
            ("requests of a survivor to the store", _most_and_mean(change)),
        ]
    return Found(title="the agreement after a loss", numbers=numbers, rows=tuple(rows))


def commit(place: Place, _costs: Mapping[str, float], _full_mesh_ranks: int) -> Found:
    """The barrier by which an elastic job's members commit a step: the core's own."""
    found = _C.simulate(place.rows(), place.settings(), 8, algorithm="tree", barrier=True, fold_from_messages=1e12)
    messages = max(found["messages"], default=0)
    return Found(
        title="a step's commit",
        numbers={"seconds": found["seconds"], "hops": found["hops"], "messages": messages},
        rows=(
            ("until the last rank knows that all have committed", format_time(found["seconds"])),
            ("messages, one after another", f"{found['hops']}"),
            ("messages of a rank", f"{messages}"),
        ),
    )


WHAT: Mapping[str, Callable[[Place, Mapping[str, float], int], Found]] = {
    "start": start,
    "agreement": agreement,
    "commit": commit,
}


def costs(place: Place, requests_per_s: float) -> dict[str, float]:
    """As ``_C.simulate_start`` takes them."""
    return {
        "store_request_s": 1 / requests_per_s,
        "store_key_s": _KEY_S,
        "store_byte_s": _BYTE_S,
        "round_trip_s": place.longest_round_trip_s,
        "message_between_hosts_s": place.costs.message_between_hosts_us * 1e-6,
        "message_within_host_s": place.costs.message_within_host_us * 1e-6,
        "connection_s": _CONNECTION_S,
        "cores": place.cores,
    }


def text(place: Place, found: Found, requests_per_s: float) -> str:
    """For people."""
    where = f"{count(place.ranks, 'rank')} on {count(len(place.hosts), 'host')}"
    heading = f"{where}, simulated\nround trips of {format_time(place.longest_round_trip_s)}"
    if "store" in "".join(name for name, _ in found.rows):
        heading += f"; a store that answers {requests_per_s:,.0f} requests a second"
    return "\n\n".join((heading, table((found.title, ""), found.rows)))


def _ranks(place: Place) -> list[int]:
    return [host.ranks for host in place.hosts]


def _most_and_mean(found: Mapping[str, Any]) -> str:
    return f"{found['requests']} at most, {found['mean_requests']:.1f} on average"
