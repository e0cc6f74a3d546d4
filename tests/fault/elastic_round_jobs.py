"""What the ranks of test_elastic_rounds.py do: train in rounds, and meet their faults in the exchange and beside it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ringdp
from ringdp import _C
from ringdp.compression.partition import owner_offset_of
from ringdp.rounds import diloco, exchange
from ringdp.rounds.codes import OwnedCodes
from tests.fault.elastic_jobs import Net, Told, batch, digests, group_of, joined, telling
from tests.fault.faults import Faults
from tests.train.harness import default_group

LAST = 9
STEPS = range(1, LAST + 1)
FINISH = LAST + 1  # as a step, for faults
STATE = FINISH + 1  # where fragments are waited for that are on their way at the end


class Mean(NamedTuple):
    """Of a fragment that has left in step `left` and landed in step `landed`: the places whose parts are in it."""

    left: int
    landed: int
    fragment: int
    members: tuple[int, ...]


OUTER: dict[str, Any] = {
    "nesterov": None,
    "averages": {"lr": 1.0, "momentum": 0.0},
    "usual": None,
    "heavy ball": {"lr": 0.5, "momentum": 0.5},
    "adam": functools.partial(torch.optim.Adam, lr=0.1),
}


def train(
    folder: str,
    steps: range,
    faults: Faults = Faults(),  # noqa: B008
    *,
    elastic: bool = True,
    places: tuple[int, ...] | None = None,
    state: dict[str, Any] | None = None,
    kind: str = "DiLoCo",
    outer: str = "nesterov",
    options: dict[str, Any] | None = None,
    width: int = 8,
    samples: bool = False,
    norm: bool = False,
    finish: bool = False,
    infinite: tuple[int, int] | None = None,
    mean_each: int = 0,
    sites: tuple[tuple[int, ...], ...] = (),
    counterparts: bool = False,
    means: Sequence[Mean] | None = None,
) -> Told:
    """`gradients` of what it tells are the global parameters. `samples`: ranks count by them.
    `means`: without elasticity, these; a place that has no part in the next one of a fragment ends there.
    `sites`: of places; the ranks of each average their gradients. `counterparts`: rounds between one rank of each site.
    `infinite`: in that step of that place the parameters become so. `mean_each`: a metric, after so many steps."""
    with telling(folder, elastic=elastic, places=places) as (told, place):
        net = Net(width, norm=norm)
        inner = torch.optim.SGD(net.parameters(), 0.1, momentum=0.5)
        given: dict[str, Any] = {"outer": OUTER[outer]} if kind == "DiLoCo" else {}
        with watched(faults, place, told) as watch:
            model = of_a_site(net, sites, place, places, elastic=elastic) if sites else net
            if counterparts and elastic:
                between = [[ranks[index] for ranks in sites if index < len(ranks)] for index in range(len(sites[1]))]
                given["process_group"] = dist.new_subgroups_by_enumeration(between)[0]
            rounds = getattr(ringdp, kind)(model, inner, **given, **(options or {}))
            if state is not None:
                net.load_state_dict(state["model"])
                inner.load_state_dict(state["inner"])
                rounds.load_state_dict(of_this_job(state["rounds"]))
            with contextlib.nullcontext() if means is None else exchanging(rounds, means, place):
                for step in steps:
                    watch.step = step
                    watch.here("forward")
                    x, y = batch(place, step)
                    count = 4 + (place + step) % 4 if samples else 8
                    inner.zero_grad()
                    (model(x[:count]) - y[:count]).square().mean().backward()
                    if infinite == (place, step):
                        torch.nn.init.constant_(net.last.bias, torch.inf)
                    if samples:
                        rounds.did(count)
                    inner.step()
                    watch.here("after")
                    if mean_each and step % mean_each == 0 and elastic:
                        told.extra.setdefault("mean", []).append(ringdp.metrics.mean(float(step)))
                    tell(told, net, rounds)
                if finish and steps.stop > LAST:
                    watch.step = FINISH
                    watch.here("forward")
                    rounds.finish()
                    tell(told, net, rounds)
                watch.step = STATE
                if means is not None:
                    rounds._wait_for_flights()
            if means is None:
                state = {"model": net.state_dict(), "inner": inner.state_dict()}
                state["rounds"] = of_owners(rounds.state_dict())
                told.state = {} if elastic else state
            else:  # places that have ended wait for the others
                dist.barrier()
        told.extra["stats"] = rounds.stats()
    return told


def of_a_site(
    net: nn.Module, sites: tuple[tuple[int, ...], ...], place: int, places: tuple[int, ...] | None, *, elastic: bool
) -> nn.Module:
    if not elastic:
        return ringdp.RingDP(net, process_group=group_of(sites, places))
    os.environ["RINGDP_SITE"] = next(str(number) for number, site in enumerate(sites) if place in site)
    inside, between = ringdp.levels()
    del os.environ["RINGDP_SITE"]
    assert between is dist.group.WORLD
    return ringdp.RingDP(net, process_group=inside)


class Ended(Exception):
    """This place has no part in the next exchange."""


@contextlib.contextmanager
def exchanging(rounds: Any, means: Sequence[Mean], place: int) -> Iterator[None]:
    """Each fragment leaves to exactly those whose parts its mean has, who are a group of their own."""
    groups = {members: dist.new_group(list(members)) for members in sorted({it.members for it in means})}
    members_of = [[it.members for it in means if it.fragment == number] for number in range(len(rounds._exchanges))]
    leave = diloco.DiLoCo._leave

    def leave_to(self: Any, number: int, *, exact: bool) -> None:
        members = members_of[number].pop(0)
        if place not in members:
            raise Ended
        self._members = groups[members]
        give_group(self._exchanges[number], self._members if len(members) > 1 else None)
        leave(self, number, exact=exact)

    with contextlib.suppress(Ended), mock.patch.object(diloco.DiLoCo, "_leave", leave_to):
        yield


def give_group(it: Any, group: dist.ProcessGroup | None) -> None:
    """A rank's residuals stay with it: see `OwnedCodes.follow_members`."""
    before, it.group = it.group, group
    if it.codes is None:
        return
    it.codes._group = group
    owned = isinstance(it.codes, OwnedCodes) and group is not before
    for piece in it.fragment.pieces if owned else ():
        residual = it.codes.residuals.current(piece.name)
        if residual is not None:
            residual = residual.clone()
            if before is not None:
                times_owned(residual, before, piece.name, float(before.size()))
            if group is not None:
                times_owned(residual, group, piece.name, 1.0 / group.size())
            it.codes.residuals.set(piece.name, residual)


