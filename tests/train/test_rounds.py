"""DiLoCo and LocalSGD: against a reference in one process, against RingDP, and the same bits on all ranks."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
import os
import re
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import FileStore  # type: ignore[attr-defined]

import ringdp
from ringdp.compression import EF21, Compression, ErrorFeedback, Sparse2
from ringdp.errors import InvalidArgumentError, InvalidStateError, MismatchError
from ringdp.rounds import DiLoCo, Fragments, LocalSGD
from tests.helpers import logged
from tests.train import rounds_reference as reference
from tests.train.harness import backends, errors_of, on_ranks, run_outcomes, run_ranks
from tests.train.rounds_reference import Rule, adamw, averaged_gradients, loss_of, paper, sgd


def steps_of(module: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    dtype = next(module.parameters()).dtype
    for step in range(first, last + 1):
        optimizer.zero_grad()
        loss_of(module, dist.get_rank(), step, dtype).backward()
        optimizer.step()


def built(
    *,
    dtype: torch.dtype = torch.float32,
    inner: reference.Optimizer = adamw,
    kind: type[DiLoCo] = DiLoCo,
    **arguments: Any,
) -> tuple[nn.Module, torch.optim.Optimizer, DiLoCo]:
    module = reference.model(dtype)
    optimizer = inner(list(module.parameters()))
    arguments = arguments if "every" in arguments else {"every": 6, "fragments": Fragments(2, delay=2), **arguments}
    return module, optimizer, kind(module, optimizer, **arguments)


def trained(
    steps: int, make: Callable[[nn.Module, torch.optim.Optimizer], DiLoCo], inner: reference.Optimizer = sgd
) -> nn.Module:
    module = reference.model()
    if dist.get_rank():  # which has to become rank 0's
        with torch.no_grad():
            for p in module.parameters():
                p.mul_(2)
    optimizer = inner(list(module.parameters()))
    rounds = make(module, optimizer)
    steps_of(module, optimizer, 1, steps)
    rounds.finish()
    return module


def values(module: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in module.parameters()]


def gradient_of(module: nn.Module, name: str) -> Tensor:
    gradient = module.get_parameter(name).grad
    assert gradient is not None
    return gradient


def difference(a: list[Tensor], b: list[Tensor]) -> float:
    return max((x - y).abs().max().item() for x, y in zip(a, b, strict=True))


def require_same_bits(tensors: list[Tensor]) -> None:
    flat = torch.cat([one.flatten().view(torch.uint8) for one in tensors])
    first = flat.clone()
    dist.broadcast(first, 0)
    assert torch.equal(first, flat)


# Against the reference.


def follows_reference(rule: Rule, optimizer: reference.Optimizer) -> None:
    outer: Any = "auto"
    if not rule.grows:
        outer = {"lr": rule.lr, "momentum": rule.momentum, "nesterov": rule.nesterov}
    cut = Fragments(rule.fragments, rule.delay, rule.mix)
    module = trained(23, lambda m, o: DiLoCo(m, o, every=rule.every, outer=outer, fragments=cut), optimizer)
    assert difference(values(module), paper(dist.get_world_size(), 23, rule, optimizer)) < 1e-12, rule
    require_same_bits(values(module))


RULES = [
    Rule(every=5),
    Rule(every=5, momentum=0.0, nesterov=False),
    Rule(every=4, momentum=0.5, nesterov=False),
    Rule(every=6, fragments=3, delay=2, mix=0.5),
    Rule(every=4, fragments=6, delay=3, mix=0.25),
    Rule(every=7, fragments=2, delay=5, mix=0.0),
    Rule(every=1, fragments=2),
    Rule(every=5, lr=1.0, momentum=0.0, nesterov=False),
    Rule(every=6, fragments=2, delay=1, mix=0.5, lr=1.0, momentum=0.0, nesterov=False),
    dataclasses.replace(reference.AUTO, every=2),
    dataclasses.replace(reference.AUTO, every=4, fragments=2, delay=1, mix=0.5),
]


@on_ranks(3)
def test_sparse_rounds_are_the_papers_algorithm() -> None:
    """To what float32 differs: codes are of float32."""
    me, samples = dist.get_rank(), [3.0, 1.0, 2.0]
    for kept, decay, outer, weighed in ((8, 0.95, None, False), (20, 0.5, {"lr": 0.7}, True), (4, 1.0, None, True)):
        feedback = True if decay == 0.95 else ErrorFeedback(decay)
        codec = Sparse2(kept / 4096, error_feedback=feedback)
        module = reference.model()
        optimizer = sgd(list(module.parameters()))
        rounds = DiLoCo(module, optimizer, every=3, outer=outer, compression=codec)
        for step in range(1, 24):
            if weighed:
                rounds.did(samples[me])
            steps_of(module, optimizer, step, step)
        rounds.finish()
        expected = reference.sparse_paper(
            3, 23, 3, kept, decay, 1.0 if outer is None else 0.7, samples if weighed else ()
        )
        assert difference(values(module), expected) < 1e-5, (kept, decay)
        require_same_bits(values(module))


@on_ranks((1, 3))
def test_it_is_the_papers_algorithm() -> None:
    """Steps that do not fill a round are there, too."""
    for rule in RULES:
        follows_reference(rule, sgd)


@on_ranks(backend=backends())
def test_any_inner_optimizer() -> None:
    follows_reference(Rule(every=6, fragments=3, delay=2, mix=0.5), adamw)


@on_ranks()
def test_any_outer_optimizer_of_torch() -> None:
    of_torch = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
    module = trained(13, lambda m, o: DiLoCo(m, o, every=3, fragments=2, outer=of_torch))
    assert difference(values(module), paper(2, 13, Rule(every=3, fragments=2))) < 1e-12
    adam = trained(13, lambda m, o: DiLoCo(m, o, every=3, outer=functools.partial(torch.optim.Adam, lr=0.05)))
    require_same_bits(values(adam))


@on_ranks()
def test_ranks_count_by_their_samples() -> None:
    shares = [3.0, 1.0]
    module, optimizer, rounds = built(dtype=torch.float64, inner=sgd, every=4, fragments=Fragments(2, 1, 0.5))
    for step in range(1, 19):
        rounds.did(shares[dist.get_rank()])
        steps_of(module, optimizer, step, step)
    rounds.finish()
    rule = dataclasses.replace(reference.AUTO, every=4, fragments=2, delay=1, mix=0.5)
    expected = paper(2, 18, rule, samples=shares)
    assert difference(values(module), expected) < 1e-12


# Against RingDP.


@on_ranks(4)
def test_a_round_of_one_step_is_data_parallelism_for_sgd_alone() -> None:
    once: Any = {"every": 1}
    warm: Any = {"every": 50, "compression": Compression(warmup_steps=30)}
    for optimizer, numbers in ((sgd, once), (sgd, warm), (adamw, once)):
        module = trained(30, functools.partial(LocalSGD, **numbers), optimizer)
        error = difference(values(module), averaged_gradients(dist.get_world_size(), 30, optimizer))
        assert error > 1e-3 if optimizer is adamw else error < 1e-14, (optimizer, numbers, error)


@pytest.mark.parametrize(("kind", "codec"), [("local", None), ("diloco", None), ("diloco", "int4")])
@on_ranks(1)
def test_a_rank_alone_is_as_without_a_wrapper(kind: str, codec: str | None) -> None:
    module, optimizer = reference.model(torch.float32), None
    plain = copy.deepcopy(module)
    optimizer, plain_optimizer = adamw(list(module.parameters())), adamw(list(plain.parameters()))
    make: Any = LocalSGD if kind == "local" else functools.partial(DiLoCo, outer={"lr": 1.0})
    rounds = make(module, optimizer, every=3, fragments=2, compression=codec)
    for step in range(1, 12):
        for one, its in ((module, optimizer), (plain, plain_optimizer)):
            its.zero_grad()
            loss_of(one, 0, step, torch.float32).backward()
            its.step()
    rounds.finish()
    assert all(map(torch.equal, values(module), values(plain)))


# The same bits.


def same_bits(codecs: list[str | None]) -> None:
    for codec in codecs:
        for fragments, delay in ((1, 0), (3, 2), (6, 3)):
            module, optimizer, rounds = built(every=4, fragments=Fragments(fragments, delay), compression=codec)
            before = values(module)
            for step in range(1, 11):
                steps_of(module, optimizer, step, step)
                with rounds.global_parameters():
                    require_same_bits(values(module))
            rounds.finish()
            require_same_bits(values(module))
            assert difference(values(module), before) > 1e-3


@on_ranks(3)
def test_all_ranks_have_the_same_bits() -> None:
    same_bits([None, "int4", "bf16", "sparse2"])


@pytest.mark.ci
@on_ranks((1, 2, 3, 4))
def test_all_ranks_have_the_same_bits_with_every_codec() -> None:
    same_bits(["int4", "int5", "int6", "int8", "nf4", "bf16", "fp16"])


@on_ranks()
def test_what_a_code_leaves_out_is_not_lost() -> None:
    """What int4 leaves out of a change is added to the next one: after many rounds the sums agree."""
    module = reference.model(torch.float32)
    parameters = list(module.parameters())
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    rounds = DiLoCo(module, optimizer, every=1, outer={"lr": 1.0}, compression="int4")
    start, rank = values(module), dist.get_rank()
    draw = torch.Generator().manual_seed(rank)
    changes = [torch.randn(p.shape, generator=draw) * 0.01 for p in parameters]
    for _ in range(64):
        for p, change in zip(parameters, changes, strict=True):
            p.grad = change.clone()
        optimizer.step()
    for p, before, change in zip(parameters, start, changes, strict=True):
        mean = change.clone()
        dist.all_reduce(mean)
        expected = before - 64 * mean / dist.get_world_size()
        assert (p - expected).abs().max() < 0.03  # one change's worth, not 64
    rounds.finish()


# Resuming.


@pytest.mark.parametrize(
    "compression, outer",
    [
        (None, None),
        ("int4", None),
        ("int4", "auto"),
        ("int8", functools.partial(torch.optim.Adam, lr=0.05)),
        (Sparse2(1 / 256), {"lr": 0.7, "momentum": 0.5}),
    ],
    ids=str,
)
@on_ranks()
def test_it_resumes_to_the_bit_from_every_step(compression: Any, outer: Any) -> None:
    last = 14
    module, optimizer, rounds = built(compression=compression, outer=outer)
    states = []
    for step in range(1, last + 1):
        steps_of(module, optimizer, step, step)
        states.append(copy.deepcopy((rounds.state_dict(), optimizer.state_dict())))
    rounds.finish()
    for step, (state, of_optimizer) in enumerate(states, 1):  # before a fragment leaves, in flight, and landed
        again, its_optimizer, its_rounds = built(compression=compression, outer=outer)
        its_rounds.load_state_dict(state)
        its_optimizer.load_state_dict(of_optimizer)
        steps_of(again, its_optimizer, step + 1, last)
        its_rounds.finish()
        assert all(map(torch.equal, values(module), values(again))), f"after step {step}"
        assert its_rounds.round == rounds.round


def rank_saves(steps: int, compression: Any) -> dict[str, Any]:
    module, optimizer, rounds = built(compression=compression, outer=reference.MOMENTUM)
    for step in range(1, steps + 1):
        rounds.did(1 + 2 * dist.get_rank())
        steps_of(module, optimizer, step, step)
    return {"state": rounds.state_dict(consolidated=True), "own": rounds.state_dict()["ranks"][str(dist.get_rank())]}


def rank_loads(state: dict[str, Any], compression: Any) -> dict[str, Any]:
    module, optimizer, rounds = built(compression=compression, outer=reference.MOMENTUM)
    rounds.load_state_dict(state)
    again = rounds.state_dict(consolidated=True)
    for step in range(8, 15):
        rounds.did(2)
        steps_of(module, optimizer, step, step)
    rounds.finish()
    require_same_bits(values(module))
    return again


@pytest.mark.parametrize(("ranks", "compression"), [(1, "int4"), (3, "int4"), (3, Sparse2(1 / 256))], ids=str)
def test_it_resumes_at_another_world_size(ranks: int, compression: Any) -> None:
    """In flight: step 7 is within the two steps after fragment 1 has left at step 6."""
    saved = run_ranks(rank_saves, 7, compression, world_size=2, backend="ring")
    state = saved[0]["state"]
    assert state["in_flight"]
    assert [one["state"]["since"] for one in saved] == [[[4, 8.0], [1, 2.0]]] * 2  # of 1 and 3 samples a step the mean
    for name, entry in state["parameters"].items():
        mean = sum(one["own"][name]["local"] for one in saved) / 2
        assert torch.allclose(entry["local"], mean, atol=1e-7)
    for again in run_ranks(rank_loads, state, compression, world_size=ranks, backend="ring"):
        for name, total in state["global"].items():
            assert torch.equal(again["global"][name], total)
            for key, value in state["outer"][name].items():
                assert torch.equal(again["outer"][name][key], value)
            kept, before = again["parameters"][name], state["parameters"][name]
            assert torch.allclose(kept["local"], before["local"], atol=1e-6)
            assert torch.allclose(kept["residual"], before["residual"], atol=1e-7)
        for name, mean in state["in_flight"]["1"]["mean"].items():
            assert torch.equal(again["in_flight"]["1"]["mean"][name], mean)


@on_ranks()
def test_a_state_that_does_not_fit_is_refused() -> None:
    _, _, rounds = built()
    state = rounds.state_dict()
    other: dict[str, Any] = {"format": 9, "algorithm": "LocalSGD", "compression": "Int8()", "outer_class": "Adam"}
    for name, value in {**other, "units": [1.0], "world_size": 3, "global": {}}.items():
        with pytest.raises(InvalidArgumentError):
            rounds.load_state_dict(state | {name: value})
    moved = copy.deepcopy(state)
    moved["schedule"]["step"] += dist.get_rank()
    with pytest.raises(MismatchError) as differ:
        rounds.load_state_dict(moved)
    assert differ.value.rank == dist.get_rank() != differ.value.peer


@on_ranks(timeout_s=20)
def test_a_state_that_does_not_fit_on_one_rank_is_told_to_all() -> None:
    _, _, rounds = built()
    state = rounds.state_dict()
    with pytest.raises((MismatchError, InvalidArgumentError)) as raised:
        rounds.load_state_dict(state | {"format": 9} if dist.get_rank() else state)
    rounds.load_state_dict(state)
    assert type(raised.value) is (InvalidArgumentError if dist.get_rank() else MismatchError)
    assert "the rounds' state has format 9" in str(raised.value)


@on_ranks()
def test_a_fragment_on_its_way_does_not_reach_a_state_that_is_loaded() -> None:
    module = nn.Linear(1000, 1000)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    rounds = DiLoCo(module, optimizer, every=2, fragments=Fragments(delay=1))
    state = copy.deepcopy(rounds.state_dict())
    for _ in range(3):
        for _ in range(2):
            module.weight.grad = torch.randn_like(module.weight)
            optimizer.step()
        works = [work for flight in rounds._flights.values() for work in flight.works]
        assert works
        rounds.load_state_dict(state)
        assert all(work.is_completed() for work in works)
        for piece in rounds._fragments[0].pieces:
            assert torch.equal(piece.parameter.detach().flatten(), state["global"][piece.name])
    rounds.finish()
    require_same_bits(values(module))


# Ranks that disagree.


def rank_is_another_step() -> None:
    module, optimizer, rounds = built()
    steps_of(module, optimizer, 1, 7 + dist.get_rank())
    rounds.finish()


def rank_has_another_every() -> None:
    module, optimizer, _ = built(inner=sgd, every=lambda step: 2 + dist.get_rank())
    steps_of(module, optimizer, 1, 6)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (rank_is_another_step, ["finish after step 7", "finish after step 8"]),
        (rank_has_another_every, ["step 2, every 2", "step 3, every 3"]),
    ],
)
def test_a_rank_that_is_elsewhere_is_a_mismatch_that_names_both(case: Callable[[], None], words: list[str]) -> None:
    outcomes = run_outcomes(case, world_size=2, backend="ring", timeout_s=20)
    assert any(isinstance(one.error, MismatchError) for one in outcomes)
    told = " ".join(str(one.error) for one in outcomes if isinstance(one.error, MismatchError))
    assert all(one in told for one in words), told


def rank_has_other_arguments(**by_rank: Any) -> tuple[type[Exception], str]:
    module = reference.model()
    arguments = {name: given[dist.get_rank()] for name, given in by_rank.items()}
    optimizer = sgd(list(module.parameters()))
    with pytest.raises((MismatchError, InvalidArgumentError)) as raised:
        DiLoCo(module, optimizer, **arguments)
    optimizer.step()  # nothing hangs on it
    return type(raised.value), str(raised.value)


def test_other_arguments_are_a_mismatch_on_all_ranks() -> None:
    for kind, text in run_ranks(rank_has_other_arguments, every=[50, 100], backend="ring"):
        assert kind is MismatchError
        assert "every: 50" in text
        assert "every: 100" in text
    for bad in ({"fragments": [1, 7]}, {"scaler": [None, 2.0]}):
        (kind, text), (own, its_text) = run_ranks(rank_has_other_arguments, backend="ring", **bad)
        assert (kind, own) == (MismatchError, InvalidArgumentError)
        assert text.startswith(f"rank 1 cannot make its DiLoCo: {its_text}")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"every": 0}, "every must be a whole number from 1 on, not 0"),
        ({"every": 2.5}, "every must be"),
        ({"every": 4, "fragments": Fragments(delay=4)}, "delay=4 must be below every=4"),
        ({"fragments": 7}, "more than the model's 6 parameters"),
        ({"fragments": True}, "fragments must be"),
        ({"fragments": 0}, "DiLoCo: fragments must be a whole number from 1 on"),
        ({"compression": Compression(warmup_steps=-1)}, "warmup_steps must be"),
        (
            {"compression": Compression("int8", [("*.bias", None)])},
            "rules of a Compression and averaging in rounds",
        ),
        ({"compression": Compression("int8", allow="4bit")}, "allow='4bit' goes with compression=\"auto\""),
        ({"compression": Compression("auto", allow="4bit")}, 'compression="auto" and averaging in rounds'),
        ({"compression": Compression("topk")}, "core's codecs .*int4.*not TopK"),
        ({"compression": "topk"}, "core's codecs .*int4.*not TopK"),
        ({"compression": Sparse2(error_feedback=EF21())}, "error_feedback of Sparse2 must be"),
        ({"compression": "int3"}, "unknown compressor 'int3'"),
        ({"outer": {"lr": 0}}, "outer: lr must be"),
        ({"outer": {"lr": 1, "nesterov": True}}, "needs a momentum"),
        ({"outer": {"lr": 1, "dampening": 0.1}}, "'dampening'"),
        ({"outer": 0.7}, 'outer must be "auto", a dict'),
        ({"outer": "nesterov"}, 'outer must be "auto", a dict'),
        ({"outer": torch.optim.Adam.step}, "outer could not be made"),
        ({"outer": len}, "outer made a int"),
        ({"outer": torch.optim.LBFGS}, "LBFGS cannot make a step by a dense gradient alone .*closure"),
        ({"outer": torch.optim.SparseAdam}, "SparseAdam cannot make a step by a dense gradient alone"),
        ({"unequal": True, "every": lambda step: 3}, "needs a number for every"),
        ({"unequal": 1}, "unequal must be"),
        ({"scaler": 2.0}, "scaler must be"),
        ({"inner": "adam"}, "inner must be an optimizer"),
        ({"inner": []}, "inner must be an optimizer"),
    ],
    ids=lambda it: str(it)[:30],
)
def test_bad_arguments_are_refused_in_words(one_rank: None, arguments: dict[str, Any], words: str) -> None:
    module = reference.model()
    inner = arguments.pop("inner", None)
    inner = sgd(list(module.parameters())) if inner is None else inner
    with pytest.raises(InvalidArgumentError, match=words):
        DiLoCo(module, inner, **arguments)


@pytest.mark.parametrize("kind", [DiLoCo, LocalSGD])
@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("delay", "fragments=ringdp.Fragments(…, delay=…)"),
        ("mix", "fragments=ringdp.Fragments(…, mix=…)"),
        ("warmup_steps", "compression=ringdp.Compression(…, warmup_steps=…)"),
    ],
)
def test_an_argument_that_it_had_names_its_place(kind: Any, name: str, place: str) -> None:
    with pytest.raises(TypeError, match=re.escape(f"{kind.__name__} has no argument {name!r}: {place} has it")):
        kind(None, None, **{name: 1})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"count": 0}, "count must be a whole number from 1 on"),
        ({"count": True}, "count must be"),
        ({"delay": -1}, "delay must be a whole number from 0 on"),
        ({"mix": 1.0}, "mix must be a number from 0"),
        ({"mix": "half"}, "mix must be"),
    ],
    ids=str,
)
def test_fragments_that_cannot_be_used_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"Fragments: {words}"):
        Fragments(**given)


def test_models_and_optimizers_that_do_not_fit_are_refused(one_rank: None) -> None:
    module = reference.model()
    stranger = nn.Parameter(torch.zeros(4, 2))
    with pytest.raises(InvalidArgumentError, match=r"shape \[4, 2\]"):
        DiLoCo(module, sgd([*module.parameters(), stranger]))
    with pytest.raises(InvalidArgumentError):
        DiLoCo("model", sgd(list(module.parameters())))  # type: ignore[arg-type]
    for empty in (nn.Sequential(nn.LazyLinear(3)), nn.Sequential(nn.Linear(3, 3, device="meta"))):
        with pytest.raises(InvalidArgumentError, match=r"parameter 0.weight has no values yet"):
            DiLoCo(empty, torch.optim.SGD(empty.parameters()))
    optimizer = sgd(list(module.parameters()))
    module.requires_grad_(False)
    with pytest.raises(InvalidArgumentError):
        DiLoCo(module, optimizer)


@pytest.fixture
def one_rank(tmp_path: Any) -> Iterator[None]:
    dist.init_process_group("ring", store=FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


# What is not finite.


def rank_has_a_nan() -> list[str]:
    rank = dist.get_rank()
    module, optimizer, rounds = built(every=4, fragments=2, compression="int8")
    with logged("ringdp.rounds") as lines:
        for step in range(1, 17):
            optimizer.zero_grad()
            loss_of(module, rank, step, torch.float32).backward()
            if step == 8 and rank == 1:  # fragment 2 leaves after it
                gradient_of(module, "2.weight").fill_(torch.nan)
            optimizer.step()
            with rounds.global_parameters():
                assert all(bool(p.isfinite().all()) for p in module.parameters())
                require_same_bits(values(module))
        rounds.finish()
        assert all(bool(p.isfinite().all()) for p in module.parameters())
        assert rounds.stats().left_out == (1 if rank == 1 else 0), lines
    return lines


def test_a_rank_whose_parameters_are_not_finite_is_left_out_and_named() -> None:
    first, second = run_ranks(rank_has_a_nan, world_size=2, backend="ring")
    assert len(second) == 1
    assert "2.weight of this rank, which goes on from the global parameters, is not finite" in second[0]
    assert len(first) == 1
    assert "fragment 2/2" in first[0]
    assert "2.weight of rank 1 is not finite, and this fragment of rank 1 does not count" in first[0]


@pytest.mark.parametrize("optimizer_of", ["sgd", "adamw"])
@on_ranks(timeout_s=20)
def test_momenta_that_a_rank_has_not_stay_as_they_are(optimizer_of: str) -> None:
    """Rank 1 forgets what is not finite, and rank 0 has it still."""
    rank = dist.get_rank()
    inner = {"sgd": sgd, "adamw": adamw}[optimizer_of]
    module, optimizer, rounds = built(inner=inner, kind=LocalSGD, every=2, average_momenta=True)
    for step in range(1, 9):
        optimizer.zero_grad()
        loss_of(module, rank, step, torch.float32).backward()
        if step == 4 and rank == 1:
            gradient_of(module, "2.weight").fill_(torch.nan)
        if step < 3 and rank == 0:
            module.get_parameter("4.weight").grad = None  # no step has made its state yet
        optimizer.step()
    require_same_bits(
        [value for p in module.parameters() for value in optimizer.state[p].values() if value.shape == p.shape]
    )
    rounds.finish()
    require_same_bits(values(module))


def rank_does_not_count_samples() -> None:
    module, optimizer, rounds = built()
    for step in range(1, 7):
        if dist.get_rank() == 0:
            rounds.did(8)
        steps_of(module, optimizer, step, step)
    rounds.finish()


def test_samples_that_one_rank_alone_counts_are_a_mismatch_on_all_ranks() -> None:
    for rank, error in enumerate(errors_of(rank_does_not_count_samples, backend="ring", timeout_s=20)):
        assert isinstance(error, MismatchError), error
        assert (error.rank, error.peer) == (rank, 1 - rank)


@pytest.mark.parametrize("compression", [None, "int8", "sparse2"])
@on_ranks()
def test_a_round_in_which_no_rank_counts_is_no_news(compression: str | None) -> None:
    """As when unequal ranks finish right after a turn: what has left last has made no step since."""
    module, optimizer, rounds = built(inner=sgd, every=2, compression=compression)
    with logged("ringdp.rounds") as lines:
        for step in range(1, 5):
            rounds.did(1 if step > 2 else 0)  # in the first round no rank did
            loss_of(module, dist.get_rank(), step, torch.float32).backward()
            optimizer.step()
            if step == 2:
                assert difference(values(module), values(reference.model(torch.float32))) == 0
    rounds.finish()
    require_same_bits(values(module))
    assert lines == []


@on_ranks()
def test_a_rank_that_does_not_count_sends_nothing_of_what_it_owes() -> None:
    module, optimizer, rounds = built(inner=sgd, every=2, compression=Sparse2(1 / 1024))
    owed: list[dict[str, Tensor]] = []
    for step in range(1, 7):
        rounds.did(dist.get_rank() if step in (1, 2, 5, 6) else 1)  # rank 0 counts in the second round alone
        steps_of(module, optimizer, step, step)
        if step % 2 == 0:
            own = rounds.state_dict()["ranks"][str(dist.get_rank())]
            owed.append({name: entry["residual"] for name, entry in own.items()})
    same = [all(torch.equal(a[name], b[name]) for name in a) for a, b in itertools.pairwise(owed)]
    assert same == [False, dist.get_rank() == 0]
    assert (dist.get_rank() == 0) == all(not it.any() for it in owed[0].values())
    rounds.state_dict(consolidated=True)
    require_same_bits(values(module))


def rank_has_a_flipped_bit() -> None:
    module, optimizer, rounds = built()
    steps_of(module, optimizer, 1, 7)
    if dist.get_rank() == 1:
        total = rounds._fragments[0].total.view(torch.int32)
        total[3] ^= 1
    steps_of(module, optimizer, 8, 14)


def test_global_parameters_that_differ_are_found() -> None:
    for error in errors_of(rank_has_a_flipped_bit, backend="ring"):
        assert isinstance(error, MismatchError), error
        assert "the global parameters differ on ranks" in str(error)


# Loss scaling, unequal ranks, other models.


@pytest.mark.parametrize(("kind", "compression"), [("torch", None), ("ringdp", None), ("ringdp", "sparse2")])
@on_ranks()
def test_steps_that_a_loss_scaler_skips_count(kind: str, compression: str | None) -> None:
    rank = dist.get_rank()
    module = reference.model(torch.float32)
    optimizer = adamw(list(module.parameters()))
    scaler = (ringdp.amp.GradScaler if kind == "ringdp" else torch.amp.GradScaler)("cpu", init_scale=4.0)
    rounds = DiLoCo(module, optimizer, every=4, scaler=scaler, compression=compression)
    done = 0
    for step in range(1, 11):
        optimizer.zero_grad()
        scaler.scale(loss_of(module, rank, step, torch.float32)).backward()
        if (step + rank) % 5 == 0:
            gradient_of(module, "0.weight").fill_(torch.inf)
        scaler.step(optimizer)
        scaler.update()
        done = int(optimizer.state[module.get_parameter("0.weight")]["step"])
    rounds.finish()
    require_same_bits(values(module))
    rounds.detach()
    assert (rounds.step, done) == (10, 8)


@on_ranks(3)
def test_a_code_that_is_none_is_a_mismatch_that_names_its_rank() -> None:
    module, optimizer, _ = built(every=2, compression="sparse2")
    broken = mock.patch.object(Sparse2, "encode", lambda self, code, *_, **__: code.fill_(255))
    with (
        broken if dist.get_rank() == 1 else contextlib.nullcontext(),
        pytest.raises(MismatchError, match=r"the code of 0\.weight by rank 1: a sparse2 code") as caught,
    ):
        steps_of(module, optimizer, 1, 2)
    assert caught.value.peer == 1


def rank_is_unequal(compression: str) -> int:
    rank = dist.get_rank()
    numbers: Any = {"every": 12, "fragments": Fragments(2, delay=1), "outer": {"lr": 1.0}}
    module, optimizer, rounds = built(inner=sgd, unequal=True, compression=compression, **numbers)
    step = 0
    while rounds.round < 4:
        step += 1
        optimizer.zero_grad()
        loss_of(module, rank, step, torch.float32).backward()
        time.sleep(0.004 * (1 + 2 * rank))
        optimizer.step()
    rounds.finish()
    require_same_bits(values(module))
    return step


@pytest.mark.parametrize("compression", ["int8", "sparse2"])
def test_unequal_ranks_make_unequal_steps_and_do_not_wait(compression: str) -> None:
    fast, slow = run_ranks(rank_is_unequal, compression, world_size=2, backend="ring")
    assert fast > 1.5 * slow


@on_ranks()
def test_unequal_ranks_count_by_their_steps() -> None:
    """Whatever the times: the mean is weighed by the steps that each rank says it has made."""
    rank = dist.get_rank()
    module = nn.Linear(4, 1, bias=False).double()
    with torch.no_grad():
        module.weight.zero_()
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    rounds = DiLoCo(module, optimizer, every=6, unequal=True, outer={"lr": 1.0})
    steps = 0
    while rounds.round < 1:
        module.weight.grad = torch.full_like(module.weight, -1.0 - rank)
        optimizer.step()
        steps += 1
    mine = torch.tensor([float(steps), steps * steps * (1.0 + rank)], dtype=torch.float64)
    dist.all_reduce(mine)
    assert torch.allclose(module.weight, (mine[1] / mine[0]).expand_as(module.weight), rtol=1e-12)


class Odd(nn.Module):
    """Tied, frozen, of several types, not contiguous, empty; and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.again = nn.Linear(6, 6)
        self.again.weight = self.first.weight
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.norm = nn.BatchNorm1d(6)
        self.turned = nn.Parameter(torch.randn(2, 6).t() * 0.3)
        self.brain = nn.Parameter(torch.randn(6, dtype=torch.bfloat16))
        self.phase = nn.Parameter(torch.randn(2, dtype=torch.complex64))
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.register_buffer("mask", torch.full((3,), 0.1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.frozen(torch.tanh(self.again(torch.relu(self.first(x))))))
        return (hidden * self.brain.float()) @ self.turned * self.phase.abs() * self.scale + self.empty.sum()


@pytest.mark.parametrize(
    ("compiled", "codec"), [(False, "int4"), (False, "sparse2"), pytest.param(True, "int4", marks=pytest.mark.ci)]
)
@on_ranks(3, timeout_s=100)
def test_tied_frozen_and_odd_parameters(compiled: bool, codec: str) -> None:
    torch.manual_seed(5 + dist.get_rank())  # rank 0's parameters become everyone's
    odd = Odd()
    module: Any = torch.compile(odd, backend="aot_eager") if compiled else odd
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.05)
    rounds = DiLoCo(module, optimizer, every=3, fragments=Fragments(3, delay=1), compression=codec)
    require_same_bits(values(module))
    steps_of(module, optimizer, 1, 8)
    buffers: dict[str, Any] = dict(odd.named_buffers())
    spread = buffers["norm.running_mean"].clone()
    rounds.finish()
    require_same_bits([*values(module), *buffers.values()])
    dist.all_reduce(spread)
    assert torch.allclose(buffers["norm.running_mean"], spread / dist.get_world_size(), atol=1e-7)
    assert torch.equal(buffers["mask"], torch.full((3,), 0.1))
    assert set(rounds.state_dict()["global"]) == {
        "first.weight", "first.bias", "again.bias", "norm.weight", "norm.bias",
        "turned", "brain", "phase", "scale", "empty",
    }  # fmt: skip


