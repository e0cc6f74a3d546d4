"""The loops over elements on a 64-bit Arm processor, emulated: the bits of this one's, in each instruction set."""

from __future__ import annotations

import platform
import re
import shutil
from pathlib import Path

import pytest

from tests.cpp.building import COMPILER, HERE, run

CSRC = HERE.parents[1] / "ringdp" / "csrc"
FLAGS = ("-std=c++20", "-O3", "-ffp-contract=off", "-static", "-pthread", f"-I{CSRC}")  # setup.py's, and no libraries
ARM = "aarch64-linux-gnu-g++"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # compiles the loops twice


def built(compiler: list[str], binary: Path) -> str:
    loops = [path for name in ("base", "kernels", "codec") for path in sorted((CSRC / name).glob("*.cpp"))]
    done = run([*compiler, *FLAGS, "-o", str(binary), *map(str, (HERE / "kernel_bits.cpp", *loops))])
    assert done.returncode == 0, done.stderr
    return str(binary)


def test_an_arm_processor_has_the_same_bits(tmp_path: Path) -> None:
    emulator = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
    if platform.machine() != "x86_64" or emulator is None or shutil.which(ARM) is None:
        pytest.skip(f"needs qemu-user and {ARM}")
    here = built(COMPILER, tmp_path / "here")
    there = run([emulator, built([ARM], tmp_path / "there"), "scalar"])
    assert there.returncode == 0, there.stderr
    assert len(re.findall(r"^float32 SUM |^int8 residual |^bfloat16 AVG by", there.stdout, re.M)) == 3
    for isa in ("scalar", "avx2", "avx512"):
        one = run([here, isa])
        if one.returncode == 2:  # this processor does not have it
            continue
        assert one.stdout.splitlines() == there.stdout.splitlines()
