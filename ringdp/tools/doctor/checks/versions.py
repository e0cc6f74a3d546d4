"""Versions, the build, and the instruction set in use."""

from __future__ import annotations

import importlib.util
import platform
import sys
from collections.abc import Iterator

from ringdp.tools.doctor.finding import Finding, note, ok
from ringdp.tools.doctor.host import Host

BEST = {"x86_64": "avx512", "aarch64": "neon"}


def check(host: Host) -> Iterator[Finding]:
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
