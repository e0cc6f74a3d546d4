"""Every contract holds over every transport: shared memory, and TCP between ranks of one host."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

# On both in every run; the others over TCP in `make test-all`.
ON_BOTH = {
    "test_collectives_core",
    "test_compressed_core",
    "test_finite_core",
    "test_messages_core",
    "test_operations_torch",
    "test_sampled_processes",
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    both = metafunc.module.__name__.rpartition(".")[2] in ON_BOTH
    tcp = pytest.param("tcp", marks=() if both else pytest.mark.slow)
    metafunc.parametrize("transport", ["shm", tcp], indirect=True, scope="module")


@pytest.fixture(scope="module", autouse=True)
def transport(request: pytest.FixtureRequest) -> Iterator[str]:
    """What ranks of one host use, in this process and in those it starts."""
    before = os.environ.get("RINGDP_TRANSPORT")
    os.environ["RINGDP_TRANSPORT"] = request.param
    yield request.param
    if before is None:
        del os.environ["RINGDP_TRANSPORT"]
    else:
        os.environ["RINGDP_TRANSPORT"] = before
