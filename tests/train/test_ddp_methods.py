"""DDP's methods and the private names that other libraries use: RingDP answers as DDP does."""

from __future__ import annotations

import inspect
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.optim.apply_optimizer_in_backward import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _BufferCommHookLocation
from torch.utils._pytree import tree_flatten
from torch.utils.checkpoint import checkpoint

from ringdp.ddp.wrapper import RingDP
from tests.train import models
from tests.train.harness import backends, each, run_ranks, same_everywhere
from tests.train.test_parallel_gradients import Twice

pytestmark = [
    pytest.mark.parametrize("backend", backends()),
    pytest.mark.filterwarnings("ignore:.*broadcast_buffers"),
]
KINDS = (RingDP, DistributedDataParallel)


def loss(model: nn.Module, step: int) -> Tensor:
    x, y = models.batch(step, dist.get_rank())
    return nn.functional.cross_entropy(model(x), y)


def same(ours: nn.Module, theirs: nn.Module) -> None:
    for (name, one), (_, other) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        torch.testing.assert_close(one, other, msg=f"{name}: {one} and {other}")
        assert (one.grad is None) == (other.grad is None), name
        if one.grad is not None:
            torch.testing.assert_close(one.grad, other.grad, msg=f"{name}.grad: {one.grad} and {other.grad}")
    for name, buffer in ours.named_buffers():
        torch.testing.assert_close(buffer, theirs.get_buffer(name))


def alike(drive: Callable[[DistributedDataParallel], Any], build: Callable[..., nn.Module], **options: Any) -> None:
    """`drive` returns the same for RingDP and DDP, and leaves the same parameters, gradients and buffers."""
    wrapped = [kind(build(), **options) for kind in KINDS]

    def answer(model: DistributedDataParallel) -> list[Any]:
        try:
            return tree_flatten(drive(model))[0]
        except RuntimeError as error:  # before torch 2.12 autograd sees that buffers are written
            if "modified by an inplace operation" not in str(error):
                raise
            return ["modified by an inplace operation"]

    answers = [answer(one) for one in wrapped]
    for one, other in zip(*answers, strict=True):
        if isinstance(one, Tensor):
            torch.testing.assert_close(one, other)
        else:
            assert one == other
    same(*wrapped)


def ignored_parameters_and_buffers() -> None:
    def build() -> nn.Module:
        module = models.build("convolutional")
        RingDP._set_params_and_buffers_to_ignore_for_model(module, ["6.bias", "2.running_mean"])
        with torch.no_grad():
            module[6].bias += dist.get_rank()  # type: ignore[index]
            module[2].running_mean += dist.get_rank()  # type: ignore[index]
        return module

    def drive(model: DistributedDataParallel) -> Any:
        for step in range(2):
            loss(model, step).backward()
        names = [name for name, _ in model.named_parameters()]
        everybody = [torch.zeros_like(model.module[6].bias) for _ in range(2)]
        dist.all_gather(everybody, model.module[6].bias.grad)
        assert not torch.equal(*everybody)  # each rank's own
        return names, model.module[6].bias.detach().clone(), model.module[2].running_mean.clone()

    alike(drive, build)


def will_sync_buffers() -> None:
    theirs = inspect.signature(DistributedDataParallel.__init__).parameters
    since_2_13: list[dict[str, Any]] = [{"forward_sync_buffers": False}] if "forward_sync_buffers" in theirs else []
    for options in ({}, *since_2_13, {"broadcast_buffers": False}):
        for name in ("convolutional", "mlp"):

            def drive(model: DistributedDataParallel) -> list[bool]:
                seen = [model.will_sync_module_buffers()]
                with model.no_sync():
                    loss(model, 0)
                seen.append(model.will_sync_module_buffers())
                loss(model, 0)
                forward_too = getattr(model, "forward_sync_buffers", None)  # since torch 2.13
                return [*seen, model.will_sync_module_buffers(), model.broadcast_buffers, forward_too]

            alike(drive, lambda name=name: models.build(name), **options)