@on_ranks(timeout_s=20)
def test_parameters_that_change_are_refused_and_it_goes_on() -> None:
    rank = dist.get_rank()
    module = reference.model(torch.float32)
    module.get_parameter("2.bias").requires_grad_(False)
    optimizer = sgd(list(module.parameters()))
    arguments: Any = {"every": 4, "fragments": Fragments(2, delay=1)}
    rounds = DiLoCo(module, optimizer, **arguments)

    def trains(first: int, last: int) -> None:
        steps_of(module, optimizer, first, last)
        with rounds.global_parameters():
            require_same_bits(values(module))

    trains(1, 5)
    optimizer.zero_grad()
    loss_of(module, rank, 6, torch.float32).backward()
    module.get_parameter("2.bias").requires_grad_(True)
    with pytest.raises(InvalidStateError) as unfrozen:
        optimizer.step()
    assert unfrozen.value.name == "2.bias"
    module.get_parameter("2.bias").requires_grad_(False)  # it goes on as if the fragment had had no turn
    trains(7, 9)
    whose: Any = module.get_submodule("4")
    whose.bias = nn.Parameter(whose.bias.detach() + rank)
    optimizer.add_param_group({"params": [whose.bias]})
    with pytest.raises(InvalidStateError) as replaced:
        trains(10, 10)
    assert replaced.value.name == "4.bias"
    rounds.finish()  # as it says
    rounds.detach()
    optimizer = sgd(list(module.parameters()))
    rounds = DiLoCo(module, optimizer, **arguments)
    trains(11, 20)
    rounds.finish()
    require_same_bits(values(module))


