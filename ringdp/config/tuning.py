"""The file of RINGDP_TUNING: which algorithm runs from which size on, on this machine instead of the built-in table.

A JSON object; python -m benchmarks tune writes one::

    {
      "ringdp_tuning": 1,
      "machine": "the machine it was measured on; for people only",
      "layouts": {
        "one_host": {"fold_two_ranks_bytes": 1048576, "fold_sent_bytes": 131072},
        "one_rank_per_host": {},
        "several_ranks_per_host": {}
      },
      "costs": {"alpha_local_us": 1.5},
      "uplinks": {"node1": "1gbit", "node2": "1gbit", "node3": "1gbit", "node4": "100mbit"}
    }

What is left out stays as it is built in. ``uplinks`` are the rates of the hosts' links, by the names that messages give
the hosts (or of sites' lines, where ranks have sites): by them hosts own more or less of a buffer
(docs/reference/algorithms.md). python -m ringdp doctor --uplinks measures and writes them. The order of summation, and
so the last bits of a sum, follow from the file: all ranks of a job must use the same one; the rendezvous compares it.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from typing import Any, NoReturn

from ringdp.config.parse import parse_rate
from ringdp.errors import InvalidArgumentError, SystemResourceError

FORMAT = 1
BUILT_IN = "built in"
MAX_BYTES = 2**50
MAX_RANKS = 2**20
MAX_US = 2**40

LAYOUTS: Mapping[str, str] = {
    "one_host": "all ranks on one host",
    "one_rank_per_host": "several hosts with one rank each",
    "several_ranks_per_host": "several hosts, several ranks on some of them",
}

LIMITS: Mapping[str, str] = {
    "fold_two_ranks_bytes": "largest all-reduce or reduce between two ranks that is a fold",
    "fold_sent_bytes": "the same for n ranks: largest (n-1) times the size, what each would send; above direct_ranks, "
    "of a tree: largest 64/n times the size",
    "flat_broadcast_bytes": "largest broadcast that its root sends to every rank itself",
    "direct_gather_bytes": "largest block of an all-gather that each rank sends to every other itself",
    "halving_rank_bytes": "largest all-reduce by halving, in bytes of the buffer for each rank; 0: none",
    "pairwise_bytes": "largest all-reduce of wider types than float16 that goes in pairs, up to direct_ranks",
    "exact_bucket_bytes": "largest bucket of gradients, before encoding, that is sent exactly where a codec was chosen",
    "far_round_trip_us": "round trip between hosts, in microseconds, from which on all of them go in pairs",
    "direct_ranks": "largest group, in ranks, in which small collectives go from each rank straight to every other",
}
"""Names of the limits with what they mean; those of ``AlgorithmTable`` in csrc/collective/algorithm_table.h. In bytes,
ranks or microseconds, as the name ends."""

MEASURED_LIMITS = ("fold_two_ranks_bytes", "fold_sent_bytes", "flat_broadcast_bytes", "direct_gather_bytes")
"""What python -m benchmarks tune finds everywhere; between hosts also exact_bucket_bytes, against int8."""

UPLINK = "uplink."
"""Before a host's name: its link in bytes a second, among `Tuning.limits`."""

_UNITS = (("_bytes", "bytes", MAX_BYTES), ("_ranks", "ranks", MAX_RANKS), ("_us", "microseconds", MAX_US))

