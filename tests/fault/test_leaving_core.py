"""A rank that leaves while operations are in flight: here they end as shut down, for the others that rank is lost."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from ringdp.errors import InvalidStateError, PeerLostError, RingError
from tests.contract.core_ranks import ALWAYS_SMALL, NEVER_SMALL, World

REASON = "its program ended by ValueError: a sample of another size"


@pytest.fixture(params=[2, 3, 5])
def ranks(request: pytest.FixtureRequest) -> Iterator[World]:
    made = World(request.param)
    yield made
    made.close()


@pytest.mark.parametrize("table", [ALWAYS_SMALL, NEVER_SMALL], ids=["small", "ring"])
def test_the_others_lose_the_rank_that_leaves(ranks: World, table: dict[str, int]) -> None:
    groups = ranks.groups(table)
    ranks.runtimes[0].set_farewell(REASON)

    def body(rank: int) -> RingError | None:
        if rank == ranks.size - 1 and rank > 1:
            return None  # it has not called, so nothing ends before rank 0 leaves
        work = groups[rank].all_reduce(np.ones(300_000, np.float32), "float32")
        if rank == 0:
            if ranks.size == 2:
                groups[0].all_reduce(np.ones(4, np.float32), "float32")  # which rank 1 does not call
            ranks.runtimes[0].shut_down()
        try:
            work.wait()
            if rank > 0:
                groups[rank].barrier().wait()
        except RingError as error:
            return error
        return None

    errors = ranks.each(body)
    if ranks.size > 2:
        assert isinstance(errors[0], InvalidStateError)
        assert "rank 0 shut down while operations were in flight" in str(errors[0])
    for rank in range(1, max(2, ranks.size - 1)):
        error = errors[rank]
        assert isinstance(error, PeerLostError), error
        assert error.peer == 0
        assert f"it left the job: {REASON}; look at that rank's own log for the reason" in str(error)
