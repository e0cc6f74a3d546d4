"""RingDP(compression=…): the same bits on all ranks, by rules, changed in the middle, refused in words."""

from __future__ import annotations

import copy
import os
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import DebugLevel, set_debug_level
from torch.distributed.optim.apply_optimizer_in_backward import _apply_optimizer_in_backward
from torch.nn.parallel.distributed import _MixedPrecision

import ringdp
from ringdp import Compression
from ringdp.compression import DGC, EF21, Int8, PowerSGD, RandomK, TopK
from ringdp.ddp.wrapper import RingDP
from tests.train import compressed_training as training
from tests.train.harness import backends, each, run_ranks, same_everywhere


class Halves:
    """A user's own, in ten lines: bfloat16 by hand, with error feedback."""

    aggregate = "owner"
    error_feedback = True

    def compress(self, x: Tensor, info: Any) -> tuple[Tensor, ...]:
        return (x.to(torch.bfloat16),)

    def decompress(self, payload: tuple[Tensor, ...], info: Any) -> Tensor:
        return payload[0].to(torch.float32)


def all_ranks_and_two_runs_have_the_same_bits_after_every_step(compression: Any) -> None:
    first, second = (training.train(RingDP(training.wide(), compression=compression), range(6)) for _ in range(2))
    assert first == second
    assert same_everywhere(first)


def weights_are_close_to_the_exact_mean_and_the_rest_is_it(compression: str, tolerance: float) -> None:
    exact, lossy = RingDP(training.wide()), RingDP(training.wide(), compression=compression)
    for model in (exact, lossy):
        training.loss_of(model, 0).backward()
    for (name, one), other in zip(exact.module.named_parameters(), lossy.module.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        error = float((one.grad - other.grad).norm() / one.grad.norm())
        assert error < tolerance, name
        assert (error > 0) == (name in training.WEIGHTS), name


def refused(arguments: dict[str, Any], said: str, *, steps_in_backward: bool = False) -> None:
    module = training.wide()
    if steps_in_backward:
        _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.05})
    with pytest.raises(ringdp.InvalidArgumentError, match=said):
        RingDP(module, **arguments)


def rules_decide_by_name_module_type_and_size() -> None:
    rules: list[tuple[Any, Any]] = [("3.*", None), (nn.LayerNorm, "bf16"), (range(1000, 1024), "int8")]
    model = RingDP(training.wide(), compression=Compression("int4", rules))
    training.train(model, range(2))
    chosen = model.compression_stats().parameters
    assert chosen["0.weight"].startswith("Int4")
    assert chosen["3.weight"] == chosen["3.bias"] == chosen["0.bias"] == "exact"
    assert chosen["1.weight"].startswith("Bfloat16")
    assert chosen["5.weight"].startswith("Int8")


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.other = nn.Linear(48, 48), nn.Linear(48, 48)

    def forward(self, x: Tensor, *, both: bool) -> Tensor:
        return self.other(self.one(x)) if both else self.one(x)


def what_a_parameter_owes_waits_until_a_rank_uses_it() -> None:
    model, rank = RingDP(TwoLayers(), compression="int4", find_unused_parameters=True), dist.get_rank()

    def owed_after(step: int, *, both: bool) -> Tensor:
        x, _ = training.batch(step, rank)
        model.zero_grad()
        model(x, both=both).square().mean().backward()
        owed = model.compression_state_dict()["ranks"][str(rank)]["other.weight"]["residual"]
        assert isinstance(owed, Tensor)
        return owed.clone()

    owed = owed_after(0, both=True)
    assert owed.any()
    assert torch.equal(owed_after(1, both=False), owed)
    assert not torch.equal(owed_after(2, both=rank == 0), owed)


def warm_up_steps_are_exact_to_the_bit() -> None:
    exact = training.train(RingDP(training.wide()), range(5))
    model = RingDP(training.wide(), compression=Compression("int4", warmup_steps=3))
    warm = training.train(model, range(5))
    assert warm[:3] == exact[:3]
    assert warm[3] != exact[3]


