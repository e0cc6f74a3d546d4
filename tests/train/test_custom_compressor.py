"""examples/custom_compressor.py: trains on one rank and on two, and can fail."""

from __future__ import annotations

import re

import pytest

from tests.helpers import need
from tests.train.harness import ring_is_built
from tests.train.test_examples import no_launcher, on_two_ranks, run_main

need("sklearn.datasets", "scikit-learn")
pytestmark = [pytest.mark.ci, pytest.mark.skipif(not ring_is_built(), reason="ringdp is not built")]
__all__ = ["no_launcher"]  # a fixture


def test_two_ranks() -> None:
    (code, out, _), (other_code, other_out, _) = on_two_ranks("custom_compressor", ["--epochs", "15"])
    assert (code, other_code, other_out) == (0, 0, ""), out
    assert "Sign(): 1.12 bits an element" in out
    assert "ok  the payloads and the residuals add up to the gradients (error feedback)" in out
    assert re.search(r"^2 ranks, backend ring, loss 0\.\d+", out, re.MULTILINE), out
    assert "ok     parameters bit-identical on all ranks" in out


@pytest.mark.usefixtures("no_launcher")
def test_one_rank_needs_no_launcher_and_the_check_can_fail() -> None:
    code, out, _ = run_main("custom_compressor", ["--epochs", "1", "--min-accuracy", "1.01"])
    assert code == 1
    assert re.search(r"^1 rank, backend ring", out, re.MULTILINE), out
    assert "FAILED test accuracy" in out
