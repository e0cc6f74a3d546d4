"""A build that travels with the sources to a machine that runs it, and has few minutes to spend on building.

    PYTHON tools/carried_build.py make    fills .gpu: ringdp's compiled modules for this Python and its torch, stripped
    PYTHON tools/carried_build.py use     puts them where `make build` leaves its own, if they can be imported

`make` compiles a copy of the tree in build/carried, so that the tree's own build stays, with kernels for
TORCH_CUDA_ARCH_LIST (9.0 where that is not set). `use` ends with status 1 and a sentence where the modules were made
from other sources, for another GPU, or cannot be imported; then nothing has changed. Standard library only, as
tools/environment.py.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import environment
from toolchain import SetupError

ROOT = environment.ROOT
CARRIED = ROOT / ".gpu"
MADE_FROM = "made_from.json"
COPY = environment.BUILD / "carried"
EGG_INFO = "ringdp.egg-info"  # in which torch finds the backend's entry point
PACKAGES = ("ringdp", "tests", "tests/core")
PATTERNS = ("ringdp/_*.so", "ringdp/_build_info.py", "tests/core/_*.so")
PACKAGED = ("MANIFEST.in", "README.md", "LICENSE")  # what setup.py reads beside what is compiled
IMPORT = """
import sys, torch
from ringdp import _C, _build_info
from tests.core import _core
if _build_info.CUDA and torch.cuda.is_available():
    here = "%d.%d" % torch.cuda.get_device_capability()
    if here not in sys.argv[1].split():
        sys.exit(f"its kernels are for {sys.argv[1]} and this GPU is of {here}")
"""


def compiled(root: Path) -> list[Path]:
    """What a build leaves below `root`, as paths from there."""
    found = [path for pattern in PATTERNS for path in root.glob(pattern)]
    return sorted(path.relative_to(root) for path in found)


def made_from(architectures: str) -> dict[str, str]:
    return {"sources": environment.digest(environment.build_inputs()), "architectures": architectures}


def make() -> None:
    """Fill .gpu. Raises SetupError."""
    variables = {**os.environ, "TORCH_CUDA_ARCH_LIST": os.environ.get("TORCH_CUDA_ARCH_LIST") or "9.0"}
    made = made_from(variables["TORCH_CUDA_ARCH_LIST"])
    copy_sources()
    command = [sys.executable, "tools/environment.py"]
    if subprocess.run(command, cwd=COPY, env=variables, check=False).returncode != 0:
        raise SetupError(f"the build that was to be carried failed: the log is {COPY}/build/build.log")
    shutil.rmtree(CARRIED, ignore_errors=True)
    for path in compiled(COPY):
        (CARRIED / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(COPY / path, CARRIED / path)
        if path.suffix == ".so":
            subprocess.run(["strip", "--strip-unneeded", str(CARRIED / path)], check=True)
    shutil.copytree(COPY / EGG_INFO, CARRIED / EGG_INFO)
    (CARRIED / MADE_FROM).write_text(json.dumps(made, indent=1))
    if reason := why_not():
        raise SetupError(f"what was built cannot be used: {reason}")
    size = sum(path.stat().st_size for path in CARRIED.rglob("*") if path.is_file())
    environment.say(f"{CARRIED.name} has a build of {size / 1e6:.1f} MB for {sys.implementation.cache_tag}")


def copy_sources() -> None:
    """Into build/carried, with their times, so that only what changed since the last time is compiled."""
    for name in ("ringdp", "tools", "tests"):
        shutil.rmtree(COPY / name, ignore_errors=True)
    inputs = [*environment.build_inputs(), *(ROOT / "ringdp").rglob("*.py"), *(ROOT / "ringdp").rglob("*.h")]
    inputs += [*(ROOT / "tools").glob("*.py"), *(ROOT / name for name in PACKAGED)]
    inputs += [ROOT / "tests" / "__init__.py", ROOT / "tests" / "core" / "__init__.py"]
    for path in inputs:
        if path.name != "_build_info.py":
            target = COPY / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, target)


def why_not() -> str | None:
    """Why what is in .gpu cannot be used here; None where it can."""
    try:
        made = json.loads((CARRIED / MADE_FROM).read_text())
    except OSError:
        return f"there is no {CARRIED.name}/{MADE_FROM}"
    if made != made_from(made["architectures"]):
        return "it was made from other sources than these"
    with tempfile.TemporaryDirectory(prefix="ringdp-carried-") as folder:  # the package as it would be
        here = {ROOT / path for path in compiled(ROOT)}
        for package in PACKAGES:
            Path(folder, package).mkdir()
            for path in (ROOT / package).iterdir():
                if path not in here and path.name not in ("core", "__pycache__"):
                    Path(folder, package, path.name).symlink_to(path)
        for path in compiled(CARRIED):
            Path(folder, path).symlink_to(CARRIED / path)
        variables = {**os.environ, "PYTHONPATH": folder, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        command = [sys.executable, "-c", IMPORT, made["architectures"]]
        done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return None
    return (done.stderr.strip().splitlines() or [f"importing it ends the process with status {done.returncode}"])[-1]


def use() -> None:
    """Put what is carried into the package's folder. Raises SetupError, before anything has changed."""
    if reason := why_not():
        raise SetupError(f"the build in {CARRIED.name} is not used: {reason}")
    for path in compiled(CARRIED):
        shutil.copy2(CARRIED / path, ROOT / path)
    shutil.copytree(CARRIED / EGG_INFO, ROOT / EGG_INFO, dirs_exist_ok=True)
    environment.say(f"the build in {CARRIED.name} is used")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("make", "use"))
    what = parser.parse_args().what
    try:
        make() if what == "make" else use()
    except SetupError as error:
        sys.exit(f"ringdp: {error}")


if __name__ == "__main__":
    main()
