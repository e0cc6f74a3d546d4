"""What all ranks of a store must have alike: its keys and settings, compared before the first operation that uses them,
and the keys of each operation, which the operation's name tells (ringdp.named)."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist

from ringdp.ddp.refusal import report_refusal
from ringdp.errors import MismatchError
from ringdp.job.backend import hear_extension, named, reaches_core
from ringdp.job.byte_collectives import all_gather_where_different, device_for

COMPARING = "comparing what all ranks must have alike"
NAMED_KEYS = 3
_ADVICE = (
    "All ranks have to create the key-value store alike, to init the same keys with the same shapes and types, and to"
    " set the same optimizer"
)


def compare_tables(lines: Sequence[str], group: dist.ProcessGroup | None, advice: str = "") -> None:
    """All ranks have the same lines.

    Args:
        advice: what to do where they differ; a store's if empty.

    Raises:
        MismatchError: they have not; names the first line that a rank has otherwise, and what both have.
    """
    if group is None:
        return
    with _named(COMPARING, group):
        told = all_gather_where_different("\n".join(lines).encode(), group, what="store")
    if told is None:
        return
    me = group.rank()
    tables = [text.decode(errors="replace").split("\n") for text in told]
    first = 0 if tables[me] != tables[0] else next(r for r, table in enumerate(tables) if table != tables[me])
    mine, theirs = _first_difference(tables[me], tables[first])
    raise MismatchError(
        f"the ranks differ: rank {me} has {mine}; rank {first} has {theirs}. {advice or _ADVICE}",
        rank=me,
        peer=first,
        operation=COMPARING,
    )


def _first_difference(mine: list[str], theirs: list[str]) -> tuple[str, str]:
    """The words of both sides for the first thing that one has otherwise or lacks."""
    ours, others = (dict(line.partition(": ")[::2] for line in lines) for lines in (mine, theirs))
    for name in sorted(ours.keys() | others.keys()):
        if ours.get(name) != others.get(name):
            return tuple(f"{name} {table[name]}" if name in table else f"no {name}" for table in (ours, others))  # type: ignore[return-value]
    return "the same in another order", "the same"


def words_for(keys: Sequence[str]) -> str:
    """Keys for the name of an operation, which tells all of them by a hash and some by their words."""
    some = ", ".join(keys[:NAMED_KEYS])
    more = (
        f" and {len(keys) - NAMED_KEYS} more (#{zlib.crc32(repr(keys).encode()):08x})" if len(keys) > NAMED_KEYS else ""
    )
    return f"{some}{more}"


class _Leaving:
    """Ends a scope that was entered."""

    def __init__(self, scope: Any) -> None:
        self._scope = scope

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        self._scope.exit()


class Operations:
    """Runs a store's operations under names, so that ranks with other keys or another optimizer fail instead of mixing.

    Over `ring` the frames of an operation carry its name. Other backends match operations by their order alone: there
    the ranks compare the names first.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._scope: Any = None
        self._leaving: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if group is not None and reaches_core(group):
            hear_extension()
            from ringdp import _C

            self._scope = _C.NamedScope()
            self._leaving = _Leaving(self._scope)

    def refuse(self, error: Exception) -> None:
        """Tell the ranks that are in another operation, or come to one, that this rank cannot; the caller raises.

        They get a MismatchError with these words, unless they refuse the same.
        """
        if self._group is None:
            return
        words = f"a key-value store refuses: {error}"
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
    told = all_gather_where_different(words.encode(), group, what="operation")
    if told is None:
        return
    me = group.rank()
    other = next(rank for rank, text in enumerate(told) if text != told[me])
    raise MismatchError(
        f"the ranks' key-value stores are in different operations: rank {me} does {words}; rank {other} does"
        f" {told[other].decode(errors='replace')}",
        rank=me,
        peer=other,
        operation=words,
    )


@contextlib.contextmanager
def _named(words: str, group: dist.ProcessGroup) -> Iterator[None]:
    if not reaches_core(group):
        yield
        return
    with named(words):
        yield
