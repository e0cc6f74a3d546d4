"""Parameters replaced, added, removed or renamed after wrapping: laid out anew on all ranks, or an error with names."""

from __future__ import annotations

import contextlib
import copy
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.nn.parallel.distributed import _MixedPrecision
from torch.nn.utils import parametrize

import ringdp
from ringdp import Compression
from ringdp.ddp.compression.choice import GradientCompression
from ringdp.ddp.wrapper import RingDP
from tests.train import models
from tests.train.compressed import Steps, compressor_id
from tests.train.harness import backends, on_ranks, run_outcomes, run_ranks

Change = Callable[[nn.Module], None]


def fresh(*shape: int) -> nn.Parameter:
    """Another one on every rank, unless rank 0's is sent."""
    seed = 7 + (dist.get_rank() if dist.is_initialized() else 0)
    return nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.2)


@contextlib.contextmanager
def as_rank_0() -> Iterator[None]:
    """For a model of one process, which has what rank 0 has."""
    get_rank, dist.get_rank = dist.get_rank, lambda group=None: 0
    try:
        yield
    finally:
        dist.get_rank = get_rank


def linear(inputs: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    layer.weight, layer.bias = fresh(outputs, inputs), fresh(outputs)
    return layer


def weight(model: Any) -> None:
    model[2].weight = fresh(40, 40)


def other_shape(model: Any) -> None:
    model[2].weight, model[2].bias = fresh(24, 40), fresh(24)
    model[4].weight = fresh(5, 24)


def assigned(model: Any) -> None:
    generator = torch.Generator().manual_seed(3)
    state = {name: torch.randn(it.shape, generator=generator) * 0.2 for name, it in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def head(model: Any) -> None:
    model[4] = nn.Sequential(linear(40, 16), nn.ReLU(), linear(16, 5))


def appended(model: Any) -> None:
    model.append(linear(5, 5))


def removed(model: Any) -> None:
    del model[2:4]


def bias_gone(model: Any) -> None:
    model[2].bias = None


def registered(model: Any) -> None:
    model[0].register_parameter("extra", fresh(40))
    model[0].register_forward_hook(lambda layer, _, output: output * layer.extra)


def tied(model: Any) -> None:
    model[1] = nn.Sequential(nn.ReLU(), nn.Linear(40, 40))
    model[1][1].weight, model[1][1].bias = model[2].weight, model[2].bias


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def parametrized(model: Any) -> None:
    parametrize.register_parametrization(model[2], "weight", Doubled())


def converted(model: Any) -> None:
    """With a new Parameter for each, as torch can be told."""
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        model.double().float()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)


def frozen_too(model: Any) -> None:
    model[0].requires_grad_(False)
    model[2].weight = nn.Parameter(fresh(40, 40).detach(), requires_grad=False)
    model[4] = linear(40, 5)


CHANGES = [weight, other_shape, assigned, head, appended, removed, bias_gone, registered, tied, parametrized]
CHANGES += [converted, frozen_too]
ARGUMENTS: list[dict[str, Any]] = [
    {"find_unused_parameters": True},
    {"find_unused_parameters": False},
    {"static_graph": True},
    {"gradient_as_bucket_view": False},
    {"skip_all_reduce_unused_params": True},
    {"bucket_cap_mb": 25},
]


def train(model: nn.Module, batch: Callable[[int], tuple[Tensor, Tensor]], steps: range) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in steps:
        x, y = batch(step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def own_batch(step: int) -> tuple[Tensor, Tensor]:
    return models.batch(step, dist.get_rank())


def joined_batch(step: int) -> tuple[Tensor, Tensor]:
    return models.joined_batch(step, dist.get_world_size())


def like_one_process(changes: list[Change], arguments: dict[str, Any]) -> None:
    """After every change the parameters go on as those of one process that has rank 0's."""
    wrapper = RingDP(models.build("mlp", seed=dist.get_rank()), **({"bucket_cap_mb": 0.001} | arguments))
    alone = models.build("mlp", seed=0)
    for number, change in enumerate([None, *changes]):
        if change is not None:
            change(wrapper.module)
            with as_rank_0():
                change(alone)
        steps = range(10 * number, 10 * number + 3)
        train(wrapper, own_batch, steps)
        train(alone, joined_batch, steps)
        for (one, ours), theirs in zip(wrapper.module.named_parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6, msg=f"{one} after {change}, {arguments}")
        named = {one for bucket in wrapper.reducer.plan.bucket_names() for one in bucket.split(": ", 1)[1].split(", ")}
        assert named == {one for one, it in wrapper.module.named_parameters() if it.requires_grad}


@on_ranks(backend=backends())
def test_a_changed_module_trains_like_one_process() -> None:
    for change in CHANGES:
        like_one_process([change], {})


@on_ranks(backend=backends())
def test_whatever_the_wrapper_was_told() -> None:
    for arguments in ARGUMENTS:
        like_one_process([weight, head, assigned], arguments)


@on_ranks(backend=backends())
def test_around() -> None:
    """Where nothing is to be averaged nothing is asked; what was accumulated before stays; copies follow, too."""
    ours, alone = RingDP(models.build("mlp"), bucket_cap_mb=0.001), models.build("mlp")

    def loss(model: nn.Module, step: int) -> Tensor:
        x, y = own_batch(step) if isinstance(model, RingDP) else joined_batch(step)
        return nn.functional.cross_entropy(model(x), y)

    loss(ours, 0).backward()
    loss(alone, 0).backward()
    kept = ours.module[2].weight.grad
    value = kept.clone()
    assigned(ours.module)
    assigned(alone)
    sent = ringdp.traffic().bytes_sent if dist.get_backend() == "ring" else 0
    with torch.no_grad():
        loss(ours, 1)
    with ours.no_sync():
        loss(ours, 1).backward()
    assert sent == (ringdp.traffic().bytes_sent if dist.get_backend() == "ring" else 0)
    loss(alone, 1).backward()
    for model in (ours, alone):
        loss(model, 2).backward()
    for one, other in zip(ours.module.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-5, atol=1e-6)
    assert torch.equal(kept, value), "a gradient that somebody kept has changed"
    again = copy.deepcopy(ours)
    reference = copy.deepcopy(alone)
    weight(again.module)
    with as_rank_0():
        weight(reference)
    train(again, own_batch, range(3, 5))
    train(reference, joined_batch, range(3, 5))
    for one, other in zip(again.module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@on_ranks(backend=backends())
def test_in_functional_call() -> None:
    """Tensors that autograd made of the parameters are no new parameters: the gradients reach those that there are."""
    ours, alone = RingDP(models.build("mlp")), models.build("mlp")
    layouts = []
    for model, batch in ((ours, own_batch), (alone, joined_batch)):
        for step in range(2):
            x, y = batch(step)
            doubled = {name: 2 * it for name, it in model.named_parameters()}
            nn.functional.cross_entropy(torch.func.functional_call(model, doubled, (x,)), y).backward()
            layouts.append(ours.reducer.plan.rebuilt())
    for one, other in zip(ours.module.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-5, atol=1e-6)
    assert layouts[1], "the buckets were laid out anew"


@on_ranks(backend=backends())
def test_structure_only() -> None:
    """Layers without parameters, or the same parameters in another order: nothing to agree about."""
    ours = RingDP(models.build("mlp"), bucket_cap_mb=0.001)
    train(ours, own_batch, range(2))
    if dist.get_rank() == 0:
        ours.module[1] = nn.Sequential(nn.ReLU(), nn.Identity())
        ours.module[3].register_buffer("unused", torch.zeros(()), persistent=False)
    ours.broadcast_buffers = ours.forward_sync_buffers = False
    train(ours, own_batch, range(2, 4))
    assert ours.reducer.plan.rebuilt()


@on_ranks(backend=backends())
def test_own_values() -> None:
    """With init_sync=False new parameters keep the values that their rank gave them."""
    ours = RingDP(models.build("mlp"), init_sync=False)
    weight(ours.module)
    x, _ = own_batch(0)
    ours(x).sum().backward()
    assert torch.equal(ours.module[2].weight, fresh(40, 40))


def all_are_here() -> None:
    """Beside the group: when this returns, no rank has an operation under way."""
    store: Any = distributed_c10d._get_default_store()
    store.set(f"here{dist.get_rank()}", "")
    store.wait([f"here{rank}" for rank in range(dist.get_world_size())])


def disagree(changes: list[str]) -> tuple[str, str, str, float]:
    """Each rank makes the change of that name, or none; what the step raises, and how long it took."""
    ours = RingDP(models.build("mlp"), bucket_cap_mb=0.001)
    train(ours, own_batch, range(2))
    all_are_here()
    name = changes[dist.get_rank()]
    if name:
        globals()[name](ours.module)
    began = time.monotonic()
    try:
        train(ours, own_batch, range(2, 3))
    except Exception as error:
        return type(error).__name__, str(error), getattr(error, "name", ""), time.monotonic() - began
    return "", "", "", 0.0


def weight_of_another(model: Any) -> None:
    model[0].weight = fresh(40, 12)


def other_type(model: Any) -> None:
    model[2].weight = nn.Parameter(fresh(40, 40).double())


@pytest.mark.parametrize("backend", backends())
@pytest.mark.parametrize(
    "changes",
    [["weight", "", ""], ["weight", "weight_of_another", "weight"], ["weight", "weight", "other_type"]],
    ids=str,
)
def test_ranks_that_disagree_get_the_names(backend: str, changes: list[str]) -> None:
    if backend == "gloo" and "" in changes:
        pytest.skip("gloo does not tell an all-gather from an all-reduce")
    for rank, outcome in enumerate(run_outcomes(disagree, changes, world_size=3, backend=backend)):
        assert outcome.text is None, outcome.text
        kind, text, _, took = outcome.value
        assert kind == "MismatchError", text
        assert "2.weight" in text or "0.weight" in text
        assert took < 10
        if changes[rank]:
            words = r"since the last forward \d\.weight was replaced on rank \d, and not all ranks"
            assert re.search(words, text), text


@on_ranks(backend=backends())
def test_what_one_rank_refuses_all_hear() -> None:
    """Rank 0 alone has put its new parameter on another device."""
    ours = RingDP(models.build("mlp"))
    on_meta = dist.get_rank() == 0
    ours.module[2].weight = nn.Parameter(torch.empty(40, 40, device="meta")) if on_meta else fresh(40, 40)
    began = time.monotonic()
    with pytest.raises(ringdp.RingError) as caught:
        ours(own_batch(0)[0])
    assert time.monotonic() - began < 10
    assert type(caught.value) is (ringdp.InvalidArgumentError if on_meta else ringdp.MismatchError)
    assert str(caught.value).startswith("since the last forward 2.weight was replaced")
    assert on_meta or "rank 0 cannot follow that" in str(caught.value)
    assert "parameter 2.weight is on meta" in str(caught.value)


@on_ranks(backend=backends())
def test_what_cannot_be_followed_is_refused() -> None:
    precision = _MixedPrecision(param_dtype=torch.bfloat16)
    elsewhere = nn.Parameter(torch.empty(40, 40, device="meta"))
    cases: tuple[tuple[Any, nn.Parameter, type[Exception]], ...] = (
        ({"mixed_precision": precision}, fresh(40, 40), ringdp.InvalidStateError),
        ({}, elsewhere, ringdp.InvalidArgumentError),
    )
    for options, replacement, error in cases:
        ours = RingDP(models.build("mlp"), **options)
        ours.module[2].weight = replacement
        with pytest.raises(error, match=r"since the last forward 2\.weight was replaced"):
            ours(own_batch(0)[0])


def compressed(compression: Any, change: str) -> tuple[dict[str, Any], dict[str, Any], list[Tensor], int, Any]:
    """The states just before and just after the first forward with the change; parameters and steps at the end."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 100), nn.Tanh(), nn.Linear(100, 40), nn.Tanh(), nn.Linear(40, 5))
    # Residuals from the first step on, though the model is small.
    ours = RingDP(model, compression=Compression(compression, [(range(200, 10_000), compression)]), bucket_cap_mb=0.01)
    ours.measure_compression(every=2)
    train(ours, own_batch, range(3))
    before = copy.deepcopy(ours.compression_state_dict())
    globals()[change](ours.module)
    x, y = own_batch(3)
    loss = nn.functional.cross_entropy(ours(x), y)
    after = copy.deepcopy(ours.compression_state_dict())
    loss.backward()
    train(ours, own_batch, range(4, 7))
    parameters = [it.detach().clone() for it in ours.module.parameters()]
    probe = ours.ringdp_features[GradientCompression].attached("test").probe
    assert probe is not None
    return before, after, parameters, ours.stats().steps, {row.step for row in probe.rows}


def first_weight(model: Any) -> None:
    model[0].weight = fresh(100, 12)


def wider_head(model: Any) -> None:
    model[2] = linear(100, 50)
    model[4] = linear(50, 5)


@pytest.mark.parametrize("backend", backends())
@pytest.mark.parametrize("change", [first_weight, wider_head])
@pytest.mark.parametrize("compression", ["int4", Steps(), "topk"], ids=compressor_id)
def test_what_compression_remembers_stays_with_the_names(backend: str, compression: Any, change: Change) -> None:
    results = run_ranks(compressed, compression, change.__name__, backend=backend)
    for rank, (before, after, parameters, steps, looked_at) in enumerate(results):
        assert before["steps"] == after["steps"] == 3
        assert steps == 7
        assert looked_at == {0, 2, 4, 6}
        old, new = before["ranks"][str(rank)], after["ranks"][str(rank)]
        changed = {"0.weight"} if change is first_weight else {"2.weight", "4.weight"}
        for name in old.keys() - changed:
            assert same_entries(old[name], new[name]), name
        if change is first_weight:  # of the same shape
            assert same_entries(old["0.weight"], new["0.weight"])
        else:
            assert not torch.as_tensor(new["2.weight"].get("residual", 0)).any()
        for one, other in zip(parameters, results[0][2], strict=True):
            assert torch.equal(one, other)


def same_entries(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(it, other[key]) if isinstance(it, Tensor) else it == other[key] for key, it in one.items()
    )


@on_ranks(backend=backends())
def test_what_forward_itself_replaces_is_refused() -> None:
    model = RingDP(models.build("mlp"))
    told = []
    for when in ("trains", "evaluates", "trains after"):
        handle = model.module.register_forward_pre_hook(lambda module, _: setattr(module[2], "weight", fresh(40, 40)))
        if when != "trains":
            handle.remove()
        try:
            with torch.set_grad_enabled(when != "evaluates"):
                loss = model(own_batch(0)[0]).sum()
            if loss.requires_grad:
                loss.backward()
            told.append("")
        except ringdp.InvalidStateError as error:
            told.append(str(error))
        handle.remove()
    assert "while forward ran 2.weight was replaced" in told[0]
    assert told[1:] == ["", ""]
