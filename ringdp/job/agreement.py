"""Settings that must be equal on all ranks, compared before they begin. A rank that refuses its own arguments takes
part in the comparison with its error, which the other ranks then raise."""

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
    """Give this rank's error to the `all_gather_where_different` in which the other ranks are, or will be.

    The caller raises the error then. The log has the error after a second in which the others have not come.

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
    """Raise MismatchError where a rank gave a refusal; `what` names the call that it refused."""
    for peer, text in enumerate(gathered):
        if text.startswith(_MARK):
            reason = text.removeprefix(_MARK).decode()
            raise MismatchError(f"rank {peer} cannot {what}: {reason}", rank=rank, peer=peer, cause=reason)


class Difference(NamedTuple):
    """The first rank whose lines differ from this rank's, and the first such line of both."""

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
    """The result of `check` on this rank, and the first difference where its `lines` are not equal on all ranks.

    Args:
        lines: names with values, "name: value".
        operation: the name under which the ranks compare.
        what: the thing that the lines describe, for the log.
        doing: the call that a rank cannot make whose `check` raises, for the others' message.

    Raises:
        Exception: raised by `check`, as a rule InvalidArgumentError; the others raise MismatchError with its text.
        MismatchError: another rank's `check` raised.
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
        by_rank = all_gather_where_different(own.encode(), group, what=what)
    if by_rank is None:
        return found, None
    me = group.rank()
    raise_refusal(by_rank, me, doing)
    peer = next(rank for rank, text in enumerate(by_rank) if text != by_rank[me])
    mine, theirs = _first_difference(own.split("\n"), by_rank[peer].decode().split("\n"))
    return found, Difference(me, peer, mine, theirs, operation)


def _first_difference(mine: Sequence[str], theirs: Sequence[str]) -> tuple[str, str]:
    """Lines are names with values, "name: value"; in the order in which this rank has them."""
    ours, others = (dict(line.partition(": ")[::2] for line in lines) for lines in (mine, theirs))
    for name in [*ours, *(it for it in others if it not in ours)]:
        if ours.get(name) != others.get(name):
            said = [f"{name}: {table[name]}" if name in table else f"no {name}" for table in (ours, others)]
            return said[0], said[1]
    return "the same lines in this order: " + ", ".join(mine), "another order: " + ", ".join(theirs)
