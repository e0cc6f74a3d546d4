"""What a member's door and a newcomer do with what others leave in the store."""

from __future__ import annotations

import socket
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from ringdp.elastic import door, transfer
from ringdp.elastic.board import Board
from ringdp.errors import HandshakeError
from ringdp.job import elastic


class _Origin(elastic.Origin):
    def __init__(self) -> None:
        super().__init__(HashStore(), start=0, size=2)

    def keys(self) -> Any:
        return self.store


def door_of_two(monkeypatch: pytest.MonkeyPatch, most: int | None = None) -> tuple[Any, SimpleNamespace]:
    """Of a group with two members, whose view and places may be set."""
    group, origin = SimpleNamespace(view=1, places=(0, 1)), _Origin()
    monkeypatch.setattr(elastic, "origin", lambda: origin)
    monkeypatch.setattr(elastic, "view_of", lambda of: of.view)
    monkeypatch.setattr(elastic, "places", lambda of: of.places)
    made = door.Door(group, lambda: None, most)  # type: ignore[arg-type, return-value]
    return made, group


@pytest.mark.parametrize("text", ["", "x", "[]", "7", "{}", '{"host": 1}', "[" * 100_000])
def test_what_is_no_ticket_or_world_is_none(text: str) -> None:
    board = Board(_Origin())
    for key in ("ticket/1", "world/1"):
        board.store.set(key, text)
    board.store.set("worlds/latest", "1")
    assert board.ticket(1) is None
    assert board.latest() is None


@pytest.mark.parametrize("changes", [False, True])
def test_a_world_is_proposed_to_the_members_that_it_is_made_of(monkeypatch: pytest.MonkeyPatch, changes: bool) -> None:
    """And not where the newcomer has become one meanwhile: it would be there twice, and wait for itself."""
    made, group = door_of_two(monkeypatch)

    def waiting(*_: Any) -> list[int]:
        if changes:
            group.view, group.places = 2, (0, 1, 2)
        return [1]

    made._waiting = waiting
    made._first_s[1] = 0.0
    made._propose()
    proposed = made._board.latest()
    assert (proposed is None) if changes else (proposed.places == [0, 1, 2])


def test_a_world_that_was_given_up_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made, _ = door_of_two(monkeypatch, 2)
    made._waiting = lambda *_: [1]
    made._board.give_up(made._board.propose(1, [1], [0, 1, 2], 5.0))
    for _ in range(2 * door.MOST_FAILURES):
        made._propose()
    assert made._board.refusal(1) is None


def test_a_meeting_that_has_failed_may_take_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as a member that ends meanwhile may wait for it."""
    made, _ = door_of_two(monkeypatch)
    made._waiting = lambda *_: [1]
    made._first_s[1] = 0.0
    seconds = []
    for _ in range(door.MOST_FAILURES):
        made._propose()
        seconds.append((proposed := made._board.latest()).seconds)
        made._board.give_up(proposed)
    assert seconds == [5.0, 10.0, 20.0, 20.0, 20.0]


def test_nobody_goes_on_in_a_world_from_which_its_newcomers_turn_away(monkeypatch: pytest.MonkeyPatch) -> None:
    made, _ = door_of_two(monkeypatch)
    first = made._board.propose(1, [1, 2], [0, 1, 2, 3], 5.0)
    made._met = made._ready = first
    made._waiting = lambda *_: [1]  # the second one has died
    made._first_s[1] = 0.0
    made._propose()
    assert made._board.latest().number > first.number
    assert made.ready() is None


@pytest.mark.parametrize(
    ("value", "words"),
    [(Path("x"), "PosixPath"), (lambda: 0, "lambda"), (torch.ones(2), None), ({"a": [1, 2.0, "b", None]}, None)],
    ids=["a path", "a function", "a tensor", "plain values"],
)
def test_states_that_newcomers_cannot_be_sent(value: Any, words: str | None) -> None:
    found = transfer.cannot_carry({"it": value})
    assert (found is None) if words is None else (words in str(found))


def test_a_port_where_nobody_listens_is_named_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic, "_FIRST_NOTICE_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(HandshakeError, match=f"there is no job at 127.0.0.1:{port}"):
        elastic.find_job("127.0.0.1", port, "", timedelta(seconds=60))
