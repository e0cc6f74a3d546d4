"""What the ranks of test_async_store.py do: train with dist_async, and be killed at a message."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import ringdp
from ringdp import kvstore
from ringdp.errors import InvalidArgumentError, RingError
from ringdp.job import elastic as elastic_job
from ringdp.kvstore.async_store import AsyncStore
from ringdp.kvstore.messages import Kind
from ringdp.kvstore.service import Service
from tests.fault.elastic_jobs import joined, telling
from tests.train.async_cases import added

NUMEL = 3000  # in slices of 960 on three ranks, and a rest
STEPS, SAVED = 12, 3


REQUESTS = tuple(it.name for it in Kind if it not in (Kind.ANSWER, Kind.ERROR))


@dataclasses.dataclass(frozen=True)
class Plan:
    """At which message a process is killed.

    Attributes:
        kind: of the message, a name of `Kind`; "": any request, "ANSWER": one of its owner.
        number: so many of that kind go before.
        after: the message has been given to the network, else not.
    """

    kind: str
    number: int
    after: bool = False

    def armed(self) -> Any:
        """While it is entered, this process follows the plan."""
        left = self.number
        name = "answer" if self.kind == "ANSWER" else "ask"
        own = getattr(Service, name)

        def count(service: Service, *given: Any, **named: Any) -> Any:
            nonlocal left
            meant = self.kind in ("", "ANSWER") or given[0].name == self.kind
            left -= meant
            if meant and left < 0 and not self.after:
                os.kill(os.getpid(), signal.SIGKILL)
            result = own(service, *given, **named)
            if meant and left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return mock.patch.object(Service, name, count)


def store(**options: Any) -> tuple[AsyncStore, Tensor]:
    kv = kvstore.create("dist_async", **options)
    kv.set_updater(added)
    value = torch.zeros(NUMEL)
    kv.init("w", value)
    kv.barrier()
    return kv, value


def steps(kv: AsyncStore, value: Tensor, numbers: range) -> None:
    for _ in numbers:
        kv.push("w", torch.ones(NUMEL))
        kv.step()
        kv.pull("w", value)
        time.sleep(0.002)


def elastic(folder: str, victim: int, plan: Plan, staleness: int | None) -> dict[str, Any]:
    """Trains with a save in the middle; the victim is killed after it."""
    with telling(folder) as (told, place):
        kv, value = store(staleness=staleness)
        steps(kv, value, range(SAVED))
        kv.barrier()
        moved = torch.zeros(NUMEL, dtype=torch.bool)
        for view in kv._table.keys["w"].cut.slices(moved, victim):
            view.fill_(True)
        kv.save(Path(folder) / "slices")
        kv.barrier()  # in which this rank may be when the victim is killed
        kv._check_saves()
        if place == victim:
            with plan.armed():
                steps(kv, value, range(SAVED, STEPS + 1000))
        steps(kv, value, range(SAVED, STEPS))
        kv.barrier()
        kv.pull("w", value)
        result = {
            "moved": sorted(set(value[moved].tolist())),
            "kept": sorted(set(value[~moved].tolist())),
            "stats": kv.stats(),
            "rank": kv.rank,
            "workers": kv.num_workers,
        }
        kv.close()
    return result | {"lines": told.lines}


def without_saves(folder: str, victim: int) -> str:
    with telling(folder) as (_, place):
        try:
            kv, value = store(staleness=2)  # another rank may be in there still
            if place == victim:
                os.kill(os.getpid(), signal.SIGKILL)
            steps(kv, value, range(100))
        except RingError as error:
            return f"{type(error).__name__}: {error}"
    return "nothing"


def beside_a_job(folder: str) -> list[str]:
    """In an elastic job: a Job and a store, in both orders."""
    found = []
    for job_first in (True, False):
        with mock.patch.object(elastic_job, "_in_use", set()), telling(f"{folder}/{job_first}"):
            net = torch.nn.Linear(2, 1)
            model = ringdp.RingDP(net)
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            makes = [lambda: ringdp.elastic.Job(model, optimizer), lambda: store(staleness=2)]  # noqa: B023
            made: list[Any] = []
            try:
                made += [make() for make in (makes if job_first else makes[::-1])]
            except InvalidArgumentError as error:
                found.append(str(error))
    return found


def left_open(folder: str) -> Tensor:
    """Rank 1 leaves the job at once, with its store open; the other works on. The value then."""
    with joined(folder, elastic=False) as rank:
        kv, value = store(staleness=None)
        if rank == 0:
            time.sleep(0.5)  # rank 1 is leaving
            steps(kv, value, range(5))
            kv.pull("w", value)
    return value


def every_request(folder: str, kv: AsyncStore, value: Tensor) -> None:
    """Requests of all kinds but the last ones, for ever."""
    while True:
        kv.push("w", torch.ones(NUMEL))
        kv.step()
        kv.pull("w", value)
        kv.pushpull("w", torch.ones(NUMEL), value)
        kv.set_learning_rate(0.1)
        kv.flush()
        kv.save(folder)
        kv.barrier()


def owner_is_killed(folder: str, victim: int, plan: Plan) -> tuple[str, float]:
    """Without elasticity: what the others get, and how long after."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    ringdp.init(init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=60)
    began = time.monotonic()
    try:
        kv = kvstore.create("dist_async", staleness=1)
        kv.set_optimizer("sgd", learning_rate=0.1)
        value = torch.zeros(NUMEL)
        kv.init("w", value)
        kv.barrier()  # in which this rank may be when the victim is killed
        began = time.monotonic()
        with plan.armed() if rank == victim else contextlib.nullcontext():
            if plan.kind in ("LEAVE", "BYE"):
                kv.close()
            else:
                every_request(f"{folder}/slices", kv, value)
    except RingError as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - began
    return "nothing", time.monotonic() - began


def worker_is_killed(folder: str, victim: int, plan: Plan) -> tuple[int, list[float]]:
    """The last rank serves: the workers that are left go on."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    ringdp.init(init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=60)
    kv = kvstore.create("dist_async", staleness=1, servers=1)
    kv.set_updater(added)
    value = torch.zeros(NUMEL)
    kv.init("w", value)
    if kv.is_server:
        kv.serve()
        return kv.stats().pushes, []
    if rank == victim:
        with plan.armed():
            steps(kv, value, range(plan.number + 1))
            kv.close()
    steps(kv, value, range(50))
    kv.close()
    return kv.stats().clock, sorted(set(value.tolist()))
