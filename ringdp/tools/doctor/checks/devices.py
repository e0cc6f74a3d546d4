"""GPUs that torch sees, and NCCL."""

from __future__ import annotations

from collections.abc import Iterator

from ringdp.config import visible_cuda_devices
from ringdp.tools.doctor.finding import Finding, note, ok
from ringdp.tools.doctor.host import Host


def check(host: Host) -> Iterator[Finding]:
    import torch
    import torch.distributed as dist

    from ringdp import _C

    built_for = torch.version.cuda
    has_driver = host.exists("/proc/driver/nvidia/version")
    count = torch.cuda.device_count() if built_for else 0
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() and built_for else None
    yield from found(
        built_for, has_driver=has_driver, count=count, nccl=nccl, visible=visible_cuda_devices(host.environ)
    )
    if count and not _C.cuda_kernels():
        remedy = "build ringdp again where nvcc is installed; compression of CUDA gradients then uses torch operations"
        yield note("this build of ringdp has no kernels for GPUs", remedy)
    if count and nccl and count < host.local_ranks:
        sentence = f"{host.local_ranks} ranks share {count} GPUs: NCCL refuses that, and ring goes through the host"
        yield note(sentence, f"start {count} ranks on this host")


def found(
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
