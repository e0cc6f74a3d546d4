"""What one rank cannot use, told to the ranks that wait for it, in the place where they compare what they have."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import threading
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from ringdp.errors import InvalidArgumentError, InvalidStateError, MismatchError, RingError
from ringdp.job.backend import named
from ringdp.job.byte_collectives import all_gather_where_different, device_for

_log = logging.getLogger("ringdp.refusal")
_MARK = b"\0refused\0"
_SILENT_S = 1.0
COMPARING_MODELS = "comparing models"
Construct = TypeVar("Construct", bound=Callable[..., None])
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

    peer: int
    mine: str
    theirs: str


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
        operation: the name under which the ranks compare.
        what: of which the lines are, for the log.
        doing: what a rank cannot do whose `check` raises.

    Raises:
        InvalidArgumentError: by `check`; the others learn why.
        MismatchError: by another rank's.
    """
    try:
        found = check()
    except InvalidArgumentError as error:
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
    pairs = zip_longest(own.split("\n"), told[peer].decode().split("\n"), fillvalue="nothing")
    mine, theirs = next((mine, theirs) for mine, theirs in pairs if mine != theirs)
    return found, Difference(peer, mine, theirs)


def tells_refusal(construct: Construct) -> Construct:
    """For a wrapper's ``__init__``: what it raises before the ranks compare their models, all ranks hear of there.

    The wrapper's attribute ``_compare_models`` is gone, or False, when they have compared them, or will not.
    """
    signature = inspect.signature(construct)

    @functools.wraps(construct)
    def construct_or_tell(self: Any, *positional: Any, **keywords: Any) -> None:
        self.__dict__["_compare_models"] = True
        try:
            construct(self, *positional, **keywords)
        except Exception as error:
            lost = isinstance(error, RingError) and not isinstance(error, InvalidArgumentError | InvalidStateError)
            if self.__dict__.get("_compare_models") and not lost:
                with contextlib.suppress(Exception):  # arguments of any kind: the error that is raised matters more
                    given = signature.bind(self, *positional, **keywords).arguments
                    _report_from_wrapper(error, given | given.pop("named", {}))
            raise

    return construct_or_tell  # type: ignore[return-value]


def _report_from_wrapper(error: Exception, arguments: dict[str, Any]) -> None:
    """Where the wrapper's ranks compare their models, in its group and on its device."""
    mesh, group = arguments.get("device_mesh"), arguments.get("process_group")
    if group is None:
        group = dist.group.WORLD if mesh is None else mesh.get_group(mesh_dim=0)
    module = arguments["module"]
    parameters = module.parameters() if isinstance(module, torch.nn.Module) else iter(())
    if isinstance(group, dist.ProcessGroup) and arguments.get("init_sync", True):
        device = next((parameter.device for parameter in parameters), torch.device("cpu"))
        report_refusal(error, group, device, COMPARING_MODELS)
