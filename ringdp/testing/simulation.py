"""n ranks in one process: the exchange that a process group would carry, request by request."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ringdp import compression
from ringdp.compression.exchange import (
    AllGather,
    AllReduce,
    AllToAll,
    BucketSlice,
    Coder,
    Exchange,
    Layout,
    Request,
    States,
)
from ringdp.errors import InvalidArgumentError, RingError


@dataclasses.dataclass(frozen=True)
class Simulation:
    """The result of `simulate`.

    Attributes:
        means: by step, the gradient that every rank has, in the shape of the inputs.
        states: by rank, of error feedback and compressor; for a next `simulate`.
        steps: how many steps there were, with those before.
    """

    means: list[Tensor]
    states: list[States]
    steps: int

    @property
    def mean(self) -> Tensor:
        """Of the last step."""
        return self.means[-1]


def simulate(
    compressor: compression.CompressorLike,
    gradients: Sequence[Tensor] | Sequence[Sequence[Tensor]],
    n: int | None = None,
    *,
    name: str = "simulated",
    scale: float = 1.0,
    after: Simulation | None = None,
) -> Simulation:
    """Average the gradients of n ranks as a real exchange does, to the bit (for ``aggregate="sum"`` of floating-point
    payloads the order of addition is rank order, where a backend may have another).

    Args:
        compressor: a name or an object; None is exact.
        gradients: of one step, a tensor for each rank; or a sequence of such steps. Float32, any shape.
        n: how many ranks; None counts them.
        name: the parameter's, which decides the owners of its elements.
        scale: the loss scale that the gradients carry.
        after: go on where this one ended.

    Raises:
        InvalidArgumentError: the gradients are not those of n ranks, or differ in shape.
        AssertionError: the ranks ended with different bits.
        Exception: the compressor's.
    """
    tensors = [it for it in gradients if isinstance(it, Tensor)]
    steps = [tensors] if tensors else [list(step) for step in gradients]
    ranks = n if n is not None else len(steps[0])
    shape = steps[0][0].shape
    if any(len(step) != ranks or any(it.shape != shape for it in step) for step in steps):
        raise InvalidArgumentError(f"each step needs {ranks} tensors, one for each rank, of shape {list(shape)}")
    chosen, device = compression.get(compressor), steps[0][0].device
    states = after.states if after is not None else [States() for _ in range(ranks)]
    begin = after.steps if after is not None else 0
    place = BucketSlice(name, tuple(shape), 0, shape.numel(), chosen)
    layouts = [Layout([place], ranks, device) for _ in range(ranks)]
    means = []
    for step, inputs in enumerate(steps, begin):
        buckets = [it.detach().reshape(-1).clone() for it in inputs]
        if ranks > 1:
            coders = [Coder(states[r], r, ranks, step, scale, device) for r in range(ranks)]
            together([layouts[r].average(buckets[r], coders[r], ranks) for r in range(ranks)])
        for r, other in enumerate(buckets):
            if not torch.equal(other.view(torch.uint8), buckets[0].view(torch.uint8)):
                raise AssertionError(f"rank {r} ended step {step} with other bits than rank 0")
        finite = bool(buckets[0].isfinite().all())
        for state in states:
            state.commit(finite)
        means.append(buckets[0].view(shape))
    return Simulation(means, states, begin + len(steps))


@torch.no_grad()
def together(exchanges: Sequence[Exchange]) -> None:
    """Run all ranks' exchanges in lockstep. Where they raise, the first error that is a rank's own is raised."""
    replies: list[Any] = [None] * len(exchanges)
    while True:
        requests: list[Request] = []
        errors: list[Exception] = []
        ended = 0
        for exchange, reply in zip(exchanges, replies, strict=True):
            try:
                requests.append(exchange.send(reply))
            except StopIteration:
                ended += 1
            except Exception as error:
                errors.append(error)
        if errors:
            raise next((it for it in errors if type(it) is not RingError), errors[0])
        if ended == len(exchanges):
            return
        assert not ended, "some ranks ended, others wait for them"
        replies = answers(requests)


def answers(requests: Sequence[Request]) -> list[Any]:
    """The answers of a process group to the ranks' requests, all of one kind."""
    first = requests[0]
    if isinstance(first, AllGather):
        rows = torch.stack([it.send for it in requests if isinstance(it, AllGather)])
        return [rows.clone() for _ in requests]
    if isinstance(first, AllReduce):
        lists = [it.tensors for it in requests if isinstance(it, AllReduce)]
        for several in zip(*lists, strict=True):
            total = several[0].clone()
            for tensor in several[1:]:
                total += tensor
            for tensor in several:
                tensor.copy_(total)
        return [None] * len(requests)
    sent = [it.send.split(it.send_sizes) for it in requests if isinstance(it, AllToAll)]
    received = [torch.cat([row[r] for row in sent]) for r in range(len(requests))]
    for r, (request, answer) in enumerate(zip(requests, received, strict=True)):
        assert isinstance(request, AllToAll)
        sizes = [row[r].numel() for row in sent]
        assert sizes == request.receive_sizes, f"rank {r} expects {request.receive_sizes} bytes and gets {sizes}"
        assert answer.dtype == torch.uint8
    return received
