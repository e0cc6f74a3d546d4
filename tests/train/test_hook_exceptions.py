"""sys.exit(), Ctrl-C and whatever else leaves a compressor or a communication hook ends backward.

On that rank as it is, on the others by an error that names the rank.
"""

from __future__ import annotations

import datetime
import os
import signal
import threading
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

import ringdp
from ringdp import Compression
from ringdp.compression import Info, Payload
from ringdp.ddp.wrapper import RingDP
from ringdp.hooks import ddp_hook
from tests.fault.launch_jobs import wait_until
from tests.forked import Program
from tests.train.harness import backends, on_ranks, run_outcomes

ERRORS = {"exit": SystemExit(7), "interrupt": KeyboardInterrupt(), "memory": MemoryError("none left")}


class Raises:
    """A compressor that raises on rank 1, in its second step."""

    def __init__(self, aggregate: str, error: str, place: str) -> None:
        self.aggregate, self.error, self.place = aggregate, ERRORS[error], place
        self.error_feedback = self if place == "feedback" else None

    def __repr__(self) -> str:
        return "Raises()"

    def _go(self, place: str, step: int) -> None:
        if place == self.place and step == 1 and dist.get_rank() == 1:
            raise self.error

    def compress(self, x: Tensor, info: Info) -> Payload:
        self._go("compress", info.step)
        return (x.clone(),)

    def decompress(self, payload: Payload, info: Info) -> Tensor:
        if info.phase == "rank":
            self._go("decompress", info.step)
        return payload[0]

    def average(self, xs: list[Tensor], infos: list[Info]) -> Generator[list[Tensor], Any, list[Tensor]]:
        sums = [x.clone() for x in xs]
        yield sums
        self._go("round", infos[0].step)
        yield [torch.ones(3)]
        return sums

    def before(self, x: Tensor, state: dict[str, Any]) -> Tensor:
        return x

    def after(self, x: Tensor, decoded: Tensor, state: dict[str, Any]) -> None:
        self._go("feedback", state.get("step", 0))
        state["step"] = 1


def backward_of(model: nn.Module) -> tuple[BaseException | None, float]:
    begin = time.monotonic()
    try:
        model(torch.ones(2, 40)).sum().backward()
    except BaseException as error:
        return error, time.monotonic() - begin
    return None, time.monotonic() - begin


@pytest.mark.parametrize(
    "wrapper, aggregate, error, place",
    [
        ("RingDP", "owner", "exit", "compress"),
        ("RingDP", "owner", "interrupt", "decompress"),
        ("RingDP", "gather", "memory", "compress"),
        ("RingDP", "sum", "interrupt", "compress"),
        ("RingDP", "rounds", "exit", "round"),
        ("RingDP", "owner", "exit", "feedback"),
        ("DDP", "owner", "exit", "compress"),
    ],
)
@on_ranks(backend=backends())
def test_what_a_compressor_raises(wrapper: str, aggregate: str, error: str, place: str) -> None:
    compressor = Raises(aggregate, error, place)
    net = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 2))
    model: nn.Module
    if wrapper == "RingDP":
        model = RingDP(net, bucket_cap_mb=0.003, compression=Compression(rules=[("*", compressor)]))
    else:
        ddp = DistributedDataParallel(net, bucket_cap_mb=0.003)
        ddp.register_comm_hook(*ddp_hook(compressor, model=ddp))
        model = ddp
    first, _ = backward_of(model)
    assert first is None, first
    raised, after_s = backward_of(model)
    assert after_s < 10  # the timeout is 60 s
    wanted = ERRORS[error]
    if dist.get_rank() == 1:
        assert type(raised) is type(wanted)
        assert raised.args == wanted.args
    else:
        assert type(raised) is ringdp.RingError
        assert f"rank 1 could not compress a bucket: {type(wanted).__name__}" in str(raised)


@on_ranks(backend=backends(), timeout_s=15)
def test_a_compressor_that_raises_before_anything_is_exchanged() -> None:
    class First(Raises):
        def compress(self, x: Tensor, info: Info) -> Payload:
            if dist.get_rank() == 1:
                raise SystemExit(7)
            return (x.clone(),)

    raised, _ = backward_of(
        RingDP(nn.Linear(40, 40), compression=Compression(rules=[("*", First("owner", "exit", "nowhere"))]))
    )
    if dist.get_rank() == 1:
        assert type(raised) is SystemExit
        assert raised.code == 7
    else:
        assert type(raised) is ringdp.MismatchError
        assert "rank 1 has no code: SystemExit: 7" in str(raised)


