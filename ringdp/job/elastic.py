"""Jobs that go on without lost ranks (``ringrun --elastic``): their groups, and units.

The default process group of such a job outlives its members: `ringdp.rank` and `ringdp.world_size` are those of the
ranks that are left, and change only inside a backward, a unit, or where `MembershipChanged` is raised. So does each
group of some ranks, by itself, when it is used next. torch's numbers of a group's ranks are those that they have in the
default group now.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from ringdp import config, refusals
from ringdp.errors import HandshakeError, InvalidArgumentError, InvalidStateError

_log = logging.getLogger("ringdp.elastic")
Result = TypeVar("Result")
_views: dict[str, dict[int, tuple[int, ...]]] = {}  # members of the views of each group, by its name
_ADMITS = "admits"
_FIRST_NOTICE_S = 10.0
_PAUSE_S = 0.02
_LISTENER_S = 5.0  # for something to listen where a newcomer expects the store of a job
_ANSWER_S = 30.0  # for what listens there to answer as a store; one on a busy host takes seconds


@dataclasses.dataclass
class Origin:
    """The elastic job of this process, as its store has it.

    Attributes:
        store: the launcher's.
        start: how often the launcher had started all ranks before.
        size: the ranks of that start.
        outside: this process is not a member yet.
    """

    store: Store
    start: int
    size: int
    outside: bool = False

    def place_of(self, ticket: int) -> int:
        """The number that a newcomer has for good: behind the ranks of the start, by its ticket, counted from 1."""
        return self.size - 1 + ticket

    def keys(self) -> Store:
        """The keys of this start, over a connection of its own.

        Raises:
            HandshakeError: this process is not a member yet, and the job has ended.
        """
        store: Any = self.store  # torch's stubs do not have clone
        if self.outside:
            try:  # torch would try for as long as operations may take
                socket.create_connection((store.host, store.port), timeout=_LISTENER_S).close()
            except OSError as error:
                raise HandshakeError(f"the job ended before this process could join it: {error}") from error
        return PrefixStore(f"{config.JOB_START}/{self.start}", store.clone())


_origin: Origin | None = None


def origin() -> Origin | None:
    """That of the default group; None where it is not elastic."""
    return _origin


_in_use: set[str] = set()


def use(feature: str) -> None:
    """A ``"job"`` or an ``"async kvstore"`` of an elastic job begins: only one kind may be there.

    Raises:
        InvalidArgumentError: the other kind is.
    """
    if _in_use - {feature}:
        refusals.refuse("job", "async kvstore")
    _in_use.add(feature)


def size_at_start(group: dist.ProcessGroup) -> int:
    """The ranks that the job had at its start, which newcomers are told; of other groups their ranks."""
    known = _origin is not None and group is dist.group.WORLD and is_elastic(group)
    return _origin.size if known and _origin is not None else group.size()


def is_elastic(group: dist.ProcessGroup) -> bool:
    """Whether the group goes on without members that are lost."""
    from ringdp import _C

    return isinstance(group, dist.ProcessGroup) and _C.is_elastic(group)


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


def view_of(group: dist.ProcessGroup) -> int:
    """The number of the group's present view, from 1; 0 where it keeps its members."""
    from ringdp import _C

    return _C.view_of(group) if is_elastic(group) else 0


# For `init`.


def check(world_size: int, backend: str, *, agent_store: bool, init_method: str | None) -> bool:
    """Whether this job's group is elastic.

    Raises:
        InvalidArgumentError: RINGDP_ELASTIC asks for it, and it cannot be.
    """
    if not config.elastic() or (world_size == 1 and not agent_store):
        return False
    wrong = None
    if backend != "ring":
        wrong = f"the backend is {backend}: an elastic job needs ring alone (without backend=, with RINGDP_CUDA=ring)"
    elif not agent_store and not (init_method or "").startswith("file:"):
        wrong = "rank 0 keeps the job's store, which would be lost with it: start with ringrun --elastic"
    if wrong is not None:
        raise InvalidArgumentError(f"RINGDP_ELASTIC=1: {wrong}")
    return True


def begin(store: Store, start: int, size: int, rank: int) -> None:
    """This process is a member from the start."""
    global _origin
    _in_use.clear()
    _origin = Origin(store, start, size)
    if rank == 0:
        store.set(config.JOB_START, f"{start} {size}")


