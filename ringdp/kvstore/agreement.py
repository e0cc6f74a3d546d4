"""The agreement of a store's ranks: keys and settings are compared before the first operation that uses them, and the
keys of each operation are part of its name (ringdp.named)."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from ringdp.errors import MismatchError
from ringdp.job.agreement import checked_alike, difference, report_refusal
from ringdp.job.backend import connect_log, reaches_core
from ringdp.job.byte_collectives import device_for
from ringdp.job.elastic import as_unit, is_elastic
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
    """The result of `check` on this rank, whose `lines`, "name: value", are equal on all ranks.

    Args:
        doing: the call that a rank cannot make whose `check` raises.
        advice: what to do where the lines differ.

    Raises:
        InvalidArgumentError: by `check`; the others raise MismatchError with its text.
        MismatchError: they differ, or another rank's `check` raises; names the first difference.
    """

    def compare() -> Found:
        return checked_alike(
            check,
            lines,
            group,
            operation=COMPARING,
            what="store",
            doing=doing,
            words=lambda one, mine, theirs: (
                f"the ranks differ: rank {one.rank} has {mine}; rank {one.peer} has {theirs}. {advice}"
            ),
        )

    return compare() if group is None else as_unit(group, COMPARING, compare)


def describe_names(keys: Sequence[str]) -> str:
    """Keys for the name of an operation: some by name, all of them by a hash."""
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
        self._elastic = group if group is not None and is_elastic(group) else None
        self._refused: Exception | None = None  # was reported already
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

    def run(self, text: str, body: Callable[[], Found]) -> Found:
        """Call `body()`, whose operations have this name. In an elastic job it is a unit (`job.elastic.as_unit`)."""
        if self._elastic is not None:
            return as_unit(self._elastic, text, lambda: self._run(text, body))
        return self._run(text, body)

    def _run(self, text: str, body: Callable[[], Found]) -> Found:
        with self.named(text):
            return body()

    def refuse(self, error: Exception) -> None:
        """Give this rank's error to the ranks that are, or will be, in another operation; the caller raises. They get a
        MismatchError with its text, unless they refuse the same.
        """
        if self._group is None or error is self._refused:
            return
        self._refused = error
        text = f"{self._who} refuses: {error}"
        if self._scope is None:
            with contextlib.suppress(Exception):
                compare_names(text, self._group)
        else:
            report_refusal(error, self._group, device_for(self._group), text)

    def named(self, text: str) -> contextlib.AbstractContextManager[None]:
        """For the operations inside the block. Raises MismatchError where another rank is in another operation."""
        if self._scope is None:
            if self._group is not None:
                compare_names(text, self._group)
            return contextlib.nullcontext()
        self._scope.enter(text)
        return self._leaving


def compare_names(text: str, group: dist.ProcessGroup) -> None:
    different = difference([text], group, what="operation", doing="do that")
    if different is not None:
        _, theirs = different.lines
        raise MismatchError(
            f"the ranks' key-value stores are in different operations: rank {different.rank} does {text}; rank"
            f" {different.peer} does " + "\n".join(theirs),
            rank=different.rank,
            peer=different.peer,
            operation=text,
        )