@pytest.mark.skipif("ring" not in backends(), reason="ring's futures keep exceptions, torch's make RuntimeErrors")
@pytest.mark.parametrize("place", ["hook", "then"])
@on_ranks()
def test_what_a_hook_raises(place: str) -> None:
    def hook(state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        if place == "hook":
            raise SystemExit(7)
        summed = dist.all_reduce(bucket.buffer(), async_op=True).get_future()

        def divided(done: torch.futures.Future[list[Tensor]]) -> Tensor:
            raise SystemExit(7)

        return summed.then(divided)

    model = RingDP(nn.Linear(40, 40))
    model.register_comm_hook(None, hook)
    error, _ = backward_of(model)
    assert type(error) is SystemExit
    assert error.code == 7


@on_ranks(backend=backends())
def test_a_future_that_is_never_completed_ends_by_the_timeout() -> None:
    group = dist.new_group(timeout=datetime.timedelta(seconds=0.3))
    model = RingDP(nn.Linear(40, 40), process_group=group)
    model.register_comm_hook(None, lambda state, bucket: torch.futures.Future())
    error, after_s = backward_of(model)
    assert type(error) is ringdp.RingTimeoutError
    assert f"the communication hook did not complete its future on rank {dist.get_rank()}" in str(error)
    assert "bucket 0: bias, weight" in str(error)
    assert error.bucket == 0
    assert 0.3 < after_s < 5


@pytest.mark.parametrize(
    "what, error, text",
    [
        ("no future", TypeError, "the communication hook returned None: it has to return a torch.futures.Future"),
        ("None", ringdp.InvalidArgumentError, "completed its future with None"),
        ("three", ringdp.InvalidArgumentError, "with 3 elements for a bucket of 16"),
    ],
)
@on_ranks(backend=backends())
def test_a_hook_that_gives_something_else_hears_of_it(what: str, error: type[Exception], text: str) -> None:
    def hook(state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        future: Any = None
        if what != "no future":
            future = torch.futures.Future()
            future.set_result(None if what == "None" else torch.ones(3))
        return future

    model = RingDP(nn.Linear(40, 40))
    model.register_comm_hook(None, hook)
    raised, _ = backward_of(model)
    assert type(raised) is error
    assert text in str(raised)


class Sleeps:
    def compress(self, x: Tensor, info: Info) -> Payload:
        if bool(x.any()):
            time.sleep(60)
        return (x,)

    def decompress(self, payload: Payload, info: Info) -> Tensor:
        return payload[0]


def interrupted(where: str) -> tuple[str, float]:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    compressed = [("*", Sleeps())] if where == "a compressor" else []
    model = RingDP(nn.Linear(40, 40), compression=Compression(rules=compressed))
    if where == "a future":
        model.register_comm_hook(None, lambda state, bucket: torch.futures.Future())
    output = model(torch.ones(2, 40)).sum()
    store: Any = distributed_c10d._get_default_store()
    if where == "an operation" and dist.get_rank() == 1:
        store.wait(["over"])  # the other one waits for this one in its backward
        return "nothing", 0.0
    sent: list[float] = []

    def press() -> None:
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    threading.Timer(0.2, press).start()
    try:
        output.backward()
        time.sleep(1)
    except BaseException as error:
        return type(error).__name__, time.monotonic() - sent[0]
    finally:
        store.set("over", "")
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    return "nothing", 0.0


@pytest.mark.parametrize("backend", backends())
@pytest.mark.parametrize("where", ["a future", "a compressor", "an operation"])
def test_ctrl_c_ends_backward(backend: str, where: str) -> None:
    first, _ = run_outcomes(interrupted, where, backend=backend)
    assert first.text is None, first.text
    error, after_s = first.value
    assert error == "KeyboardInterrupt"
    assert after_s < 1.1


PROGRAM = """
import os, signal, sys, threading, time
import torch
import ringdp
rank, folder, backend, how = int(sys.argv[1]), *sys.argv[2:]
ringdp.init(backend, rank=rank, world_size=2, init_method=f"file://{folder}/store", timeout=60, device="cpu")

class Mine:
    def compress(self, x, info):
        if rank == 1 and x.any():
            if how == "exit":
                sys.exit(7)
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
            time.sleep(60)
        return (x,)

    def decompress(self, payload, info):
        return payload[0]

model = ringdp.RingDP(torch.nn.Linear(40, 40), compression=ringdp.Compression(rules=[("*", Mine())]))
open(f"{folder}/ready-{rank}", "w").close()
model(torch.ones(2, 40)).sum().backward()
"""


@pytest.mark.parametrize(
    "backend", [pytest.param(it, marks=pytest.mark.ci) if it == "gloo" else it for it in backends()]
)
@pytest.mark.parametrize("how, code", [("exit", 7), ("interrupt", -signal.SIGINT)])
def test_the_process_ends_by_it(backend: str, how: str, code: int, tmp_path: Path) -> None:
    words = (str(tmp_path), backend, how)
    programs = [Program(PROGRAM, str(rank), *words, environ=os.environ, origin=rank) for rank in range(2)]
    try:
        for rank in range(2):
            wait_until((tmp_path / f"ready-{rank}").exists, f"rank {rank} in the job")
        begin = time.monotonic()
        errors = [program.communicate(timeout=50)[0] for program in programs]
    finally:
        for program in programs:
            program.kill()
    assert [program.returncode for program in programs] == [1, code], errors
    assert time.monotonic() - begin < 20, errors  # the timeout is 60 s
    assert "terminate called" not in errors[1]
    if how == "exit":
        assert "RingError: rank 1 could not compress a bucket: SystemExit: 7" in errors[0]
    elif backend == "ring":
        assert "PeerLostError" in errors[0]
        assert "lost rank 1" in errors[0]
