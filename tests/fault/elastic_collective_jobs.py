"""What the ranks of test_elastic_collectives.py do: operations of the program's own, beside a loss."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import ringdp
from ringdp.errors import MembershipChanged, PeerLostError
from tests.fault.elastic_jobs import Net, Told, batch, digests, joined, one_step, telling
from tests.fault.faults import Faults


def _scatter(world: int) -> None:
    mine = [torch.ones(2) for _ in range(world)] if dist.get_rank() == 0 else None
    dist.scatter(torch.zeros(2), mine, src=0)


def _in_flight(world: int) -> None:
    for work in [dist.all_reduce(torch.ones(1000), async_op=True) for _ in range(3)]:
        work.wait()


CALLS: dict[str, Callable[[int], Any]] = {
    "barrier": lambda world: dist.barrier(),
    "broadcast": lambda world: dist.broadcast(torch.ones(2), src=0),
    "all_gather": lambda world: dist.all_gather([torch.zeros(2) for _ in range(world)], torch.ones(2)),
    "all_gather_into_tensor": lambda world: dist.all_gather_into_tensor(torch.zeros(2 * world), torch.ones(2)),
    "reduce_scatter": lambda world: dist.reduce_scatter_tensor(torch.zeros(2), torch.ones(2 * world)),
    "all_to_all": lambda world: dist.all_to_all_single(torch.zeros(2 * world), torch.ones(2 * world)),
    "scatter": _scatter,
    "all_gather_object": lambda world: dist.all_gather_object([None] * world, dist.get_rank()),
    "broadcast_object_list": lambda world: dist.broadcast_object_list([{"rank": dist.get_rank()}], src=0),
    "recv": lambda world: dist.recv(torch.zeros(2), src=1),
    "async": _in_flight,
}


def own(folder: str, kind: str, late: int) -> dict[str, Any]:
    """Rank 1 dies before the call. `late`: the rank that comes to it only after its loss is known; then a step."""
    with joined(folder, elastic=True) as place:
        model = ringdp.RingDP(Net(8))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        one_step(model, optimizer, place, 0, lambda phase: None, Told())
        world = dist.get_world_size()
        if place == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if place == late:
            time.sleep(0.3)
        told: dict[str, Any] = {"raised": ""}
        try:
            CALLS[kind](world)
            dist.barrier()  # a call that had nothing to do with the lost rank may have ended; the next one says it
        except MembershipChanged as error:
            told |= {"raised": str(error), "survivors": error.survivors}
        total = torch.ones(3)
        dist.all_reduce(total)
        after = Told()
        one_step(model, optimizer, place, 1, lambda phase: None, after)
        return told | {"sum": total[0].item(), "size": dist.get_world_size(), "gradients": after.gradients}


def groups(folder: str) -> dict[str, Any]:
    """Groups made before the loss: one with the rank that dies, one without it."""
    with joined(folder, elastic=True) as place:
        model = ringdp.RingDP(Net(8))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with_it, without_it = dist.new_group([0, 1, 2]), dist.new_group([0, 2])
        if place == 1:
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGKILL)
        told: dict[str, Any] = {"raised": ""}
        try:
            dist.all_reduce(torch.ones(2), group=with_it)
        except PeerLostError as error:
            told["raised"] = str(error)
        after = Told()
        one_step(model, optimizer, place, 1, lambda phase: None, after)
        total = torch.ones(2)
        dist.all_reduce(total, group=without_it)
        return told | {"sum": total[0].item(), "size": dist.get_world_size(), "gradients": after.gradients}


def zero_redundancy(folder: str) -> dict[str, Any]:
    """torch's optimizer that shares its state out: its own broadcasts cannot be made again."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    with joined(folder, elastic=True) as place:
        model = ringdp.RingDP(Net(8))
        optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.SGD, lr=0.1)
        raised = ""
        for step in range(3):
            x, y = batch(place, step)
            (model(x) - y).square().mean().backward()
            if (place, step) == (1, 1):
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                optimizer.step()
            except MembershipChanged as error:
                raised = str(error)
                break
            optimizer.zero_grad()
        total = torch.ones(1)
        dist.all_reduce(total)
        return {"raised": raised, "sum": total.item()}


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layer, self.head = nn.Linear(6, 16), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.layer(x)))


def everything(
    folder: str,
    steps: range,
    faults: Faults = Faults(),  # noqa: B008
    *,
    elastic: bool = True,
    places: tuple[int, ...] | None = None,
    state: Any = None,
) -> Told:
    """Two wrappers whose backward is one, a compiled module, workers that load data, clipping, a schedule, a scaler."""
    with telling(folder, elastic=elastic, places=places) as (told, place):
        compiled: Any = torch.compile(Pair(), backend="aot_eager")
        first = ringdp.RingDP(compiled)
        second = ringdp.RingDP(Net(8), weight="samples")
        parameters = [*first.parameters(), *second.parameters()]
        optimizer = torch.optim.AdamW(parameters, 0.01)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        scaler = ringdp.amp.GradScaler("cpu", init_scale=4.0)
        kept: tuple[Any, ...] = (first, second, optimizer, schedule, scaler)
        if state is not None:
            for one, saved in zip(kept, state["kept"], strict=True):
                one.load_state_dict(saved)
        data: Any = [batch(place, step)[0][: 4 + place] for step in steps]
        for step, x in zip(steps, torch.utils.data.DataLoader(data, batch_size=None, num_workers=2), strict=True):
            here = faults.at(place, step)
            here("forward")
            loss = first(x).square().mean() + second(x).abs().mean()
            handle = second.module.first.weight.register_hook(lambda gradient, here=here: here("last bucket"))
            scaler.scale(loss).backward()
            handle.remove()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(parameters, 0.5)
            told.gradients.append(digests([one.grad for one in parameters if one.grad is not None]))
            here("optimizer")
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
            optimizer.zero_grad()
            told.parameters.append(digests(parameters))
            told.sizes.append(ringdp.world_size())
        told.state = {"kept": [one.state_dict() for one in kept]}
    return told
