"""Arguments of the compressors: what cannot be is refused at once, in words that say what can."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch

from ringdp import compression
from ringdp.errors import InvalidArgumentError
from ringdp.testing import simulate

FRACTIONS = [0, -1, 1.1, math.nan, math.inf, "0.1", None, True, torch.tensor(0.1)]
CLIPS = [0, -1.0, math.nan, math.inf, "1", True]
WHOLE = [-1, 1.5, "3", None, True]
FLAGS = ["no", None, 1]
BLOCKS = [0, -8, 8.0, "8", None, True, 10**12]

REFUSED: list[tuple[str, str, list[Any], str]] = [
    ("TopK", "fraction", FRACTIONS, "a number above 0 and at most 1"),
    ("TopK", "ramp_steps", WHOLE, "a whole number from 0 on"),
    ("RandomK", "fraction", FRACTIONS, "a number above 0 and at most 1"),
    ("PowerSGD", "rank", [0, *WHOLE], "a whole number from 1 on"),
    ("PowerSGD", "warm_start", FLAGS, "True or False"),
    *[(name, "block", BLOCKS, "a whole number from 1 on, at most") for name in ("Int8", "QSGD", "TernGrad")],
    ("Int4", "block", [63, *BLOCKS], "an even number from 2 on, at most"),
    *[(name, "block", [12, *BLOCKS], "a multiple of 8, at most") for name in ("Int5", "Int6", "NormalFloat4", "Sign")],
    *[(name, "rotate", FLAGS, "True or False") for name in ("Int8", "Int6", "Int5", "Int4")],
    ("QSGD", "bits", [3, 0, 4.0, "4", None, True], "one of 2, 4, 8"),
    ("TernGrad", "clip", CLIPS, "a number above 0 that is not infinite, or None"),
    ("DGC", "momentum", [-1, 1, math.nan, "0.9", None, True], "a number from 0 on and below 1"),
    ("DGC", "clip", CLIPS, "a number above 0 that is not infinite, or None"),
    ("DGC", "masking", FLAGS, "True or False"),
    ("Auto", "allow", ["x", "NEAR", None, 1, ["near"]], "one of exact, near, 4bit, aggressive"),
]


@pytest.mark.parametrize(
    ("name", "argument", "values", "allowed"), REFUSED, ids=[f"{name}-{argument}" for name, argument, *_ in REFUSED]
)
def test_what_cannot_be_is_refused(name: str, argument: str, values: list[Any], allowed: str) -> None:
    for value in values:
        words = re.escape(f"{name}: {argument} must be {allowed}") + ".*" + re.escape(f", not {value!r}")
        with pytest.raises(InvalidArgumentError, match=words):
            getattr(compression, name)(**{argument: value})


@pytest.mark.parametrize(
    "compressor",
    [
        compression.TopK(1e-320),
        compression.TopK(1),
        compression.RandomK(1e-320),
        compression.RandomK(1e-9, error_feedback=False),
        compression.PowerSGD(10**10),
        compression.Int8(block=1 << 20),
    ],
    ids=str,
)
def test_the_ends_of_a_range_run(compressor: Any) -> None:
    mean = simulate(compressor, [torch.ones(40, 40)] * 2).mean
    assert bool(mean.any())
    assert bool(mean.isfinite().all())
