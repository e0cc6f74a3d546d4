"""The messages between the workers and the owners of a store: one header for requests and answers, and a payload."""

from __future__ import annotations

import dataclasses
import enum
import struct

from torch import Tensor


class Kind(enum.IntEnum):
    """Requests, and the owner's two answers."""

    PUSH = enum.auto()
    PULL = enum.auto()
    PUSHPULL = enum.auto()  # both, of the same keys
    TICK = enum.auto()  # the worker's clock is that of the header
    SET = enum.auto()  # a number of the update, for example its rate
    SAVE = enum.auto()  # done when all workers ask for it; the payload is a folder, or none: a barrier
    SYNC = enum.auto()  # answered when the worker's requests before it have been done
    LEAVE = enum.auto()  # the worker's clock counts no more
    BYE = enum.auto()  # the worker has the answers to that of all owners: its last request
    ANSWER = enum.auto()
    ERROR = enum.auto()  # the payload is a text


ANSWERED = (Kind.PULL, Kind.PUSHPULL, Kind.SAVE, Kind.SYNC, Kind.LEAVE)


@dataclasses.dataclass
class Message:
    """Attributes:
    sequence: of the worker's request among its requests to this owner; an answer has its request's.
    clock: of the worker when it asked.
    agreed: how often the ranks had agreed on keys and settings when the worker asked.
    scale: of a push.
    key: of a push or a pull of one key: its number; the payload then has no head that says which keys it is of.
    age: of an answer, see `Clocks.age`.
    held_s: for how long the owner had the request before it might be answered.
    payload: uint8, or None.
    """

    kind: Kind
    sequence: int
    clock: int
    agreed: int = 0
    scale: float = 1.0
    age: int = 0
    held_s: float = 0.0
    payload: Tensor | None = None
    key: int = -1
    into: Tensor | None = None  # of a pull from this rank's own owner: memory for the answer

    def header(self) -> bytes:
        return _FORM.pack(
            self.kind, self.agreed, self.sequence, self.clock, self.age, self.scale, self.held_s, self.key
        )

    @classmethod
    def of(cls, header: bytes, payload: Tensor | None) -> Message:
        kind, agreed, sequence, clock, age, scale, held_s, key = _FORM.unpack_from(header)
        return cls(Kind(kind), sequence, clock, agreed, scale, age, held_s, payload, key)


_FORM = struct.Struct("<iIqqqddq")
