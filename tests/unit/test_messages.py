"""The texts of refusals that need no second rank: what, why, what to do. Other tests ask for class and fields."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ringdp.compression.auto import with_permission
from ringdp.ddp import dtensors
from ringdp.ddp.batch_weight import BatchWeight
from ringdp.errors import InvalidArgumentError, InvalidStateError, MismatchError
from ringdp.rounds.exchange import Record, _require_same
from ringdp.rounds.start import checked_parameters


class OfABucket:
    aggregate = "rounds"

    def average(self, xs: Any, infos: Any) -> Any:
        yield list(xs)

    def __repr__(self) -> str:
        return "OfABucket()"


def other_part() -> None:
    parameter = SimpleNamespace(device_mesh=SimpleNamespace(mesh=torch.arange(2)))
    with (
        mock.patch.object(dist, "get_rank", return_value=0),
        mock.patch.object(dist, "get_process_group_ranks", return_value=[0, 1, 2, 3]),
    ):
        dtensors._check_mesh("0.weight", parameter, object())  # type: ignore[arg-type]


def counted_alone() -> None:
    flight = SimpleNamespace(rank=1, name="round 2")
    _require_same(flight, [Record(1.0, counts_samples=True), Record(1.0)])  # type: ignore[arg-type]


def stranger() -> None:
    model = torch.nn.Linear(2, 2)
    other = torch.nn.Parameter(torch.zeros(4, 2))
    with mock.patch.object(dist, "get_process_group_ranks", return_value=[0]):
        checked_parameters("DiLoCo", model, [torch.optim.SGD([*model.parameters(), other], lr=0.1)], object())  # type: ignore[arg-type]


TEXTS: tuple[tuple[Callable[[], Any], type[Exception], str], ...] = (
    (
        other_part,
        InvalidArgumentError,
        "parameter 0.weight is a DTensor over ranks [0, 1], and RingDP on rank 0 would average it with [1] of them,"
        " which hold other parts: give RingDP the mesh's other dimension (device_mesh=mesh['replicate']); a module of"
        " fully_shard needs no RingDP",
    ),
    (
        lambda: BatchWeight("tokens"),
        InvalidArgumentError,
        "RingDP's weight must be 'samples' (the first dimension of the first tensor that the forward gets), 'call'"
        " (what set_weight gives before each forward) or None (all count the same), not 'tokens'",
    ),
    (
        lambda: BatchWeight("call").take((), {}),
        InvalidStateError,
        "RingDP(weight='call'): call set_weight(number of samples or tokens) before each forward that trains",
    ),
    (
        lambda: BatchWeight("call").set("many"),
        InvalidArgumentError,
        "set_weight takes a number, or a tensor with one element, not 'many'",
    ),
    (
        lambda: BatchWeight("samples").take((torch.tensor(1.0),), {}),
        InvalidArgumentError,
        "RingDP(weight='samples') counts the first dimension of the first tensor that the forward gets, and there is a"
        " tensor without dimensions first: call set_weight(number of samples) before the forward",
    ),
    (
        counted_alone,
        MismatchError,
        "round 2: rank 0 has called did() and rank 1 has not: call did() on all ranks before each step, or on none",
    ),
    (
        stranger,
        InvalidArgumentError,
        "DiLoCo: SGD has a parameter of shape [4, 2] that is not in the model: put it into the module",
    ),
    (
        lambda: with_permission("int8", "exact"),
        InvalidArgumentError,
        "allow='exact' goes with compression=\"auto\", not with 'int8'",
    ),
)


@pytest.mark.parametrize("case", range(len(TEXTS)))
def test_text(case: int) -> None:
    call, error, text = TEXTS[case]
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value) == text


def test_a_rank_that_counts_samples_alone_is_named() -> None:
    with pytest.raises(MismatchError) as caught:
        counted_alone()
    assert (caught.value.rank, caught.value.peer) == (1, 0)