def set_compression_in_the_middle_keeps_what_others_remember(compressor: Any) -> None:
    model = RingDP(training.wide(), compression=Compression("int4", [("3.weight", compressor)]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    training.train(model, range(3), optimizer)
    before = model.compression_state_dict()["ranks"][str(dist.get_rank())]
    model.set_compression(Compression(rules=[("3.weight", copy.deepcopy(compressor))]))
    after = model.compression_state_dict()["ranks"][str(dist.get_rank())]
    assert set(after) == {"3.weight"}
    assert after["3.weight"].keys() == before["3.weight"].keys()
    for one, other in zip(tensors_in(after["3.weight"]), tensors_in(before["3.weight"]), strict=True):
        assert torch.equal(one, other)
    assert any(bool(one.any()) for one in tensors_in(after["3.weight"]))
    training.train(model, range(3, 5), optimizer)
    model.set_compression(None)
    exact = RingDP(training.wide())
    exact.load_state_dict(model.state_dict())
    assert training.train(model, range(5, 7)) == training.train(exact, range(5, 7))


def ranks_that_choose_differently_hear_what_and_where(choices: list[dict[str, Any]], said: list[str]) -> None:
    mine = dist.get_rank()
    with pytest.raises(ringdp.MismatchError) as caught:
        RingDP(training.wide(), **choices[mine])
    assert caught.value.peer == 1 - mine
    text = str(caught.value)
    assert text.startswith(f"the ranks chose different compression: {said[mine]}")
    assert f"on rank {mine}, {said[1 - mine]}" in text
    assert f"on rank {1 - mine}." in text


def no_sync_compresses_once() -> None:
    """Two backwards, one exchange: the code of the sum, not the sum of codes."""
    model, alone = (RingDP(training.wide(), compression="int8") for _ in range(2))
    with model.no_sync():
        training.loss_of(model, 0).backward()
    training.loss_of(model, 1).backward()
    (training.loss_of(alone, 0) + training.loss_of(alone, 1)).backward()
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0.02, atol=2e-3)
    assert model.stats().steps == 1


def an_infinity_of_one_rank_is_seen_by_all_and_leaves_no_trace(where: str, compression: Any) -> None:
    """inf in one gradient of one rank: all see it, nothing is remembered, the next step is as if it had not been."""
    model = RingDP(training.wide(), compression=compression)
    undisturbed = RingDP(training.wide(), compression=compression)
    for one in (model, undisturbed):
        training.loss_of(one, 0).backward()
        one.zero_grad()
    before = model.compression_state_dict()["ranks"][str(dist.get_rank())]
    poisoned = model.module.get_parameter(where)
    handle = poisoned.register_hook(lambda g: torch.full_like(g, torch.inf) if dist.get_rank() == 1 else g)
    training.loss_of(model, 1).backward()
    handle.remove()
    assert not bool(torch.isfinite(poisoned.grad).all())
    after = model.compression_state_dict()["ranks"][str(dist.get_rank())]
    for name, entry in before.items():
        assert training.digest(tensors_in(entry)) == training.digest(tensors_in(after[name])), name
    seen = []
    for one in (model, undisturbed):
        one.zero_grad()
        training.loss_of(one, 2).backward()
        seen.append(training.digest(training.gradients(one)))
    if not isinstance(compression, Halves):  # its hook counts steps
        assert seen[0] == seen[1]
    assert same_everywhere(seen)


def tensors_in(entry: Any) -> list[Tensor]:
    if isinstance(entry, Tensor):
        return [entry]
    values = entry.values() if isinstance(entry, dict) else entry if isinstance(entry, (list, tuple)) else ()
    return [tensor for value in values for tensor in tensors_in(value)]


def errors_bytes_and_times_are_measured_without_changing_the_run() -> None:
    model = RingDP(training.wide(), compression="int4")
    model.measure_compression(every=2)
    with_probe = training.train(model, range(5))
    assert with_probe == training.train(RingDP(training.wide(), compression="int4"), range(5))
    stats = model.compression_stats()
    assert {row.step for row in stats.quality} == {0, 2, 4}
    assert {row.name for row in stats.quality} == set(training.WEIGHTS)
    for row in stats.quality:
        assert 1e-4 < row.own_nmse < 0.05
        assert 1e-4 < row.mean_nmse < 0.05
        assert 0.95 < row.cosine <= 1.0
        assert row.residual_ratio is not None
        assert 0 < row.residual_ratio < 1
    compressed = sum(model.module.get_parameter(name).numel() for name in training.WEIGHTS)
    assert stats.bytes_before == 4 * compressed
    assert 4.2 / 32 < stats.bytes_after / stats.bytes_before < 4.6 / 32
    assert stats.wire_bytes > 0
    assert stats.wire_s > 0
    assert stats.coding_s > 0


def methods_in_python_are_measured_too(compression: Any) -> None:
    model = RingDP(training.wide(), compression=compression)
    model.measure_compression(every=2)
    assert training.train(model, range(4)) == training.train(RingDP(training.wide(), compression=compression), range(4))
    stats = model.compression_stats()
    assert {(row.step, row.name) for row in stats.quality} == {(step, n) for step in (0, 2) for n in training.WEIGHTS}
    last = [row.residual_ratio for row in stats.quality if row.step == 2]
    feeds_back = bool(compression.error_feedback)
    assert all(ratio is not None and 0 < ratio < 20 if feeds_back else ratio is None for ratio in last)
    sparse = not isinstance(compression, PowerSGD)
    assert set(stats.sparsity) == (set(training.WEIGHTS) if sparse else set())
    for row in stats.rows():
        if not sparse:
            assert row["density"] is row["union_density"] is row["union_over_chosen"] is row["dropped_mass"] is None
            continue
        assert 0.04 < row["density"] < 0.12
        assert 1 <= row["union_over_chosen"] < 4  # the other rank may choose more than this one
        assert row["union_density"] == pytest.approx(row["density"] * row["union_over_chosen"])
        assert 0.1 < row["dropped_mass"] < 0.98
    assert all(one.dropped_mass is None for one in stats.sparsity.values())  # the last step was not measured


LOSSY = ["int8", "int4", "bf16", Halves(), Int8(block=64), Int8(error_feedback=True)]
TOLERANCES = {"int8": 0.02, "int6": 0.06, "int5": 0.1, "int4": 0.2, "nf4": 0.2, "bf16": 0.006, "fp16": 1e-3}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"compression": "int9"}, "unknown compressor 'int9'"),
    ({"compression": Int8}, "Int8 is a class"),
    ({"compression": 8}, "no method compress"),
    ({"compression": Compression("int8", cast(Any, ["*.bias"]))}, "a rule is a pair"),
    ({"compression": Compression("int8", warmup_steps=-1)}, "warmup_steps must be"),
    ({"reduce_dtype": torch.int8}, "reduce_dtype must be"),
    ({"compression": "topk", "mixed_precision": _MixedPrecision(param_dtype=torch.bfloat16)}, "mixed_precision"),
]
CHOICES: list[tuple[list[dict[str, Any]], list[str]]] = [
    ([{"compression": "int8"}, {"compression": "int4"}], ["'0.weight': Int8(", "'0.weight': Int4("]),
    ([{}, {"compression": "topk"}], ["None", "TopK("]),
    ([{"compression": "auto"}, {}], ["Auto(", "None"]),
    ([{"compression": Compression(rules=[("*", "int8")])}, {}], ["None but for 1 rules", "None"]),
]


