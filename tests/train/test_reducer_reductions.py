"""Buckets reduced by a codec or by a hook of their own: bits, residuals, overflow, and everything a step can do."""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from ringdp import _C
from ringdp.compression.partition import bounds, owner_offset_of
from ringdp.ddp.wrapper import RingDP
from ringdp.errors import InvalidArgumentError, InvalidStateError
from tests.train.given_gradients import Formula, Given, hash_of, noise
from tests.train.harness import backends, on_ranks, run_ranks

SHAPES = {"large": (70, 41), "exact": (33,), "odd": (257,), "small": (5,), "other": (3000,)}
EXACT = {"exact"}
ZEROS = {name: torch.zeros(shape) for name, shape in SHAPES.items()}


def wrap(model: torch.nn.Module, reduction: Any, exact: set[str] = EXACT, **options: Any) -> RingDP:
    ours = RingDP(model, **options)
    set_reduction(ours, reduction, exact)
    return ours


def names_of(ours: RingDP) -> list[str]:
    return [name for name, _ in ours.module.named_parameters()]


def set_reduction(ours: RingDP, reduction: Any, exact: set[str] = EXACT) -> None:
    names = names_of(ours)
    reductions = [] if reduction is None else [reduction]
    which = [-1 if name in exact or reduction is None else 0 for name in names]
    ours.reducer.set_reductions(reductions, which, [owner_offset_of(name) for name in names])


def step(ours: RingDP, given: dict[str, Tensor], scale: float = 1.0) -> dict[str, Tensor | None]:
    ours.zero_grad()
    (ours(given) * scale).backward()
    return gradients(ours)


def gradients(ours: RingDP) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in ours.module.named_parameters()}


def present(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return gradient


def check(
    got: dict[str, Tensor | None],
    formula: Formula,
    given: Sequence[dict[str, Tensor]],
    exact: Set[str] = EXACT,
    of_dtype: dict[str, torch.dtype] | None = None,
    **numbers: Any,
) -> None:
    """Each gradient but the exact ones has the bits of the formula's mean of what the ranks gave."""
    for name in SHAPES.keys() - exact:
        result, dtype = present(got[name]), (of_dtype or {}).get(name, torch.float32)
        assert result.dtype == dtype, name
        mean = formula.mean(name, [one[name] for one in given], **numbers)
        assert torch.equal(result.flatten(), mean.to(dtype)), (name, list(formula.residuals[0]))


def residuals(ours: RingDP) -> dict[str, Tensor]:
    names = names_of(ours)
    return {names[index]: values for index, values in ours.reducer.compression.residuals().items()}


def everywhere_the_same(tensors: dict[str, Tensor]) -> None:
    hashes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(hashes, hash_of(tensors))
    assert len(set(hashes)) == 1, hashes


# Bits.


def native(codec: str, feedback: bool) -> None:
    """Several steps, buckets rebuilt after the first, in more than one bucket."""
    world, rank = dist.get_world_size(), dist.get_rank()
    ours = wrap(Given(SHAPES), _C.CodecReduction(codec, feedback), bucket_cap_mb=0.004)
    formula = Formula(codec, world, feedback)
    for number in range(5):
        given = [noise(SHAPES, r, number) for r in range(world)]
        got = step(ours, given[rank])
        assert ours.reducer.overflow.finite() is True
        check(got, formula, given)
        expected = torch.stack([one["exact"] for one in given]).double().mean(0)
        torch.testing.assert_close(present(got["exact"]).double(), expected, rtol=1e-5, atol=1e-6)
        everywhere_the_same({name: present(result) for name, result in got.items()})
        kept = residuals(ours)
        assert set(kept) == (set(SHAPES) - EXACT if feedback else set())
        for name, values in kept.items():
            assert torch.equal(values, formula.residuals[rank][name]), (number, name)
    assert ours.reducer.plan.rebuilt()


CODECS = [("int8", False), ("int8", True), ("int4", True), ("int6", False)]


@pytest.mark.parametrize(("codec", "feedback"), CODECS)
@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.ci), pytest.param(4, marks=pytest.mark.ci)])
def test_a_codec_gives_the_bits_of_the_formula(codec: str, feedback: bool, world: int) -> None:
    run_ranks(native, codec, feedback, world_size=world, backend="ring")


