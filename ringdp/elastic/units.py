"""Collectives of the script that the loss of a rank does not end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from ringdp.job.byte_collectives import require_member
from ringdp.job.elastic import as_unit

Result = TypeVar("Result")


def unit(
    body: Callable[[], Result],
    *,
    writes: Sequence[torch.Tensor] = (),
    process_group: dist.ProcessGroup | None = None,
) -> Result:
    """Call `body()`, whose collectives are over the group; all its ranks call `unit`, in the same place.

    Where a rank is lost in an elastic job, the ranks that are left call `body()` again, unless it has returned on all
    of them: so all have the result of the same ranks. In other jobs it is `body()` alone.

    Args:
        body: has no effect but its result and what it writes into `writes`. It asks for ranks and their number each
            time, since these change.
        writes: tensors that it changes in place; before it is called again they have their old values.
        process_group: None: all ranks.

    Raises:
        InvalidStateError: before `ringdp.init`.
        MembershipChanged: a rank was lost while an operation outside units was unfinished.
    """
    return as_unit(require_member(process_group, "ringdp.elastic.unit"), "a unit of the script", body, writes=writes)
