"""run_ranks: results in rank order, errors and deaths in words, functions from anywhere."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch

import ringdp
from ringdp.errors import InvalidArgumentError
from ringdp.testing import RankError, run_ranks
from tests.train.harness import ring_is_built

pytestmark = pytest.mark.skipif(not ring_is_built(), reason="ringdp is not built")


def summed(x: float) -> tuple[int, float]:
    tensor = torch.tensor([x * (ringdp.rank() + 1)])
    torch.distributed.all_reduce(tensor)
    return ringdp.rank(), float(tensor)


def fails_on(rank: int) -> None:
    if ringdp.rank() == rank:
        raise ValueError("the third batch is empty")
    torch.distributed.barrier()


def killed(rank: int) -> None:
    if ringdp.rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    torch.distributed.barrier()


def test_results_come_in_rank_order() -> None:
    assert run_ranks(summed, 3, 2.0) == [(0, 12.0), (1, 12.0), (2, 12.0)]


def test_a_function_inside_a_function() -> None:
    """As a notebook's are: no other process can import it."""
    offset = 10

    def ranks() -> torch.Tensor:
        return torch.tensor([ringdp.rank() + offset])

    assert [int(it) for it in run_ranks(ranks, 2)] == [10, 11]


def test_an_error_comes_back_in_words() -> None:
    with pytest.raises(RankError, match=r"(?s)fails_on failed on \d of 2 ranks:.*rank 1.*ValueError: the third batch"):
        run_ranks(fails_on, 2, 1)


def test_a_death_and_a_hang_are_told() -> None:
    with pytest.raises(RankError, match=r"(?s)rank 1 was killed by SIGKILL .*rank 1 ---\nwas killed by SIGKILL"):
        run_ranks(killed, 2, 1)
    begin = time.monotonic()
    with pytest.raises(RankError, match="did not end in time"):
        run_ranks(time.sleep, 1, 60.0, timeout_s=4)
    assert time.monotonic() - begin < 20
    with pytest.raises(InvalidArgumentError, match="at least one rank"):
        run_ranks(summed, 0)