@on_ranks(4, timeout_s=20)
def test_two_on_one_optimizer_are_of_two_levels() -> None:
    module = reference.model()
    optimizer = sgd(list(module.parameters()))
    first = LocalSGD(module, optimizer)
    with pytest.raises(InvalidArgumentError):
        DiLoCo(module, optimizer)
    first.finish()
    first.detach()
    inside, between = (dist.new_subgroups_by_enumeration(it)[0] for it in ([[0, 1], [2, 3]], [[0, 2], [1, 3]]))
    often = LocalSGD(module, optimizer, every=2, process_group=inside)
    seldom = LocalSGD(module, optimizer, every=4, process_group=between)
    steps_of(module, optimizer, 1, 8)
    require_same_bits(values(module))
    often.finish()
    seldom.finish()


@on_ranks(4)
def test_parameters_that_are_dtensors() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("between", "inside"))
    module = nn.Linear(6, 4, bias=False).double()
    torch.manual_seed(0)
    whole = torch.randn(4, 6, dtype=torch.float64)
    module.weight = nn.Parameter(distribute_tensor(whole, mesh["inside"], [Shard(0)]))
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    with pytest.raises(InvalidArgumentError):
        DiLoCo(module, optimizer)
    rounds = DiLoCo(module, optimizer, every=2, outer={"lr": 1.0}, process_group=mesh["between"].get_group())
    place = dist.get_rank() // 2  # in "between"
    for _ in range(2):
        change = torch.full((4, 6), 1.0 + 2 * place, dtype=torch.float64)
        module.weight.grad = distribute_tensor(change, mesh["inside"], [Shard(0)])
        optimizer.step()
    trained: Any = module.weight.detach()
    full = trained.redistribute(placements=[Replicate()]).to_local()
    assert torch.allclose(full, whole - 2 * 2.0)
    rounds.finish()


