"""The C++ tests that have threads, under TSan: a file of its own, so that it runs beside test_cpp.py."""

from __future__ import annotations

import pytest

from tests.cpp.test_cpp import check_passes, of_build

pytestmark = [pytest.mark.ci, pytest.mark.timeout(1300)]  # the first test waits for the compiler


@pytest.mark.parametrize("test", of_build("tsan"))
def test_passes(test: str) -> None:
    check_passes("tsan", test)
