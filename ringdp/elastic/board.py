"""The keys in the job's store by which newcomers and members find each other.

A newcomer hands in a ticket, and shows by a count that goes on that it lives. The lowest member proposes a world: the
present members and newcomers, who then connect to each other while the members train on. The members decide in a unit
whether they go on in it (`ElasticGroup::go_on_in`), and tell the newcomers.
"""

from __future__ import annotations

import dataclasses
import hmac
import json
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from ringdp import config
from ringdp.job import elastic


def prove(host: str, pid: int) -> str:
    secret = config.RingConfig.from_environment().secret
    return "" if secret is None else hmac.new(secret, f"ringdp {host} {pid}".encode(), "sha256").hexdigest()


@dataclasses.dataclass(frozen=True)
class Ticket:
    """What a newcomer says of itself.

    Attributes:
        host, pid: where it runs.
        version: of ringdp.
        model: by parameter and buffer, its name, shape and dtype.
        parts: the names of what its Job was given.
        settings: of its RingDP or DiLoCo, by argument.
        proof: made of the job's secret and its process; "" without one.
    """

    host: str
    pid: int
    version: str
    model: list[str]
    parts: list[str]
    settings: dict[str, str]
    proof: str

    @property
    def who(self) -> str:
        return f"pid {self.pid} on {self.host}"

    def difference(self, mine: Ticket) -> str | None:
        """Why it cannot join a rank that would have said `mine`."""
        if not hmac.compare_digest(self.proof, prove(self.host, self.pid)):
            return "its secret is not the job's: give --secret-file the file that the first launchers have"
        if self.version != mine.version:
            return f"it has ringdp {self.version}, the job {mine.version}"
        for what, its_list, our_list in (("model", self.model, mine.model), ("Job", self.parts, mine.parts)):
            for its, ours in zip([*its_list, "no more"], [*our_list, "no more"], strict=False):
                if its != ours:
                    return f"its {what} has {its}, the job's has {ours}"
        for name in sorted(self.settings.keys() | mine.settings.keys()):
            its, ours = self.settings.get(name, "its default"), mine.settings.get(name, "its default")
            if its != ours:
                return f"it has {name} {its}, the job has {ours}"
        return None


@dataclasses.dataclass(frozen=True)
class World:
    """A proposal.

    Attributes:
        number: it is the latest one with the highest.
        view: of the members that it names.
        tickets: of the newcomers.
        places: by rank in it, the numbers that ranks have for good: the members' in their order, then newcomers'.
        seconds: in which they have to connect to each other.
    """

    number: int
    view: int
    tickets: list[int]
    places: list[int]
    seconds: float

    @property
    def name(self) -> str:
        return f"world {self.number}"

    @property
    def members(self) -> int:
        return len(self.places) - len(self.tickets)


_Read = TypeVar("_Read", Ticket, World)


def _read(kind: type[_Read], text: str) -> _Read | None:
    """None: it is not one."""
    try:
        made = kind(**json.loads(text))
    except (ValueError, TypeError, RecursionError):
        return None
    kinds = {"int": int, "float": float, "str": str, "list": list, "dict": dict}
    right = ((getattr(made, it.name), str(it.type).partition("[")) for it in dataclasses.fields(kind))
    return made if all(isinstance(value, kinds[name]) for value, (name, _, _) in right) else None


class Board:
    """The keys of one start of the job. Each has a connection of its own; used by one thread at a time."""

    def __init__(self, origin: elastic.Origin) -> None:
        self.store: Store = origin.keys()

    def find(self, key: str) -> str | None:
        return self.store.get(key).decode() if self.store.check([key]) else None

    # Newcomers.

    def hand_in(self, ticket: Ticket) -> int:
        number = self.store.add("tickets", 1)
        self.store.set(f"ticket/{number}", json.dumps(dataclasses.asdict(ticket)))
        return number

    def show_life(self, ticket: int) -> None:
        self.store.add(f"alive/{ticket}", 1)

    def refusal(self, ticket: int) -> str | None:
        return self.find(f"refused/{ticket}")

    def entry(self, world: World) -> tuple[int, int] | None:
        """The view in which the members go on in this world, and the units that they had left; None: not yet."""
        text = self.find(f"world/{world.number}/entry")
        if text is None:
            return None
        view, left = map(int, text.split())
        return view, left

    def confirm(self, world: World, ticket: int) -> None:
        """This newcomer is ready to go on in it."""
        self.store.set(f"world/{world.number}/ready/{ticket}", "")

    def over(self) -> bool:
        """The training has ended."""
        return self.store.check([config.JOB_OVER])

    # Members.

    def handed_in(self) -> int:
        """The number of the last ticket; some may not be there yet."""
        return int(self.store.add("tickets", 0))

    def has_ticket(self, number: int) -> bool:
        return self.store.check([f"ticket/{number}"])

    def ticket(self, number: int) -> Ticket | None:
        """None: it cannot be read."""
        return _read(Ticket, self.find(f"ticket/{number}") or "")

    def life(self, ticket: int) -> int:
        return int(self.store.add(f"alive/{ticket}", 0))

    def refuse(self, ticket: int, reason: str) -> None:
        self.store.set(f"refused/{ticket}", reason)

    def propose(self, view: int, tickets: list[int], places: list[int], seconds: float) -> World:
        world = World(self.store.add("worlds/made", 1), view, tickets, places, seconds)
        self.store.set(f"world/{world.number}", json.dumps(dataclasses.asdict(world)))
        self.store.set("worlds/latest", str(world.number))
        return world

    def give_up(self, world: World) -> None:
        """A member or newcomer could not connect to the others."""
        self.store.set(f"world/{world.number}/failed", "")

    def given_up(self, world: World) -> bool:
        return self.store.check([f"world/{world.number}/failed"])

    def confirmed(self, world: World) -> bool:
        """All its newcomers are ready."""
        return self.store.check([f"world/{world.number}/ready/{ticket}" for ticket in world.tickets])

    def enter(self, world: World, view: int, left: int) -> None:
        self.store.set(f"world/{world.number}/entry", f"{view} {left}")

    def end(self) -> None:
        self.store.set(config.JOB_OVER, "")

    # Both.

    def latest(self) -> World | None:
        number = self.find("worlds/latest")
        text = None if number is None else self.find(f"world/{number}")
        return None if text is None else _read(World, text)


class Met:
    """The connections of this process to the others of a world. Blocks for as long as one of them is missing.

    Raises:
        RingError: one of them did not come in time, or could not be reached.
    """

    def __init__(self, board: Board, world: World, rank: int, start: int) -> None:
        from ringdp import _C

        settings = dataclasses.replace(config.RingConfig.from_environment(), epoch=start)
        size = len(world.places)
        settings = dataclasses.replace(settings, full_mesh_ranks=max(settings.full_mesh_ranks, size))
        self._board, self._world, self._config = board, world, settings.as_dict()
        self._pending = _C.PendingMesh(
            store=PrefixStore(world.name, board.store),
            rank=rank,
            size=size,
            hello="",
            timeout=timedelta(seconds=world.seconds),
            first_notice_s=world.seconds,
            config=self._config,
        )

    def prepare(self, group: dist.ProcessGroup) -> None:
        """From now on the group may go on over them."""
        from ringdp import _C

        _C.prepare_world(
            process_group=group,
            name=self._world.name,
            pending=self._pending,
            store=self._board.store,
            places=self._world.places,
            config=self._config,
        )