def buffer_hooks() -> None:
    def average(group: dist.ProcessGroup, buffers: dict[str, Tensor]) -> None:
        for buffer in buffers.values():
            if buffer.is_floating_point():
                dist.all_reduce(buffer, group=group)
                buffer /= group.size()

    def add_later(group: dist.ProcessGroup, buffers: dict[str, Tensor]) -> list[Any]:
        floating = [buffer for buffer in buffers.values() if buffer.is_floating_point()]
        return [dist.all_reduce(buffer, group=group, async_op=True).get_future() for buffer in floating]

    cases = [
        (average, _BufferCommHookLocation.PRE_FORWARD),
        (average, _BufferCommHookLocation.POST_FORWARD),
        (add_later, _BufferCommHookLocation.POST_FORWARD),
    ]
    for hook, place in cases:

        def drive(model: DistributedDataParallel, hook: Any = hook, place: Any = place) -> list[Tensor]:
            model._register_buffer_comm_hook(model.process_group, hook, place)
            for step in range(3):
                loss(model, step).backward()
            everybody = [torch.zeros_like(model.module[2].running_mean) for _ in range(2)]
            dist.all_gather(everybody, model.module[2].running_mean)
            assert torch.equal(*everybody) == (place == _BufferCommHookLocation.POST_FORWARD)
            return everybody

        alike(drive, lambda: models.build("convolutional"))
    with pytest.raises(AssertionError, match="callable"):
        RingDP(models.build("convolutional"))._register_buffer_comm_hook(None, 3)  # type: ignore[arg-type]


def static_graph_later() -> None:
    def drive(model: DistributedDataParallel) -> Any:
        model._set_static_graph()
        with pytest.warns(UserWarning, match="no need to set it again"):
            model._set_static_graph()
        for step in range(3):
            loss(model, step).backward()
        return model._get_ddp_logging_data()["static_graph"]

    alike(drive, lambda: models.build("tied"))
    with pytest.warns(UserWarning, match="find_unused_parameters=true"):
        RingDP(models.build("mlp"), find_unused_parameters=True)._set_static_graph()


def another_process_group() -> None:
    """From all ranks to one, as where ranks leave: the gradient is then this rank's own."""
    alone = [dist.new_group([0]), dist.new_group([1])][dist.get_rank()]

    def drive(model: DistributedDataParallel) -> None:
        for step in range(2):
            loss(model, step).backward()
        model.zero_grad()
        model._update_process_group(alone)
        for step in range(2, 5):
            loss(model, step).backward()
        assert model.process_group is alone

    alike(drive, lambda: models.build("mlp"))


def fused_optimizer() -> None:
    def drive(model: DistributedDataParallel) -> None:
        model._register_fused_optim(torch.optim.SGD, 0.05, optim_params=list(model.module[0].parameters()))
        for step in range(3):
            model.zero_grad()
            loss(model, step).backward()

    alike(drive, lambda: models.build("mlp"))


def sink_and_sampling() -> None:
    def drive(model: DistributedDataParallel) -> None:
        for clone in (True, False):
            model._set_ddp_sink_clone(clone)
            x, y = models.batch(int(clone), dist.get_rank())
            output = model(x)
            output = output.mul_(2) if clone else output * 2
            nn.functional.cross_entropy(output, y).backward()
        model._set_ddp_runtime_logging_sample_rate(3)
        with pytest.raises(ValueError, match="equal or greater than 1"):
            model._set_ddp_runtime_logging_sample_rate(0)

    alike(drive, lambda: models.build("mlp"), find_unused_parameters=True)


def without_hooks() -> None:
    def drive(model: DistributedDataParallel) -> None:
        loss(model, 0).backward()
        model.zero_grad()
        model._remove_autograd_hooks()
        with model.no_sync():
            loss(model, 1).backward()

    alike(drive, lambda: models.build("mlp"))


def finalized() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used = nn.Linear(2, 2)
            self.unused = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.used(x)
            return out

    for kind in KINDS:
        model = kind(Half(), find_unused_parameters=False)
        model._check_reducer_finalized()
        model(torch.ones(1, 2)).sum().backward()
        with pytest.raises(RuntimeError, match="Expected to have finished reduction"):
            model._check_reducer_finalized()