@pytest.mark.parametrize("unequal", [False, True])
@on_ranks(4)
def test_exact_inside_and_rounds_between(unequal: bool) -> None:
    inside, between = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])[0], None
    between = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])[0]
    module = reference.model(torch.float32)
    model = ringdp.RingDP(module, process_group=inside, guard=1)
    optimizer = adamw(list(model.parameters()))
    rounds = DiLoCo(
        model,
        optimizer,
        every=4,
        fragments=Fragments(2, delay=1),
        compression="int4",
        process_group=between,
        unequal=unequal,
    )
    step = 0
    while (rounds.round < 3) if unequal else (step < 12):
        step += 1
        steps_of(model, optimizer, step, step)
    model.check_replicas()  # ranks inside have the same bits also between rounds
    rounds.finish()
    require_same_bits(values(module))


@on_ranks()
def test_global_parameters_for_evaluation() -> None:
    module, optimizer, rounds = built()
    steps_of(module, optimizer, 1, 5)
    mine = values(module)
    with rounds.global_parameters():
        require_same_bits(values(module))
        assert difference(values(module), mine) > 0
        with pytest.raises(InvalidStateError), rounds.global_parameters():
            pass
        with pytest.raises(InvalidStateError):
            optimizer.step()
    with contextlib.suppress(ZeroDivisionError), rounds.global_parameters():
        raise ZeroDivisionError
    assert all(map(torch.equal, values(module), mine))


