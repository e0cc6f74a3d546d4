"""`python -m benchmarks` lists what can be run, `python -m benchmarks NAME …` runs it; NAME --help explains."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from benchmarks.lib import session


class Runnable(NamedTuple):
    """A module of a folder, what it answers, and what one run with its defaults takes."""

    module: str
    question: str
    minutes: float
    needs: str = "2 cores"


RUNNABLES = {
    "allreduce": Runnable(
        "collectives.allreduce", "how fast is an all-reduce beside gloo, Open MPI and a hand-written loop?", 2,
        "2 cores; root for --hosts; mpi4py and Open MPI for mpi; g++ for ceiling",
    ),
    "ceilings": Runnable(
        "collectives.ceilings", "how far is ringdp from what this machine can do? one table", 11,
        "2 cores; g++; root and iperf3 for compressed",
    ),
    "tune": Runnable(
        "collectives.tune", "from which size on is which algorithm faster here? writes the file of RINGDP_TUNING", 2,
        "2 cores; root for --hosts",
    ),
    "simulated": Runnable(
        "collectives.simulated", "how near is python -m ringdp simulate to this machine?", 2,
        "2 cores; root for --hosts",
    ),
    "tls": Runnable("collectives.tls", "what does TLS between ranks cost?", 1, "2 cores; root for --hosts"),
    "startup": Runnable("collectives.startup", "how long do 2 to 64 ranks of one host take to join, beside gloo?", 3),
    "step": Runnable(
        "training.step", "what does a training step take under RingDP and its options, beside torch's DDP?", 3,
        "2 cores; root for --hosts",
    ),
    "reducer": Runnable("training.reducer", "what does the wrapper itself cost the host in a step?", 1, "1 core"),
    "memory": Runnable("training.memory", "how much memory does a step take at its peak, beside torch's DDP?", 5),
    "memory_soak": Runnable("training.memory_soak", "does a long training keep its memory and descriptors?", 1),
    "kvstore": Runnable("training.kvstore", "what does the key-value store cost beside collectives?", 2),
    "async_store": Runnable(
        "training.async_store", "the asynchronous store beside dist_sync and torch RPC: times, slow ranks, losses", 6
    ),
    "embedding": Runnable(
        "training.embedding", "a sharded embedding beside whole tables: samples/s, memory", 5,
        "4 cores, 8 GiB",
    ),
    "compression_quality": Runnable(
        "compression.quality", "what do compressors do to gradients, and to the loss of a training?", 30,
        "1 core; scikit-learn",
    ),
    "time_to_loss": Runnable(
        "compression.time_to_loss", "after how many seconds does a model reach a loss, with which compressor?", 15,
        "2 cores; root for --hosts; scikit-learn",
    ),
    "kernels": Runnable("compression.kernels", "how fast are the codecs and top-k's choice beside memcpy?", 2, "g++"),
    "failures": Runnable(
        "failures.failures", "how soon, and in which words, do ranks learn of a fault, beside gloo?", 4, "root"
    ),
    "false_alarms": Runnable("failures.false_alarms", "is a rank that is slow for want of a core called lost?", 30),
    "joins": Runnable(
        "failures.joins", "how soon is a killed rank replaced, and how long do the others wait, beside torchft?", 3,
        "2 cores; torchft, horovod; root for --hosts",
    ),
    "churn": Runnable("failures.churn", "do elastic jobs hold their promises while ranks are killed?", 5),
    "elastic_peers": Runnable(
        "failures.elastic_peers", "what does elasticity cost, and a loss, beside torchft and Horovod Elastic?", 4,
        "2 cores; torchft, horovod",
    ),
    "diagnosis": Runnable(
        "failures.diagnosis", "does the report name the cause that was injected?", 10, "2 cores; root"
    ),
    "verdicts": Runnable(
        "failures.verdicts", "how often is the report's remedy a wrong one?", 60, "2 cores; root for quota"
    ),
    "far": Runnable("far.far", "how much of a long or lossy line do hosts get, beside gloo?", 2, "long_line or hosts"),
    "unequal": Runnable("far.unequal", "what does a map of unequal links bring, beside the least time?", 1, "root"),
    "door": Runnable("far.door", "how fast is a relayed pair of hosts, and a start through one port?", 1, "root"),
    "far_loss": Runnable("far.loss", "time to a loss between two sites: exact, codes, rounds", 20),
    "rounds": Runnable("far.rounds", "what do rounds (DiLoCo) cost?", 5),
    "muon": Runnable("training.muon", "Muon beside AdamW: loss, and a step that is shared", 15),
    "rounds_late": Runnable("far.rounds_late", "what do late ranks cost in rounds?", 10),
    "rounds_deaths": Runnable(
        "far.rounds_deaths", "what do ranks that die and come back cost, in steps and in rounds?", 13
    ),
    "rounds_loss": Runnable("far.rounds_loss", "what do rounds do to the loss, as exact changes and as codes?", 40),
    "hosts": Runnable("lib.hosts", "none: makes several hosts out of one machine", 0, "root, iproute2"),
    "long_line": Runnable(
        "far.long_line", "none: the same with a delay, losses, a queue and NAT between them", 0, "root, tun, g++"
    ),
    "gpu_kernels": Runnable("gpu.kernels", "how fast are the CUDA kernels beside a copy?", 2, "1 GPU"),
    "gpu_step": Runnable("gpu.step", "a step over NCCL: RingDP beside torch's DDP", 3, "1 GPU"),
    "staging": Runnable("gpu.staging", "all-reduce of GPU tensors through pinned memory and ring", 1, "1 GPU"),
    "plots": Runnable("lib.plots", "none: draws the pictures of docs/lab from results", 15, "matplotlib"),
}  # fmt: skip


def module_of(name: str) -> Any:
    return importlib.import_module(f"benchmarks.{RUNNABLES[name].module}")


def listed() -> str:
    lines = [f"{'name':<20}minutes  {'question':<96}needs"]
    lines += [f"{name:<20}{it.minutes or '':>7}  {it.question:<96}{it.needs}" for name, it in RUNNABLES.items()]
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(f"{__doc__}\n\n{listed()}\n\nEverything that needs a GPU: bash benchmarks/gpu/check.sh")
        return 0
    name, *rest = argv
    if name not in RUNNABLES:
        print(f"{name!r} is not known: choose from {', '.join(RUNNABLES)}", file=sys.stderr)
        return 2
    module = module_of(name)
    if hasattr(module, "main"):
        return int(module.main(rest))
    return session.main(module, name, rest)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
