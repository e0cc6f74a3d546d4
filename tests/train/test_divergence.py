"""The divergence guard: what differs is found in time and named, what is meant to differ is left alone."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as local_sgd
from torch.distributed.algorithms.join import Join

from ringdp.ddp.divergence.options import Guard, ReplicaGuard
from ringdp.errors import InvalidArgumentError, MismatchError
from tests.helpers import logged
from tests.train.harness import backends, default_group, each, ring_is_built, run_ranks, same_everywhere
from tests.train.models import Tied, convolutional, mlp

pytestmark = pytest.mark.skipif(not ring_is_built(), reason="ringdp is not built")
LOG = ("ringdp.divergence", logging.INFO)


def wrapped(module: nn.Module, **options: Any) -> Any:
    import ringdp

    return ringdp.RingDP(begun(module), **options)


def bits(tensors: Any) -> list[Any]:
    return [tensor.detach().view(torch.int32).tolist() for tensor in tensors]


def begun(module: nn.Module) -> nn.Module:
    """With the parameters that all of these tests begin with."""
    torch.manual_seed(1)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(4, 12, generator=torch.Generator().manual_seed(100 * step + rank))


def step(model: Any, optimizer: Any, number: int) -> None:
    model(batch(default_group().rank(), number)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def found(
    model: Any, steps: int, change: Callable[[int], Any] = lambda number: None, optimizer: Any = None
) -> tuple[int, Any]:
    """Run steps, each after `change`: the one in which the guard raised, and the error."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.0)
    for number in range(steps):
        change(number)
        try:
            step(model, optimizer, number)
        except ValueError as error:
            return number, error
    raise AssertionError("not found")


def flip(tensor: Tensor, bit: int = 0) -> None:
    with torch.no_grad():
        flat = tensor.view(-1)[-1:].view(torch.int32)
        flat ^= 1 << bit


def on(guilty: int, when: int, tensor: Callable[[], Tensor], bit: int = 0) -> Callable[[int], Any]:
    """For `found`: that rank's bit flips before that step."""

    def change(number: int) -> None:
        if number == when and default_group().rank() == guilty:
            flip(tensor(), bit)

    return change


# On three ranks.


def a_flipped_bit_is_found_in_time_with_its_name_and_rank(every: int, when: int, name: str, bit: int) -> None:
    model = wrapped(mlp(), guard=every)
    number, error = found(model, when + 3 * every + 3, on(2, when, lambda: model.module.get_parameter(name), bit))
    assert number - when <= every
    assert f"parameter '{name}' on rank 2 differs from that on ranks 0, 1 (of 6 tensors)" in str(error)
    assert error.name == f"parameter '{name}'"
    assert error.rank == default_group().rank()
    assert error.peer == (2 if error.rank != 2 else None)
    assert number == error.step + 1  # at the forward after the step beside which the hashes travelled


def warned(action: str, rate: float = 0.01) -> tuple[list[str], list[Tensor]]:
    """What the guard says of a bit that flips on rank 0, and the parameters after it."""
    model = wrapped(mlp(), guard=Guard(4, action))
    optimizer = torch.optim.SGD(model.parameters(), rate)
    with logged(*LOG) as lines:
        for number in range(30):
            step(model, optimizer, number)
            if number == 5 and default_group().rank() == 0:
                flip(model.module[2].weight, 20)
        if action == "warn":  # what the guard leaves alone now is compared all the same
            with pytest.raises(MismatchError, match=r"the replicas differ: parameter '2\.weight'"):
                model.check_replicas()
    assert len(lines) == (default_group().rank() == 0 or dist.get_world_size() == 2)
    return lines, [parameter.detach() for parameter in model.parameters()]


def a_warning_comes_once_for_each_tensor_and_training_goes_on() -> None:
    for line in warned("warn")[0]:
        assert "parameter '2.weight' on rank 0 differs from that on ranks 1, 2" in line
        assert "It is not compared again" in line
        assert len(f"ringdp: {line}") <= 2 * 128  # of a console


def sync_copies_from_the_majority() -> None:
    lines, parameters = warned("sync")
    assert all("All ranks have the majority's from now on" in line for line in lines)
    assert same_everywhere(bits(parameters))
    _, parameters = warned("sync", 0.0)  # none of rank 0's, which was the odd one
    assert all(map(torch.equal, parameters, begun(mlp()).parameters()))


