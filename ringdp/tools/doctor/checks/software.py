"""Versions and the build, the environment variables that change ringdp's behaviour, GPUs and NCCL."""

from __future__ import annotations

import importlib.util
import platform
import sys
from collections.abc import Iterator

from ringdp.config import unknown_variables, visible_cuda_devices
from ringdp.tools.doctor.finding import Finding, note, ok, problem
from ringdp.tools.doctor.host import Host


def versions(host: Host) -> Iterator[Finding]:
    """Versions, the build, and the instruction set in use."""
    import torch

    import ringdp
    from ringdp import _C, _build, _build_info

    version = ".".join(torch.__version__.split(".")[:2])
    facts = {"ringdp": ringdp.__version__, "torch": torch.__version__, "python": platform.python_version()}
    yield ok(f"ringdp {ringdp.__version__}, torch {torch.__version__}, Python {platform.python_version()}", **facts)
    tested = ".".join(map(str, _build.NEWEST_TESTED_TORCH))
    if tuple(map(int, version.split("."))) > _build.NEWEST_TESTED_TORCH:
        yield note(f"torch {version} is newer than {tested}, the newest that ringdp was tested with")
    system = platform.uname()
    yield ok(f"{system.system} {system.release} on {system.machine}", kernel=system.release, machine=system.machine)
    cuda = getattr(_build_info, "CUDA", None)
    built = f"built for torch {_build_info.TORCH_VERSION} by {_build_info.COMPILER}, {_describe_cuda(cuda)}"
    yield ok(built, built_for=_build_info.TORCH_VERSION, compiler=_build_info.COMPILER, cuda=cuda)
    isa = _C.isa()
    yield ok(f"kernels for {isa}; {processor_name(host) or 'a processor that does not say its name'}", isa=isa)
    if importlib.util.find_spec("numpy") is None:
        yield ok("NumPy is not installed, and nothing of ringdp needs it", numpy=None)
    if sys.flags.optimize:
        yield note("Python runs with -O: assertions of your script are skipped", "leave out -O and PYTHONOPTIMIZE")


def processor_name(host: Host) -> str | None:
    """Of /proc/cpuinfo; None on processors that have no name there."""
    for line in (host.read("/proc/cpuinfo") or "").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "Model"):
            return " ".join(value.split())
    return None


def _describe_cuda(version: str | None) -> str:
    return f"with kernels for CUDA {version}" if version else "without CUDA"


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


def settings(host: Host) -> Iterator[Finding]:
    """The environment variables that change ringdp's behaviour."""
    given = host.settings()
    if isinstance(given, str):
        yield problem(given, "set it as docs/reference/settings.md says, or unset it")
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


def devices(host: Host) -> Iterator[Finding]:
    """GPUs that torch sees, and NCCL."""
    import torch
    import torch.distributed as dist

    from ringdp import _C

    built_for = torch.version.cuda
    has_driver = host.exists("/proc/driver/nvidia/version")
    count = torch.cuda.device_count() if built_for else 0
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() and built_for else None
    yield from gpus(
        built_for, has_driver=has_driver, count=count, nccl=nccl, visible=visible_cuda_devices(host.environ)
    )
    if count and not _C.cuda_kernels():
        remedy = "build ringdp again where nvcc is installed; compression of CUDA gradients then uses torch operations"
        yield note("this build of ringdp has no kernels for GPUs", remedy)
    if count and nccl and count < host.local_ranks:
        sentence = f"{host.local_ranks} ranks share {count} GPUs: NCCL refuses that, and ring goes through the host"
        yield note(sentence, f"start {count} ranks on this host")


def gpus(
    built_for: str | None, *, has_driver: bool, count: int, nccl: str | None, visible: str | None
) -> Iterator[Finding]:
    """Whether torch can use the GPUs of this host."""
    facts = {"cuda": built_for, "gpus": count, "nccl": nccl}
    if count:
        yield ok(f"{count} GPUs, CUDA {built_for}, NCCL {nccl or 'missing'}", **facts)
    elif has_driver and built_for is None:
        yield note(
            "an NVIDIA driver is loaded, and this torch is built without CUDA", "install a CUDA build of torch", **facts
        )
    elif has_driver and visible is not None:
        yield note(f"CUDA_VISIBLE_DEVICES={visible!r} hides all GPUs", "unset it", **facts)
    else:
        yield ok("no GPU: ranks train on the CPU over ring", **facts)
