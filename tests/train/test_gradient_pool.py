# mypy: disable-error-code="attr-defined, operator, call-overload, arg-type, union-attr"
"""The memory RingDP keeps for gradients on the CPU: whose tensors lie in it, and that they are tensors as any other.

In one process, with a group of two of which nobody plays the second; what needs a process of its own runs in one.
"""

from __future__ import annotations

import contextlib
import copy
import io
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

import ringdp
from ringdp import RingDP, gradient_memory
from ringdp._C import in_gradient_pool
from ringdp.errors import InvalidArgumentError
from tests.forked import Program
from tests.train.harness import run_ranks

WIDTH = 600  # a weight has 1.4 MiB: above the pool's 1 MiB, below the 4 MiB of a bucket of its own
LARGE = 1100  # 4.6 MiB: reduced where autograd left it
BATCH = 512  # its activations have 1.2 MiB
KEPT_STEPS = 10


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


class Seen(torch.autograd.Function):
    """The identity, which tells `noted` whether memory allocated in its backward comes from the pool."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, noted: list[bool]) -> Tensor:
        ctx.noted = noted
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.noted.append(allocates_in_pool())
        return gradient, None


def allocates_in_pool() -> bool:
    return in_gradient_pool(torch.empty(1 << 20))


class Model(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.noted: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = x
        for layer in self.layers:
            hidden = Seen.apply(torch.tanh(layer(hidden)), self.noted)
        return hidden


def wrapped(module: nn.Module | None = None, **options: Any) -> RingDP:
    torch.manual_seed(0)
    result = RingDP(Model() if module is None else module, **options)
    result.register_comm_hook(None, noop_hook)
    return result


def step(model: nn.Module, rows: int = BATCH, width: int = WIDTH) -> Tensor:
    model.zero_grad()
    loss: Tensor = model(torch.randn(rows, width)).square().mean()
    loss.backward()
    return loss


def alone(code: str, **environ: str) -> str:
    """What a process prints that has made no RingDP before; it must end well."""
    head = "import torch, tests.train.test_gradient_pool as t; import torch.distributed as dist\n"
    head += "dist.init_process_group('fake', store=t.FakeStore(), rank=0, world_size=2)\n"
    program = Program(head + code, environ=os.environ | {"OMP_NUM_THREADS": "1"} | environ)
    said, _ = program.communicate(60)
    assert program.returncode == 0, said
    return said


# Whose memory it is.


@pytest.mark.parametrize(("width", "as_view"), [(WIDTH, True), (WIDTH, False), (LARGE, True)])
def test_buckets_gradients_and_what_backward_allocates_come_from_the_pool(width: int, as_view: bool) -> None:
    module = Model(width)
    model = wrapped(module, gradient_as_bucket_view=as_view)
    batch = torch.randn(BATCH, width)
    for _ in range(2):
        model.zero_grad()
        output = model(batch)
        output.mean().backward()
    assert module.noted == [True] * 6
    assert gradient_memory().installed
    for layer in module.layers:
        in_bucket = as_view and width == WIDTH
        large = layer.weight.grad.untyped_storage().nbytes() >= (2 << 20 if in_bucket else 1 << 20)
        assert in_gradient_pool(layer.weight.grad) == large
    assert in_gradient_pool(module.layers[0].weight.grad)
    elsewhere = {"weight": module.layers[0].weight, "batch": batch, "output": output, "later": torch.empty(1 << 20)}
    assert not [name for name, tensor in elsewhere.items() if in_gradient_pool(tensor)]


def test_another_thread_and_another_model_have_no_part_in_it() -> None:
    module, noted = Model(), []

    class Elsewhere(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            thread = threading.Thread(target=lambda: noted.append(allocates_in_pool()))
            thread.start()
            thread.join()
            return gradient

    model = wrapped(nn.Sequential(module, nn.Identity()))
    Elsewhere.apply(model(torch.randn(BATCH, WIDTH))).mean().backward()  # before the output's part
    bare = Model()
    step(bare)
    assert [noted, bare.noted, module.noted] == [[False], [False] * 3, [True] * 3]


def test_not_without_synchronisation() -> None:
    module = Model()
    model = wrapped(module)
    with model.no_sync():
        step(model)
    assert module.noted == [False] * 3
    step(model)
    assert module.noted[3:] == [True] * 3


def test_a_backward_that_raises_leaves_no_mark_behind() -> None:
    module = Model()
    model = wrapped(module)
    output = model(torch.randn(BATCH, WIDTH))

    def fail(_: Tensor) -> None:
        raise ValueError("on purpose")

    module.layers[0].weight.register_hook(fail)
    with pytest.raises(ValueError, match="on purpose"):
        output.mean().backward()
    assert module.noted == [True] * 3
    bare = Model()
    bare(torch.randn(BATCH, WIDTH)).mean().backward()
    assert bare.noted == [False] * 3


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_parts_of_a_backward_belong_to_it(reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.inner, self.last = nn.Linear(WIDTH, WIDTH), Model(), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.last(checkpoint(self.inner, self.first(x), use_reentrant=reentrant))
            return result

    module = Checkpointed()
    step(wrapped(module))
    assert module.inner.noted == [True] * 3
    bare = Model()
    step(bare)
    assert bare.noted == [False] * 3


def test_two_wrappers_in_one_backward() -> None:
    modules = Model(), Model()
    models = [wrapped(module) for module in modules]
    x = torch.randn(BATCH, WIDTH)
    for _ in range(2):
        models[1](models[0](x)).mean().backward()
    assert modules[0].noted == modules[1].noted == [True] * 6
    plain = Model()
    with_none = wrapped(plain, gradient_pool=False)
    step(with_none)
    assert plain.noted == [False] * 3, "a wrapper that does not want it, alone in its backward"


def test_backwards_in_two_threads() -> None:
    modules = [Model() for _ in range(2)]
    models = [wrapped(module) for module in modules]
    bare, failures = Model(), []

    def train(model: nn.Module) -> None:
        try:
            for _ in range(5):
                step(model)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=train, args=(model,)) for model in (*models, bare)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert [module.noted for module in (*modules, bare)] == [[True] * 15, [True] * 15, [False] * 15]


def test_ddp_has_no_part_in_it() -> None:
    model = wrapped()
    step(model)
    module = Model()
    ddp = DistributedDataParallel(module)
    ddp.register_comm_hook(None, noop_hook)
    step(ddp)
    assert module.noted == [False] * 3
    assert not in_gradient_pool(module.layers[0].weight.grad)


# How much is kept.


def test_what_a_step_needs_is_there_for_the_next_one_and_faults_no_page_in() -> None:
    import resource

    model = wrapped(Model(LARGE))
    batch = torch.randn(32, LARGE)
    faults = []
    for _ in range(6):
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        model.zero_grad()
        model(batch).mean().backward()
        faults.append(resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before)
    assert max(faults[3:]) < 300, f"{faults} page faults; the gradients alone have 3500 pages"
    assert gradient_memory().bytes_in_use >= sum(4 * layer.weight.numel() for layer in model.module.layers)


def test_idle_memory_goes_after_a_few_steps() -> None:
    model = wrapped()
    step(model, rows=16 * BATCH)
    most = gradient_memory().bytes_idle
    assert most > 16 * BATCH * WIDTH * 4
    for _ in range(KEPT_STEPS + 1):
        step(model, rows=8)
    assert gradient_memory().bytes_idle < most / 4


def test_it_goes_with_the_last_wrapper_but_for_tensors_that_are_kept() -> None:
    said = alone(
        "import gc\n"
        "m, other = t.wrapped(), t.wrapped(); t.step(m); t.step(other)\n"
        "kept = m.module.layers[0].weight.grad; values = kept.clone(); bytes = kept.untyped_storage().nbytes()\n"
        "del m; gc.collect(); print(t.gradient_memory().bytes_idle > 2 * bytes)\n"
        "del other; gc.collect(); memory = t.gradient_memory()\n"
        "print(memory.bytes_in_use == -(-bytes // 4096) * 4096, memory.bytes_idle < 4 << 20)\n"
        "again = t.wrapped(); t.step(again); print(torch.equal(kept, values))\n"
        "del again, kept; gc.collect(); print(t.gradient_memory())\n"
    )
    assert said.split() == ["True"] * 4 + ["GradientMemory(installed=True,", "bytes_in_use=0,", "bytes_idle=0)"]


def test_what_it_holds_is_in_the_logging_data() -> None:
    model = wrapped()
    step(model)
    data = model._get_ddp_logging_data()
    assert data["gradient_pool_bytes_in_use"] == gradient_memory().bytes_in_use > 0
    assert data["gradient_pool_bytes_idle"] == gradient_memory().bytes_idle


# A tensor that lies in it is a tensor as any other.


@pytest.fixture
def gradient(group: None) -> Tensor:
    """Values 0, 1, …, in the pool."""
    found: list[Tensor] = []
    module = Model()
    model = wrapped(module)
    module.layers[0].weight.register_hook(lambda _: found.append(torch.arange(1 << 19, dtype=torch.float32)))
    step(model)
    assert in_gradient_pool(found[0])
    return found.pop()


def saved(tensor: Tensor) -> Tensor:
    torch.save(tensor, file := io.BytesIO())
    file.seek(0)
    loaded: Tensor = torch.load(file)
    return loaded


def resized(tensor: Tensor) -> Tensor:
    tensor.untyped_storage().resize_(tensor.untyped_storage().nbytes() * 2)
    tensor.untyped_storage().resize_(tensor.numel() * 4)
    return tensor


def lazily(tensor: Tensor) -> Tensor:
    other = torch._lazy_clone(tensor)
    other.add_(1)
    return tensor


COPIES: dict[str, Callable[[Tensor], Tensor]] = {
    "torch.save": saved,
    "pickle": lambda tensor: pickle.loads(pickle.dumps(tensor)),
    "deepcopy": copy.deepcopy,
    "share_memory_": lambda tensor: tensor.share_memory_(),
    "resize_": resized,
    "_lazy_clone": lazily,
    "numpy": lambda tensor: torch.from_numpy(tensor.numpy()),
    "dlpack": torch.from_dlpack,
    "storage": lambda tensor: tensor.untyped_storage().clone() and tensor.clone(),
    "set_": lambda tensor: torch.empty(0).set_(tensor.untyped_storage(), 0, tensor.shape),
}


@pytest.mark.parametrize("how", COPIES)
def test_copies_and_moves(gradient: Tensor, how: str) -> None:
    result = COPIES[how](gradient)
    del gradient
    assert torch.equal(result.flatten(), torch.arange(1 << 19, dtype=torch.float32))


def test_a_forked_child_has_its_own_and_a_program_may_end_with_such_tensors_everywhere() -> None:
    said = alone(
        "import os, sys, threading\n"
        "m = t.wrapped(); t.step(m)\n"
        "kept = [p.grad for p in m.parameters()]; values = [grad.clone() for grad in kept]\n"
        "same = lambda: all(map(torch.equal, kept, values))\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    good = same()\n"
        "    for grad in kept: grad.zero_()\n"
        "    del kept[:], m; t.step(t.Model())\n"
        "    os._exit(0 if good else 1)\n"
        "print(os.waitpid(child, 0)[1], same()); t.step(m); sys.kept = kept\n"
        "local = threading.local(); local.kept = kept\n"
        "threading.Thread(target=lambda: threading.Event().wait(), daemon=True).start()"
    )
    assert said == "0 True\n"


def test_the_profiler_sees_each_allocation_and_its_end() -> None:
    model = wrapped()
    step(model)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        for _ in range(2):
            step(model)
    events: Any = seen.profiler.kineto_results.events()
    sizes = [event.nbytes() for event in events if event.name() == "[memory]"]
    weight = 4 * WIDTH * WIDTH
    assert sizes.count(weight) == sizes.count(-weight) == 6, "3 layers, 2 steps: copied into the bucket"
    assert sizes.count(4 << 20) == sizes.count(-(4 << 20)) == 6, "those of Seen"


def train(kind: str, pool: bool) -> list[Tensor]:
    torch.manual_seed(dist.get_rank())
    module: nn.Module = Model(700)
    if kind == "optimizer in backward":
        _apply_optimizer_in_backward(torch.optim.Adam, module.parameters(), {"lr": 0.01})
    compression = "int8" if kind == "int8" else None
    model = RingDP(module, gradient_pool=pool, gradient_as_bucket_view=kind != "own gradients", compression=compression)
    optimizer = torch.optim.Adam(module.parameters())
    for number in range(4):
        optimizer.zero_grad()
        with model.no_sync() if kind == "no_sync" and number % 2 else contextlib.nullcontext():
            torch.manual_seed(10 * number + dist.get_rank())
            model(torch.randn(64, 700)).square().mean().backward(create_graph=kind == "create_graph")
        if kind != "optimizer in backward":
            optimizer.step()
    result = [parameter.detach().clone() for parameter in module.parameters()]
    optimizer.zero_grad()
    return result


def train_with_and_without() -> dict[str, bool]:
    return {kind: all(map(torch.equal, train(kind, True), train(kind, False))) for kind in KINDS}


KINDS = ("", "own gradients", "no_sync", "create_graph", "optimizer in backward", "int8")


def test_a_training_has_the_same_bits_with_and_without_it() -> None:
    for same in run_ranks(train_with_and_without, backend="ring"):
        assert same == dict.fromkeys(KINDS, True)


# Where there is none.


@pytest.mark.parametrize(
    "options, environ",
    [
        ("gradient_pool=False", {}),
        pytest.param("", {"RINGDP_GRADIENT_POOL": "0"}, marks=pytest.mark.ci),
        pytest.param("device_ids=None", None, marks=pytest.mark.ci),
    ],
)
def test_switched_off_the_process_is_as_it_was(options: str, environ: dict[str, str] | None) -> None:
    said = alone(
        f"m = t.wrapped({options}); t.step(m); print('installed', t.gradient_memory().installed, m.module.noted)",
        **(environ or {}),
    )
    on = environ is None  # the control
    assert said.split("\n")[0] == f"installed {on} {[on] * 3}"


@pytest.mark.parametrize("value", [None, 1, "no"])
def test_the_argument_is_true_or_false(value: Any) -> None:
    with pytest.raises(InvalidArgumentError):
        RingDP(Model(), gradient_pool=value)


def test_the_variable_is_0_or_1() -> None:
    from ringdp.config import gradient_pool

    assert [gradient_pool({"RINGDP_GRADIENT_POOL": text}) for text in ("", "1", "0")] == [True, True, False]
    with pytest.raises(InvalidArgumentError, match="RINGDP_GRADIENT_POOL=off is neither 0 nor 1"):
        gradient_pool({"RINGDP_GRADIENT_POOL": "off"})


# torch's allocator for phones, through libc10's C++ names.
REPLACE = """
import ctypes, logging, sys
logging.basicConfig(stream=sys.stdout, format='%(message)s')
c10 = ctypes.CDLL(t.torch.__path__[0] + '/lib/libc10.so')
c10._ZN3c1028GetDefaultMobileCPUAllocatorEv.restype = ctypes.c_void_p
def replace(priority=0):
    mobile = ctypes.c_void_p(c10._ZN3c1028GetDefaultMobileCPUAllocatorEv())
    c10._ZN3c1015SetCPUAllocatorEPNS_9AllocatorEh(mobile, ctypes.c_uint8(priority))