def attributes() -> None:
    """The wrapper does not forward names to the module, and says so as DDP does."""
    texts = []
    for kind in KINDS:
        model = kind(models.build("mlp"))
        assert model.train() is model
        assert model.eval() is model
        assert not model.module[0].training
        with pytest.raises(AttributeError) as caught:
            model.in_features  # noqa: B018
        texts.append(str(caught.value).replace(kind.__name__, "Wrapper"))
        assert model.join_device == torch.device("cpu")
        assert model.join_process_group is dist.group.WORLD
    assert texts[0] == texts[1]


def saving() -> None:
    ours = RingDP(models.build("convolutional"))
    loss(ours, 0).backward()
    saved = io.BytesIO()
    torch.save(ours.state_dict(), saved)
    saved.seek(0)
    loaded = torch.load(saved, weights_only=True)
    other = DistributedDataParallel(models.build("convolutional", seed=5))
    other.load_state_dict(loaded)
    for one, again in zip(ours.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(one, again)


def delayed_all_reduce() -> None:
    """Delayed parameters are averaged once the hooked parameter has its gradient, and ready when backward ends."""

    def build(kind: type[DistributedDataParallel]) -> DistributedDataParallel:
        module = models.build("mlp")
        delayed = [(name, parameter) for name, parameter in module.named_parameters() if name.startswith(("2", "4"))]
        return kind(module, delay_all_reduce_named_params=delayed, param_to_hook_all_reduce=module[0].weight)  # type: ignore[index]

    ours, plain = build(RingDP), DistributedDataParallel(models.build("mlp"))
    build(DistributedDataParallel)  # takes the same
    for step in range(3):
        for model in (ours, plain):
            for parameter in model.parameters():
                parameter.grad = None
            loss(model, step).backward()
        same(ours, plain)


def device_meshes() -> None:
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    alike(lambda model: loss(model, 0).backward(), lambda: models.build("mlp"), device_mesh=mesh)
    grid = dist.device_mesh.init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    alike(lambda model: loss(model, 1).backward(), lambda: models.build("mlp"), device_mesh=grid["replicate"])


def checkpointed_as_a_whole() -> None:
    """The wrapper inside activation checkpointing: its forward runs again in the middle of its own backward.

    DDP takes this as long as no parameter has its gradient before that; RingDP in any case.
    """
    for reentrant in (False, True):
        ours, theirs = RingDP(models.build("tied")), DistributedDataParallel(models.build("tied"))
        for step in range(3):
            x, y = models.batch(step, dist.get_rank())
            output: Any = checkpoint(ours, x.requires_grad_(), use_reentrant=reentrant)
            nn.functional.cross_entropy(output, y).backward()
            loss(theirs, step).backward()
            same(ours, theirs)


def logging_data() -> None:
    """DDP's keys, and the same values where they do not depend on time."""
    data = []
    for kind in KINDS:
        model = kind(
            models.build("convolutional"), find_unused_parameters=False, gradient_as_bucket_view=True, bucket_cap_mb=25
        )
        assert "comm_hook" not in model._get_ddp_logging_data()
        model._set_ddp_runtime_logging_sample_rate(2)
        for step in range(14):
            loss(model, step).backward()
            logged = model._get_ddp_logging_data()["iteration"]
            assert logged == (step if step < 10 or step % 2 == 0 else step - 1)
        data.append(model._get_ddp_logging_data())
    ours, theirs = data
    own_backend = dist.get_backend() != "gloo"
    assert not {key for key in set(theirs) - set(ours) if not (own_backend and key.startswith("gloo"))}
    timed = {key for key in theirs if "time" in key}
    for key in set(theirs) - timed - {"backend_name", "prev_iteration_grad_ready_order_indices"}:
        assert ours.get(key, theirs[key]) == theirs[key], key
    assert ours["backend_name"] == dist.get_backend()
    assert timed
    for key in timed:
        assert ours[key] > 0, key
    assert ours["forward_compute_time_start"] <= ours["backward_compute_time_start"]
    assert ours["backward_compute_time_start"] <= ours["backward_comm_time_start"] <= ours["backward_comm_time_end"]
    overlap = ours["avg_backward_compute_comm_overlap_time"]
    assert overlap <= min(ours["avg_backward_compute_time"], ours["avg_backward_comm_time"])
    mixed = RingDP(models.build("mixed_types"))._get_ddp_logging_data()
    assert mixed["dtypes"] == "c10::BFloat16, c10::complex<float>, double, float"


def logged_errors() -> None:
    """What went wrong is in the logging data, whoever raised it: Python, the reducer in forward or in backward."""
    for kind in KINDS:
        model = kind(models.build("mlp"))
        loss(model, 0).backward()
        with pytest.raises(RuntimeError, match="before training loop starts") as caught:
            model._set_static_graph()
        data = model._get_ddp_logging_data()
        assert data["has_error"] == 1
        assert str(caught.value).splitlines()[0][:60] in data["error"]
        model = kind(Twice())
        with pytest.raises(RuntimeError, match="mark a variable ready only once"):
            model(torch.ones(2, 12)).sum().backward()
        assert "mark a variable ready only once" in model._get_ddp_logging_data()["error"]


def an_optimizer_in_backward_gets_the_bits_of_one_behind_it() -> None:
    plain, module = RingDP(models.build("mlp")), models.build("mlp")
    _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.05})
    ours, optimizer = RingDP(module), torch.optim.SGD(plain.parameters(), lr=0.05)
    for step in range(3):
        for model in (plain, ours):
            loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert all(map(torch.equal, ours.parameters(), plain.parameters()))


