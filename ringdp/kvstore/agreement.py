"""What all ranks of a store must have alike: its keys and settings, compared before the first operation that uses them,
and the keys of each operation, which the operation's name tells (ringdp.named)."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from ringdp.errors import MismatchError
from ringdp.job.agreement import checked_alike, report_refusal
from ringdp.job.backend import connect_log, reaches_core
from ringdp.job.byte_collectives import all_gather_where_different, device_for
from ringdp.kvstore.keys import Key

Found = TypeVar("Found")
COMPARING = "comparing what all ranks must have alike"
_NAMED_KEYS = 3
_ADVICE = (
    "All ranks have to create the key-value store alike, to init the same keys with the same shapes and types, and to"
    " set the same optimizer"
)


def compare_settings(
    check: Callable[[], Found],
    lines: Callable[[Found], Sequence[str]],
    group: dist.ProcessGroup | None,
    *,
    doing: str,
    advice: str = _ADVICE,
) -> Found:
    """What `check` gives on this rank, of which all ranks have the same `lines`, "name: value".

    Args:
        doing: what a rank cannot do whose `check` raises.
        advice: what to do where the lines differ.

    Raises:
        InvalidArgumentError: by `check`; the others learn why.
        MismatchError: they differ, or another rank's `check` raises; names the first difference.
    """
    if group is None:
        return check()
    found, difference = checked_alike(check, lines, group, operation=COMPARING, what="store", doing=doing)
    if difference is not None:
        raise difference.error(
            f"the ranks differ: rank {difference.rank} has {difference.mine}; rank {difference.peer} has"
            f" {difference.theirs}. {advice}"
        )
    return found


def describe_names(keys: Sequence[str]) -> str:
    """Keys for the name of an operation, which tells all of them by a hash and some by their words."""
    named = ", ".join(keys[:_NAMED_KEYS])
    if len(keys) <= _NAMED_KEYS:
        return named
    return f"{named} and {len(keys) - _NAMED_KEYS} more (#{zlib.crc32(repr(keys).encode()):08x})"


def describe_keys(keys: Sequence[Key]) -> str:
    """As `describe_names`, with the shapes and types of those that are named."""
    return describe_names([key.describe() for key in keys[:_NAMED_KEYS]] + [key.name for key in keys[_NAMED_KEYS:]])


class _Leaving:
    """Ends a scope that was entered."""

    def __init__(self, scope: Any) -> None:
        self._scope = scope

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        self._scope.exit()


class Operations:
    """Runs the operations of a store, or of `who`, under names: ranks with other keys or another optimizer fail instead
    of mixing.

    Over `ring` the frames of an operation carry its name. Other backends match operations by their order alone: there
    the ranks compare the names first.
    """

    def __init__(self, group: dist.ProcessGroup | None, who: str = "a key-value store") -> None:
        self._group, self._who = group, who
        self._refused: Exception | None = None  # was told already
        self._scope: Any = None
        self._leaving: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if group is not None and reaches_core(group):
            connect_log()
            from ringdp import _C

            self._scope = _C.NamedScope()
            self._leaving = _Leaving(self._scope)

    @property
    def by_frames(self) -> bool:
        """Whether the frames of an operation carry its name, and tensors on the CPU go over ring."""
        return self._scope is not None

    def refuse(self, error: Exception) -> None:
        """Tell the ranks that are in another operation, or come to one, that this rank cannot; the caller raises.

        They get a MismatchError with these words, unless they refuse the same.
        """
        if self._group is None or error is self._refused:
            return
        self._refused = error
        words = f"{self._who} refuses: {error}"
        if self._scope is None:
            with contextlib.suppress(Exception):
                compare_names(words, self._group)
        else:
            report_refusal(error, self._group, device_for(self._group), words)

    def named(self, words: str) -> contextlib.AbstractContextManager[None]:
        """For the operations inside the block. Raises MismatchError where another rank is in another operation."""
        if self._scope is None:
            if self._group is not None:
                compare_names(words, self._group)
            return contextlib.nullcontext()
        self._scope.enter(words)
        return self._leaving


def compare_names(words: str, group: dist.ProcessGroup) -> None:
    gathered = all_gather_where_different(words.encode(), group, what="operation")
    if gathered is None:
        return
    me = group.rank()
    other = next(rank for rank, text in enumerate(gathered) if text != gathered[me])
    raise MismatchError(
        f"the ranks' key-value stores are in different operations: rank {me} does {words}; rank {other} does"
        f" {gathered[other].decode(errors='replace')}",
        rank=me,
        peer=other,
        operation=words,
    )