"""


OF_ANOTHER_LIBRARY = {
    "before": (
        "replace()\nfor _ in range(2): t.step(t.wrapped())\nprint(t.gradient_memory())",
        "another library replaced torch's CPU allocator before RingDP could install its own",
        "GradientMemory(installed=False, bytes_in_use=0, bytes_idle=0)",
    ),
    "after": (
        "m = t.wrapped(); t.step(m); kept = m.module.layers[0].weight.grad.clone(); replace()\n"
        "for _ in range(3): t.step(m)\nprint(m.module.noted, t.gradient_memory().installed)",
        "another library replaced torch's CPU allocator after RingDP had installed its own",
        f"{[True] * 3 + [False] * 9} False",
    ),
    "of higher priority": (
        "default = c10._ZN3c1022GetDefaultCPUAllocatorEv; default.restype = ctypes.c_void_p\n"
        "c10._ZN3c1015SetCPUAllocatorEPNS_9AllocatorEh(ctypes.c_void_p(default()), ctypes.c_uint8(9))\n"
        "t.step(t.wrapped()); print(t.gradient_memory())",
        "torch keeps another CPU allocator of higher priority: gradient_pool has no effect",
        "GradientMemory(installed=False, bytes_in_use=0, bytes_idle=0)",
    ),
}


@pytest.mark.parametrize("when", OF_ANOTHER_LIBRARY)
def test_an_allocator_of_another_library_is_left_alone_and_said_once(when: str) -> None:
    code, warning, end = OF_ANOTHER_LIBRARY[when]
    said = alone(REPLACE + code)
    assert said.count(warning) == 1
    assert said.strip().endswith(end)


def test_without_address_space_torch_says_what_it_always_says() -> None:
    said = alone(
        "import resource\n"
        "m = t.wrapped(); t.step(m)\n"
        "pages = int(open('/proc/self/statm').read().split()[0])\n"
        "resource.setrlimit(resource.RLIMIT_AS, (pages * 4096 + (48 << 20), -1))\n"
        "m.module.layers[0].weight.register_hook(lambda _: torch.empty(1 << 30))\n"
        "try: t.step(m)\n"
        "except RuntimeError as error: print(error)\n"
    )
    assert "can't allocate memory: you tried to allocate 4294967296 bytes" in said


def test_the_public_name() -> None:
    assert "gradient_memory" in ringdp.__all__
    assert ringdp.gradient_memory is gradient_memory