def rank_has_levels(sites: list[str] | None) -> tuple[list[int] | None, ...]:
    with mock.patch.dict(os.environ, RINGDP_SITE="" if sites is None else sites[dist.get_rank()]):
        found = ringdp.levels()
    return tuple(None if one is None else dist.get_process_group_ranks(one) for one in found)


def test_levels_are_those_of_sites_and_hosts() -> None:
    assert run_ranks(rank_has_levels, None, world_size=2, backend="ring") == [([0, 1], None)] * 2
    assert run_ranks(rank_has_levels, ["a", "b"], world_size=2, backend="ring") == [(None, [0, 1])] * 2
    four = run_ranks(rank_has_levels, ["a", "b", "a", "b"], world_size=4, backend="ring")
    assert four == [([0, 2], [0, 1]), ([1, 3], [0, 1]), ([0, 2], [2, 3]), ([1, 3], [2, 3])]
    for error in errors_of(rank_has_levels, ["a", "b", "b"], world_size=3, backend="ring"):
        assert isinstance(error, InvalidArgumentError)
        assert "there are ranks 0; ranks 1, 2" in str(error)


@pytest.mark.parametrize(("codec", "fewer"), [("int4", 750), ("sparse2", 18_520)])
@on_ranks()
def test_stats_say_what_was_sent(codec: str, fewer: int) -> None:
    """32 bits in 100 steps against int4's 4.25 once; or against 84 bytes of 4,096 elements, and 77 of the bias."""
    module = nn.Linear(256, 256)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    rounds = DiLoCo(module, optimizer, every=100, compression=codec)
    before = ringdp.traffic().bytes_sent
    for _ in range(100):
        module.weight.grad, module.bias.grad = torch.randn_like(module.weight), torch.randn_like(module.bias)
        optimizer.step()
    sent, stats = ringdp.traffic().bytes_sent - before, rounds.stats()
    assert stats.bytes_sent <= sent <= stats.bytes_sent + 2000
    assert stats.bytes_of_exact_steps / stats.bytes_sent == pytest.approx(fewer, rel=0.012)
    assert (stats.rounds, stats.steps) == (1, 100)
    assert stats.drift[0] > 0
    assert stats.waited_s >= 0


