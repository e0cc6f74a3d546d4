"""Builds the fake device and runs tests on it: python -m tests.fake_cuda [PYTEST ARGUMENTS]

Twice: lazily, which finds a wait that is missing, and in an order drawn from a seed (SEED=…; printed).
"""

from __future__ import annotations

import os
import random
import shlex
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BUILD = ROOT / "build" / "fake_cuda"
RINGDP_HEADERS = ("torch/device/device_codec.h", "cuda/kernels.h")
SOURCES = sorted(HERE.glob("*.cpp"))
GPU_TESTS = ("ring_gpu", "codes_gpu", "training_gpu", "init_gpu", "mixed_job_gpu", "nccl_pair")
TESTS = ["tests/fake_cuda", *(f"tests/gpu/test_{name}.py" for name in GPU_TESTS)]
# What the device has not: graphs, the profiler. Two hosts say no more of it than one, and take long.
NOT_THERE = "not captur and not synchronises_the_device and not waits_for_nothing and not two_hosts"


def build() -> Path:
    """The compiled module, for the torch of this Python."""
    import torch
    from torch.utils import cpp_extension

    folder = BUILD / torch.__version__

    csrc = ROOT / "ringdp" / "csrc"
    compiler = shlex.split(os.environ.get("CXX") or "c++")
    include = [*cpp_extension.include_paths(), sysconfig.get_path("include"), str(csrc)]
    flags = ["-std=c++20", "-O1", "-g1", "-fPIC", "-Wall"]
    folder.mkdir(parents=True, exist_ok=True)
    newest_header = max(path.stat().st_mtime for path in [*HERE.glob("*.h"), *map(csrc.joinpath, RINGDP_HEADERS)])

    def compiled(source: Path) -> Path:
        target = folder / f"{source.stem}.o"
        if not target.exists() or target.stat().st_mtime < max(source.stat().st_mtime, newest_header):
            where = [part for path in include for part in ("-isystem" if "torch" in path else "-I", path)]
            subprocess.run([*compiler, *flags, *where, "-c", str(source), "-o", str(target)], check=True)
        return target

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compiled, SOURCES))
    module = folder / "fake_cuda.so"
    if not module.exists() or module.stat().st_mtime < max(path.stat().st_mtime for path in objects):
        libraries = [f"-L{path}" for path in cpp_extension.library_paths()]
        names = ["-ltorch", "-ltorch_cpu", "-lc10", "-ltorch_python"]
        subprocess.run([*compiler, "-shared", *map(str, objects), *libraries, *names, "-o", str(module)], check=True)
    return module


def main(arguments: list[str]) -> int:
    module = build()
    seed = os.environ.get("SEED") or str(random.SystemRandom().randrange(1 << 32))
    status = 0
    for order in ("lazy", seed):
        print(f"== the fake device, {order if order == 'lazy' else f'SEED={order}'}", flush=True)
        variables = {"FAKE_CUDA": str(module), "FAKE_CUDA_ORDER": order, "RINGDP_REDUCE_ALONE": "1"}
        path = os.pathsep.join([str(HERE / "site"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            *(arguments or [*TESTS, "-q", "-k", NOT_THERE]),
        ]
        status |= subprocess.run(
            command, cwd=ROOT, env=os.environ | variables | {"PYTHONPATH": path}, check=False
        ).returncode
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