@pytest.mark.parametrize("compression", ["nf4", "int5"])
@on_ranks()
def test_what_an_owner_leaves_out_of_the_mean_is_added_to_the_next(compression: str) -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    shapes: dict[str, tuple[int, ...]] = {"weight": (64, 41)}
    ours = RingDP(Given(shapes), compression=compression)
    formula = Formula(compression, world, True)
    for number in range(3):
        given = [noise(shapes, r, number) for r in range(world)]
        result = present(step(ours, given[rank])["weight"])
        assert torch.equal(result.flatten(), formula.mean("weight", [one["weight"] for one in given]))
    kept, edges = residuals(ours)["weight"], bounds(64 * 41, world, owner_offset_of("weight"))
    assert torch.equal(kept, formula.residuals[rank]["weight"])
    assert bool(kept[edges[rank] : edges[rank + 1]].any())


@on_ranks()
def test_parameters_of_other_dtypes() -> None:
    """Gradients of other dtypes are cast in, and the mean is rounded once into .grad."""
    world, rank = dist.get_world_size(), dist.get_rank()
    others = {"large": torch.bfloat16, "odd": torch.float64, "other": torch.float16}
    ours = wrap(Given(SHAPES, others), _C.CodecReduction("int8", True))
    formula = Formula("int8", world, True)
    for number in range(3):
        given = [
            {name: one.to(others.get(name, torch.float32)) for name, one in noise(SHAPES, r, number).items()}
            for r in range(world)
        ]
        got = step(ours, given[rank])
        check(got, formula, given, of_dtype=others)


@on_ranks()
def test_reduce_dtype_rounds_once() -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    shapes = {"a": (300,), "b": (7, 5)}
    low = dict.fromkeys(shapes, torch.bfloat16)
    for own in (True, False):
        ours = RingDP(Given(shapes, low), gradient_as_bucket_view=not own)
        options = _C.ReducerOptions()
        options.caps_bytes, options.average, options.own_gradients = ours._caps_bytes, True, own
        options.names_compared, options.reduce_dtype = True, torch.float32
        parameters = zip(shapes, ours.module.parameters(), strict=True)
        described = [_C.ModuleParameter(parameter, name, "") for name, parameter in parameters]
        ours.reducer = _C.Reducer(described, ours.process_group, options)
        for number in range(3):
            given = [{n: g.bfloat16() for n, g in noise(shapes, r, number).items()} for r in range(world)]
            got = step(ours, given[rank])
            for name in shapes:
                mean = torch.stack([one[name].float() for one in given]).sum(0) / world
                assert torch.equal(present(got[name]), mean.bfloat16())


@on_ranks()
def test_a_method_that_is_not_enabled_reduces_exactly() -> None:
    """Not enabled: the exact mean, from the same buckets; residuals stay as they are."""
    world, rank = dist.get_world_size(), dist.get_rank()
    reduction = _C.CodecReduction("int4", True)
    ours = wrap(Given(SHAPES), reduction)
    formula = Formula("int4", world, True)
    for number in range(4):
        reduction.enabled = number >= 2
        given = [noise(SHAPES, r, number) for r in range(world)]
        got = step(ours, given[rank])
        if reduction.enabled:
            check(got, formula, given)
            continue
        for name in SHAPES.keys() - EXACT:
            assert torch.equal(present(got[name]), (given[0][name] + given[1][name]) / 2)


# Overflow.