@on_ranks()
def test_momenta_are_averaged_where_asked_for_and_detach_ends_it() -> None:
    module, optimizer, rounds = built(inner=sgd, kind=LocalSGD, every=3, average_momenta=True)
    steps_of(module, optimizer, 1, 9)
    require_same_bits([optimizer.state[p]["momentum_buffer"] for p in module.parameters()])
    rounds.detach()
    for p in module.parameters():
        p.grad = torch.full_like(p, dist.get_rank())
    for _ in range(3):
        optimizer.step()
    if dist.get_rank() == 0:
        require_same_bits(values(module))  # with its own, which the others compare with
    else:
        with pytest.raises(AssertionError):
            require_same_bits(values(module))


def test_it_needs_init() -> None:
    module = reference.model()
    with pytest.raises(InvalidStateError):
        DiLoCo(module, sgd(list(module.parameters())))


class Counts(nn.Module):
    """Each sample's number of times in the gradients that were taken, as a parameter."""

    def __init__(self, samples: int) -> None:
        super().__init__()
        self.times = nn.Parameter(torch.zeros(samples))

    def forward(self, batch: Tensor) -> Tensor:
        return -self.times[batch].sum()


def an_epoch_of_rounds(samples: int, batch: int, accumulate: int) -> tuple[list[float], int]:
    model = Counts(samples)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=0.0)
    rounds = LocalSGD(model, optimizer, every=1)
    job = ringdp.elastic.Job(rounds, optimizer)
    steps = 0
    for _ in job.epochs(1):
        for number, x in enumerate(job.loader(torch.arange(samples), batch, shuffle=False)):
            model(x).backward()
            if (number + 1) % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
                steps += 1
    return (model.times.detach() * dist.get_world_size()).tolist(), steps


@pytest.mark.parametrize(("samples", "batch"), [(10, 4), (9, 4), (7, 3), (3, 2)])
def test_a_rank_without_a_sample_of_a_batch_changes_nothing(samples: int, batch: int) -> None:
    """The loader gives it the dataset's first one, which would be in the mean once more."""
    for times, steps in run_ranks(an_epoch_of_rounds, samples, batch, 1, world_size=3, backend="ring"):
        assert times == [1.0] * samples
        assert steps == -(-samples // batch)
