"""What there is of each kind is told by one table; its other places (Python's classes, the oracles, the cost model, the
pages) agree with it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ringdp import compression
from ringdp.compression import Info
from ringdp.costs import HostLayout, work
from tests.helpers import need
from tests.registries import ALGORITHMS, ALL_REDUCES, BLOCK_CODECS, CODEC_COMPRESSORS, CODEC_SPECS, COMPRESSORS

need("tests.core._core", "ringdp's extension, built with `make build`,")

DOCS = Path(__file__).resolve().parents[2] / "docs"


def rows(page: str) -> list[str]:
    """The first cell of each row of the page's tables."""
    [path] = DOCS.rglob(page)
    return [line.split("|")[1].replace("`", "") for line in path.read_text().splitlines() if line.startswith("|")]


def has_row(page: str, name: str) -> bool:
    return any(name in first.replace('"', " ").replace(",", " ").split() for first in rows(page))


def test_numbers_on_the_wire_are_what_they_were() -> None:
    """Append, never renumber: jobs of two versions refuse each other by the protocol's version, not by luck."""
    numbers = {name: row["number"] for name, row in CODEC_SPECS.items()}
    known = {"float16": 0, "bfloat16": 1, "int8": 2, "int4": 3, "int5": 4, "int6": 5, "nf4": 6}
    assert {name: numbers.get(name) for name in known} == known
    assert sorted(numbers.values()) == list(range(len(numbers)))
    algorithms = {row["name"]: row["number"] for row in ALGORITHMS}
    known = {"exchange": 0, "ring": 1, "fold": 2, "pairwise": 3, "chain": 4, "two_level": 5}
    known |= {"compressed": 6, "elsewhere": 7, "tree": 8, "halving": 9}
    assert {name: algorithms.get(name) for name in known} == known
    assert len(set(algorithms.values())) == len(algorithms) == len(ALGORITHMS)


def test_every_codec_has_a_compressor() -> None:
    assert set(CODEC_COMPRESSORS) == set(CODEC_SPECS)


@pytest.mark.parametrize("codec", CODEC_SPECS)
def test_a_compressor_says_of_its_codec_what_the_core_says(codec: str) -> None:
    one, spec = CODEC_COMPRESSORS[codec], CODEC_SPECS[codec]
    assert one.code_bytes(spec["block"]) * 8 == spec["bits"] * spec["block"] + 8 * spec["scale_bytes"]
    if codec not in BLOCK_CODECS:
        return
    assert one.block == spec["block"]
    assert (getattr(one, "lowest", -127), getattr(one, "highest", 127)) == (spec["lowest"], spec["highest"])
    steps = torch.arange(spec["block"]) % (spec["highest"] - spec["lowest"] + 1)
    x = (spec["lowest"] + steps).to(torch.float32)  # the scale is 1
    info = Info(name="x", shape=(x.numel(),), numel=x.numel())
    wholes = set(one.decode(one.encode(x), x.numel()).tolist())
    assert wholes <= set(map(float, spec["levels"] or range(spec["lowest"], spec["highest"] + 1)))
    assert one.decompress(one.compress(x, info), info)[0] == spec["lowest"]


@pytest.mark.parametrize("name", COMPRESSORS)
def test_a_compressor_has_a_row_and_is_exported(name: str) -> None:
    names = [it for it in compression.names() if type(compression.get(it)) is type(COMPRESSORS[name])]
    assert any(has_row("compressors.md", it) for it in names)
    assert type(COMPRESSORS[name]).__name__ in compression.__all__


@pytest.mark.parametrize("codec", CODEC_SPECS)
def test_a_codec_has_a_row(codec: str) -> None:
    assert has_row("wire_format.md", codec)


@pytest.mark.parametrize("algorithm", ALL_REDUCES)
def test_an_algorithm_has_a_row_an_oracle_and_costs(algorithm: str) -> None:
    from tests.contract.core_checks import ORDERS

    assert has_row("algorithms.md", algorithm.split("_")[0])
    assert algorithm in ORDERS
    assert work(algorithm, HostLayout((2, 2), cores=2), 1 << 20).rank_bytes > 0