COSTS: Mapping[str, str] = {
    "alpha_local_us": "microseconds a message within a host takes, however short",
    "alpha_remote_us": "the same between hosts",
    "beta_local_ns_per_byte": "nanoseconds per byte sent within a host",
    "beta_remote_ns_per_byte": "the same between hosts",
    "gamma_ns_per_byte": "nanoseconds to add a byte",
}
"""Constants of the cost model (ringdp/costs.py): they choose nothing,
``python -m ringdp bench --explain`` uses them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuning:
    """What a file says, checked.

    Attributes:
        limits: ``"one_host.fold_sent_bytes"`` to bytes, ``"one_host.direct_ranks"`` to ranks, for those that differ
            from the built-in table; ``"uplink.node1"`` to bytes a second.
        costs: constants of the cost model by name, where the file has any.
        source: where it is from, for messages.
    """

    limits: Mapping[str, int] = dataclasses.field(default_factory=dict)
    costs: Mapping[str, float] = dataclasses.field(default_factory=dict)
    source: str = BUILT_IN


def read(path: str) -> Tuning:
    """Read the file at ``path``.

    Raises:
        SystemResourceError: it is not there or cannot be read.
        InvalidArgumentError: it is not JSON or says something that is not allowed; the message names file and key.
    """
    return parse(_document(path), path=path)


def _document(path: str) -> Any:
    try:
        with open(path, encoding="utf-8") as file:
            content = file.read(1 << 20)
    except (OSError, UnicodeDecodeError) as error:
        raise SystemResourceError(
            f"RINGDP_TUNING={path} cannot be read: {error}; python -m benchmarks tune writes such a file"
        ) from error
    try:
        return json.loads(content)
    except ValueError as error:
        raise InvalidArgumentError(f"RINGDP_TUNING={path} is not JSON: {error}") from None


def write_uplinks(path: str, uplinks: Mapping[str, float], machine: str) -> None:
    """Put the links of hosts, in bytes a second by name, into the file, which keeps what else it says.

    Args:
        machine: what a new file says of the machine.

    Raises:
        SystemResourceError: it cannot be written, or is there and cannot be read.
        InvalidArgumentError: it is there, and is not such a file.
    """
    document: dict[str, Any] = {"ringdp_tuning": FORMAT, "machine": machine}
    if os.path.exists(path):
        document = _document(path)
        parse(document, path=path)
    document["uplinks"] = {host: f"{rate * 8 / 1e6:.2f}mbit" for host, rate in uplinks.items()}
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(json.dumps(document, indent=2) + "\n")
    except OSError as error:
        raise SystemResourceError(f"{path}: {error.strerror}") from None


def parse(document: Any, *, path: str) -> Tuning:
    """Check what `read` found. ``path`` is for messages. Raises InvalidArgumentError."""

    def refuse(key: str, problem: str) -> NoReturn:
        raise InvalidArgumentError(f"RINGDP_TUNING={path}: {key} {problem}")

    def section(parent: str, value: Any, allowed: Mapping[str, str]) -> Mapping[str, Any]:
        if not isinstance(value, dict):
            refuse(parent, f"must be an object with some of {', '.join(allowed)}, not {_shown(value)}")
        for key in value:
            if key not in allowed:
                refuse(f"{parent}.{key}", f"is not known; allowed are {', '.join(allowed)}")
        return value

    if not isinstance(document, dict):
        refuse("the file", f"must hold a JSON object, not {_shown(document)}")
    if document.get("ringdp_tuning") != FORMAT:
        refuse("ringdp_tuning", f"must be {FORMAT}, not {_shown(document.get('ringdp_tuning'))}")
    for key in document:
        if key not in ("ringdp_tuning", "machine", "layouts", "costs", "uplinks"):
            refuse(key, "is not known; allowed are ringdp_tuning, machine, layouts, costs, uplinks")
    limits: dict[str, int] = {}
    for layout, values in section("layouts", document.get("layouts", {}), LAYOUTS).items():
        for name, value in section(f"layouts.{layout}", values, LIMITS).items():
            unit, most = next((unit, most) for ending, unit, most in _UNITS if name.endswith(ending))
            if type(value) is not int or not 0 <= value <= most:
                wanted = f"a whole number of {unit}, 0 to 2**{most.bit_length() - 1}"
                refuse(f"layouts.{layout}.{name}", f"must be {wanted}, not {_shown(value)}")
            limits[f"{layout}.{name}"] = value
    costs: dict[str, float] = {}
    for name, value in section("costs", document.get("costs", {}), COSTS).items():
        if type(value) not in (int, float) or not math.isfinite(value) or value < 0:
            refuse(f"costs.{name}", f"must be a number, 0 or more, not {_shown(value)}")
        costs[name] = float(value)
    uplinks = document.get("uplinks", {})
    if not isinstance(uplinks, dict) or len(uplinks) == 1:
        refuse("uplinks", f"must be an object with the rates of two hosts or more, not {_shown(uplinks)}")
    for host, rate in uplinks.items():
        if not host or any(letter.isspace() or letter == "=" for letter in host):
            refuse("uplinks", f"has {_shown(host)}, which is not a host's name")
        limits[UPLINK + host] = _bytes_per_s(rate)
        if limits[UPLINK + host] == 0:
            refuse(f"uplinks.{host}", f"must be a rate as 1gbit, 100mbit or 125MB/s, not {_shown(rate)}")
    return Tuning(limits=limits, costs=costs, source=f"RINGDP_TUNING={path}")


def _bytes_per_s(rate: Any) -> int:
    """0 where it is not a rate."""
    try:
        found = round(parse_rate(rate)) if isinstance(rate, str) else 0
    except ValueError:
        return 0
    return found if found <= MAX_BYTES else 0


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
