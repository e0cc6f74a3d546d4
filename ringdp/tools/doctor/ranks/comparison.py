"""Whether all ranks have the same versions and settings; those that differ are named."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ringdp.tools.doctor.checks import software
from ringdp.tools.doctor.finding import Finding, Verdict, note, ok, problem
from ringdp.tools.doctor.host import Host
from ringdp.tools.doctor.ranks.meeting import describe_ranks

MUST_AGREE = {
    "ringdp": "install the same ringdp everywhere",
    "torch": "install the same torch everywhere",
    "RINGDP_TLS": "set it alike on all ranks",
    "RINGDP_CHECKSUM": "set it alike on all ranks",
    "RINGDP_STREAMS": "set it alike on all ranks",
    "RINGDP_FULL_MESH_RANKS": "set it alike on all ranks",
    "RINGDP_TUNING": "give all ranks the same table",
    "RINGDP_CUDA": "set it alike on all ranks",
    "RINGDP_TRANSPORT": "set it alike on all ranks of a host",
}
"""Ranks that differ in these do not meet, or would not do the same; with a remedy."""

OF_A_RANK = (
    "MASTER_ADDR",
    "MASTER_PORT",
    "CUDA_VISIBLE_DEVICES",
    "RINGDP_HOST_ID",
    "RINGDP_SITE",
    "RINGDP_ADVERTISE",
    "RINGDP_DOOR",
    "RINGDP_TLS_CERT",
    "RINGDP_TLS_KEY",
    "RINGDP_TLS_CA",
    "RINGDP_RANK_PROCESS",
)
"""Settings that may differ between ranks or hosts by their nature."""


@dataclasses.dataclass(frozen=True)
class Likeness:
    """The values that ought to be the same on all ranks, by name, as people read them."""

    values: Mapping[str, str]

    @classmethod
    def of(cls, host: Host) -> Likeness:
        """This rank's."""
        import torch

        import ringdp
        from ringdp import _C

        values = {
            "ringdp": ringdp.__version__,
            "torch": torch.__version__,
            "Python": platform.python_version(),
            "kernel": platform.release(),
            "processor": software.processor_name(host) or platform.machine(),
            "instruction set": _C.isa(),
            "cores": str(host.cores),
        }
        chosen = software.chosen(host)
        return cls(values | {name: value for name, value in chosen.items() if name not in OF_A_RANK})


def findings(of_ranks: Sequence[Mapping[str, str]]) -> Iterator[Finding]:
    """A finding for each value that is not the same on all ranks: the smaller group of ranks is named."""
    names = list(dict.fromkeys(name for values in of_ranks for name in values))
    differing = 0
    for name in names:
        groups: dict[str, list[int]] = {}
        for rank, values in enumerate(of_ranks):
            groups.setdefault(values.get(name, "not set"), []).append(rank)
        if len(groups) == 1:
            continue
        differing += 1
        yield _difference(name, groups)
    if not differing and len(of_ranks) > 1:
        yield ok(f"all {len(of_ranks)} ranks have the same versions and settings")


def _difference(name: str, groups: Mapping[str, Sequence[int]]) -> Finding:
    rarest_first = sorted(groups.items(), key=lambda item: (len(item[1]), item[1]))
    sentence = f"{name} differs: " + ", ".join(f"{value} on {describe_ranks(ranks)}" for value, ranks in rarest_first)
    facts: dict[str, Any] = {"name": name, "values": {value: list(ranks) for value, ranks in groups.items()}}
    if name in MUST_AGREE:
        return problem(sentence, MUST_AGREE[name], **facts)
    if name.startswith(("RINGDP_", "NCCL_", "GLOO_", "TORCH_", "OMP_", "MKL_")):
        return note(sentence, f"set {name} alike everywhere unless you mean it (ringrun -H passes it on)", **facts)
    if name == "cores":
        return note(
            sentence, "ranks on fewer cores are waited for: ringdp.data.BalancedSampler gives them less to do", **facts
        )
    return Finding("", Verdict.OK, f"{sentence}; this changes no result", facts=facts)
