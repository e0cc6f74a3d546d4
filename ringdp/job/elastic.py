"""Jobs that go on without lost ranks (``ringrun --elastic``): their groups, and units.

The default process group of such a job outlives its members: `ringdp.rank` and `ringdp.world_size` are those of the
ranks that are left, and change only inside a backward, a unit, or where `MembershipChanged` is raised. So does each
group of some ranks, by itself, when it is used next. torch's numbers of a group's ranks are those that they have in the
default group now.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ringdp import config, refusals
from ringdp.errors import InvalidArgumentError

_log = logging.getLogger("ringdp.elastic")
Result = TypeVar("Result")
_views: dict[str, dict[int, tuple[int, ...]]] = {}  # members of the views of each group, by its name


def is_elastic(group: dist.ProcessGroup) -> bool:
    """Whether the group goes on without members that are lost."""
    from ringdp import _C

    return isinstance(group, dist.ProcessGroup) and _C.is_elastic(group)


def refuse_where_elastic(group: dist.ProcessGroup | None, feature: str, name: str = "") -> None:
    """Raise InvalidArgumentError if the group goes on without lost members, which this feature of the table cannot."""
    if group is not None and is_elastic(group):
        refusals.refuse("elastic", feature, name)


def as_unit(
    group: dist.ProcessGroup, what: str, body: Callable[[], Result], *, writes: Sequence[torch.Tensor] = ()
) -> Result:
    """Run `body()` as a unit on all ranks of the group: it counts when it has returned on all. After the loss of a rank
    the ranks that are left call it again, unless it had returned on all of them.

    In other groups than that of an elastic job it is `body()` alone.

    Args:
        what: for the log.
        body: its operations on the group may be repeated; it must have no other effect before it counts.
        writes: tensors into which it writes; where it is called again, they have their old values.

    Raises:
        MembershipChanged: a rank was lost while an operation outside units was unfinished.
    """
    if not is_elastic(group):
        return body()
    from ringdp import _C

    before = [tensor.detach().clone() for tensor in writes]
    results: list[Result] = []
    calls = 0

    def from_the_old_values() -> None:
        nonlocal calls
        with torch.no_grad():
            for tensor, kept in zip(writes, before, strict=True) if calls else ():
                tensor.copy_(kept)
        calls += 1
        results.append(body())

    _C.run_unit(group, what, from_the_old_values)
    return results[-1]


def places(group: dist.ProcessGroup, view: int | None = None) -> tuple[int, ...]:
    """By rank of the group, the rank that each member had at the beginning of the job.

    Args:
        view: the number of an earlier view of an elastic group; None: its present members.
    """
    if not is_elastic(group):
        return tuple(range(group.size()))
    from ringdp import _C

    return tuple(_C.members_of(group)) if view is None else _views[group.group_name][view]


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
_plain = False


def making() -> bool:
    """Whether the group that is being made is to be elastic."""
    return _making


@contextlib.contextmanager
def lasting_groups() -> Iterator[None]:
    """Inside the block groups of torch.distributed are made elastic."""
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


@contextlib.contextmanager
def plain_groups() -> Iterator[None]:
    """Inside the block new process groups keep their members."""
    global _plain
    before, _plain = _plain, True
    try:
        yield
    finally:
        _plain = before


def follow(group: dist.ProcessGroup) -> None:
    """The default group has been made: its rank and size follow its members, as those of new groups will, and the
    launcher lets ranks die from now on."""
    _follow(group)
    _let_new_groups_follow()
    if (report := config.report_file()) is not None:
        with contextlib.suppress(OSError):
            Path(report).with_name(config.ELASTIC_MARK).touch()


def _follow(group: dist.ProcessGroup) -> None:
    from ringdp import _C

    views = _views[group.group_name] = {_C.view_of(group): tuple(_C.members_of(group))}
    _C.follow_view(group)
    _C.on_change(group, functools.partial(_changed, views))


def _let_new_groups_follow() -> None:
    """What makes the groups of ``torch.distributed`` makes elastic ones, where the default group is one."""
    torchs: Any = dist.distributed_c10d
    torchs_own = torchs._new_process_group_helper
    if getattr(torchs_own, "of_ringdp", False):
        return

    @functools.wraps(torchs_own)
    def make(*given: Any, **named: Any) -> Any:
        world = dist.group.WORLD
        if _plain or world is None or not is_elastic(world):
            return torchs_own(*given, **named)
        with lasting_groups():
            made = torchs_own(*given, **named)
        if is_elastic(made[0]):
            _follow(made[0])
        return made

    make.of_ringdp = True  # type: ignore[attr-defined]
    torchs._new_process_group_helper = make


def _changed(
    views: dict[int, tuple[int, ...]],
    view: int,
    members: Sequence[int],
    lost: Sequence[str],
    cause: str,
    counted: bool,
    replay: bool,
) -> None:
    """Update torch's own lists of the groups' ranks after a change of the members of one."""
    from ringdp import _C

    views[view] = tuple(members)

    torchs: Any = dist.distributed_c10d
    world = dist.group.WORLD
    if world is not None and is_elastic(world):
        numbers = {place: rank for rank, place in enumerate(_C.members_of(world))}
        for group in [it for it in torchs._world.pg_group_ranks if is_elastic(it)]:
            places = _C.members_of(group)
            torchs._world.pg_group_ranks[group] = {
                numbers[place]: rank for rank, place in enumerate(places) if place in numbers
            }
        if len(numbers) > 0 and world.rank() == 0:
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