@pytest.mark.parametrize(
    ("where", "rank_of_it", "value", "compressed"),
    [("other", 0, math.inf, True), ("large", 1, math.nan, True), ("small", 2, -math.inf, True),
     ("exact", 1, math.inf, True), ("odd", 2, math.nan, False)],
)  # fmt: skip
@on_ranks(3)
def test_one_overflow_is_seen_by_all_and_leaves_no_trace(
    where: str, rank_of_it: int, value: float, compressed: bool
) -> None:
    """Seen by every rank in that step; residuals keep their bits; the next step is as if it had not been."""
    world, rank = dist.get_world_size(), dist.get_rank()
    exact = EXACT if compressed else EXACT | {where}
    ours = wrap(Given(SHAPES), _C.CodecReduction("int4", True), exact, bucket_cap_mb=0.004)
    formula = Formula("int4", world, True)
    for number in range(4):
        given = [noise(SHAPES, r, number) for r in range(world)]
        bad = number in (0, 2)
        before = residuals(ours)
        if bad:
            given[rank_of_it][where].view(-1)[-1] = value
        got = step(ours, given[rank])
        assert ours.reducer.overflow.finite() is not bad
        names = names_of(ours)
        if bad:
            assert [names[i] for i in ours.reducer.overflow.non_finite()] == [where]
            own = ours.reducer.overflow.own_non_finite()
            assert (names[own] if own >= 0 else None) == (where if rank == rank_of_it else None)
            after = residuals(ours)
            assert all(torch.equal(after[name], values) for name, values in before.items())
            assert all(not values.any() for name, values in after.items() if name not in before)
            continue
        assert ours.reducer.overflow.own_non_finite() == -1
        check(got, formula, given, exact)


@pytest.mark.parametrize("how", ["noted", "set"])
@on_ranks()
def test_residuals_have_no_loss_scale(how: str) -> None:
    """Residuals are kept without the scale: it may change from step to step."""
    world, rank = dist.get_world_size(), dist.get_rank()
    ours = wrap(Given(SHAPES), _C.CodecReduction("int4", True))
    formula = Formula("int4", world, True)
    for number, scale in enumerate([1.0, 1024.0, 2.0, 65536.0]):
        given = [{n: scale * g for n, g in noise(SHAPES, r, number).items()} for r in range(world)]
        ours.zero_grad()
        loss = ours(given[rank])
        if how == "noted":
            loss.register_hook(lambda gradient, scale=scale: _C.note_loss_scale(scale))
        else:
            ours.reducer.compression.set_loss_scale(scale)
        loss.backward()
        check(gradients(ours), formula, given, factor=scale)


@on_ranks()
def test_exact_gradients_are_watched_where_it_is_asked_for() -> None:
    ours = RingDP(Given(SHAPES))
    assert ours.reducer.overflow.finite() is None
    given = noise(SHAPES, dist.get_rank(), 0)
    step(ours, given)
    assert ours.reducer.overflow.finite() is None
    ours.reducer.overflow.watch(True)
    step(ours, given)
    assert ours.reducer.overflow.finite() is True
    if dist.get_rank() == 1:
        given["odd"][3] = math.nan
    step(ours, given)
    assert ours.reducer.overflow.finite() is False
    ours.reducer.overflow.watch(False)
    step(ours, given)
    assert ours.reducer.overflow.finite() is None


# What a step can do.


@on_ranks(3)
def test_parameters_without_gradient() -> None:
    """`odd` on rank 0 only, `other` on no rank: its residual stays, and its .grad None."""
    world, rank = dist.get_world_size(), dist.get_rank()
    ours = wrap(Given(SHAPES), _C.CodecReduction("int4", True), find_unused_parameters=True, bucket_cap_mb=0.004)
    formula = Formula("int4", world, True)
    for number in range(4):
        given = [noise(SHAPES, r, number) for r in range(world)]
        if number % 2 == 1:
            for r in range(world):
                del given[r]["other"]
                if r != 0:
                    del given[r]["odd"]
        before = residuals(ours)
        got = step(ours, given[rank])
        if number % 2 == 1:
            assert got["other"] is None
            assert torch.equal(residuals(ours)["other"], before["other"])
        check(got, formula, [ZEROS | one for one in given], EXACT | {"other"} if number % 2 else EXACT)


