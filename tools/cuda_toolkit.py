"""Which CUDA toolkit a build takes, if any: torch's CUDA decides, and nvcc has to be of the same major version.

    python tools/cuda_toolkit.py            compiles every kernel for every architecture, keeps nothing: CI has no GPU
    python tools/cuda_toolkit.py --ends     for the oldest, the newest and sm_90, in 60 % of the time

Used by setup.py and by tools/environment.py, which run before anything is installed: standard library only. A build
without kernels is a whole build, so what does not fit is told in a sentence and is no error.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

# Where nvcc is when neither the environment nor PATH says it.
USUAL_ROOT = Path("/usr/local/cuda")
# Built for whatever torch lists: the first GPU that ringdp was written for.
ALWAYS = "sm_90"
# What torch 2.11 and 2.13 for CUDA 13 list (torch._C._cuda_getArchFlags()), for a compile without such a torch.
LISTED = "sm_75 sm_80 sm_86 sm_90 sm_100 sm_120"
# The same bits as on the CPU: no contraction, no flushed denormals, divisions and roots rounded once.
COMPILE_FLAGS = [
    "-std=c++20",
    "-O3",
    "--fmad=false",
    "-ftz=false",
    "-prec-div=true",
    "-prec-sqrt=true",
    "-Xcompiler",
    "-fPIC,-ffp-contract=off,-fvisibility=hidden",
]


@dataclass(frozen=True)
class Toolkit:
    """A CUDA toolkit as its nvcc describes it."""

    root: Path  # nvcc is root/bin/nvcc
    version: str  # major.minor
    includes: tuple[Path, ...]  # for C++ files that nvcc does not compile
    libraries: tuple[Path, ...]  # folders to look for the CUDA runtime
    targets: frozenset[str]  # what nvcc can compile for: sm_90, …

    @property
    def nvcc(self) -> Path:
        return self.root / "bin" / "nvcc"


def find_nvcc() -> str | None:
    """nvcc's path: of $CUDA_HOME or $CUDA_PATH where one is set, else on PATH, else where it is usually installed."""
    named = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if named:
        return shutil.which("nvcc", path=str(Path(named, "bin")))
    return shutil.which("nvcc") or shutil.which("nvcc", path=str(USUAL_ROOT / "bin"))


def read_toolkit(nvcc: str) -> Toolkit | None:
    """What this nvcc says of itself (a script on PATH may stand for one elsewhere); None where it does not answer."""
    dry = _answer(nvcc, "--dryrun", "-c", "x.cu")
    version = re.search(r"release (\d+\.\d+)", _answer(nvcc, "--version"))
    here = re.search(r"^#\$ _HERE_=(.+)$", dry, re.MULTILINE)
    if version is None or here is None:
        return None
    return Toolkit(
        root=Path(here[1].strip()).resolve().parent,
        version=version[1],
        includes=_folders(dry, "INCLUDES", "-I"),
        libraries=_folders(dry, "LIBRARIES", "-L"),
        targets=frozenset(_answer(nvcc, "--list-gpu-code").split()),
    )


def choose(torch_version: str, torch_cuda: str | None) -> tuple[Toolkit | None, str]:
    """The toolkit for a torch with this CUDA (`torch.version.cuda`), and a sentence where the user ought to know more:
    why there are no kernels, '' where nobody would expect them."""
    nvcc = find_nvcc()
    toolkit = read_toolkit(nvcc) if nvcc else None
    if torch_cuda is None:
        found = f"torch {torch_version} has no CUDA: built for CPUs, although nvcc {{}} is at {nvcc}"
        return None, found.format(toolkit.version) if toolkit else ""
    without = f"torch {torch_version} has CUDA {torch_cuda}, and ringdp is built without CUDA kernels: "
    wanted = f"the toolkit of CUDA {major(torch_cuda)} (CUDA_HOME=…)"
    if nvcc is None:
        place = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
        where = f"{place}/bin" if place else f"PATH and {USUAL_ROOT}/bin"
        return None, f"{without}there is no nvcc in {where}; install or name {wanted}, then build again"
    if toolkit is None:
        return None, f"{without}{nvcc} does not say its version; name {wanted}, then build again"
    if major(toolkit.version) != major(torch_cuda):
        return None, f"{without}{nvcc} is of CUDA {toolkit.version}; name {wanted}, then build again"
    return toolkit, ""


def major(version: str) -> int:
    return int(version.split(".")[0])


def architecture_flags(listed: str, targets: frozenset[str]) -> list[str]:
    """nvcc's words for each architecture in torch's list ('sm_80 sm_90 compute_90') that this nvcc knows, sm_90 always.

    The newest also as PTX, which the driver compiles for GPUs that are newer still.
    """
    wanted = {*re.findall(r"\bsm_\d+\b", listed), ALWAYS} & targets
    if not wanted:
        return []
    numbers = sorted(int(name.removeprefix("sm_")) for name in wanted)
    codes = [f"-gencode=arch=compute_{n},code=sm_{n}" for n in numbers]
    return [*codes, f"-gencode=arch=compute_{numbers[-1]},code=compute_{numbers[-1]}"]


def ends_of(listed: str) -> str:
    """The oldest and the newest of these architectures: what the one lacks, and what the other no longer has."""
    names = sorted(listed.split(), key=lambda name: int(name.removeprefix("sm_")))
    return f"{names[0]} {names[-1]}"


def compile_all(csrc: Path, listed: str = LISTED) -> list[str]:
    """Compile csrc/cuda/*.cu with the nvcc that is found, as many at once as there are cores; what failed, in words."""
    nvcc = find_nvcc()
    toolkit = read_toolkit(nvcc) if nvcc else None
    if toolkit is None:
        return ["no nvcc, or it does not answer"]
    words = [str(toolkit.nvcc), *COMPILE_FLAGS, *architecture_flags(listed, toolkit.targets), f"-I{csrc}", "-c"]

    def failure(source: Path) -> str:
        done = subprocess.run(
            [*words, str(source), "-o", f"{folder}/{source.name}.o"], capture_output=True, text=True, check=False
        )
        return "" if done.returncode == 0 else f"{source}:\n{done.stdout}{done.stderr}"

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(os.sched_getaffinity(0))) as workers:
        return [text for text in workers.map(failure, sorted((csrc / "cuda").glob("*.cu"))) if text]


def runtime_library(folders: list[Path]) -> Path | None:
    """The CUDA runtime to link: libcudart.so, or a numbered one as pip's packages of NVIDIA have it."""
    for pattern in ("libcudart.so", "libcudart.so.*"):
        for folder in folders:
            if found := sorted(folder.glob(pattern)):
                return found[0]
    return None


def _answer(nvcc: str, *words: str) -> str:
    try:
        done = subprocess.run(
            [nvcc, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout


def _folders(dry: str, name: str, flag: str) -> tuple[Path, ...]:
    """The folders of one of the lines `#$ NAME="-I/folder" …` that a dry run prints first."""
    line = re.search(rf"^#\$ {name}=(.*)$", dry, re.MULTILINE)
    words = shlex.split(line[1]) if line else []
    found = [Path(word.removeprefix(flag)).resolve() for word in words if word.startswith(flag)]
    return tuple(dict.fromkeys(folder for folder in found if folder.is_dir() and folder != Path("/usr/include")))


if __name__ == "__main__":
    chosen = ends_of(LISTED) if sys.argv[1:] == ["--ends"] else LISTED
    failed = compile_all(Path(__file__).resolve().parent.parent / "ringdp" / "csrc", chosen)
    sys.exit("\n".join(failed) or None)
