"""Builds the fake device and runs tests on it: python -m tests.fake_cuda [PYTEST ARGUMENTS]

ringdp's compiled module is linked anew of what `make build` left and of what it has for CUDA, the kernels too, compiled
with the emulation of tests/cpp.

Twice: lazily, which finds a wait that is missing, and in an order drawn from a seed (SEED=…; printed).
It compiles for torch 2.11 to 2.15 (a guard of 2.11 has no isStreamCapturing, so it is left out). In a torch with CUDA
its operators run as well, in place of CUDA's; ringdp has to be built without kernels there, since those ask the driver.
"""

from __future__ import annotations

import ast
import os
import random
import shlex
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BUILD = ROOT / "build" / "fake_cuda"
CSRC = ROOT / "ringdp" / "csrc"
EMULATION = ROOT / "tests" / "cpp" / "emulated_cuda"
DEVICE_SOURCES = sorted(HERE.glob("*.cpp"))
PRODUCT_SOURCES = [
    *sorted((CSRC / "cuda").glob("*.cu")),
    *sorted((CSRC / "torch" / "device" / "cuda").glob("*.cpp")),
    *sorted((HERE / "product").glob("*.cpp")),
    EMULATION / "device.cpp",
]
TESTS = ["tests/fake_cuda", "tests/gpu"]
# What the device has not: graphs, the profiler, an allocator that keeps memory, streams that run beside a busy one. Two
# hosts say no more of it than one, nor other compressors of an elastic job, and take long.
ABSENT = (
    "captur",
    "synchronises_the_device",
    "waits_for_nothing",
    "reserved_memory",
    "copies_do_not_wait",
    "two_hosts",
    "steps:none",
    "steps:topk",
    "rounds:",
)
NOT_THERE = " and ".join(f"not {name}" for name in ABSENT)
# Written for the CPU, and run with all tensors on the device (everything.py).
TRAINING = [f"tests/train/test_parallel_{name}.py" for name in ("gradients", "unused", "freezing", "hooks")]
# What is another on a device: which ranks lack a gradient is read now and then, memory comes in larger blocks, a tensor
# on this one cannot be pickled, and sparse ones are gloo's.
NOT_ALIKE = "not who_lacks and not between_accumulation_steps and not copies and not sparse_gradients"


def build() -> tuple[Path, Path]:
    """For this Python's torch: the module of the device, and ringdp's with its part for CUDA compiled for it."""
    import torch
    from torch.utils import cpp_extension

    folder = BUILD / torch.__version__
    compiler = shlex.split(os.environ.get("CXX") or "c++")
    theirs = [*cpp_extension.include_paths(), sysconfig.get_path("include")]
    ours = [HERE / "product", EMULATION, HERE, CSRC]  # the first has files in place of torch's
    include = [word for path in theirs for word in ("-isystem", path)] + [f"-I{path}" for path in ours]
    flags = ["-std=c++20", "-O1", "-g1", "-fPIC", "-Wall", "-Wno-unknown-pragmas", "-ffp-contract=off", "-MMD", "-MP"]

    def compiled(source: Path) -> Path:
        target = folder / source.relative_to(ROOT).with_suffix(".o")
        if is_stale(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            hidden = [] if source.parent == HERE else ["-fvisibility=hidden"]
            words = [*compiler, *flags, *hidden, *include, "-x", "c++", "-c", str(source), "-o", str(target)]
            subprocess.run(words, check=True)
        return target

    def linked(name: str, objects: Sequence[Path]) -> Path:
        module = folder / name
        if not module.exists() or module.stat().st_mtime < max(path.stat().st_mtime for path in objects):
            libraries = [f"-L{path}" for path in cpp_extension.library_paths()]
            names = ["-ltorch", "-ltorch_cpu", "-lc10", "-ltorch_python", "-lrt"]
            subprocess.run([*compiler, "-shared", *map(str, objects), *libraries, *names, "-o", module], check=True)
        return module

    # The largest, the kernels, first.
    sources = sorted([*DEVICE_SOURCES, *PRODUCT_SOURCES], key=lambda path: path.suffix != ".cu")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = dict(zip(sources, pool.map(compiled, sources), strict=True))
    device = linked("fake_cuda.so", [objects[source] for source in DEVICE_SOURCES])
    return device, linked("_C.so", [*without_cuda(), *(objects[source] for source in PRODUCT_SOURCES)])


def is_stale(target: Path) -> bool:
    """Whether a file that the object was compiled of is newer than it."""
    listed = target.with_suffix(".d")
    if not target.exists() or not listed.exists():
        return True
    made = target.stat().st_mtime
    of = [__file__, *listed.read_text().partition(":")[2].replace("\\\n", " ").replace(":", " ").split()]
    return any(not Path(path).exists() or Path(path).stat().st_mtime > made for path in of)


def without_cuda() -> list[Path]:
    """What ringdp._C is linked of (tools/extension_build.py), but for what stands there where there is no CUDA."""
    sys.path.insert(0, str(ROOT / "tools"))
    import extension_build

    folder = ROOT / extension_build.BUILD_FOLDER / "ringdp._C"
    sources, core, *_ = ast.literal_eval((folder / "inputs").read_text())
    absent = {*extension_build.sources("torch/device/no_cuda", "cuda")}
    return [*(folder / Path(source).with_suffix(".o") for source in sources if source not in absent), *map(Path, core)]


def variables_of(device: Path, product: Path, order: str) -> dict[str, str]:
    """The environment of a Python that has the device and takes ringdp from this checkout."""
    path = os.pathsep.join([str(HERE / "site"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    modules = {"FAKE_CUDA": str(device), "FAKE_CUDA_RINGDP": str(product)}
    return {**modules, "FAKE_CUDA_ORDER": order, "RINGDP_REDUCE_ALONE": "1", "PYTHONPATH": path}


def run(arguments: list[str], variables: dict[str, str]) -> tuple[int, str]:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    ran = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return ran.returncode, ran.stdout


def run_all(variables: dict[str, str], arguments: list[str]) -> tuple[int, str]:
    """The exit status, and what to show of it."""
    if arguments:
        return run(arguments, variables)
    status, text = run([*TESTS, "-q", "-k", NOT_THERE], variables)
    everything = {"RINGDP_TEST_DEVICE": "cuda", "RINGDP_TEST_BACKENDS": "ring"}
    other, more = run([*TRAINING, "-q", "-k", NOT_ALIKE], variables | everything)
    return status | other, text + more


def main(arguments: list[str]) -> int:
    device, product = build()
    seed = os.environ.get("SEED") or str(random.SystemRandom().randrange(1 << 32))
    orders = {"lazy": "lazy", f"SEED={seed}": seed}
    status = 0
    with ThreadPoolExecutor(len(orders)) as pool:  # side by side: most tests wait for a stream or a rank
        ran = {
            name: pool.submit(run_all, variables_of(device, product, order), arguments)
            for name, order in orders.items()
        }
        for name, done in ran.items():
            one, text = done.result()
            print(f"== the fake device, {name}\n{text}", end="", flush=True)
            status |= one
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