def joined_with_zero() -> None:
    """One Join over the wrapper and a sharded optimizer, with uneven inputs."""
    results = []
    for kind in KINDS:
        model = kind(models.build("mlp"))
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
        with Join([model, optimizer]):
            for step in range(2 + 2 * dist.get_rank()):
                optimizer.zero_grad()
                loss(model, step).backward()
                optimizer.step()
        results.append([parameter.detach() for parameter in model.parameters()])
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-7)
    assert same_everywhere([parameter.tolist() for parameter in results[0]])


def stopped_early() -> None:
    """throw_on_early_termination: every rank stops where the first one has no more input, with DDP's error."""
    ends = []
    for kind in KINDS:
        model = kind(models.build("mlp"))
        done: list[int] = []

        def steps(model: Any = model, done: list[int] = done) -> None:
            with model.join(throw_on_early_termination=True):
                for step in range(2 + 2 * dist.get_rank()):
                    loss(model, step).backward()
                    done.append(step)

        with pytest.raises(RuntimeError, match="exhausted") as caught:
            steps()
        ends.append((done, str(caught.value)))
    assert ends[0] == ends[1]


def join_disabled() -> None:
    def drive(model: DistributedDataParallel) -> None:
        with model.join(enable=False):
            for step in range(3):
                loss(model, step).backward()

    alike(drive, lambda: models.build("mlp"))


CASES = [
    checkpointed_as_a_whole,
    logging_data,
    ignored_parameters_and_buffers,
    will_sync_buffers,
    buffer_hooks,
    static_graph_later,
    another_process_group,
    fused_optimizer,
    sink_and_sampling,
    without_hooks,
    attributes,
    saving,
    delayed_all_reduce,
    device_meshes,
    joined_with_zero,
    join_disabled,
]


def test_as_ddp(backend: str) -> None:
    run_ranks(each, *CASES, backend=backend)


def test_an_optimizer_in_backward_gets_the_bits_of_one_behind_it(backend: str) -> None:
    run_ranks(an_optimizer_in_backward_gets_the_bits_of_one_behind_it, world_size=3, backend=backend)


@pytest.mark.parametrize("case", [logged_errors, finalized, stopped_early])  # these leave a group that has failed
def test_errors_as_ddps(backend: str, case: Any) -> None:
    run_ranks(case, backend=backend)
