"""The state of rounds, saved and loaded: exact for each rank, or one for any number of ranks.

``{"format", "algorithm", "world_size", "schedule", "compression", "outer_class", "units", "medians", "since",
"counts_samples", "global": {name: [numel]}, "outer": {name: {…}}, "in_flight": {fragment: {…}}, "ranks": {"2": {name:
{"local", "residual"}}}}``: this rank's entries alone are in "ranks", so that torch.distributed.checkpoint keeps those
of all ranks apart. Consolidated: ``"parameters": {name: {…}}`` in place of "ranks", the same on all ranks. Tensors are
flat, row by row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringdp.compression import saved
from ringdp.errors import InvalidArgumentError
from ringdp.job.agreement import checked_alike
from ringdp.job.backend import named
from ringdp.job.elastic import as_unit
from ringdp.rounds import start
from ringdp.rounds.exchange import Arrival, Flight, FragmentExchange, Record
from ringdp.rounds.fragments import Fragment, Piece
from ringdp.rounds.outer import OuterStep, class_of
from ringdp.rounds.pace import Pace
from ringdp.rounds.settings import Settings

_FORMAT = 1
_WHERE = "the rounds' state"


@dataclasses.dataclass
class Rounds:
    """The parts of a `DiLoCo` that are saved: its fragments with their exchanges, in the same order.

    Attributes:
        outer: of each fragment the outer optimizer.
        flights: fragments on their way, by number.
        units: of each fragment the unit of its ranks' weights.
        since: of each fragment the steps and the samples since it last left.
        counts_samples: whether ranks weigh by samples.
    """

    settings: Settings
    members: dist.ProcessGroup
    pace: Pace
    fragments: Sequence[Fragment]
    exchanges: Sequence[FragmentExchange]
    outer: Sequence[OuterStep]
    flights: dict[int, Flight]
    units: list[float]
    since: tuple[list[int], list[float]]
    counts_samples: bool


def state_dict(rounds: Rounds, *, consolidated: bool) -> dict[str, Any]:
    """See `DiLoCo.state_dict`; nothing is under way."""
    if not consolidated:
        return _state_dict(rounds, consolidated=False)
    return as_unit(rounds.members, "the state of rounds", lambda: _state_dict(rounds, consolidated=True))


def _state_dict(rounds: Rounds, *, consolidated: bool) -> dict[str, Any]:
    members = rounds.members
    for exchange in rounds.exchanges:
        if exchange.codes is not None:
            exchange.codes.follow_members()
    own: dict[str, dict[str, Tensor]] = {}
    state: dict[str, Any] = {
        "format": _FORMAT,
        "algorithm": rounds.settings.who,
        "world_size": members.size(),
        "schedule": rounds.pace.schedule.state(),
        "compression": rounds.settings.compressor,
        "outer_class": class_of(rounds.settings.outer),
        "units": list(rounds.units),
        "medians": [one.median for one in rounds.exchanges],
        "since": _since(rounds, consolidated),
        "counts_samples": rounds.counts_samples,
        "global": {},
        "outer": {},
        "in_flight": {},
    }
    for number, (fragment, exchange) in enumerate(zip(rounds.fragments, rounds.exchanges, strict=True)):
        local = torch.empty_like(fragment.total)
        if rounds.settings.quorum is None:
            fragment.read(local)
        else:  # which may be training meanwhile, and else has these
            local.copy_(fragment.total)
        residuals: dict[str, Tensor | None] = {}
        if exchange.codes is not None:
            residuals = {piece.name: exchange.codes.residuals.current(piece.name) for piece in fragment.pieces}
        if consolidated:
            local = _mean(local, members) if rounds.settings.quorum is None else local
            residuals = _mean_residuals(fragment, exchange, residuals)
        outer = rounds.outer[number].state()
        for piece in fragment.pieces:
            state["global"][piece.name] = piece.of(fragment.total).clone()
            state["outer"][piece.name] = {key: _part(fragment, piece, value) for key, value in outer.items()}
            own[piece.name] = {"local": piece.of(local).clone()}
            owed = residuals.get(piece.name)
            if owed is not None:
                own[piece.name]["residual"] = owed.clone()
        if number in rounds.flights:
            state["in_flight"][str(number)] = _flight_state(fragment, rounds.flights[number])
    return state | ({"parameters": own} if consolidated else {"ranks": {str(members.rank()): own}})


def load_state_dict(rounds: Rounds, state: Mapping[str, Any]) -> None:
    """See `DiLoCo.load_state_dict`. Nothing is changed where something does not fit."""
    own, consolidated = as_unit(rounds.members, "loading the state of rounds", lambda: _agreed(rounds, state))
    _take(rounds, state, own, consolidated=consolidated)


def take_over(rounds: Rounds, state: Mapping[str, Any]) -> None:
    """On a newcomer: go on as the ranks whose consolidated state it is, which `share` it."""
    _take(rounds, state, _checked(rounds, state)[0], consolidated=True)


def share(rounds: Rounds, state: Mapping[str, Any]) -> None:
    """On all ranks but newcomers: what the mean lacked in this consolidated state is owed by the ranks that are there
    now."""
    for fragment, exchange in zip(rounds.fragments, rounds.exchanges, strict=True):
        if exchange.codes is not None:
            exchange.codes.follow_members()
        for piece in fragment.pieces:
            _owe(exchange, piece, state["parameters"][piece.name].get("residual"), consolidated=True)


def _take(rounds: Rounds, state: Mapping[str, Any], own: Mapping[str, Any], *, consolidated: bool) -> None:
    members, fragments = rounds.members, rounds.fragments
    rounds.pace.load(dict(state["schedule"]))
    rounds.counts_samples = bool(state.get("counts_samples", False))
    rounds.units = [float(one) for one in state["units"]]
    rounds.since = ([int(one[0]) for one in state["since"]], [float(one[1]) for one in state["since"]])
    rounds.flights.clear()
    for exchange, median in zip(rounds.exchanges, state.get("medians", ()), strict=False):
        exchange.median = float(median)
    for number, (fragment, exchange) in enumerate(zip(fragments, rounds.exchanges, strict=True)):
        if exchange.codes is not None:
            exchange.codes.follow_members()
        for piece in fragment.pieces:
            piece.of(fragment.total).copy_(state["global"][piece.name])
            piece.of(fragment.buffer).copy_(own[piece.name]["local"])
            _owe(exchange, piece, own[piece.name].get("residual"), consolidated=consolidated)
        fragment.write(fragment.buffer)
        rounds.outer[number].load(_joined(fragment, state["outer"]))
        if (flight := state["in_flight"].get(str(number))) is not None:
            rounds.flights[number] = _flight(fragment, flight, members.rank())


def _owe(exchange: FragmentExchange, piece: Piece, owed: Tensor | None, *, consolidated: bool) -> None:
    """`consolidated`: it is of the mean over ranks, of which this one takes its part."""
    if exchange.codes is None:
        return
    exchange.codes.residuals.drop(piece.name)
    if owed is not None:
        owed = owed.to("cpu", copy=True)
        exchange.codes.residuals.set(piece.name, exchange.codes.part(piece, owed) if consolidated else owed)


def _checked(rounds: Rounds, state: Any) -> tuple[Mapping[str, Any], bool]:
    """This rank's entries, and whether they are for any number of ranks.

    Raises:
        InvalidArgumentError: it does not fit.
    """
    who, members = rounds.settings.who, rounds.members
    if saved.field(state, "format", int, _WHERE) != _FORMAT:
        raise InvalidArgumentError(f"{_WHERE} has format {state['format']!r}, and {_FORMAT} is expected")
    if (algorithm := saved.field(state, "algorithm", str, _WHERE)) != who:
        raise InvalidArgumentError(f"{_WHERE} is of a {algorithm}, and this is a {who}")
    if (before := saved.field(state, "compression", str, _WHERE)) != rounds.settings.compressor:
        raise InvalidArgumentError(
            f"{_WHERE} has changes compressed by {before}, here it is {rounds.settings.compressor}: give it the same"
            " compression"
        )
    if (outer := state.get("outer_class", here := class_of(rounds.settings.outer))) != here:
        raise InvalidArgumentError(
            f"{_WHERE} is of the outer optimizer {outer}, here it is {here}: give it the same outer"
        )
    if len(state["units"]) != len(rounds.fragments):
        raise InvalidArgumentError(
            f"{_WHERE} has {len(state['units'])} fragments, and there are {len(rounds.fragments)} here: give it the"
            " same number"
        )
    timed = "turn" in saved.field(state, "schedule", Mapping, _WHERE)
    if timed != rounds.settings.unequal:
        raise InvalidArgumentError(f"{_WHERE} was saved with unequal={timed}, here it is {not timed}")
    if (is_open := "met" in state["schedule"]) != (rounds.settings.quorum is not None):
        raise InvalidArgumentError(f"{_WHERE} was saved with{'' if is_open else 'out'} a quorum, here it is otherwise")
    consolidated = "parameters" in state
    if not consolidated:
        by_rank = saved.field(state, "ranks", Mapping, _WHERE)
        saved_by = saved.field(state, "world_size", int, _WHERE)
        if saved_by != members.size() or str(members.rank()) not in by_rank:
            raise InvalidArgumentError(
                f"{_WHERE} was saved by rank {', '.join(map(str, by_rank))} of {saved_by}, and this is rank"
                f" {members.rank()} of {members.size()}: save it with consolidated=True, which loads anywhere",
                rank=members.rank(),
            )
    own = state["parameters"] if consolidated else state["ranks"][str(members.rank())]
    totals = saved.field(state, "global", Mapping, _WHERE)
    pieces = {piece.name: piece for fragment in rounds.fragments for piece in fragment.pieces}
    if different := sorted(set(pieces) ^ set(totals)):
        has = "has no" if different[0] in pieces else "has"
        raise InvalidArgumentError(f"{_WHERE} {has} parameter {different[0]!r}, and the model's parameters differ")
    for name, piece in pieces.items():
        for what, value in (("global", totals[name]), ("local", own[name]["local"])):
            if not isinstance(value, Tensor) or value.shape != (piece.count,):
                shown = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise InvalidArgumentError(
                    f"{_WHERE} has a {what} {name!r} of {shown}, and the model's has {piece.count} elements", name=name
                )
        if "residual" in own[name]:
            saved.check_elements(name, "residual", own[name]["residual"], piece.count)
    return own, consolidated


def _agreed(rounds: Rounds, state: Any) -> tuple[Mapping[str, Any], bool]:
    """As `_checked`, where all ranks' states fit and are of one step.

    Raises:
        InvalidArgumentError: this rank's does not fit; the others raise MismatchError with its text.
        MismatchError: another rank's does not fit, or ranks load different steps.
    """
    who, members = rounds.settings.who, rounds.members

    def lines(_: tuple[Mapping[str, Any], bool]) -> list[str]:
        schedule = {key: value for key, value in state["schedule"].items() if key != "turn_s"}
        own_steps = rounds.settings.unequal or rounds.settings.quorum is not None
        names = ["turn" if rounds.settings.unequal else "met"] if own_steps else ["step", *sorted(schedule)]
        return [f"{name}: {schedule[name]}" for name in names]

    return checked_alike(
        lambda: _checked(rounds, state),
        lines,
        members,
        operation="rounds: loading a state",
        what=f"{who}'s state",
        doing=f"load its state of the {who}",
        words=lambda one, mine, theirs: (
            f"{who}.load_state_dict: this rank loads a state with {mine}, rank {one.peer} one with {theirs}: load"
            " states that were saved together"
        ),
    )


def _part(fragment: Fragment, piece: Piece, value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return piece.of(value).clone() if value.shape == fragment.total.shape else value.clone()


def _joined(fragment: Fragment, by_name: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The whole tensor of the parts that `_part` has made."""
    first = by_name[fragment.pieces[0].name]
    joined: dict[str, Any] = {}
    for key, value in first.items():
        parts = [by_name[piece.name][key] for piece in fragment.pieces]
        whole = isinstance(value, Tensor) and value.shape == (fragment.pieces[0].count,) and value.dim() == 1
        joined[key] = torch.cat(parts) if whole else value
    return joined