def times_owned(residual: torch.Tensor, group: dist.ProcessGroup, name: str, factor: float) -> None:
    for begin, end in _C.owned_elements(group, len(residual), owner_offset_of(name)):
        residual[begin:end] *= factor


def part_of_a_site(folder: str) -> None:
    with joined(folder, elastic=True):
        net = Net(8)
        model = ringdp.RingDP(net)
        group, _ = dist.new_subgroups_by_enumeration([[0, 1], [2]])
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        if ringdp.rank() < 2:
            with pytest.raises(ringdp.InvalidArgumentError, match="keeps in step, but not 2: give it all of them"):
                ringdp.DiLoCo(model, optimizer, every=2, process_group=group)
        ringdp.monitored_barrier()


class Incomplete:
    """The first time this rank is as if a mean had not come, where another rank is lost: the round is made again."""

    def __init__(self) -> None:
        self._met = False

    def __call__(self) -> None:
        if not self._met:
            self._met = True
            dist.barrier()  # which the lost rank does not enter


def tell(told: Told, net: nn.Module, rounds: Any) -> None:
    told.gradients.append(digests([one.total for one in rounds._fragments]))
    buffers = [it for it in net.buffers() if it.is_floating_point()]
    told.parameters.append(digests([*net.parameters(), *buffers]))
    told.sizes.append(ringdp.world_size())


