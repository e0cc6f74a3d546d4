"""The texts of refusals that need no second rank: what, why, what to do. Other tests ask for class and fields."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.optim import _apply_optimizer_in_backward  # type: ignore[attr-defined]
from torch.nn.parallel.distributed import _MixedPrecision

from ringdp.compression import Rules
from ringdp.compression.auto import with_permission
from ringdp.ddp import dtensors, mixed_precision, optimizer_in_backward, reproducible
from ringdp.ddp.batch_weight import BatchWeight
from ringdp.errors import InvalidArgumentError, InvalidStateError, MismatchError
from ringdp.job import elastic
from ringdp.rounds.exchange import FragmentExchange, Record
from ringdp.rounds.start import checked_parameters


class OfABucket:
    aggregate = "rounds"

    def average(self, xs: Any, infos: Any) -> Any:
        yield list(xs)

    def __repr__(self) -> str:
        return "OfABucket()"


def steps_in_backward() -> None:
    layer = torch.nn.Linear(1, 1)
    _apply_optimizer_in_backward(torch.optim.SGD, layer.parameters(), {"lr": 0.1})
    optimizer_in_backward.no_compression_in_backward(layer.parameters())


def other_part() -> None:
    parameter = SimpleNamespace(device_mesh=SimpleNamespace(mesh=torch.arange(2)))
    with (
        mock.patch.object(dist, "get_rank", return_value=0),
        mock.patch.object(dist, "get_process_group_ranks", return_value=[0, 1, 2, 3]),
    ):
        dtensors._check_mesh("0.weight", parameter, object())  # type: ignore[arg-type]


def counted_alone() -> None:
    exchange = object.__new__(FragmentExchange)
    exchange.group = SimpleNamespace(rank=lambda: 1)  # type: ignore[assignment]
    exchange._require_same("round 2", [Record(1.0, counts_samples=True), Record(1.0)])


def stranger() -> None:
    model = torch.nn.Linear(2, 2)
    other = torch.nn.Parameter(torch.zeros(4, 2))
    with mock.patch.object(dist, "get_process_group_ranks", return_value=[0]):
        checked_parameters("DiLoCo", model, [torch.optim.SGD([*model.parameters(), other], lr=0.1)], object())  # type: ignore[arg-type]


TEXTS: tuple[tuple[Callable[[], Any], type[Exception], str], ...] = (
    (
        lambda: reproducible.refuse_rules(Rules(compression="auto")),
        InvalidArgumentError,
        'reproducible=True and compression="auto" cannot be combined: "auto" chooses by measured speeds. Name a'
        " compressor",
    ),
    (
        lambda: reproducible.refuse_rules(Rules(compression=OfABucket())),
        InvalidArgumentError,
        "reproducible=True and OfABucket() cannot be combined: its `average` may mix the parameters of a bucket. If it"
        " does not, set per_parameter = True in the class",
    ),
    (
        lambda: reproducible.refuse_hook(powerSGD_hook.powerSGD_hook),
        InvalidArgumentError,
        "reproducible=True and the communication hook powerSGD_hook cannot be combined: it may mix the parameters of a"
        " bucket. If it does not, set powerSGD_hook.per_parameter = True",
    ),
    (
        lambda: reproducible.checked(1),
        InvalidArgumentError,
        "RingDP's reproducible must be True or False, not 1",
    ),
    (
        lambda: mixed_precision.no_compression_beside(_MixedPrecision(param_dtype=torch.bfloat16)),
        InvalidArgumentError,
        "mixed_precision sends gradients as bfloat16 and cannot be combined with compression: leave out"
        " mixed_precision, and call forward under torch.autocast",
    ),
    (
        steps_in_backward,
        InvalidArgumentError,
        "compression and optimizers that step during backward (_apply_optimizer_in_backward) cannot be combined: leave"
        " out one of them",
    ),
    (
        other_part,
        InvalidArgumentError,
        "parameter 0.weight is a DTensor over ranks [0, 1], and RingDP on rank 0 would average it with [1] of them,"
        " which hold other parts: give RingDP the mesh's other dimension (device_mesh=mesh['replicate']); a module of"
        " fully_shard needs no RingDP",
    ),
    (
        lambda: BatchWeight.checked("tokens", delayed=False),
        InvalidArgumentError,
        "RingDP's weight must be 'samples' (the first dimension of the first tensor that the forward gets), 'call'"
        " (what set_weight gives before each forward) or None (all count the same), not 'tokens'",
    ),
    (
        lambda: BatchWeight.checked("call", delayed=True),
        InvalidArgumentError,
        "weight and delay_all_reduce_named_params cannot be combined: the delayed all-reduce counts all ranks the same."
        " Leave out one of them",
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
        lambda: elastic.refuse("a key-value store", but="a table"),
        InvalidArgumentError,
        "RINGDP_ELASTIC=1: a key-value store cannot be repeated after the loss of a rank: leave it out, or start"
        " without --elastic (there is a table)",
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