@pytest.mark.parametrize("world_size", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (4, 5, 8))])
@pytest.mark.parametrize("backend", backends())
def test_all_ranks_and_two_runs_have_the_same_bits(backend: str, world_size: int) -> None:
    alike = (partial(all_ranks_and_two_runs_have_the_same_bits_after_every_step, it) for it in LOSSY)
    run_ranks(each, *alike, world_size=world_size, backend=backend)


@pytest.mark.parametrize("backend", backends())
def test_two_ranks(backend: str) -> None:
    changed = [Int8(error_feedback=True), Int8(error_feedback=EF21()), TopK(0.1, error_feedback=DGC(0.9))]
    run_ranks(
        each,
        *(partial(weights_are_close_to_the_exact_mean_and_the_rest_is_it, *it) for it in TOLERANCES.items()),
        *(partial(set_compression_in_the_middle_keeps_what_others_remember, it) for it in changed),
        *(partial(ranks_that_choose_differently_hear_what_and_where, *it) for it in CHOICES),
        world_size=2,
        backend=backend,
    )


@pytest.mark.skipif("ring" not in backends(), reason="ring is not asked for")
def test_two_ranks_over_ring() -> None:
    sparse = [TopK(0.05), TopK(0.05, error_feedback=DGC()), TopK(0.05, error_feedback=False), RandomK(0.05)]
    where = [("0.weight", "int8"), ("3.bias", "int8"), ("5.weight", "int4"), ("0.weight", "int4")]
    run_ranks(
        each,
        rules_decide_by_name_module_type_and_size,
        warm_up_steps_are_exact_to_the_bit,
        what_a_parameter_owes_waits_until_a_rank_uses_it,
        no_sync_compresses_once,
        *(
            partial(an_infinity_of_one_rank_is_seen_by_all_and_leaves_no_trace, *it)
            for it in (*where, *((name, Halves()) for name in ("0.weight", "3.bias", "5.weight")))
        ),
        errors_bytes_and_times_are_measured_without_changing_the_run,
        *(partial(methods_in_python_are_measured_too, it) for it in (*sparse, PowerSGD(2))),
        world_size=2,
        backend="ring",
    )


def test_arguments_that_cannot_be_used_are_refused() -> None:
    in_backward = partial(refused, {"compression": "int8"}, "_apply_optimizer_in_backward", steps_in_backward=True)
    run_ranks(each, *(partial(refused, *it) for it in REFUSED), in_backward, world_size=1, backend="ring")


def in_detail(folder: str) -> list[str]:
    """TORCH_DISTRIBUTED_DEBUG=DETAIL puts a backend of torch's before ring: the same bits, by torch operations."""
    set_debug_level(DebugLevel.DETAIL)
    try:
        rank = int(os.environ["RANK"])
        dist.init_process_group("ring", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
        return training.train(RingDP(training.wide(), compression="int4"), range(4))
    finally:
        set_debug_level(DebugLevel.OFF)
        dist.destroy_process_group()


def plainly() -> list[str]:
    return training.train(RingDP(training.wide(), compression="int4"), range(4))


def test_torchs_debug_level_changes_no_bit(tmp_path: Path) -> None:
    plain = run_ranks(plainly, world_size=2, backend="ring")
    assert run_ranks(in_detail, str(tmp_path), world_size=2, backend=None) == plain
