"""The exceptions ringdp raises. Each is a `RingError` and the built-in it resembles."""

from __future__ import annotations

from typing import Any

from ringdp import stories


class RingError(RuntimeError):
    """Base of all of ringdp's errors; the fields name ranks, hosts and the operation (None where not known).

    Attributes:
        rank: the rank that raises.
        host: its host name.
        peer: the rank that caused it.
        peer_host: the host of that rank.
        peer_pid: its process id.
        operation: the operation that failed, for example ``all_reduce #17 (float32[4096], SUM)``.
        sequence: the operation's number within its group.
        step: the training step, where RingDP knows it.
        bucket: the bucket's index, where the operation was one.
        name: names of the bucket's parameters, or the name given by ``ringdp.named``.
        cause: the text of the first cause.
        advice: what to do.
        view: the number of the view of an elastic group after the change that raised this error, from 1.
        survivors: those members, by their ranks at the start.
    """

    _fields = (
        "rank", "host", "peer", "peer_host", "peer_pid", "operation", "sequence",
        "step", "bucket", "name", "cause", "advice", "view", "survivors",
    )  # fmt: skip
    rank: int | None
    host: str | None
    peer: int | None
    peer_host: str | None
    peer_pid: int | None
    operation: str | None
    sequence: int | None
    step: int | None
    bucket: int | None
    name: str | None
    cause: str | None
    advice: str | None
    view: int | None
    survivors: list[int] | None

    def __init__(self, message: str = "", **fields: Any) -> None:
        super().__init__(message)
        unknown = set(fields) - set(self._fields)
        if unknown:
            raise TypeError(f"unknown fields: {', '.join(sorted(unknown))}")
        for field in self._fields:
            setattr(self, field, fields.get(field))

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), str(self), {f: getattr(self, f) for f in self._fields}))


def _rebuild(cls: type[RingError], message: str, fields: dict[str, Any]) -> RingError:
    return cls(message, **fields)


class PeerLostError(RingError, ConnectionError):
    """A rank died, left, or its connection broke."""


class DamagedDataError(PeerLostError):
    """A connection changed what it carried: the checksum of a frame (RINGDP_CHECKSUM) does not fit its bytes.

    ``peer`` is the rank at the other end of that connection; on a rank without an end of it the message names both.
    """


class MembershipChanged(PeerLostError):
    """In an elastic job: a rank was lost while an operation of the program's own was unfinished. Raised on all ranks
    that are left; the process group has its new members now, so a program that loads its last checkpoint goes on."""


class ExpelledError(PeerLostError):
    """In an elastic job: the other ranks could not reach this one and go on without it. Its process has to end."""


class RingTimeoutError(RingError, TimeoutError):
    """An operation did not end within its time; the message names the rank that was missing."""


class MismatchError(RingError, ValueError):
    """The ranks disagree about what they are doing; the message has both sides' values."""


class HandshakeError(RingError, ConnectionError):
    """The ranks could not meet, or do not belong to the same job."""


class InvalidArgumentError(RingError, ValueError):
    """This rank's own arguments cannot be used."""


class InvalidStateError(RingError):
    """A call at the wrong time: before init, after shutdown, after a failure, in a forked child."""


class GradientOverflowError(RingError, OverflowError):
    """Gradients were not finite in so many steps in a row that no loss scale can be the reason."""


class RankError(RingError):
    """In `ringdp.launch`: a rank raised, died or took too long. The message begins with what happened, and has every
    failed rank's traceback, the first failure last."""


class SystemResourceError(RingError, OSError):
    """The system refused descriptors, memory, a port or a file."""


def from_core(kind: str, message: str, made: int = -1, /, **fields: Any) -> RingError:
    """The exception of that class for an error of the C++ core; see `with_story`.

    Args:
        kind: the name of the class.
        message: the core's text.
        made: the steps that this process has made; -1 where they are not known.
        fields: those of `RingError`.
    """
    cls: type[RingError] = globals()[kind]
    return cls(with_story(message, fields.get("rank"), made), **fields)


def with_story(message: str, rank: int | None, made: int = -1) -> str:
    """The message of an error of `rank`, behind the sentence about different numbers of batches where they caused it.

    Args:
        message: as the core and the reducer have composed it.
        rank: the one that raises it; None where that is not known.
        made: as in `from_core`.
    """
    if stories.ADVICE in message:
        return message
    story = stories.unequal(message, rank, made if made > 0 else None)
    return message if story is None else f"{story.sentence()} ({message})"
