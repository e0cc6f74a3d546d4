"""Rules that fit nothing, or cannot be used, where ranks meet: all ranks raise, soon, and the group still works."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim.apply_optimizer_in_backward import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel

import ringdp
from ringdp import Compression
from ringdp.ddp.wrapper import RingDP
from ringdp.hooks import ddp_hook
from tests.train import compressed_training as training
from tests.train.harness import backends, on_ranks, run_ranks

each_backend = pytest.mark.parametrize("backend", backends())
_SOON_S = 5.0  # of a wait that would last for the group's timeout
TYPO = {"compression": Compression("int8", [("0.wieght", None)])}


def wrap(**arguments: Any) -> None:
    RingDP(training.wide(), **arguments)


def wrap_without_comparing(**arguments: Any) -> None:
    RingDP(training.wide(), init_sync=False, **arguments)


def change(**arguments: Any) -> None:
    """The model goes on as it was."""
    model = RingDP(training.wide())
    try:
        model.set_compression(**arguments)
    finally:
        with pytest.raises(ringdp.InvalidStateError):
            model.compression_stats()
        training.train(model, range(1))


def raises(how: Callable[..., None], choices: list[dict[str, Any]]) -> ringdp.RingError:
    begin = time.monotonic()
    with pytest.raises(ringdp.RingError) as caught:
        how(**choices[dist.get_rank() % len(choices)])
    assert time.monotonic() - begin < _SOON_S
    dist.barrier()
    return caught.value


@each_backend
@pytest.mark.parametrize("how", [wrap, wrap_without_comparing, change])
def test_a_typo_on_all_ranks_is_refused_on_all(backend: str, how: Callable[..., None]) -> None:
    for error in run_ranks(raises, how, [TYPO], backend=backend, timeout_s=20):
        assert type(error) is ringdp.InvalidArgumentError
        assert "no parameter fits rule 1 of 1, '0.wieght': the closest names are '0.weight'" in str(error)


@each_backend
@pytest.mark.parametrize(
    ("how", "bad", "reason"),
    [
        (wrap, TYPO, "choose its compression: no parameter fits rule 1 of 1, '0.wieght'"),
        (wrap_without_comparing, TYPO, "choose its compression: no parameter fits rule 1 of 1, '0.wieght'"),
        (change, TYPO, "choose its compression: no parameter fits rule 1 of 1, '0.wieght'"),
        (wrap, {"compression": "int9"}, "wrap its model: unknown compressor 'int9'"),
        (change, {"compression": "int9"}, "choose its compression: unknown compressor 'int9'"),
        (
            wrap,
            {"compression": Compression("int8", [(cast(Any, len), None)])},
            "choose its compression: rule 1 of 1, the function len,",
        ),
        (
            wrap,
            {"compression": Compression("int8", warmup_steps=-1)},
            "wrap its model: Compression: warmup_steps must be",
        ),
        (
            wrap,
            {"compression": Compression(unmatched_rules="no")},
            "wrap its model: Compression: unmatched_rules must be",
        ),
        (
            change,
            {"compression": Compression("int8", allow="near")},
            "choose its compression: allow='near' goes with",
        ),
        (wrap, {"compression": "int8", "bucket_cap_mb": -1}, "wrap its model: RingDP's bucket_cap_mb must be"),
    ],
)
def test_what_one_rank_cannot_use_all_ranks_hear_of(
    backend: str, how: Callable[..., None], bad: dict[str, Any], reason: str
) -> None:
    good = {"compression": "int8"}
    zero, one, two = run_ranks(raises, how, [good, bad, good], world_size=3, backend=backend, timeout_s=20)
    assert type(one) is ringdp.InvalidArgumentError
    for error in (zero, two):
        assert type(error) is ringdp.MismatchError
        assert error.peer == 1
        assert str(error).startswith(f"rank 1 cannot {reason}")
        assert str(one) in str(error)


def steps_in_backward_on_one_rank() -> ringdp.RingError:
    module = training.wide()
    if dist.get_rank() == 1:
        _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.05})
    with pytest.raises(ringdp.RingError) as caught:
        RingDP(module, compression="int8")
    dist.barrier()
    return caught.value


@each_backend
def test_optimizers_in_backward_on_one_rank(backend: str) -> None:
    zero, one = run_ranks(steps_in_backward_on_one_rank, backend=backend, timeout_s=20)
    assert type(one) is ringdp.InvalidArgumentError
    assert str(zero) == f"rank 1 cannot choose its compression: {one}"


@each_backend
@pytest.mark.parametrize("how", [wrap, change])
def test_ranks_with_different_rules(backend: str, how: Callable[..., None]) -> None:
    choices = [{"compression": Compression("int8", [(rule, None)])} for rule in ("3.weight", "0.*")]
    for rank, error in enumerate(run_ranks(raises, how, choices, backend=backend, timeout_s=20)):
        assert type(error) is ringdp.MismatchError
        assert f"'0.weight': {'exact' if rank else 'Int8('}" in str(error)


@each_backend
def test_ranks_that_leave_other_rules_without_effect(backend: str) -> None:
    """They come to the same compressors, and one of them has a typo that is a warning."""
    fine = {"compression": Compression("int8", [("0.*", None)], unmatched_rules="warn")}
    typo = {"compression": Compression("int8", [("0.*", None), ("3.wieght", None)], unmatched_rules="warn")}
    zero, one = run_ranks(raises, wrap, [fine, typo], backend=backend, timeout_s=20)
    assert type(zero) is type(one) is ringdp.MismatchError
    assert "all rules count on rank 0, no parameter fits rule 2 of 2, '3.wieght'" in str(zero)


def odd() -> nn.Module:
    return nn.ParameterDict({"new\nline": torch.ones(40, 40), "tab\t": torch.ones(40, 40)})


def wrap_odd(**arguments: Any) -> None:
    RingDP(odd(), **arguments)


@each_backend
def test_names_with_lines_and_tabs(backend: str) -> None:
    choices = [{"compression": Compression("int8", [(name, None)])} for name in odd().state_dict()]
    for rank, error in enumerate(run_ranks(raises, wrap_odd, choices, backend=backend, timeout_s=20)):
        assert f"'new\\nline': {'Int8(' if rank else 'exact on rank 0'}" in str(error)
        assert error.peer == 1 - rank


def heard(logger: str, work: Callable[[], object]) -> list[str]:
    with mock.patch.object(logging.getLogger(logger), "warning") as warning:
        work()
    return [call.args[0] % call.args[1:] for call in warning.call_args_list]


@on_ranks(backend=backends())
def test_a_warning_in_place_of_the_error_comes_from_one_rank() -> None:
    rules = [("*.bias", None), ("0.wieght", None), ("0.bias", "bf16")]

    def both() -> None:
        model = RingDP(training.wide(), compression=Compression("int8", rules, unmatched_rules="warn"))
        model.set_compression(Compression("int4", rules[:2], unmatched_rules="warn"))

    wanted = ["no parameter fits rule 2 of 3, '0.wieght'", "rule 3 of 3, '0.bias', never counts"]
    wanted += ["no parameter fits rule 2 of 2, '0.wieght'"]
    told = [text.split(":")[0] for text in heard("ringdp.model_compression", both)]
    assert told == (wanted if dist.get_rank() == 0 else [])


@on_ranks(backend=backends())
def test_a_hook_without_the_model_warns_after_the_first_backward() -> None:
    """Rules of sizes need no model: what fits nothing is known after the first backward."""
    ddp = DistributedDataParallel(training.wide(), bucket_cap_mb=0.004)
    ddp.register_comm_hook(
        *ddp_hook(Compression("int8", [(range(5, 6), None), (range(4000), None), (range(8), "int4")]))
    )
    told = heard("ringdp.hooks", lambda: [training.loss_of(ddp, step).backward() for step in range(2)])
    text = r"of the parameters that have gradients, no parameter fits rule 1 of 3, range\(5, 6\).*;.*never counts.*"
    assert re.fullmatch(text, ";".join(told)) if dist.get_rank() == 0 else told == []


@on_ranks(backend=backends())
def test_a_hook_with_the_model_refuses_at_once() -> None:
    ddp = DistributedDataParallel(training.wide())
    for rules in ([("0.wieght", None)], [(nn.Conv2d, None)], [(range(5, 6), None)]):
        with pytest.raises(ringdp.InvalidArgumentError):
            ddp_hook(Compression("int8", rules), model=ddp)
    told = heard("ringdp.hooks", lambda: ddp_hook(Compression("int8", rules, unmatched_rules="warn"), model=ddp))
    assert len(told) == (dist.get_rank() == 0)


@on_ranks(backend=backends())
def test_a_hook_with_another_model_than_ddps_says_so() -> None:
    ddp = DistributedDataParallel(training.wide())
    ddp.register_comm_hook(*ddp_hook(Compression("int8", [("0.weight", None)]), model=training.wide()))
    told = heard("ringdp.hooks", lambda: training.loss_of(ddp, 0).backward())
    assert len(told) == len(list(training.wide().parameters()))
    assert "is not in the model given to ddp_hook(model=...)" in told[0]
