"""What type checkers say of mistakes. mypy reports an `ignore` that nothing needs: `make lint` checks these lines."""

from __future__ import annotations

import torch

import ringdp
from ringdp import _C
from ringdp.ddp.arguments import ARGUMENTS, DDPArguments
from tests.core import _core


def never_called(model: torch.nn.Module) -> None:
    ringdp.rnak()  # type: ignore[attr-defined]
    ringdp.RingDP(model, bogus=3)  # type: ignore[call-arg]
    ringdp.RingDP(model, static_graph="yes")  # type: ignore[arg-type]
    ringdp.init(timeot=3)  # type: ignore[call-arg]
    _C.traffik()  # type: ignore[attr-defined]
    _C.GradientMarks([], note=True)  # type: ignore[call-arg]
    _core.Runtime(_core.MemoryStore(), "0", 1)  # type: ignore[arg-type]
    ringdp.testing.check_compresor()  # type: ignore[attr-defined]
    ringdp.RingDP(model, compression="int8", static_graph=True, gradient_as_bucket_view=False).no_sync()
    assert ringdp.rank() < ringdp.world_size()


def test_checkers_know_the_arguments_that_there_are() -> None:
    names = list(ARGUMENTS)
    assert names[names.index("find_unused_parameters") + 1 :] == list(DDPArguments.__annotations__)
