"""What the CUDA kernels' Python face says where there is no GPU: no, and why."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import ringdp  # noqa: E402
from ringdp import _C  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]


def test_tensors_on_the_cpu_are_refused_in_words() -> None:
    code = torch.empty(_C.codec_bytes("int8", 4), dtype=torch.uint8)
    words = r"x is Float on cpu; it must be Float, contiguous, on a CUDA device"
    for call in (_C.cuda_encode, _C.cuda_decode_set):
        with pytest.raises(ringdp.InvalidArgumentError, match=words if call is _C.cuda_encode else "on a CUDA device"):
            call("int8", [torch.ones(4)], [code])
    with pytest.raises(ringdp.InvalidArgumentError, match="values is Float on cpu"):
        _C.cuda_find_non_finite(torch.ones(4), torch.zeros(1, dtype=torch.int32))


def test_a_build_without_kernels_says_so() -> None:
    if _C.cuda_kernels():
        pytest.skip("this build has CUDA kernels")
    with pytest.raises(ringdp.InvalidStateError, match="no CUDA kernels: build it where torch has CUDA and nvcc"):
        _C.cuda_select(torch.ones(1), 0.5, 1)


@pytest.mark.nightly
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_benchmark_of_the_kernels_says_that_it_needs_a_gpu() -> None:
    words = [sys.executable, "-m", "benchmarks", "gpu_kernels"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("gpu_kernels: torch ")
    assert "sees no CUDA device" in done.stderr
    wrong = subprocess.run(
        [*words, "--elements", "many"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert wrong.returncode == 2
    assert "'many' is not a number of elements" in wrong.stderr
