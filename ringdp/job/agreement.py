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
    """The lines of all ranks, which are not equal; those of `peer` are the first that differ from this rank's."""

    rank: int
    peer: int
    by_rank: list[list[str]]

    @property
    def lines(self) -> tuple[list[str], list[str]]:
        """This rank's and the peer's."""
        return self.by_rank[self.rank], self.by_rank[self.peer]

    def first_other(self, values: Sequence[object]) -> int | None:
        """The first rank whose one of these differs from this rank's."""
        return next((rank for rank, value in enumerate(values) if value != values[self.rank]), None)

    def first(self) -> tuple[str, str]:
        """The first line of both that differs, where they are names with values, "name: value"; in the order in which
        this rank has them."""
        mine, theirs = self.lines
        ours, others = (dict(line.partition(": ")[::2] for line in lines) for lines in (mine, theirs))
        for name in [*ours, *(it for it in others if it not in ours)]:
            if ours.get(name) != others.get(name):
                said = [f"{name}: {table[name]}" if name in table else f"no {name}" for table in (ours, others)]
                return said[0], said[1]
        return "the same lines in this order: " + ", ".join(mine), "another order: " + ", ".join(theirs)


def difference(
    lines: Sequence[str],
    group: dist.ProcessGroup,
    *,
    what: str,
    doing: str,
    device: torch.device | None = None,
) -> Difference | None:
    """Compare this rank's lines with those of all ranks; None where they are equal.

    Args:
        what: the thing that the lines describe.
        doing: the call that a rank cannot make whose `report_refusal` comes here, for the others' message.
        device: see `device_for`.

    Raises:
        MismatchError: another rank has reported a refusal.
    """
    if group.size() == 1:
        return None
    gathered = all_gather_where_different("\n".join(lines).encode(), group, what=what, device=device)
    if gathered is None:
        return None
    me = group.rank()
    raise_refusal(gathered, me, doing)
    peer = next((rank for rank, text in enumerate(gathered) if text != gathered[me]), me)
    return Difference(me, peer, [text.decode().split("\n") for text in gathered])


def checked_alike(
    check: Callable[[], Found],
    lines: Callable[[Found], Sequence[str]],
    group: dist.ProcessGroup | None,
    *,
    operation: str,
    what: str,
    doing: str,
    words: Callable[[Difference, str, str], str],
    device: torch.device | None = None,
) -> Found:
    """The result of `check` on this rank, where its `lines` are equal on all ranks.

    Args:
        group: None: this rank is alone.
        operation: the name under which the ranks compare.
        what, doing, device: see `difference`.
        words: the message about a difference, given its `first` of this rank and of the peer.

    Raises:
        Exception: raised by `check`, as a rule InvalidArgumentError; the others raise MismatchError with its text.
        MismatchError: the lines differ, or another rank's `check` raised.
    """
    if group is None or group.size() == 1:
        return check()
    try:
        found = check()
    except Exception as error:  # also Python's own, of arguments of another kind
        report_refusal(error, group, device_for(group) if device is None else device, operation)
        raise
    with named(operation):
        different = difference(lines(found), group, what=what, doing=doing, device=device)
    if different is not None:
        raise MismatchError(
            words(different, *different.first()), rank=different.rank, peer=different.peer, operation=operation
        )
    return found