def replicas_can_be_compared_at_once() -> None:
    model = wrapped(mlp(), guard=0)
    assert model.ringdp_features[ReplicaGuard].guard is None
    model.check_replicas()
    if default_group().rank() == 2:
        flip(model.module[4].weight)
        flip(model.module[4].bias)
    words = "parameter '4.weight' on rank 2 differs from that on ranks 0, 1, and so do 1 more of 6 tensors"
    with pytest.raises(MismatchError, match=words):
        model.check_replicas()


@pytest.mark.parametrize("backend", backends())
def test_three_ranks(backend: str) -> None:
    flips = [
        (1, 3, "0.weight", 0),
        (2, 7, "4.bias", 31),
        (5, 4, "2.weight", 12),
        (20, 6, "4.bias", 1),
        (40, 57, "0.weight", 3),
    ]
    run_ranks(
        each,
        *(partial(a_flipped_bit_is_found_in_time_with_its_name_and_rank, *it) for it in flips),
        a_warning_comes_once_for_each_tensor_and_training_goes_on,
        sync_copies_from_the_majority,
        replicas_can_be_compared_at_once,
        world_size=3,
        backend=backend,
    )


# On two ranks.


def uneven_backwards_are_found(how: str) -> None:
    model = wrapped(mlp(), guard=6, broadcast_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)

    def change(number: int) -> None:
        if default_group().rank() != 1 or number != 7:
            return
        model(batch(1, 99)).square().mean().backward()
        if how == "no optimizer":
            optimizer.zero_grad()

    _, error = found(model, 40, change, optimizer)
    assert "parameter '0.weight' differs between rank 0 and rank 1" in str(error)


@pytest.mark.parametrize("backend", backends())
@pytest.mark.parametrize("how", ["forward and backward", "no optimizer"])
def test_a_rank_that_ran_another_number_of_backwards_is_found(backend: str, how: str) -> None:
    run_ranks(uneven_backwards_are_found, how, backend=backend, timeout_s=50)


def uneven_backwards_of_equal_replicas() -> None:
    model = wrapped(mlp(), guard=6, broadcast_buffers=False)
    words = "the ranks' steps differ; rank 1 has run 9 backwards in 8 steps that began with a forward"
    if dist.get_backend() == "ring":  # compares the operations' names, and finds it in that step
        words = "a second backward through one forward"

    def steps() -> None:
        for number in range(40):
            loss = model(batch(0, number)).square().mean()
            if default_group().rank() == 1 and number == 7:
                loss.backward(retain_graph=True)
            loss.backward()

    with pytest.raises(ValueError, match=words):
        steps()


@pytest.mark.parametrize("backend", backends())
def test_a_backward_too_many_is_found_where_replicas_are_still_equal(backend: str) -> None:
    run_ranks(uneven_backwards_of_equal_replicas, backend=backend, timeout_s=50)


