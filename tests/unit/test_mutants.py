"""The list of faults that the tests have to find (python -m tests.mutants) fits the sources and the tests."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.mutants.faults import ALL, Mutant

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("mutant", ALL, ids=lambda mutant: mutant.name)
def test_a_fault_has_one_place_and_tests(mutant: Mutant) -> None:
    assert (ROOT / "ringdp" / mutant.file).read_text().count(mutant.text) == 1
    assert mutant.text != mutant.instead
    assert mutant.tests
    for test in mutant.tests:
        file, _, function = test.partition("::")
        assert f"def {function.partition('[')[0]}" in (ROOT / file).read_text()


def test_a_name_stands_for_one_fault() -> None:
    assert max(Counter(mutant.name for mutant in ALL).values()) == 1
