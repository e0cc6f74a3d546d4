"""The check of a communication hook, with the messages of torch's DistributedDataParallel."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch._C._distributed_c10d import GradBucket


def what_is_wrong_with(hook: Any) -> tuple[type[Exception], str] | None:
    """The exception and its text for an object that cannot be called with ``(state, bucket)``; None for a hook.

    torch's own check refuses annotations that are text (``from __future__ import annotations``).
    """
    if not callable(hook):
        return TypeError, "Communication hook must be callable."
    try:
        signature = inspect.signature(hook, eval_str=True)
    except NameError:  # a name known to type checkers only: nothing to compare with
        return None
    bucket = signature.parameters.get("bucket")
    if bucket is not None and bucket.annotation not in (inspect.Parameter.empty, GradBucket):
        return ValueError, "Communication hook: bucket annotation should be dist.GradBucket."
    if signature.return_annotation not in (inspect.Signature.empty, torch.futures.Future[torch.Tensor]):
        return ValueError, "Communication hook: return annotation should be torch.futures.Future[torch.Tensor]."
    return None