class WithBuffers(nn.Module):
    """Its buffers are this rank's: a counter, and batch statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 6)
        self.norm = nn.BatchNorm1d(6)
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1 + default_group().rank())
        return self.norm(self.linear(x))


def training_as_it_should_be_is_not_disturbed(case: str) -> None:
    import ringdp

    options: dict[str, Any] = {"guard": 3}
    rank = default_group().rank()
    with logged(*LOG) as lines:
        module: nn.Module = mlp()
        if case in ("buffers", "broadcast"):
            module = WithBuffers()
            options |= {"broadcast_buffers": case == "broadcast"}
            options |= {"guard": Guard(3, ignore=["calls"])} if case == "buffers" else {}
        elif case == "ignored":
            options["guard"] = Guard(3, ignore=["4.*"])
        elif case == "convolutional":
            module = convolutional()
        elif case == "tied":
            module = Tied()
        elif case == "precision":
            half = torch.nn.parallel.distributed._MixedPrecision(param_dtype=torch.bfloat16)
            options["mixed_precision"] = half
        elif case == "frozen":
            module[0].requires_grad_(False)  # type: ignore[index]
        model = wrapped(module, **options)
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        model.guard_optimizer(optimizer)
        scaler = ringdp.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2) if case == "amp" else None
        for number in range(25):
            if case == "ignored" and rank == 1 and number == 5:
                flip(model.module[4].bias)
            if case == "replaced" and number in (6, 13):
                torch.manual_seed(number)
                model.module[0].weight = nn.Parameter(torch.randn(40, 12))
                optimizer = torch.optim.Adam(model.parameters(), 0.01)
            if case == "frozen" and number == 11:
                module[0].requires_grad_(True)  # type: ignore[index]
            if case == "accumulation":
                with model.no_sync():
                    model(batch(rank, 1000 + number)).square().mean().backward()
                    model(batch(rank, 2000 + number)).square().mean().backward()
            if case == "evaluation":
                with torch.no_grad():
                    model(batch(rank, number))
            loss = model(batch(rank, number)).square().mean()
            if scaler is None:
                loss.backward()
                optimizer.step()
            else:
                scaler.scale(loss * (float("inf") if number % 7 == 3 and rank == 1 else 1.0)).backward()
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()
        assert model.ringdp_features[ReplicaGuard].guard._looks > 10
        model.check_replicas()
    assert lines == []


QUIET = (
    *("plain", "buffers", "broadcast", "ignored", "convolutional", "tied", "precision", "frozen"),
    *("amp", "replaced", "accumulation", "evaluation"),
)


def the_guard_rests_while_ranks_join_and_then_goes_on() -> None:
    model = wrapped(mlp(), guard=3)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with logged(*LOG) as lines:
        for number in range(8):
            step(model, optimizer, number)
        for _ in range(2):
            looks = model.ringdp_features[ReplicaGuard].guard._looks
            with Join([model]):
                for number in range(5 + 4 * default_group().rank()):
                    step(model, optimizer, number)
            assert model.ringdp_features[ReplicaGuard].guard._looks in (0, looks)
            for number in range(7):
                step(model, optimizer, 50 + number)
            assert model.ringdp_features[ReplicaGuard].guard._looks > 0
        model.check_replicas()
    assert lines == []
    _, error = found(model, 4, on(0, 0, lambda: model.module[2].weight, 7), optimizer)
    assert isinstance(error, MismatchError)
    assert error.name == "parameter '2.weight'"


def a_group_of_ranks_with_other_numbers_of_steps_is_guarded() -> None:
    """As torchft does it: a rank that has run fewer steps comes in."""
    rank = default_group().rank()
    pair, alone = dist.new_group([0, 1]), [dist.new_group([one]) for one in range(2)][rank]
    model = wrapped(mlp(), guard=3)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    model._update_process_group(alone)
    for number in range(4 + 5 * rank):
        step(model, optimizer, number)
    model._update_process_group(pair)
    for number in range(9):
        step(model, optimizer, number)
    _, error = found(model, 5, on(1, 0, lambda: model.module[0].weight))
    assert "parameter '0.weight' differs between rank 0 and rank 1" in str(error)
    assert "backwards" not in str(error)


@pytest.mark.parametrize("backend", backends())
def test_two_ranks(backend: str) -> None:
    run_ranks(
        each,
        *(partial(training_as_it_should_be_is_not_disturbed, case) for case in QUIET),
        the_guard_rests_while_ranks_join_and_then_goes_on,
        a_group_of_ranks_with_other_numbers_of_steps_is_guarded,
        backend=backend,
    )


def every_place_is_found_within_the_steps() -> None:
    """Each byte of a small module flips in turn."""
    every = 23
    for place in range(1, 25, 3):
        model = wrapped(nn.Linear(12, 1), guard=every)
        part = model.module.weight[:, : 1 + place % 12]
        number, _ = found(model, 4 * every, on(1, place, partial(Tensor.detach, part), 7))
        assert number - place <= every


def two_ranks_have_no_majority_and_take_the_lower_ones() -> None:
    lines, parameters = warned("sync")
    assert all("parameter '2.weight' differs between rank 0 and rank 1" in line for line in lines)
    assert same_everywhere(bits(parameters))


def a_buffer_that_differs_is_named_and_batch_statistics_are_left_out() -> None:
    _, error = found(wrapped(WithBuffers(), guard=3, broadcast_buffers=False), 12)
    assert "buffer 'calls' differs between rank 0 and rank 1 (of 5 tensors)" in str(error)


def optimizer_state_is_compared_where_it_is_given() -> None:
    model = wrapped(mlp(), guard=4)
    optimizer = torch.optim.Adam(model.parameters(), 0.0)
    model.guard_optimizer(optimizer)
    change = on(1, 6, lambda: optimizer.state[model.module[4].bias]["exp_avg_sq"], 30)
    _, error = found(model, 12, change, optimizer)
    assert "optimizer state 'exp_avg_sq' of '4.bias' differs between rank 0 and rank 1" in str(error)


def a_difference_that_is_gone_again_is_told_as_that() -> None:
    """The bit flips back before the hashes are compared: all is hashed after step 40, and judged after step 41."""
    model = wrapped(mlp(), guard=40)

    def change(number: int) -> None:
        if default_group().rank() == 1 and number in (38, 41):
            flip(model.module[2].weight, 3)

    _, error = found(model, 80, change)
    assert "the replicas differed and do so no longer: " in str(error)
    assert "one of parameter '0.weight' to parameter '4.bias'" in str(error)


def ranks_with_other_guards_are_told() -> None:
    with pytest.raises(MismatchError) as caught:
        wrapped(mlp(), guard=3 + default_group().rank())
    assert "every=3, on='raise', ignore=[] on rank" in str(caught.value)
    assert "every=4" in str(caught.value)


def a_copy_of_the_wrapper_has_its_own_guard() -> None:
    again = copy.deepcopy(wrapped(mlp(), guard=10))
    optimizer = torch.optim.SGD(again.parameters(), 0.1)
    for number in range(25):
        step(again, optimizer, number)
    assert again.ringdp_features[ReplicaGuard].guard._looks == 24


def by_default_it_can_raise_and_can_be_left_out() -> None:
    model = wrapped(mlp(), guard=Guard(on="raise"))
    number, error = found(model, 540, on(1, 20, lambda: model.module[2].weight, 5))
    assert number <= 520
    assert isinstance(error, MismatchError)
    assert "parameter '2.weight' differs between rank 0 and rank 1" in str(error)
    assert wrapped(mlp(), init_sync=False).ringdp_features[ReplicaGuard].guard is None


def a_hook_that_lets_replicas_differ_is_left_alone(name: str) -> None:
    model = wrapped(mlp())
    state: Any = None
    if name == "local SGD":
        alone = [dist.new_group([rank]) for rank in range(2)][default_group().rank()]
        state = local_sgd.PostLocalSGDState(None, alone, start_localSGD_iter=5)
    hooks: dict[str, Any] = {
        "mean": default_hooks.allreduce_hook,
        "half": default_hooks.bf16_compress_hook,
        "none": debugging_hooks.noop_hook,
        "local SGD": local_sgd.post_localSGD_hook,
    }
    model.register_comm_hook(state, hooks[name])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with logged(*LOG) as lines:
        for number in range(60):
            step(model, optimizer, number)
    assert lines == []
    equal = name in ("mean", "half")
    assert same_everywhere(bits(model.parameters())) == equal
    assert (model.ringdp_features[ReplicaGuard].guard is not None) == equal


def by_default_programs_that_run_without_it_run_with_it(case: str) -> None:
    """Programs in which ranks differ on purpose, or call forward on one rank alone."""
    rank = default_group().rank()
    module: nn.Module = WithBuffers() if case == "buffers" else mlp()
    model = wrapped(module, broadcast_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    with logged(*LOG) as lines:
        for number in range(130):
            if case == "one rank looks" and rank == 0:
                model.eval()
                model(batch(0, number))  # records gradients, and has no backward
                model.train()
            if case == "one rank looks":
                dist.barrier()
            if case == "micro-batches" and rank == 1:
                with model.no_sync():
                    model(batch(rank, 1000 + number)).square().mean().backward()
            if case == "two backwards":
                loss = model(batch(rank, number)).square().mean()
                loss.backward(retain_graph=True)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                continue
            if case == "join" and number == 60:
                with Join([model]):
                    for again in range(3 + 4 * rank):
                        step(model, torch.optim.SGD(model.parameters(), 0.05), again)
            step(model, torch.optim.SGD(model.parameters(), 0.05) if case == "join" else optimizer, number)
    assert model.ringdp_features[ReplicaGuard].guard is not None
    assert model.ringdp_features[ReplicaGuard].guard._number > 3
    assert lines == []


@pytest.mark.skipif("ring" not in backends(), reason="ring is not asked for")
def test_two_ranks_over_ring() -> None:
    run_ranks(
        each,
        every_place_is_found_within_the_steps,
        two_ranks_have_no_majority_and_take_the_lower_ones,
        a_buffer_that_differs_is_named_and_batch_statistics_are_left_out,
        optimizer_state_is_compared_where_it_is_given,
        a_difference_that_is_gone_again_is_told_as_that,
        ranks_with_other_guards_are_told,
        a_copy_of_the_wrapper_has_its_own_guard,
        by_default_it_can_raise_and_can_be_left_out,
        *(partial(a_hook_that_lets_replicas_differ_is_left_alone, it) for it in ("mean", "half", "none", "local SGD")),
        *(
            partial(by_default_programs_that_run_without_it_run_with_it, case)
            for case in ("buffers", "one rank looks", "micro-batches", "two backwards", "join")
        ),
        backend="ring",
    )


def by_default(when: int, steps: int) -> tuple[list[str], int]:
    """What the guard that nobody asked for logs, and the step after which it did."""
    model = wrapped(mlp())
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    change = on(2, when, lambda: model.module[2].weight, 5)
    seen = 0
    with logged(*LOG) as lines:
        for number in range(steps):
            change(number)
            step(model, optimizer, number)
            if lines and not seen:
                seen = number - when
    return lines, seen


@pytest.mark.parametrize("when", [0, 560])
def test_by_default_a_flipped_bit_is_told_once_and_training_goes_on(when: int) -> None:
    results = run_ranks(by_default, when, when + 510, world_size=3, backend="ring")
    assert [len(lines) for lines, _ in results] == [1, 0, 1]
    for rank in (0, 2):
        (line,), steps = results[rank]
        assert "parameter '2.weight' on rank 2 differs from that on ranks 0, 1 (of 6 tensors)" in line
        assert steps <= 500


def arguments_that_cannot_be_used_are_refused() -> None:
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: -1, "Guard: every must be a whole number from 0 on, not -1"),
        (lambda: True, "RingDP: guard must be a ringdp.Guard, a number of steps, or None, not True"),
        (lambda: 1.5, "RingDP: guard must be"),
        (lambda: Guard("often"), "Guard: every must be"),  # type: ignore[arg-type]
        (lambda: Guard(on="stop"), "Guard: on must be one of raise, warn, sync, not 'stop'"),
        (lambda: Guard(ignore="0.weight"), "Guard: ignore must be a list of names or patterns"),
        (lambda: Guard(ignore=["nothing.*"]), "has 'nothing.*', which fits no parameter and no buffer"),
    ]
    for given, words in cases:
        with pytest.raises(InvalidArgumentError) as caught:
            wrapped(mlp(), guard=given())
        assert words in str(caught.value)


def test_arguments_that_cannot_be_used_are_refused() -> None:
    run_ranks(arguments_that_cannot_be_used_are_refused, world_size=1)


def test_what_no_plain_memory_holds_is_left_out_and_the_parts_of_others_are_compared() -> None:
    from ringdp.ddp.divergence.replica import Replica

    class Opaque(Tensor):
        @classmethod
        def __torch_dispatch__(cls, *arguments: Any) -> Any:
            raise NotImplementedError

    module: Any = mlp()
    opaque: Any = torch.Tensor._make_wrapper_subclass(Opaque, (40, 12))
    module[0].register_buffer("opaque", opaque)
    module[2].register_buffer("packed", torch.zeros(3, 3).to_mkldnn())
    module[2].register_buffer("sparse", torch.eye(3).to_sparse())
    replica = Replica.of(module, with_buffers=True)
    assert replica.left_out == ("buffer '0.opaque'", "buffer '2.packed'")
    assert len(replica.names) == 8
    assert replica.names[-2:] == ("indices of buffer '2.sparse'", "values of buffer '2.sparse'")


def test_the_hash_of_parts_adds_up_over_any_cut() -> None:
    from ringdp import _C

    torch.manual_seed(0)
    tensors = [torch.randn(7, 3), torch.zeros(0), torch.randint(9, (5,)), torch.randn(4, 6).t(), torch.randn(8)[::2]]
    one = _C.ReplicaHash(tensors)
    assert one.bytes == sum(tensor.nbytes for tensor in tensors)
    for parts in (1, 2, 7, one.bytes, one.bytes + 3):
        seen = [one.tensors_in(part, parts) for part in range(parts)]
        assert {index for first, end in seen for index in range(first, end)} >= {0, 2, 3, 4}
        before = [one.part(part, parts) for part in range(parts)]
        flip(tensors[0])
        after = [one.part(part, parts) for part in range(parts)]
        flip(tensors[0])
        assert sum(a != b for a, b in zip(before, after, strict=True)) == 1
    assert (
        one.each() == _C.ReplicaHash([tensor.clone(memory_format=torch.preserve_format) for tensor in tensors]).each()
    )
    with pytest.raises(ValueError, match="tensor 0 is Sparse"):
        _C.ReplicaHash([torch.eye(3).to_sparse()])
