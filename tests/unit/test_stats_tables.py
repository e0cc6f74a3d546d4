"""What a RingDP's figures look like when they are printed."""

from __future__ import annotations

import dataclasses
from typing import Any

from ringdp.compression.exchange import Sparsity
from ringdp.ddp.compression.auto import Decision
from ringdp.ddp.compression.quality import Quality
from ringdp.ddp.compression.stats import CompressionStats
from ringdp.ddp.reduction_stats import Stats
from ringdp.text import count, cut, short_table


def aligned(text: str) -> bool:
    """Lines of each table, up to the next empty line, end in the same column or before."""
    for part in text.split("\n\n"):
        lines = part.split("\n")
        rulers = [line for line in lines if line.startswith("--")]
        if rulers and any(len(line) > len(rulers[0]) for line in lines if line and not line.startswith("…")):
            return False
    return True


def test_stats() -> None:
    stats = Stats(
        steps=200, buckets=7, bytes=45 << 20, backward_s=0.0123, exposed_wait_s=0.0004, total_backward_s=2.5,
        total_exposed_wait_s=0.1,
    )  # fmt: skip
    assert str(stats).split("\n") == [
        "200 steps, 45 MiB of gradients in 7 buckets",
        "              last step     mean  all steps",
        "------------  ---------  -------  ---------",
        "backward        12.3 ms  12.5 ms      2.5 s",
        "exposed wait     400 µs   500 µs     100 ms",
    ]
    assert repr(stats).startswith("Stats(steps=200, buckets=7, bytes=47185920, backward_s=0.0123,")
    assert "0 steps" in str(dataclasses.replace(stats, steps=0)), "before the first step"


def bucket(index: int) -> dict[str, Any]:
    return {
        "index": index, "name": f"bucket {index}: {index}.weight", "reduction": index % 2 - 1, "numel": 1 << 18,
        "bytes_before": 1 << 20, "bytes_after": 1 << 17, "coding_s": 2e-4, "seconds": 0.02, "exposed_s": 3e-6,
    }  # fmt: skip


def stats_of(number: int, **changes: Any) -> CompressionStats:
    names = [f"{i}.weight" for i in range(number)]
    values: dict[str, Any] = {
        "steps": 4, "parameters": dict.fromkeys(names, "Int8()") | {"bias": "exact"}, "bytes_before": 20 << 20,
        "bytes_after": 5 << 20, "wire_bytes": 3 << 20, "coding_s": 0.012, "wire_s": 0.8, "exposed_s": 0.033,
        "buckets": [bucket(i) for i in range(number)], "sparsity": {}, "decisions": [], "quality": [],
    }  # fmt: skip
    return CompressionStats(**(values | changes))


def test_compression_stats() -> None:
    text = str(stats_of(2))
    assert "after 4 steps" in text
    assert "their codes, once, 4.0 times smaller" in text
    assert "bucket 1: 1.weight  compressed      1 MiB  128 KiB  200 µs       20 ms          3 µs" in text
    assert "bucket 0: 0.weight       exact" in text
    assert "…" not in text
    assert aligned(text)
    assert repr(stats_of(2)).startswith("CompressionStats(steps=4, parameters={'0.weight': 'Int8()'")


def test_what_is_left_out_is_counted() -> None:
    quality = [Quality(step, f"{i}.weight", "Int8()", 0.1, 0.2, 0.9, None) for step in (0, 2) for i in range(30)]
    sparsity = {f"{i}.weight": Sparsity(100, 100, 10, 15) for i in range(14)}
    decisions = [Decision(step, f"reason {step}") for step in range(9)]
    text = str(stats_of(40, quality=quality, sparsity=sparsity, decisions=decisions))
    assert "0.weight, 1.weight, 2.weight and 37 more" in text
    for line in ("… and 28 more", "… and 2 more", "… and 18 more", "60 rows of all steps", "… 4 decisions before"):
        assert line in text
    assert "measured in step 2" in text
    assert "from step 8: reason 8" in text
    assert "reason 3" not in text
    assert "10 %" in text
    assert aligned(text)
    assert len(text.split("\n")) < 80


def test_nothing_compressed_and_long_names() -> None:
    odd = stats_of(1, bytes_after=0, buckets=[bucket(0) | {"name": "x" * 500}], parameters={"y" * 500: "Z" * 500})
    assert max(map(len, str(odd).split("\n"))) < 150
    assert aligned(str(odd))


def test_words() -> None:
    assert (count(1, "step"), count(0, "step"), count(1200, "step")) == ("1 step", "0 steps", "1,200 steps")
    assert (cut("abcdef", 4), cut("abcd", 4)) == ("abc…", "abcd")
    assert short_table(["a"], [["x"]] * 12).count("x") == 12
    assert short_table(["a"], [["x"]] * 13).endswith("… and 1 more")
