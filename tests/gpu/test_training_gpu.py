"""RingDP on a GPU: against DDP to the bit, against the CPU to the bit, and no synchronisation in a step."""

from __future__ import annotations

import hashlib
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ringdp
from ringdp.ddp.wrapper import RingDP
from tests.train import models
from tests.train.given_gradients import Formula, Given, noise
from tests.train.harness import on_ranks, run_ranks

pytestmark = pytest.mark.gpu

NCCL = "cpu:ring,cuda:nccl"
DEVICE = torch.device("cuda", 0)


def digest(tensors: Any) -> str:
    text = hashlib.sha256()
    for one in tensors:
        text.update(b"none" if one is None else one.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return text.hexdigest()


def steps(module: nn.Module, count: int = 4, scaler: Any = None) -> list[str]:
    """A digest of gradients and parameters after each step."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    seen = []
    for step in range(count):
        x, y = (part.to(DEVICE) for part in models.batch(step, dist.get_rank()))
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16, enabled=scaler is not None):
            loss = nn.functional.cross_entropy(module(x).float(), y)
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss * (torch.inf if step == 1 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
        seen.append(digest([*(p.grad for p in module.parameters()), *module.parameters()]))
    return seen


# --- against DDP


@pytest.mark.parametrize("name", [name for name in models.MODELS if name != "reentrant"])
@on_ranks(1, backend=NCCL)
def test_one_rank_over_nccl_trains_as_ddp_to_the_bit(name: str) -> None:
    torch.backends.cudnn.deterministic = True
    ours = steps(RingDP(models.build(name).to(DEVICE), device_ids=[0]))
    theirs = steps(DistributedDataParallel(models.build(name).to(DEVICE), device_ids=[0]))
    assert ours == theirs


@pytest.mark.parametrize("compression", [None, "int8"])
@on_ranks(1, backend=NCCL)
def test_loss_scaling_over_nccl(compression: str | None) -> None:
    ours = RingDP(models.build("mlp").to(DEVICE), compression=compression)
    scaler = ringdp.amp.GradScaler("cuda", init_scale=1024.0)
    ours_seen = steps(ours, scaler=scaler)
    theirs = DistributedDataParallel(models.build("mlp").to(DEVICE))
    their_scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    theirs_seen = steps(theirs, scaler=their_scaler)
    assert scaler.get_scale() == their_scaler.get_scale() == 512.0, "the step that overflowed halved it"
    if compression is None:
        assert ours_seen[0] == theirs_seen[0]
        assert ours_seen[2:] == theirs_seen[2:]  # what a skipped step leaves in the gradients is nobody's


# --- against the CPU

SHAPES = {"weight": (300, 70), "bias": (70,), "odd": (127, 41), "small": (30, 30)}


def gradients_of(kinds: list[str], compression: str | None) -> list[list[Tensor]]:
    """The mean gradients of three steps, whose own gradients are given."""
    rank = dist.get_rank()
    device = torch.device(kinds[rank])
    model = RingDP(Given(SHAPES).to(device), compression=compression)
    seen = []
    for step in range(3):
        model.zero_grad()
        model({name: one.to(device) for name, one in noise(SHAPES, rank, step).items()}).backward()
        seen.append([p.grad.cpu() for p in model.parameters() if p.grad is not None])
    return seen


KINDS = [["cuda", "cuda"], ["cuda", "cpu"], ["cpu", "cuda", "cuda"]]


@pytest.mark.parametrize("kinds", KINDS, ids=":".join)
def test_exact_means_have_the_bits_of_the_cpu(kinds: list[str]) -> None:
    ranks = len(kinds)
    expected = run_ranks(gradients_of, ["cpu"] * ranks, None, world_size=ranks, backend="ring")
    for ours, theirs in zip(
        run_ranks(gradients_of, kinds, None, world_size=ranks, backend="ring"), expected, strict=True
    ):
        for one, other in zip(ours, theirs, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("codec", ["int8", "int4"])
@pytest.mark.parametrize("kinds", KINDS, ids=":".join)
def test_compressed_means_have_the_bits_of_the_formula(kinds: list[str], codec: str) -> None:
    check_against_the_formula(run_ranks(gradients_of, kinds, codec, world_size=len(kinds), backend="ring"), codec)


def check_against_the_formula(told: list[list[list[Tensor]]], codec: str) -> None:
    """What `gradients_of` has told on each rank, where the ranks exchanged codes."""
    formula = Formula(codec, len(told), feedback=codec == "int4")
    for step in range(3):
        every = [noise(SHAPES, rank, step) for rank in range(len(told))]
        for number, name in enumerate(SHAPES):
            if every[0][name].numel() < 1024:
                continue  # small ones go exactly
            wanted = formula.mean(name, [one[name] for one in every]).view(SHAPES[name])
            for rank, seen in enumerate(told):
                assert torch.equal(seen[step][number], wanted), f"step {step}, {name}, rank {rank}"


# --- what a step does to the host

STEP = "the step"
WAITS = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize", "aten::item",
         "aten::_local_scalar_dense")  # fmt: skip


def waits_in_steps(compression: str | None, wrapper: str) -> list[str]:
    """What stopped the host in three steps, after three to warm up."""
    torch.manual_seed(0)
    layers = [nn.Linear(256, 256) for _ in range(8)]
    model: Any = nn.Sequential(*layers).to(DEVICE)
    model = DistributedDataParallel(model) if wrapper == "DDP" else RingDP(model, compression=compression)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(64, 256, device=DEVICE)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(3):
            with torch.profiler.record_function(STEP):
                step()
        torch.cuda.synchronize()
    events = profile.events()
    spans = [event.time_range for event in events if event.name == STEP and event.device_type.name == "CPU"]
    assert len(spans) == 3
    return [
        event.name
        for event in events
        if event.name in WAITS and any(s.start <= event.time_range.start <= s.end for s in spans)
    ]


@pytest.mark.parametrize("compression", [None, "int8", "int4"])
def test_the_host_waits_for_nothing_in_a_step_over_nccl(compression: str | None) -> None:
    assert run_ranks(waits_in_steps, compression, "RingDP", world_size=1, backend=NCCL) == [[]]


@pytest.mark.parametrize("compression", [None, "int8"])
def test_nothing_synchronises_the_device_in_a_staged_step(compression: str | None) -> None:
    for waits in run_ranks(waits_in_steps, compression, "RingDP", world_size=2, backend="ring"):
        assert waits == []


# --- CUDA graphs


def refuses_capture() -> None:
    model = RingDP(nn.Linear(64, 64).to(DEVICE))
    x = torch.randn(8, 64, device=DEVICE)
    model(x).sum().backward()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(Exception, match="CUDA graph"), torch.cuda.graph(graph):
        model(x).sum().backward()


@pytest.mark.parametrize("backend, ranks", [(NCCL, 1), ("ring", 2)])
def test_capturing_a_step_is_refused_in_words(backend: str, ranks: int) -> None:
    run_ranks(refuses_capture, world_size=ranks, backend=backend)


# --- streams


def trains_from_another_stream() -> None:
    """A step on a stream of the user's gives what one on the default stream gives."""
    seen = []
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            model = RingDP(models.build("mlp").to(DEVICE))
            seen.append(steps(model))
        torch.cuda.synchronize()
    assert seen[0] == seen[1]


@pytest.mark.parametrize("backend, ranks", [(NCCL, 1), ("ring", 2)])
def test_a_stream_of_the_users(backend: str, ranks: int) -> None:
    run_ranks(trains_from_another_stream, world_size=ranks, backend=backend)


# --- a compressor in Python

LATE_S = 1.5


def reaches_the_first_layer(late_s: float) -> tuple[float, list[Tensor]]:
    """How long backward took to the first layer's gradient, while the last rank had not begun; the mean gradients."""
    torch.manual_seed(0)
    layers = [nn.Linear(128, 128) for _ in range(4)]
    model = RingDP(nn.Sequential(*layers).to(DEVICE), compression="topk", bucket_cap_mb=0.05)
    reached: list[float] = []
    layers[0].weight.register_hook(lambda _: reached.append(time.perf_counter()))
    for _ in range(2):  # then the buckets are planned, and the threads are there
        model(torch.ones(8, 128, device=DEVICE)).sum().backward()
    dist.barrier()
    loss = model(torch.full((8, 128), 1.0 + dist.get_rank(), device=DEVICE)).sum()
    if dist.get_rank() + 1 == dist.get_world_size():
        time.sleep(late_s)
    begun = time.perf_counter()
    loss.backward()
    return reached[-1] - begun, [p.grad.cpu() for p in model.parameters() if p.grad is not None]


def test_a_compressor_in_python_does_not_hold_up_backward() -> None:
    (took_s, ours), (_, theirs) = run_ranks(reaches_the_first_layer, LATE_S, world_size=2, backend="ring")
    assert took_s < LATE_S / 2
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