@on_ranks()
def test_no_sync_compresses_once() -> None:
    """Under no_sync gradients add up exactly; the step that synchronises compresses the sum, once."""
    world, rank = dist.get_world_size(), dist.get_rank()
    ours = wrap(Given(SHAPES), _C.CodecReduction("int4", True))
    formula = Formula("int4", world, True)
    for number in range(3):
        parts = [[noise(SHAPES, r, 10 * number + part) for r in range(world)] for part in range(3)]
        ours.zero_grad()
        for part in range(2):
            with ours.no_sync():
                ours(parts[part][rank]).backward()
        ours(parts[2][rank]).backward()
        one, two, three = parts
        sums = [{name: one[r][name] + two[r][name] + three[r][name] for name in SHAPES} for r in range(world)]
        check(gradients(ours), formula, sums)


@on_ranks()
def test_freezing_in_the_middle() -> None:
    """A parameter is frozen for a step: the others' residuals and its own live on."""
    world, rank = dist.get_world_size(), dist.get_rank()
    ours = wrap(Given(SHAPES), _C.CodecReduction("int4", True))
    formula = Formula("int4", world, True)
    for number in range(6):
        ours.module.get_parameter("odd").requires_grad_(number not in (2, 3))
        given = [noise(SHAPES, r, number) for r in range(world)]
        got = step(ours, given[rank])
        assert (got["odd"] is None) == (number in (2, 3))
        check(got, formula, given, EXACT | {"odd"} if number in (2, 3) else EXACT)


@pytest.mark.parametrize("divide_by_all", [True, False])
@on_ranks(3)
def test_uneven_inputs(divide_by_all: bool) -> None:
    """Rank 1 runs out of input: it adds zeros, and its residual waits until it has input again."""
    world, rank = dist.get_world_size(), dist.get_rank()
    ours = wrap(Given(SHAPES), _C.CodecReduction("int8", False))
    formula = Formula("int8", world, False)
    counts = [4, 2, 4]
    results: list[dict[str, Tensor | None]] = []
    with ours.join(divide_by_initial_world_size=divide_by_all):
        for number in range(counts[rank]):
            results.append(step(ours, noise(SHAPES, rank, number)))
    for number, got in enumerate(results):
        with_input = [number < count for count in counts]
        given = [noise(SHAPES, r, number) if with_input[r] else ZEROS for r in range(world)]
        check(got, formula, given, divisor=world if divide_by_all else sum(with_input))


@on_ranks()
def test_a_rank_without_input_keeps_its_residuals() -> None:
    rank = dist.get_rank()
    ours = wrap(Given(SHAPES), _C.CodecReduction("int4", True))
    kept: dict[str, Tensor] = {}
    with ours.join():
        for number in range(4 if rank == 0 else 2):
            step(ours, noise(SHAPES, rank, number))
            kept = residuals(ours)
    assert all(torch.equal(values, kept[name]) for name, values in residuals(ours).items())
    with ours.join():
        everywhere_the_same({n: g for n, g in step(ours, noise(SHAPES, rank, 9)).items() if g is not None})


@pytest.mark.parametrize(
    "options",
    [{"gradient_as_bucket_view": False}, {"static_graph": True}, {"find_unused_parameters": False},
     {"find_unused_parameters": True, "skip_all_reduce_unused_params": True}],
)  # fmt: skip
@on_ranks()
def test_options(options: dict[str, Any]) -> None:
    """Whatever RingDP is told about gradients, the bits are the formula's."""
    world, rank = dist.get_world_size(), dist.get_rank()
    ours = wrap(Given(SHAPES), _C.CodecReduction("int4", True), bucket_cap_mb=0.004, **options)
    formula = Formula("int4", world, True)
    for number in range(4):
        given = [noise(SHAPES, r, number) for r in range(world)]
        got = step(ours, given[rank])
        check(got, formula, given)


