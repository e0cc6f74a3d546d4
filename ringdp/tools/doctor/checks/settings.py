"""The environment variables that change ringdp's behaviour."""

from __future__ import annotations

from collections.abc import Iterator

from ringdp.config import unknown_variables
from ringdp.tools.doctor.finding import Finding, note, ok, problem
from ringdp.tools.doctor.host import Host

OTHERS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "MASTER_ADDR", "MASTER_PORT")
OF_PEERS = ("NCCL_", "GLOO_", "TORCH_DISTRIBUTED_", "TORCH_NCCL_")
OF_A_RUN = ("RINGDP_SECRET_FILE", "RINGDP_REPORT_FILE", "RINGDP_DUMP_DIR")
"""Set by ringrun to a path of its own: they differ between hosts or ranks, and the user did not choose them."""


def chosen(host: Host) -> dict[str, str]:
    """The variables that are set and that ringdp, torch's backends or thread pools read."""
    prefixes = ("RINGDP_", *OF_PEERS)
    return {
        name: value
        for name, value in sorted(host.environ.items())
        if value and (name.startswith(prefixes) or name in OTHERS) and name not in OF_A_RUN
    }


def check(host: Host) -> Iterator[Finding]:
    settings = host.settings()
    if isinstance(settings, str):
        yield problem(settings, "set it as docs/reference/settings.md says, or unset it")
    for name, near in unknown_variables(host.environ).items():
        yield problem(f"{name} is not a variable that ringdp reads", f"write {near[0]}, or unset it")
    found = chosen(host)
    if not found:
        yield ok("no variable changes ringdp's behaviour")
    else:
        yield ok("set: " + ", ".join(f"{name}={value}" for name, value in found.items()), variables=found)
    if host.environ.get("RINGDP_RATE"):
        sentence = f"RINGDP_RATE={host.environ['RINGDP_RATE']} slows this host down on purpose"
        yield note(sentence, "unset RINGDP_RATE for real runs")