def admit(store: Store) -> None:
    """Newcomers are let in from now on. `store`: the keys of this start."""
    store.set(_ADMITS, "")
    _mark(config.ADMITS_MARK)


def find_job(host: str, port: int, name: str, timeout: timedelta) -> None:
    """This process is a newcomer to the job whose ranks or launchers have a store there. Returns when that lets
    newcomers in. `name`: of the job, where several have met there; or "".

    Raises:
        HandshakeError: there is no such job, or several.
    """
    global _origin
    where, asked, notice_s = f"{host}:{port}", time.monotonic(), _FIRST_NOTICE_S
    try:
        store: Store = _open(host, port, timeout)
        while True:
            waited_s = time.monotonic() - asked
            store = _job_store(store, name, where, timeout)
            if store.check([config.JOB_START]):
                start, size = map(int, store.get(config.JOB_START).split())
                found = Origin(store, start, size, outside=True)
                if PrefixStore(f"{config.JOB_START}/{start}", store).check([_ADMITS]):
                    _origin = found
                    return
            if waited_s > timeout.total_seconds():
                raise HandshakeError(
                    f"the job at {where} lets no newcomer in: its script makes no ringdp.elastic.Job, or it was not"
                    " started by ringrun --elastic"
                )
            if waited_s > notice_s:
                _log.warning("waits for the job at %s to let newcomers in (ringdp.elastic.Job)", where)
                notice_s *= 2
            time.sleep(_PAUSE_S)
    except (dist.DistNetworkError, dist.DistStoreError, OSError) as error:
        if isinstance(error, HandshakeError):
            raise
        raise HandshakeError(
            f"there is no job at {where}: is it over, or is that not the address of its store (--rdzv-endpoint, or"
            f" MASTER_ADDR:MASTER_PORT of its ranks)? {error}"
        ) from error


def _open(host: str, port: int, timeout: timedelta) -> Store:
    """TCPStore would try for as long as its operations may take, and wait for what speaks something else for ever.
    Raises OSError."""
    end = time.monotonic() + _LISTENER_S
    while True:
        try:
            socket.create_connection((host, port), timeout=_LISTENER_S).close()
            break
        except OSError:
            if time.monotonic() > end:
                raise
        time.sleep(_PAUSE_S)
    opened: list[Store] = []
    connect = functools.partial(TCPStore, host, port, None, False, timeout=timeout, wait_for_workers=False)
    thread = threading.Thread(target=lambda: opened.append(connect()), name="ringdp-store", daemon=True)
    thread.start()
    thread.join(_ANSWER_S)
    if not opened:
        raise OSError(f"what listens there does not answer as a store does, for {_ANSWER_S:g} s")
    return opened[0]


def _job_store(store: Store, name: str, where: str, timeout: timedelta) -> Store:
    """That of the ranks, if this one is the launchers' and names it."""
    if store.check([config.JOB_START]) or not store.check([config.JOB_STORE]):
        return store
    names = store.get(config.JOB_STORE).decode().split("\n")
    if name not in names:
        if name or len(names) > 1:
            raise HandshakeError(
                f"{len(names)} jobs have met at {where}: {', '.join(names[:9])}; name the one to join by --rdzv-id"
            )
        [name] = names
    its_host, its_port = config.read_address(store.get(f"{config.JOB_STORE}/{name}").decode())
    return TCPStore(its_host, its_port, None, False, timeout=timeout, wait_for_workers=False)


def joined() -> None:
    """This process has become a member."""
    if _origin is not None and _origin.outside:
        _origin.outside = False
        _mark(config.MEMBER_MARK)


def refuse_outside(what: str) -> None:
    """Raises InvalidStateError in a newcomer that is no member yet, of which `what` needs all ranks."""
    if _origin is not None and _origin.outside:
        raise InvalidStateError(
            f"{what}: this process is about to join a running job, and is no rank of it before its script iterates over"
            " job.epochs() or job.loader() of ringdp.elastic.Job"
        )


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
    _mark(config.ELASTIC_MARK)


def _mark(name: str) -> None:
    """For the launcher, beside this rank's report."""
    if (report := config.report_file()) is not None:
        with contextlib.suppress(OSError):
            Path(report).with_name(name).touch()


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
