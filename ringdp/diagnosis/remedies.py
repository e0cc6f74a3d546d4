"""Remedies for communication that a step has to wait for, each with its gain by the cost model."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from ringdp.costs import AlgorithmCosts, HostLayout, work
from ringdp.diagnosis.split import Split
from ringdp.diagnosis.window import OWN
from ringdp.text import format_time

_INT8_RATIO = 32 / 9  # a scale of 32 bits for blocks of 32
_CODING_NS_PER_BYTE = 1.0  # of gradients, both ways; a core does at least that (docs/lab/benchmarks.md)
_LITTLE_OVERLAP = 0.3
_LATENCY = 0.5  # of the time on the way, from which messages cost more than bytes
_WORTH = 0.05


@dataclass(frozen=True)
class Sent:
    """What a rank exchanges in a step.

    Attributes:
        bytes: of gradients.
        coded_bytes: of their codes; the same as `bytes` where nothing is compressed.
        buckets: operations.
        on_its_way_s: from the first bucket's launch to the end, the mean of all ranks.
        per_host: ranks of each host.
    """

    bytes: int
    coded_bytes: int
    buckets: int
    on_its_way_s: float
    per_host: Sequence[int]

    @property
    def ratio(self) -> float:
        return self.bytes / self.coded_bytes if self.coded_bytes else 1.0


def remedy_for_communication(parts: Split, sent: Sent, *, by_network: bool = True) -> str:
    """The most promising first, each with the time of a step that the model predicts. `by_network`: a link was the
    limit, so that fewer bytes take less time; within a host encoding takes longer than copying."""
    step = float(parts.step.mean())
    exposed = float(parts.communication.mean())
    compressed = _int8(sent, step, exposed) if by_network else None
    ideas = [idea for idea in (compressed, _buckets(parts, sent, step, exposed)) if idea is not None]
    ideas.append((step - exposed / 2, "accumulate gradients over two batches (no_sync)"))
    ideas.sort(key=lambda one: one[0])
    worth = [one for one in ideas if one[0] <= (1 - _WORTH) * step] or ideas[:1]
    return "; or ".join(f"{text}: {format_time(seconds)} a step expected" for seconds, text in worth)


def fitted(sent: Sent) -> tuple[AlgorithmCosts, HostLayout]:
    """The cost model with the bytes' cost for which its ring takes as long as was measured."""
    place = HostLayout(tuple(sent.per_host), max(sent.per_host))
    costs = AlgorithmCosts()
    several = len(place.per_host) > 1
    name = "beta_remote_ns_per_byte" if several else "beta_local_ns_per_byte"
    latency = dataclasses.replace(costs, **{name: 0.0}, gamma_ns_per_byte=0.0)
    ring = work("ring", place, max(sent.coded_bytes, 1))
    fixed = dataclasses.replace(ring, link_bytes=0.0, local_bytes=0.0).seconds(latency, place) * sent.buckets
    moved = ring.link_bytes if several else ring.local_bytes
    beta = max(sent.on_its_way_s - fixed, 0.0) / max(moved, 1.0) * 1e9
    return dataclasses.replace(latency, **{name: beta}), place


def predicted_s(sent: Sent, bytes_sent: float, buckets: int) -> float:
    """How long the buckets of a step should be on their way if they had so many bytes."""
    costs, place = fitted(sent)
    each = work("ring", place, max(round(bytes_sent / buckets), 1))
    return buckets * each.seconds(costs, place)


def _int8(sent: Sent, step: float, exposed: float) -> tuple[float, str] | None:
    if sent.ratio > 1.5:
        return None  # it is compressed already
    hidden = max(sent.on_its_way_s - exposed, 0.0)
    coding = sent.bytes * _CODING_NS_PER_BYTE * 1e-9
    on_its_way = predicted_s(sent, sent.bytes / _INT8_RATIO, max(sent.buckets, 1)) + coding
    return step - exposed + max(on_its_way - hidden, 0.0), "compression='int8'"


def _buckets(parts: Split, sent: Sent, step: float, exposed: float) -> tuple[float, str] | None:
    """Fewer buckets where messages cost more than bytes; more where nothing leaves before backward has ended."""
    few = max(1, sent.buckets // 4)
    fixed = predicted_s(sent, 0, max(sent.buckets, 1))
    if sent.buckets >= 8 and fixed >= _LATENCY * sent.on_its_way_s:
        return step - fixed * (1 - few / sent.buckets), "larger buckets (bucket_cap_mb four times as large)"
    backward = float(parts.own[:, OWN.index("backward")].mean())
    hidden = max(sent.on_its_way_s - exposed, 0.0)
    if sent.bytes >= 4 << 20 and backward > 0 and hidden < _LITTLE_OVERLAP * min(backward, sent.on_its_way_s):
        more = min(backward * 0.5, exposed * 0.5)
        return step - more, "smaller buckets (bucket_cap_mb=4), so that the first leave earlier in backward"
    return None
