"""No communication at all: to measure a step without it, or for gradients that are averaged elsewhere."""

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket


def noop_hook(state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Leave the bucket with this rank's own gradients: the ranks' parameters drift apart."""
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


noop_hook.repeatable = True  # type: ignore[attr-defined]  # for elastic jobs
