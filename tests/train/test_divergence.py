"""The divergence guard: what differs is found in time and named, what is meant to differ is left alone."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ringdp.errors import MismatchError
from tests.helpers import logged
from tests.train.harness import RankFailed, backends, default_group, ring_is_built, run_outcomes, run_ranks
from tests.train.models import Tied, convolutional, mlp

pytestmark = pytest.mark.skipif(not ring_is_built(), reason="ringdp is not built")
LOG = ("ringdp.divergence", logging.INFO)


def wrapped(module: nn.Module, **options: Any) -> Any:
    import ringdp

    return ringdp.RingDP(begun(module), **options)


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


def flip(tensor: Tensor, bit: int = 0) -> None:
    with torch.no_grad():
        flat = tensor.view(-1)[-1:].view(torch.int32)
        flat ^= 1 << bit


def found_after(every: int, guilty: int, when: int, name: str, bit: int) -> tuple[int, str, Any]:
    """In how many steps a flipped bit was found, and the error."""
    model = wrapped(mlp(), guard_every=every, on_divergence="raise")
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    for number in range(when + 3 * every + 3):
        if number == when and default_group().rank() == guilty:
            flip(dict(model.module.named_parameters())[name], bit)
        try:
            step(model, optimizer, number)
        except ValueError as error:
            return number - when, str(error), error
    raise AssertionError("not found")


@pytest.mark.parametrize("backend", backends())
@pytest.mark.parametrize(
    ("every", "when", "name", "bit"),
    [
        (1, 3, "0.weight", 0),
        (2, 7, "4.bias", 31),
        (5, 4, "2.weight", 12),
        (20, 6, "4.bias", 1),
        (40, 57, "0.weight", 3),
    ],
)
def test_a_flipped_bit_is_found_in_time_with_its_name_and_rank(
    backend: str, every: int, when: int, name: str, bit: int
) -> None:
    results = run_ranks(found_after, every, 2, when, name, bit, world_size=3, backend=backend)
    for steps, text, error in results:
        assert steps <= every
        assert f"parameter '{name}' on rank 2 differs from that on ranks 0, 1 (of 6 tensors)" in text
        assert f"parameter '{name}'" == error.name
        assert error.peer == (2 if error.rank != 2 else None)
        assert error.step is not None
    assert [error.rank for _, _, error in results] == [0, 1, 2]


def slices(every: int) -> set[int]:
    """Flip each byte of a small module in turn; the steps that each took."""
    took = set()
    for place in range(1, 25, 3):
        model = wrapped(nn.Linear(12, 1), guard_every=every, on_divergence="raise")
        optimizer = torch.optim.SGD(model.parameters(), 0.0)
        for number in range(4 * every):
            if number == place and default_group().rank() == 1:
                flip(model.module.weight[:, : 1 + place % 12], 7)
            try:
                step(model, optimizer, number)
            except ValueError:
                took.add(number - place)
                break
        else:
            raise AssertionError(f"{place} not found")
    return took


def test_every_place_is_found_within_the_steps() -> None:
    every = 23
    for took in run_ranks(slices, every, world_size=2, backend="ring"):
        assert max(took) <= every


def warned(action: str, rate: float = 0.01) -> tuple[list[str], list[Tensor]]:
    model = wrapped(mlp(), guard_every=4, on_divergence=action)
    optimizer = torch.optim.SGD(model.parameters(), rate)
    with logged(*LOG) as lines:
        for number in range(30):
            step(model, optimizer, number)
            if number == 5 and default_group().rank() == 0:
                flip(model.module[2].weight, 20)
        if action == "warn":  # what the guard leaves alone now is compared all the same
            with pytest.raises(ValueError, match=r"the replicas differ: parameter '2\.weight'"):
                model.check_replicas()
    return lines, [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("backend", backends())
def test_a_warning_comes_once_for_each_tensor_and_training_goes_on(backend: str) -> None:
    results = run_ranks(warned, "warn", world_size=3, backend=backend)
    for rank, (lines, _) in enumerate(results):
        assert len(lines) == (rank == 0)
    assert "parameter '2.weight' on rank 0 differs from that on ranks 1, 2" in results[0][0][0]
    assert "It is not compared again" in results[0][0][0]


@pytest.mark.parametrize("backend", backends())
def test_sync_copies_from_the_majority(backend: str) -> None:
    results = run_ranks(warned, "sync", world_size=3, backend=backend)
    assert [len(lines) for lines, _ in results] == [1, 0, 0]
    assert "All ranks have the majority's from now on" in results[0][0][0]
    for _, parameters in results[1:]:
        assert all(map(torch.equal, parameters, results[0][1]))
    for _, parameters in run_ranks(warned, "sync", 0.0, world_size=3, backend=backend):
        assert all(
            map(torch.equal, parameters, begun(mlp()).parameters())
        )  # and none of rank 0's, which was the odd one


def test_two_ranks_have_no_majority_and_take_the_lower_ones() -> None:
    (lines, first), (_, second) = run_ranks(warned, "sync", world_size=2, backend="ring")
    assert "parameter '2.weight' differs between rank 0 and rank 1" in lines[0]
    assert all(map(torch.equal, first, second))


def uneven_backwards(how: str) -> str:
    model = wrapped(mlp(), guard_every=6, on_divergence="raise", broadcast_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    guilty = default_group().rank() == 1
    try:
        for number in range(40):
            if guilty and number == 7:
                if how == "forward and backward":
                    model(batch(1, 99)).square().mean().backward()  # a step without the optimizer's
                elif how == "backward":
                    loss = model(batch(1, 99)).square().mean()
                    loss.backward(retain_graph=True)
                elif how == "no optimizer":
                    model(batch(1, number)).square().mean().backward()
                    optimizer.zero_grad()
                    continue
            step(model, optimizer, number)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("backend", backends())
@pytest.mark.parametrize("how", ["forward and backward", "backward", "no optimizer"])
def test_a_rank_that_ran_another_number_of_backwards_is_found(backend: str, how: str) -> None:
    texts = run_ranks(uneven_backwards, how, world_size=2, backend=backend, timeout_s=50)
    for text in texts:
        assert "differ" in text
        assert "parameter '0.weight' differs between rank 0 and rank 1" in text


def uneven_backwards_of_equal_replicas() -> str:
    model = wrapped(mlp(), guard_every=6, on_divergence="raise", broadcast_buffers=False)
    try:
        for number in range(40):
            loss = model(batch(0, number)).square().mean()
            if default_group().rank() == 1 and number == 7:
                loss.backward(retain_graph=True)
            loss.backward()
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("backend", backends())
def test_a_backward_too_many_is_found_where_replicas_are_still_equal(backend: str) -> None:
    for text in run_ranks(uneven_backwards_of_equal_replicas, world_size=2, backend=backend, timeout_s=50):
        if backend == "ring":  # compares the operations' names, and finds it in that step
            assert "a second backward through one forward" in text
        else:
            assert "the ranks' steps differ; rank 1 has run 9 backwards in 8 steps that began with a forward" in text


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


def quiet(case: str) -> list[str]:
    """Some training in which all is well; what the guard said."""
    import ringdp

    options: dict[str, Any] = {"guard_every": 3, "on_divergence": "raise"}
    rank = default_group().rank()
    with logged(*LOG) as lines:
        module: nn.Module = mlp()
        if case in ("buffers", "broadcast"):
            module = WithBuffers()
            options |= {"broadcast_buffers": case == "broadcast"}
            options |= {"guard_ignore": ["calls"]} if case == "buffers" else {}
        elif case == "ignored":
            options["guard_ignore"] = ["4.*"]
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
        assert model._guard._looks > 10
        model.check_replicas()
    return lines


@pytest.mark.parametrize(
    "case",
    [
        *("plain", "buffers", "broadcast", "ignored", "convolutional", "tied", "precision", "frozen"),
        *("amp", "replaced", "accumulation", "evaluation"),
    ],
)
@pytest.mark.parametrize("backend", backends())
def test_training_as_it_should_be_is_not_disturbed(case: str, backend: str) -> None:
    assert run_ranks(quiet, case, world_size=2, backend=backend) == [[], []]


def own_buffers() -> str:
    model = wrapped(WithBuffers(), guard_every=3, on_divergence="raise", broadcast_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    try:
        for number in range(12):
            step(model, optimizer, number)
    except ValueError as error:
        return str(error)
    return ""


def test_a_buffer_that_differs_is_named_and_batch_statistics_are_left_out() -> None:
    for text in run_ranks(own_buffers, world_size=2, backend="ring"):
        assert "buffer 'calls' differs between rank 0 and rank 1 (of 5 tensors)" in text


def optimizer_state() -> str:
    model = wrapped(mlp(), guard_every=4, on_divergence="raise")
    optimizer = torch.optim.Adam(model.parameters(), 0.0)
    model.guard_optimizer(optimizer)
    try:
        for number in range(12):
            step(model, optimizer, number)
            if number == 5 and default_group().rank() == 1:
                flip(optimizer.state[model.module[4].bias]["exp_avg_sq"], 30)
    except ValueError as error:
        return str(error)
    return ""


def test_optimizer_state_is_compared_where_it_is_given() -> None:
    for text in run_ranks(optimizer_state, world_size=2, backend="ring"):
        assert "optimizer state 'exp_avg_sq' of '4.bias' differs between rank 0 and rank 1" in text


def joining() -> None:
    from torch.distributed.algorithms.join import Join

    model = wrapped(mlp(), guard_every=3, on_divergence="raise")
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with logged(*LOG) as lines:
        for number in range(8):
            step(model, optimizer, number)
        for _ in range(2):
            looks = model._guard._looks
            with Join([model]):
                for number in range(5 + 4 * default_group().rank()):
                    step(model, optimizer, number)
            assert model._guard._looks in (0, looks)
            for number in range(7):
                step(model, optimizer, 50 + number)
            assert model._guard._looks > 0
        model.check_replicas()
    assert lines == []
    if default_group().rank() == 0:
        flip(model.module[2].weight, 7)

    def go_on() -> None:
        for number in range(4):
            step(model, optimizer, number)

    with pytest.raises(MismatchError, match=r"2\.weight"):
        go_on()


@pytest.mark.parametrize("backend", backends())
def test_the_guard_rests_while_ranks_join_and_then_goes_on(backend: str) -> None:
    run_ranks(joining, world_size=2, backend=backend)


def other_group() -> str:
    """As torchft does it: a rank that has run fewer steps comes in."""
    import torch.distributed as dist

    rank = default_group().rank()
    pair, alone = dist.new_group([0, 1]), [dist.new_group([one]) for one in range(2)][rank]
    model = wrapped(mlp(), guard_every=3, on_divergence="raise")
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    model._update_process_group(alone)
    for number in range(4 + 5 * rank):
        step(model, optimizer, number)
    model._update_process_group(pair)
    for number in range(9):
        step(model, optimizer, number)
    if rank == 1:
        flip(model.module[0].weight)
    try:
        for number in range(5):
            step(model, optimizer, number)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("backend", backends())
def test_a_group_of_ranks_with_other_numbers_of_steps_is_guarded(backend: str) -> None:
    for text in run_ranks(other_group, world_size=2, backend=backend):
        assert "parameter '0.weight' differs between rank 0 and rank 1" in text
        assert "backwards" not in text


def transient() -> str:
    """The bit flips back before the hashes are compared: all is hashed after step 40, and judged after step 60."""
    model = wrapped(mlp(), guard_every=40, on_divergence="raise")
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    try:
        for number in range(80):
            if default_group().rank() == 1 and number in (38, 45):
                flip(model.module[2].weight, 3)
            step(model, optimizer, number)
    except ValueError as error:
        return str(error)
    return ""


def test_a_difference_that_is_gone_again_is_told_as_that() -> None:
    for text in run_ranks(transient, world_size=2, backend="ring"):
        assert "the replicas differed and do so no longer: " in text
        assert "one of parameter '0.weight' to parameter '4.bias'" in text


def checked_now() -> str:
    model = wrapped(mlp(), guard_every=0)
    assert model._guard is None
    model.check_replicas()
    if default_group().rank() == 2:
        flip(model.module[4].weight)
        flip(model.module[4].bias)
    with pytest.raises(ValueError, match="4") as caught:
        model.check_replicas()
    return str(caught.value)


@pytest.mark.parametrize("backend", backends())
def test_replicas_can_be_compared_at_once(backend: str) -> None:
    for text in run_ranks(checked_now, world_size=3, backend=backend):
        assert "parameter '4.weight' on rank 2 differs from that on ranks 0, 1, and so do 1 more of 6 tensors" in text


def other_options() -> None:
    wrapped(mlp(), guard_every=3 + default_group().rank())


def test_ranks_with_other_guards_are_told() -> None:
    outcomes = run_outcomes(other_options, world_size=2, backend="ring")
    for outcome in outcomes:
        assert "guard_every=3, on_divergence='raise', guard_ignore=[] on rank" in str(outcome.error)
        assert "guard_every=4" in str(outcome.error)


def refused(options: dict[str, Any]) -> None:
    wrapped(mlp(), **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"guard_every": -1}, "guard_every must be a number of steps from 0 on, or None, not -1"),
        ({"guard_every": True}, "guard_every must be"),
        ({"guard_every": 1.5}, "guard_every must be"),
        ({"on_divergence": "stop"}, "on_divergence must be one of 'raise', 'warn', 'sync', not 'stop'"),
        ({"guard_ignore": "0.weight"}, "guard_ignore must be a list of names or patterns"),
        ({"guard_ignore": ["nothing.*"]}, "has 'nothing.*', which fits no parameter and no buffer"),
    ],
)
def test_arguments_that_cannot_be_used_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(RankFailed) as failed:
        run_ranks(refused, options, world_size=1, backend="gloo")
    assert words in str(failed.value)


def copied() -> bool:
    model = wrapped(mlp(), guard_every=10)
    again = copy.deepcopy(model)
    optimizer = torch.optim.SGD(again.parameters(), 0.1)
    for number in range(25):
        step(again, optimizer, number)
    return bool(again._guard._looks == 24)


def test_a_copy_of_the_wrapper_has_its_own_guard() -> None:
    assert run_ranks(copied, world_size=2, backend="ring") == [True, True]


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


def by_default(options: dict[str, Any], guilty: int, when: int, steps: int) -> tuple[list[str], int]:
    """What the guard that nobody asked for logs, and the step after which it did."""
    model = wrapped(mlp(), **options)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    found = 0
    with logged(*LOG) as lines:
        for number in range(steps):
            if number == when and default_group().rank() == guilty:
                flip(model.module[2].weight, 5)
            step(model, optimizer, number)
            if lines and not found:
                found = number - when
    return lines, found


def test_by_default_a_flipped_bit_is_told_once_and_training_goes_on() -> None:
    for when in (0, 35, 700):
        results = run_ranks(by_default, {}, 2, when, when + 540, world_size=3, backend="ring")
        assert [len(lines) for lines, _ in results] == [1, 0, 1]
        for rank in (0, 2):
            (line,), steps = results[rank]
            assert "parameter '2.weight' on rank 2 differs from that on ranks 0, 1 (of 6 tensors)" in line
            assert steps <= 500


def test_by_default_it_can_raise() -> None:
    outcomes = run_outcomes(by_default, {"on_divergence": "raise"}, 1, 20, 540, world_size=2, backend="ring")
    for outcome in outcomes:
        assert isinstance(outcome.error, MismatchError)
        assert "parameter '2.weight' differs between rank 0 and rank 1" in str(outcome.error)


@pytest.mark.parametrize("options", [{"guard_every": 0}, {"init_sync": False}, {"guard_ignore": ["2.*"]}])
def test_it_can_be_left_out(options: dict[str, Any]) -> None:
    assert run_ranks(by_default, options, 1, 20, 540, world_size=2, backend="ring") == [([], 0)] * 2


def hooked(name: str) -> tuple[bool, list[str]]:
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks
    from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as local_sgd

    model = wrapped(mlp())
    state: Any = None
    hook: Any = default_hooks.allreduce_hook
    if name == "half":
        hook = default_hooks.bf16_compress_hook
    elif name == "none":
        hook = debugging_hooks.noop_hook
    elif name == "local SGD":
        hook = local_sgd.post_localSGD_hook
        alone = [dist.new_group([rank]) for rank in range(2)][default_group().rank()]
        state = local_sgd.PostLocalSGDState(None, alone, start_localSGD_iter=5)
    model.register_comm_hook(state, hook)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with logged(*LOG) as lines:
        for number in range(60):
            step(model, optimizer, number)
        different = len({float(one) for one in _sums(model)}) > 1
    assert different == (name in ("none", "local SGD"))
    return model._guard is not None, lines


def _sums(model: Any) -> list[Tensor]:
    import torch.distributed as dist

    mine = torch.stack([parameter.detach().double().sum() for parameter in model.parameters()]).sum().reshape(1)
    sums = [torch.zeros(1, dtype=torch.float64) for _ in range(dist.get_world_size())]
    dist.all_gather(sums, mine)
    return sums


@pytest.mark.parametrize(("name", "guarded"), [("mean", True), ("half", True), ("none", False), ("local SGD", False)])
def test_a_hook_that_lets_replicas_differ_is_left_alone(name: str, guarded: bool) -> None:
    assert run_ranks(hooked, name, world_size=2, backend="ring") == [(guarded, [])] * 2


def normal_by_default(case: str) -> list[str]:
    """Programs in which ranks differ on purpose, or call forward on one rank alone."""
    import torch.distributed as dist
    from torch.distributed.algorithms.join import Join

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
    assert model._guard is not None
    assert model._guard._number > 3
    return lines


@pytest.mark.parametrize("case", ["buffers", "one rank looks", "micro-batches", "two backwards", "join"])
def test_by_default_programs_that_run_without_it_run_with_it(case: str) -> None:
    assert run_ranks(normal_by_default, case, world_size=2, backend="ring") == [[], []]