def _flight_state(fragment: Fragment, flight: Flight) -> dict[str, Any]:
    arrival = flight.arrival
    assert arrival is not None
    return {
        "name": flight.name,
        "usable": arrival.usable,
        "of_parameters": arrival.of_parameters,
        "weight": arrival.weight,
        "records": [list(dataclasses.astuple(one)[:3]) for one in arrival.records],
        "mean": {piece.name: piece.of(fragment.buffer).clone() for piece in fragment.pieces},
    }


def _flight(fragment: Fragment, state: Mapping[str, Any], rank: int) -> Flight:
    records = tuple(Record(*one) for one in state["records"])
    flight = Flight(state["name"], records[min(rank, len(records) - 1)], unit=1.0, exact=False, averages=False)
    flight.arrival = Arrival(state["usable"], state["of_parameters"], state["weight"], records, rank)
    for piece in fragment.pieces:
        piece.of(fragment.buffer).copy_(state["mean"][piece.name])
    return flight


def _mean(local: Tensor, members: dist.ProcessGroup) -> Tensor:
    if members.size() > 1:
        with named("rounds: mean of parameters"):
            dist.all_reduce(local, group=members)
        local /= members.size()
    return local


def _since(rounds: Rounds, consolidated: bool) -> list[list[float]]:
    """For each fragment the steps and samples since it last left; consolidated the mean over the ranks. With a quorum
    it is none: states are of the moment when it left."""
    if rounds.settings.quorum is not None:
        return [[0, 0.0] for _ in rounds.fragments]
    since = [[float(steps), float(samples)] for steps, samples in zip(*rounds.since, strict=True)]
    if consolidated and rounds.members.size() > 1:
        start.average([mean := torch.tensor(since, dtype=torch.float64, device="cpu")], rounds.members)
        since = mean.tolist()
    return [[round(steps), samples] for steps, samples in since]


def _mean_residuals(
    fragment: Fragment, exchange: FragmentExchange, residuals: Mapping[str, Tensor | None]
) -> dict[str, Tensor | None]:
    """The residual of the mean over ranks: their shares, added up."""
    means: dict[str, Tensor | None] = dict(residuals)
    if exchange.group is None or exchange.codes is None:
        return means
    for piece in fragment.pieces:
        residual = residuals[piece.name]
        if residual is not None:
            share = exchange.codes.share(piece, residual)
            with named("rounds: mean of what codes owe"):
                dist.all_reduce(share, group=exchange.group)
            means[piece.name] = share
    return means
