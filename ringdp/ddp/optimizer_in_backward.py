"""torch's optimizers that step during backward (`torch.distributed.optim._apply_optimizer_in_backward`), under RingDP.

Each parameter's optimizers step as soon as its bucket is averaged, while backward goes on; its gradient is then None.
torch's own hook for this waits on accelerator streams and fails on a machine without one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from ringdp.hooks.average import all_reduce_mean


def has_optimizers(parameters: Iterable[Tensor]) -> bool:
    return any(hasattr(parameter, "_in_backward_optimizers") for parameter in parameters)


def take_over(parameters: Iterable[Tensor]) -> None:
    """Remove the hooks that ``_apply_optimizer_in_backward`` left on the parameters, which would step before gradients
    are averaged."""
    # A program that gave parameters optimizers has loaded it; for others it is slow, and warns of torch.jit.script.
    from torch.distributed.optim.apply_optimizer_in_backward import param_to_optim_hook_handle_map

    for parameter in parameters:
        for handle in param_to_optim_hook_handle_map.get(parameter, []):
            handle.remove()


def stepping_at_end(wrapper: DistributedDataParallel) -> Callable[[], None]:
    """In an elastic job, where a bucket's mean counts only with the step: to be called at the end of the backward."""
    wrapper_alive = weakref.ref(wrapper)

    def step() -> None:
        alive = wrapper_alive()
        for parameter in [] if alive is None else alive._module_parameters:
            optimizers = getattr(parameter, "_in_backward_optimizers", [])
            if parameter.grad is None:
                continue
            for optimizer in optimizers:
                optimizer.step()
            if optimizers:
                parameter.grad = None

    return step


def stepping_hook(
    wrapper: DistributedDataParallel,
) -> Callable[[object, GradBucket], torch.futures.Future[Tensor]]:
    """The communication hook that averages a bucket and lets its parameters' optimizers step."""
    wrapper_alive = weakref.ref(wrapper)

    def average_and_step(state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        alive = wrapper_alive()
        assert alive is not None, "a wrapper's bucket outlived it"

        def step(mean: Tensor) -> Tensor:
            gradients = [mean] if mean.is_sparse else bucket.gradients()
            for parameter, gradient in zip(bucket.parameters(), gradients, strict=True):
                optimizers = getattr(parameter, "_in_backward_optimizers", [])
                if optimizers:  # the bucket may have another type (reduce_dtype)
                    parameter.grad = gradient.to(getattr(parameter, "grad_dtype", None) or parameter.dtype)
                for optimizer in optimizers:
                    optimizer.step()
                if optimizers:
                    parameter.grad = None
            return mean

        return all_reduce_mean(bucket.buffer(), alive.process_group, step)

    average_and_step.per_parameter = True  # type: ignore[attr-defined]  # for RingDP(reproducible=True)
    return average_and_step
