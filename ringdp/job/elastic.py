"""Jobs that go on without lost ranks (``ringrun --elastic``): the group, and its units.

The default process group of such a job outlives its members: `ringdp.rank` and `ringdp.world_size` are those of the
ranks that are left, and change only inside a backward, a unit, or where `MembershipChanged` is raised.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from ringdp import config, refusals
from ringdp.errors import InvalidArgumentError

_log = logging.getLogger("ringdp.elastic")
Result = TypeVar("Result")
_views: dict[int, tuple[int, ...]] = {}  # of the default group


def is_elastic(group: dist.ProcessGroup) -> bool:
    """Whether the group goes on without members that are lost."""
    from ringdp import _C

    return isinstance(group, dist.ProcessGroup) and _C.is_elastic(group)


def refuse_where_elastic(group: dist.ProcessGroup | None, feature: str, name: str = "") -> None:
    """Raise InvalidArgumentError if the group goes on without lost members, which this feature of the table cannot."""
    if group is not None and is_elastic(group):
        refusals.refuse("elastic", feature, name)


def as_unit(group: dist.ProcessGroup, what: str, body: Callable[[], Result]) -> Result:
    """Run `body()` as a unit on all ranks of the group: it counts when it has returned on all. After the loss of a rank
    the ranks that are left call it again, unless it had returned on all of them.

    In other groups than that of an elastic job it is `body()` alone.

    Args:
        what: for the log.
        body: its operations on the group may be repeated; it must have no other effect before it counts.

    Raises:
        MembershipChanged: a rank was lost while an operation outside units was unfinished.
    """
    if not is_elastic(group):
        return body()
    from ringdp import _C

    results: list[Result] = []
    _C.run_unit(group, what, lambda: results.append(body()))
    return results[-1]


def places(group: dist.ProcessGroup, view: int | None = None) -> tuple[int, ...]:
    """By rank of the group, the rank that each member had at the beginning of the job.

    Args:
        view: the number of an earlier view of an elastic group; None: its present members.
    """
    if not is_elastic(group):
        return tuple(range(group.size()))
    from ringdp import _C

    return _views[_C.view_of(group) if view is None else view]


# For `init`.


def check(world_size: int, backend: str, *, agent_store: bool, init_method: str | None) -> bool:
    """Whether this job's group is elastic.

    Raises:
        InvalidArgumentError: RINGDP_ELASTIC asks for it, and it cannot be.
    """
    if not config.elastic() or world_size == 1:
        return False
    wrong = None
    if backend != "ring":
        wrong = f"the backend is {backend}: an elastic job needs ring alone (pass device='cpu' to ringdp.init())"
    elif not agent_store and not (init_method or "").startswith("file:"):
        wrong = "rank 0 keeps the job's store, which would be lost with it: start with ringrun --elastic"
    if wrong is not None:
        raise InvalidArgumentError(f"RINGDP_ELASTIC=1: {wrong}")
    return True


_making = False


def making() -> bool:
    """Whether the group that is being made is to be elastic."""
    return _making


@contextlib.contextmanager
def lasting_groups() -> Iterator[None]:
    """Inside the block the default group of torch.distributed is made elastic."""
    global _making
    from ringdp import _C

    torchs: Any = dist.distributed_c10d
    torchs_own = torchs.ProcessGroup

    class Lasting(torchs_own):  # type: ignore[misc, valid-type]
        """Stands in for torch's class; makes groups whose rank and size are those of their present members."""

        def __new__(cls, store: Any, rank: int, size: int) -> Any:
            return _C.make_lasting_group(store, rank, size)

    torchs.ProcessGroup = Lasting
    _making = True
    try:
        yield
    finally:
        _making = False
        torchs.ProcessGroup = torchs_own


def follow(group: dist.ProcessGroup) -> None:
    """The group has been made: its rank and size follow its members, and the launcher lets ranks die from now on."""
    from ringdp import _C

    _views.clear()
    _views[_C.view_of(group)] = tuple(range(group.size()))
    _C.follow_view(group)
    _C.on_change(group, _changed)
    if (report := config.report_file()) is not None:
        with contextlib.suppress(OSError):
            Path(report).with_name(config.ELASTIC_MARK).touch()


def _changed(view: int, members: Sequence[int], lost: Sequence[str], cause: str, counted: bool, replay: bool) -> None:
    """Update torch's own list of the group's ranks after a change of its members."""
    _views[view] = tuple(members)
    torchs: Any = dist.distributed_c10d
    group = dist.group.WORLD
    if group in torchs._world.pg_group_ranks:
        torchs._world.pg_group_ranks[group] = {rank: rank for rank in range(len(members))}
    if len(members) > 0 and group is not None and group.rank() == 0:
        _mark_first()
    _log.debug("view %d: places %s; lost %s (%s)", view, list(members), list(lost), cause)


def _mark_first() -> None:
    """Mark for the launcher that this process is rank 0 now, whose output it shows from here on."""
    report = config.report_file()
    if report is None:
        return
    sizes = []
    for stream, descriptor in ((sys.stdout, 1), (sys.stderr, 2)):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or none at all
            stream.flush()
        size = 0
        with contextlib.suppress(OSError):
            found = os.fstat(descriptor)
            size = found.st_size if stat.S_ISREG(found.st_mode) else 0
        sizes.append(size)
    mark = Path(report).with_name(config.FIRST_MARK)
    with contextlib.suppress(OSError):
        if not mark.exists():
            made = mark.with_suffix(".tmp")
            made.write_text(f"{sizes[0]} {sizes[1]}\n")
            made.rename(mark)
