"""What all ranks must have alike before they begin, compared; and what one rank cannot use, told to the ranks that wait
for it in the place where they compare."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist

from ringdp.errors import MismatchError
from ringdp.job.backend import named
from ringdp.job.byte_collectives import all_gather_where_different, device_for

_log = logging.getLogger("ringdp.refusal")
_MARK = b"\0refused\0"
_SILENT_S = 1.0
Found = TypeVar("Found")


def report_refusal(error: Exception, group: dist.ProcessGroup, device: torch.device, operation: str) -> None:
    """Take part in the `all_gather_where_different` that the other ranks are in, or come to, with this rank's error.

    The caller raises the error then. Where the others do not come within a second, the log has it meanwhile.

    Args:
        operation: the name under which the others gather.
    """
    if group.size() == 1:
        return
    late = "rank %d: %s: %s (it waits for the other ranks, which get this error when they arrive here)"
    log = threading.Timer(_SILENT_S, _log.error, (late, group.rank(), type(error).__name__, error))
    log.daemon = True
    log.start()
    try:
        with contextlib.suppress(Exception), named(operation):
            all_gather_where_different(_MARK + str(error).encode(), group, what="arguments", device=device)
    finally:
        log.cancel()


def raise_refusal(gathered: Sequence[bytes], rank: int, what: str) -> None:
    """Raise MismatchError where a rank has told that it refuses; `what` is what it cannot do."""
    for peer, text in enumerate(gathered):
        if text.startswith(_MARK):
            reason = text.removeprefix(_MARK).decode()
            raise MismatchError(f"rank {peer} cannot {what}: {reason}", rank=rank, peer=peer, cause=reason)


class Difference(NamedTuple):
    """The first rank that has something else, and the first line that differs: this rank's and its."""

    rank: int
    peer: int
    mine: str
    theirs: str
    operation: str

    def error(self, words: str) -> MismatchError:
        return MismatchError(words, rank=self.rank, peer=self.peer, operation=self.operation)


def checked_alike(
    check: Callable[[], Found],
    lines: Callable[[Found], Sequence[str]],
    group: dist.ProcessGroup,
    *,
    operation: str,
    what: str,
    doing: str,
) -> tuple[Found, Difference | None]:
    """What `check` gives on this rank, and, where `lines` of it are not the same on all ranks, how they differ.

    Args:
        lines: names with values, "name: value".
        operation: the name under which the ranks compare.
        what: of which the lines are, for the log.
        doing: what a rank cannot do whose `check` raises.

    Raises:
        Exception: by `check`, as a rule InvalidArgumentError; the others learn why.
        MismatchError: by another rank's.
    """
    try:
        found = check()
    except Exception as error:  # also Python's own, of arguments of another kind
        report_refusal(error, group, device_for(group), operation)
        raise
    if group.size() == 1:
        return found, None
    own = "\n".join(lines(found))
    with named(operation):
        told = all_gather_where_different(own.encode(), group, what=what)
    if told is None:
        return found, None
    me = group.rank()
    raise_refusal(told, me, doing)
    peer = next(rank for rank, text in enumerate(told) if text != told[me])
    mine, theirs = _first_difference(own.split("\n"), told[peer].decode().split("\n"))
    return found, Difference(me, peer, mine, theirs, operation)


def _first_difference(mine: Sequence[str], theirs: Sequence[str]) -> tuple[str, str]:
    """Lines are names with values, "name: value"; in the order in which this rank has them."""
    ours, others = (dict(line.partition(": ")[::2] for line in lines) for lines in (mine, theirs))
    for name in [*ours, *(it for it in others if it not in ours)]:
        if ours.get(name) != others.get(name):
            said = [f"{name}: {table[name]}" if name in table else f"no {name}" for table in (ours, others)]
            return said[0], said[1]
    return "the same lines in this order: " + ", ".join(mine), "another order: " + ", ".join(theirs)
