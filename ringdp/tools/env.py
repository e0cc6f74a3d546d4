"""``python -m ringdp env``: what a report of a fault needs to say about this machine and its software."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from ringdp.config import threads
from ringdp.errors import SystemResourceError

_ABOUT = "Print versions, cores, memory, devices and the variables that change how ringdp works; put it into reports."
_PACKAGES = ("numpy", "lightning", "pytorch-lightning", "accelerate", "transformers", "ray", "torchft-nightly")
_PREFIXES = ("RINGDP_", "OMP_", "MKL_", "NCCL_", "GLOO_", "CUDA_", "TORCH_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_")


def add_parsers(commands: Any) -> None:
    """Add the command to the parsers of ``python -m ringdp``."""
    parser = commands.add_parser("env", help="versions and settings, for a report of a fault", description=_ABOUT)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print a line for each fact; the exit code."""
    del args
    facts = list(_facts(os.environ))
    width = max(len(name) for name, _ in facts)
    sys.stdout.write("".join(f"{name:<{width}}  {value}\n" for name, value in facts))
    return 0


def versions() -> str:
    """In one line: of ringdp, of the torch that it was built for and of the one that is here, and of Python."""
    import torch

    import ringdp
    from ringdp import _build_info

    built = "" if torch.__version__ == _build_info.TORCH_VERSION else f" (built for {_build_info.TORCH_VERSION})"
    return f"ringdp {ringdp.__version__}, torch {torch.__version__}{built}, Python {platform.python_version()}"


def _facts(variables: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    import torch

    from ringdp import _build_info

    yield "versions", versions()
    yield "built by", f"{_build_info.COMPILER}, CUDA {_build_info.CUDA or 'none'}"
    yield "OpenSSL", _openssl()
    yield "system", f"{platform.platform()}, {platform.libc_ver()[0]} {platform.libc_ver()[1]}"
    yield "processor", _first("/proc/cpuinfo", "model name") or platform.machine()
    yield "cores", f"{threads.usable_cores()} usable of {os.cpu_count()}"
    yield "memory", _first("/proc/meminfo", "MemTotal") or "unknown"
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    yield "GPUs", ", ".join(gpus) or "none that torch sees"
    for name in _PACKAGES:
        try:
            yield name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    for name in sorted(variables):
        if name.startswith(_PREFIXES):
            yield name, variables[name]


def _openssl() -> str:
    from ringdp import _C

    try:
        return str(_C.openssl_version())
    except SystemResourceError as error:
        return f"none that RINGDP_TLS can use: {error}"


def _first(file: str, name: str) -> str | None:
    """The value of the first line ``name: value`` of a file of the kernel."""
    try:
        lines = Path(file).read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), None)