class Watch:
    """Asks the faults at each place of an exchange, and tells whose parts are in each mean."""

    def __init__(self, faults: Faults, place: int, told: Told) -> None:
        self._faults, self._place, self._told = faults, place, told
        self.step, self.by_time = 0, False
        self._left: dict[int, int] = {}  # in which step, by flight

    def here(self, phase: str) -> None:
        self._faults.at(self._place, self.step)(phase)

    def start(self, original: Any, it: Any, flight: Any) -> None:
        self.here("leaving")
        if not self.by_time:  # which needs the seconds
            flight.mine = dataclasses.replace(flight.mine, step_s=self._place + 1.0)
        original(it, flight)
        self._left[id(flight)] = self.step
        self.here("sent")

    def gather(self, original: Any, *arguments: Any, **named: Any) -> Any:
        work = original(*arguments, **named)
        if threading.current_thread() is threading.main_thread():
            self.here("between")
        return work

    def again(self, original: Any, it: Any, flight: Any) -> None:
        if flight.view:
            self.here("again")
        original(it, flight)

    def arrived(self, original: Any, it: Any, flight: Any) -> Any:
        arrival = original(it, flight)
        self.here("arrived")
        return arrival

    def arrive(self, original: Any, it: Any, flight: Any, beside: Any) -> Any:
        arrival = original(it, flight, beside)
        self.here("done")
        return arrival

    def land(self, original: Any, it: Any, number: int, flight: Any) -> Any:
        arrival = original(it, number, flight)
        self.here("landed")
        members = tuple(0 if self.by_time else round(one.step_s) - 1 for one in arrival.records)
        self._told.extra.setdefault("means", []).append(Mean(self._left[id(flight)], self.step, number, members))
        return arrival


@contextlib.contextmanager
def watched(faults: Faults, place: int, told: Told) -> Iterator[Watch]:
    watch = Watch(faults, place, told)

    def patched(what: Any, name: str, how: Callable[..., Any]) -> Any:
        original = getattr(what, name)
        return mock.patch.object(what, name, lambda *given, **named: how(original, *given, **named))

    with contextlib.ExitStack() as stack:
        stack.enter_context(patched(exchange.FragmentExchange, "start", watch.start))
        stack.enter_context(patched(exchange.FragmentExchange, "_send_again", watch.again))
        stack.enter_context(patched(exchange.FragmentExchange, "_arrived", watch.arrived))
        stack.enter_context(patched(exchange.FragmentExchange, "_arrive", watch.arrive))
        stack.enter_context(patched(exchange, "all_gather_single", watch.gather))
        stack.enter_context(patched(diloco.DiLoCo, "_wait", watch.land))
        yield watch


def of_owners(state: dict[str, Any]) -> dict[str, Any]:
    """A rank's state with residuals of its own changes."""
    own = state["ranks"][str(ringdp.rank())]
    return state | {"ranks": {"own": _scaled(own, float(ringdp.world_size()), state["compression"])}}


def of_this_job(state: dict[str, Any]) -> dict[str, Any]:
    rank, ranks = ringdp.rank(), ringdp.world_size()
    own = _scaled(state["ranks"]["own"], 1.0 / ranks, state["compression"])
    return state | {"world_size": ranks, "ranks": {str(rank): own}}


def _scaled(own: dict[str, Any], factor: float, compression: str) -> dict[str, Any]:
    if compression.startswith("Sparse2"):  # no rank owns elements
        return own
    scaled = {}
    for name, entry in own.items():
        scaled[name] = dict(entry)
        if "residual" in entry:
            scaled[name]["residual"] = residual = entry["residual"].clone()
            times_owned(residual, default_group(), name, factor)
    return scaled


def unequal(folder: str, faults: Faults) -> dict[str, Any]:
    """Rounds by time, in which a rank is lost."""
    os.environ["RINGDP_ELASTIC"] = "1"
    with telling(folder) as (told, place):
        net = Net(8)
        inner = torch.optim.SGD(net.parameters(), 0.05)
        with watched(faults, place, told) as watch:
            watch.by_time = True
            rounds = ringdp.DiLoCo(net, inner, every=4, fragments=ringdp.Fragments(2, delay=1), unequal=True)
            while rounds.round < 6:
                watch.step = rounds.round
                x, y = batch(place, rounds.step)
                inner.zero_grad()
                (net(x) - y).square().mean().backward()
                watch.here("forward")
                inner.step()
                threading.Event().wait(0.002 * (place + 1))
            rounds.finish()
        told.parameters.append(digests(list(net.parameters())))
    return {"parameters": told.parameters, "means": told.extra["means"], "sizes": told.sizes}