@on_ranks()
def test_large_gradients_and_memory_formats() -> None:
    """A gradient that is a bucket by itself is coded where autograd left it, channels-last memory as it lies."""
    world, rank = dist.get_world_size(), dist.get_rank()
    shapes = {"huge": (1_100_000,), "image": (8, 6, 5, 5)}
    model = Given(shapes)
    model.get_parameter("image").data = model.get_parameter("image").data.to(memory_format=torch.channels_last)
    ours = wrap(model, _C.CodecReduction("int8", True), set())
    formula = Formula("int8", world, True)
    for number in range(3):
        given = [noise(shapes, r, number) for r in range(world)]
        got = step(ours, given[rank])
        assert torch.equal(present(got["huge"]), formula.mean("huge", [one["huge"] for one in given]))
        in_memory = [one["image"].permute(0, 2, 3, 1).contiguous() for one in given]
        mean = formula.mean("image", in_memory).view(8, 5, 5, 6).permute(0, 3, 1, 2)
        assert torch.equal(present(got["image"]), mean)
        kept = formula.residuals[rank]["image"].view(8, 5, 5, 6).permute(0, 3, 1, 2)
        assert torch.equal(residuals(ours)["image"], kept.flatten())
    saved = ours.reducer.compression.residuals()
    ours.reducer.compression.set_residuals(saved)
    assert all(torch.equal(values, saved[index]) for index, values in ours.reducer.compression.residuals().items())


@on_ranks()
def test_a_second_backward_without_zero_grad() -> None:
    """retain_graph: the second backward accumulates on the mean of the first."""
    world, rank = dist.get_world_size(), dist.get_rank()
    ours = wrap(Given(SHAPES), _C.CodecReduction("int4", True))
    formula = Formula("int4", world, True)
    given = [noise(SHAPES, r, 0) for r in range(world)]
    loss = ours(given[rank])
    loss.backward(retain_graph=True)
    first = {name: formula.mean(name, [one[name] for one in given]).view(SHAPES[name]) for name in SHAPES}
    ours(given[rank]).backward()
    check(gradients(ours), formula, [{name: first[name] + one[name] for name in SHAPES} for one in given])


# Changing reductions.


@on_ranks()
def test_methods_change_between_steps() -> None:
    """int8 becomes int4 for `odd` only: the others keep their residuals, it begins anew."""
    world, rank = dist.get_world_size(), dist.get_rank()
    ours = wrap(Given(SHAPES), _C.CodecReduction("int8", True))
    names = names_of(ours)
    formulas = dict.fromkeys(SHAPES, Formula("int8", world, True))
    for number in range(6):
        if number == 3:
            reductions = [_C.CodecReduction("int4", True), _C.CodecReduction("int8", True)]
            which = [-1 if name in EXACT else 0 if name == "odd" else 1 for name in names]
            ours.reducer.set_reductions(reductions, which, [owner_offset_of(name) for name in names])
            formulas["odd"] = Formula("int4", world, True)
            assert set(residuals(ours)) == set(SHAPES) - EXACT - {"odd"}
        given = [noise(SHAPES, r, number) for r in range(world)]
        got = step(ours, given[rank])
        check(got, formulas["odd"], given, SHAPES.keys() - {"odd"})
        check(got, formulas["large"], given, EXACT | {"odd"})
    set_reduction(ours, None)
    assert residuals(ours) == {}
    assert torch.equal(step(ours, noise(SHAPES, 0, 0))["odd"], noise(SHAPES, 0, 0)["odd"])  # type: ignore[arg-type]


