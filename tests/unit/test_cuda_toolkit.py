"""tools/cuda_toolkit.py: which nvcc is taken for which torch, and the sentences where none is.

Every nvcc here is a script.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.nightly
ROOT = Path(__file__).resolve().parents[2]
TORCH = "2.11.0+cu130"


@pytest.fixture
def cuda_toolkit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The module, on a machine without any nvcc."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    module = importlib.import_module("cuda_toolkit")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.setattr(module, "USUAL_ROOT", tmp_path / "usual")
    return module


def make_nvcc(root: Path, version: str, targets: str = "sm_80 sm_90 sm_120") -> Path:
    """A toolkit of this version: a script that answers what is asked, and its folders."""
    for folder in ("bin", "include", "lib"):
        (root / folder).mkdir(parents=True)
    path = root / "bin" / "nvcc"
    path.write_text(
        f"""#!/bin/sh
case "$1" in
  --version) echo "Cuda compilation tools, release {version}, V{version}.88";;
  --list-gpu-code) echo {targets};;
  --dryrun) cat <<'end'
#$ _HERE_={root}/bin
#$ INCLUDES="-I{root}/bin/../include"
#$ LIBRARIES=  "-L{root}/bin/../lib/stubs" "-L{root}/bin/../lib"
end
esac
""".replace("cat <<", 'while read line; do echo "$line"; done <<')
    )
    path.chmod(0o755)
    return path


def test_a_cpu_torch_without_nvcc_says_nothing(cuda_toolkit: ModuleType) -> None:
    assert cuda_toolkit.choose("2.13.0+cpu", None) == (None, "")


def test_a_cpu_torch_beside_nvcc_says_one_line(cuda_toolkit: ModuleType, tmp_path: Path) -> None:
    nvcc = make_nvcc(tmp_path / "usual", "13.0")
    toolkit, words = cuda_toolkit.choose("2.13.0+cpu", None)
    assert toolkit is None
    assert words == f"torch 2.13.0+cpu has no CUDA: built for CPUs, although nvcc 13.0 is at {nvcc}"


@pytest.mark.parametrize("version", ["13.0", "13.4"])
def test_nvcc_of_the_same_major_version_fits(cuda_toolkit: ModuleType, tmp_path: Path, version: str) -> None:
    make_nvcc(tmp_path / "usual", version)
    toolkit, words = cuda_toolkit.choose(TORCH, "13.0")
    assert words == ""
    assert (toolkit.version, toolkit.root, toolkit.nvcc) == (version, tmp_path / "usual", tmp_path / "usual/bin/nvcc")
    assert toolkit.includes == (tmp_path / "usual" / "include",)
    assert toolkit.libraries == (tmp_path / "usual" / "lib",), "a folder that is not there is left out"


def test_a_script_on_path_stands_for_the_toolkit_it_calls(
    cuda_toolkit: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = make_nvcc(tmp_path / "cuda-13.0", "13.0")
    caller = tmp_path / "empty" / "nvcc"
    caller.write_text(f'#!/bin/sh\nexec {real} "$@"\n')
    caller.chmod(0o755)
    toolkit, _ = cuda_toolkit.choose(TORCH, "13.0")
    assert toolkit.root == tmp_path / "cuda-13.0"


def test_cuda_home_goes_before_path(cuda_toolkit: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(make_nvcc(tmp_path / "first", "12.4").parent))
    make_nvcc(tmp_path / "named", "13.0")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "named"))
    assert cuda_toolkit.choose(TORCH, "13.0")[0].root == tmp_path / "named"
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "nowhere"))
    toolkit, words = cuda_toolkit.choose(TORCH, "13.0")
    assert toolkit is None
    assert f"there is no nvcc in {tmp_path}/nowhere/bin" in words


def test_a_mismatch_is_explained(cuda_toolkit: ModuleType, tmp_path: Path) -> None:
    nvcc = make_nvcc(tmp_path / "usual", "12.4")
    toolkit, words = cuda_toolkit.choose(TORCH, "13.0")
    assert toolkit is None
    wanted = (
        r"has CUDA 13\.0, and .* without CUDA kernels: {} is of CUDA 12\.4; name the toolkit of CUDA 13 \(CUDA_HOME"
    )
    assert re.search(wanted.format(re.escape(str(nvcc))), words)


def test_a_cuda_torch_without_nvcc_is_told_where_it_was_looked_for(cuda_toolkit: ModuleType, tmp_path: Path) -> None:
    toolkit, words = cuda_toolkit.choose(TORCH, "13.0")
    assert toolkit is None
    assert f"no nvcc in PATH and {tmp_path}/usual/bin; install or name the toolkit of CUDA 13" in words


def test_an_nvcc_that_does_not_answer_is_named(cuda_toolkit: ModuleType, tmp_path: Path) -> None:
    nvcc = make_nvcc(tmp_path / "usual", "13.0")
    nvcc.write_text("#!/bin/sh\nexit 1\n")
    assert f"{nvcc} does not say its version" in cuda_toolkit.choose(TORCH, "13.0")[1]


def test_architectures_are_those_of_torch_that_nvcc_knows_and_sm_90(cuda_toolkit: ModuleType) -> None:
    known = frozenset({"sm_80", "sm_90", "sm_100"})
    assert cuda_toolkit.architecture_flags("sm_50 sm_80 sm_120 compute_120", known) == [
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_90,code=sm_90",
        "-gencode=arch=compute_90,code=compute_90",
    ]
    assert cuda_toolkit.architecture_flags("sm_100 sm_90a", known)[-1].endswith("code=compute_100")
    assert cuda_toolkit.architecture_flags("", frozenset()) == []


def test_the_ends_of_what_torch_lists(cuda_toolkit: ModuleType) -> None:
    assert cuda_toolkit.ends_of("sm_80 sm_120 sm_90") == "sm_80 sm_120"
    assert cuda_toolkit.ends_of(cuda_toolkit.LISTED) == "sm_75 sm_120"


def test_the_runtime_is_found_where_only_a_numbered_one_is(cuda_toolkit: ModuleType, tmp_path: Path) -> None:
    toolkit, package = tmp_path / "lib", tmp_path / "cu13"
    for folder in (toolkit, package):
        folder.mkdir()
    assert cuda_toolkit.runtime_library([toolkit, package]) is None
    (package / "libcudart.so.13").touch()
    assert cuda_toolkit.runtime_library([toolkit, package]) == package / "libcudart.so.13"
    (toolkit / "libcudart.so").touch()
    assert cuda_toolkit.runtime_library([package, toolkit]) == toolkit / "libcudart.so"
