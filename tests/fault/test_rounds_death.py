"""A rank that dies while fragments are on their way is named, and the global parameters stay as they were."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ringdp.errors import PeerLostError
from ringdp.rounds import DiLoCo, Fragments
from tests.train.harness import run_outcomes

EVERY = 6


def rank_dies(folder: str, at_step: int, compression: str | None) -> tuple[str, float, bool]:
    """Rank 1 after a step; what rank 0 raises, how long after that, and whether global parameters are the old ones."""
    torch.manual_seed(0)
    rank, place = dist.get_rank(), Path(folder, "died")
    module = torch.nn.Linear(2000, 500)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    rounds = DiLoCo(module, optimizer, every=EVERY, fragments=Fragments(2, delay=2), compression=compression)
    before: tuple[torch.Tensor, ...] = ()
    try:
        for step in range(1, 4 * EVERY):
            for p in module.parameters():
                p.grad = torch.randn_like(p)
            if step > EVERY:
                before = rounds._fragments[0].total.clone(), rounds._fragments[1].total.clone()
            optimizer.step()
            if rank == 1 and step == at_step:
                place.write_text(str(time.monotonic()))
                os.kill(os.getpid(), signal.SIGKILL)
            while rank == 0 and step == at_step and not place.exists():
                time.sleep(0.001)
    except PeerLostError as error:
        after = rounds._fragments[0].total, rounds._fragments[1].total
        same = all(map(torch.equal, before, after))
        return str(error), time.monotonic() - float(place.read_text()), same
    raise AssertionError("rank 0 noticed nothing")


@pytest.mark.parametrize("compression", [None, "int4"])
@pytest.mark.parametrize("at_step", [EVERY + 2, EVERY + 3])  # before its fragment leaves, and on its way
def test_a_rank_that_dies_in_a_round_is_named(tmp_path: Path, at_step: int, compression: str | None) -> None:
    first, second = run_outcomes(rank_dies, str(tmp_path), at_step, compression, world_size=2, backend="ring")
    assert second.text is not None
    assert first.value is not None, first.text
    message, took_s, same = first.value
    assert "rank 1" in message
    assert took_s < 1.0
    assert same