@on_ranks()
def test_what_is_refused() -> None:
    reduction = _C.CodecReduction("int8", False)
    ours = RingDP(Given(SHAPES))
    output = ours(noise(SHAPES, 0, 0))
    with pytest.raises(InvalidStateError, match="between a forward and its backward"):
        set_reduction(ours, reduction)
    del output
    set_reduction(ours, reduction)  # that forward has no graph any more
    with pytest.raises(InvalidStateError, match="communication hook and compression"):
        ours.register_comm_hook(None, default_hooks.allreduce_hook)
    with pytest.raises(InvalidArgumentError, match="of 3 elements for parameter large, which has 2870"):
        ours.reducer.compression.set_residuals({0: torch.zeros(3)})
    hooked = RingDP(Given(SHAPES))
    hooked.register_comm_hook(None, default_hooks.allreduce_hook)
    with pytest.raises(InvalidStateError, match="communication hook and compression"):
        set_reduction(hooked, reduction)
    with pytest.raises(InvalidArgumentError, match="one reduction and one owner offset for each of 5 parameters"):
        ours.reducer.set_reductions([reduction], [0], [0])


@on_ranks(backend="gloo")
def test_codecs_need_ring() -> None:
    with pytest.raises(InvalidArgumentError, match=r"codec int8 for parameter large needs the backend ring.*gloo"):
        wrap(Given(SHAPES), _C.CodecReduction("int8", False))


# Hooks as reductions.


class Halving:
    """State of a hook that says what it saw and is told how the backward ended."""

    def __init__(self, finite: bool | None) -> None:
        self.says = finite
        self.buckets: list[list[int]] = []
        self.commits: list[bool] = []

    def finite(self) -> bool | None:
        return self.says

    def commit(self, finite: bool, *, unused: Sequence[str] = ()) -> None:
        self.commits.append(finite)


def halved_sum(state: Halving, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    state.buckets.append([gradient.numel() for gradient in bucket.gradients()])
    buffer = bucket.buffer()
    assert buffer.dtype == torch.float32
    work = dist.all_reduce(buffer, async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: done.value()[0] / 2)


@pytest.mark.parametrize("finite", [True, False, None])
@on_ranks(backend=backends())
def test_a_hook_reduces_its_own_buckets(finite: bool | None) -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    state = Halving(finite)
    ours = wrap(Given(SHAPES, {"odd": torch.float16}), _C.PythonReduction(state, halved_sum), bucket_cap_mb=0.004)
    for number in range(3):
        given = [noise(SHAPES, r, number) for r in range(world)]
        given[0]["odd"] = given[0]["odd"].half()
        given[1]["odd"] = given[1]["odd"].half()
        if number == 1 and rank == 1:
            given[1]["exact"][0] = math.inf
        got = step(ours, given[rank])
        for name in SHAPES.keys() - EXACT:
            result = present(got[name])
            expected = (given[0][name].float() + given[1][name].float()) / 2
            assert torch.equal(result, expected.to(result.dtype)), name
        assert ours.reducer.overflow.finite() is (number != 1 and finite is not False)
    assert state.commits == [finite is not False, False, finite is not False]
    assert {numel for bucket in state.buckets for numel in bucket} == {
        math.prod(shape) for name, shape in SHAPES.items() if name not in EXACT
    }


# Figures.


@on_ranks()
def test_what_each_bucket_cost() -> None:
    ours = wrap(Given(SHAPES), _C.CodecReduction("int8", True))
    for number in range(2):
        step(ours, noise(SHAPES, dist.get_rank(), number))
    rows = ours.reducer.report.bucket_rows()
    coded = [row for row in rows if row["reduction"] == 0]
    numels = [math.prod(shape) for name, shape in SHAPES.items() if name not in EXACT]
    assert sum(row["numel"] for row in coded) == sum(numels)
    assert sum(row["bytes_before"] for row in coded) == 4 * sum(numels)
    assert sum(row["bytes_after"] for row in coded) == sum(numel + 4 * -(-numel // 256) for numel in numels)
    assert all(row["bytes_after"] == row["bytes_before"] for row in rows if row["reduction"] == -1)
    assert all(0 < row["seconds"] < 10 and 0 <= row["exposed_s"] < 10 for row in rows)
