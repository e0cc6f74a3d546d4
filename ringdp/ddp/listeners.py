"""Functions that are called in each forward that records gradients, as `ringdp.data.BalancedSampler` needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ringdp.ddp.features import Feature, FeaturedDDP


class Listeners(Feature):
    """Attributes:
    calls: on all ranks the same. They end with a join, in which ranks have run different numbers of steps.
    """

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []
        self._has_joined = False

    def between_steps(self, ddp: FeaturedDDP) -> None:
        for listener in [] if self._has_joined else list(self.calls):
            listener()

    def join_is_over(self) -> None:
        self._has_joined = True

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"calls": []}
