"""RingDP over a map of unequal links: error feedback over resumes with the same map, and with another one."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ringdp import Compression
from ringdp.compression import Int8
from ringdp.ddp.wrapper import RingDP
from ringdp.errors import InvalidArgumentError
from tests.train import compressed_training as training
from tests.train.harness import run_ranks

SITES = "abc"


def ring(folder: str, rates: Sequence[str]) -> dist.ProcessGroup:
    """A group of three ranks, each a site of its own, whose lines have these rates; none: without a map."""
    rank = dist.get_rank()
    settings = {"RINGDP_SITE": SITES[rank]}
    if rates:
        path = Path(folder, f"{rank}-{'-'.join(rates)}.json")
        path.write_text(json.dumps({"ringdp_tuning": 1, "uplinks": dict(zip(SITES, rates, strict=True))}))
        settings["RINGDP_TUNING"] = str(path)
    with mock.patch.dict(os.environ, settings):
        return dist.new_group(backend="ring")


def make(group: dist.ProcessGroup) -> tuple[RingDP, torch.optim.Optimizer]:
    model = RingDP(
        training.wide(), process_group=group, compression=Compression(Int8(error_feedback=True), warmup_steps=0)
    )
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def saved(thing: Any) -> Any:
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def goes_on(folder: str, rates: Sequence[str], then: Sequence[str]) -> tuple[bool, str]:
    """Whether a run that loads its exact state over lines of the rates `then` has the bits of one that goes on, and how
    loading it was refused; a consolidated state loads everywhere."""
    model, optimizer = make(ring(folder, rates))
    training.train(model, range(4), optimizer)
    kept = saved({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    exact = saved(model.compression_state_dict())
    of_all = saved(model.compression_state_dict(consolidated=True))
    went_on = training.train(model, range(4, 8), optimizer)

    again, its_optimizer = make(ring(folder, then))
    again.load_state_dict(kept["model"])
    its_optimizer.load_state_dict(kept["optimizer"])
    refused = ""
    try:
        again.load_compression_state_dict(exact)
    except InvalidArgumentError as error:
        refused = str(error)
        again.load_compression_state_dict(of_all)
    return training.train(again, range(4, 8), its_optimizer) == went_on, refused


SLOW = ("1gbit", "1gbit", "100mbit")


@pytest.mark.parametrize(
    ("rates", "then", "words"),
    [
        (SLOW, SLOW, ""),
        (("1gbit", "1gbit", "1gbit"), (), ""),
        (SLOW, (), "owned 50% : 50% : 0% of a buffer, and they own equal parts now"),
        ((), SLOW, "owned equal parts of a buffer, and they own 50% : 50% : 0% now"),
    ],
)
def test_residuals_are_of_owners(rates: Sequence[str], then: Sequence[str], words: str, tmp_path: Path) -> None:
    for same, refused in run_ranks(goes_on, str(tmp_path), rates, then, world_size=3):
        assert same == (not words)
        assert words in refused
        assert bool(words) == bool(refused)
