"""examples/c_compressor.py: builds, checks and trains on one rank and on two; can fail; can do without a compiler."""

from __future__ import annotations

import re

import pytest

from tests.train.harness import ring_is_built
from tests.train.test_examples import no_launcher, on_two_ranks, run_main

pytestmark = [pytest.mark.ci, pytest.mark.skipif(not ring_is_built(), reason="ringdp is not built")]
__all__ = ["no_launcher"]  # a fixture


def test_two_ranks() -> None:
    (code, out, _), (other_code, other_out, _) = on_two_ranks("c_compressor", [])
    if out.startswith("skipped: there is no C compiler"):
        pytest.skip(out.strip())
    assert (code, other_code, other_out) == (0, 0, ""), out
    assert "CCompressor('shift8', 8.12 bits an element" in out
    assert "ok  its functions do what ringdp/compressor.h says, and write nowhere else" in out
    assert re.search(r"^2 ranks, 200 steps", out, re.MULTILINE), out
    assert "ok     parameters bit-identical on all ranks" in out
    assert re.search(r"ok     loss 0\.00\d+ ", out), out


@pytest.mark.usefixtures("no_launcher")
def test_one_rank_needs_no_launcher_and_the_check_can_fail() -> None:
    code, out, _ = run_main("c_compressor", ["--steps", "1"])
    if not out.startswith("skipped"):
        assert code == 1
        assert re.search(r"^1 rank, 1 steps", out, re.MULTILINE), out
        assert "FAILED loss" in out


@pytest.mark.usefixtures("no_launcher")
def test_without_a_compiler_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    code, out, _ = run_main("c_compressor", [])
    assert (code, out) == (0, "skipped: there is no C compiler on this machine (apt-get install gcc)\n")
