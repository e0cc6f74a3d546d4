"""What RingDP adds to DistributedDataParallel: parts with the same entry points, in one list.

`RingDP.__init__` has the list. A part never keeps the RingDP, which owns it and is given to each call; what another
part knows it asks of that part's public methods, by ``ddp.ringdp_features[ThatPart]``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ringdp.ddp.logging_data import ReducerLog

if TYPE_CHECKING:
    from ringdp import _C
    from ringdp.job.placement import Placement

Kind = TypeVar("Kind", bound="Feature")


class Feature:
    """A part of one RingDP. Used by the thread that constructs it and runs its forwards.

    Attributes:
        made_with_reducer: names of attributes that a copy makes anew with its reducer. The class has their defaults.
    """

    made_with_reducer: tuple[str, ...] = ()

    def in_use(self, ddp: FeaturedDDP) -> dict[str, str]:
        """Those of `refusals.FEATURES` that it brings along, with the name of the user's object or ""."""
        return {}

    def settings(self) -> dict[str, str]:
        """What all ranks need to have alike, by the name of the argument, as far as it is not the default."""
        return {}

    # In the order in which they are called; those of a group, a module or a join that changes come last.

    def before_reducer(self, ddp: FeaturedDDP) -> None:
        """At construction, and in a copy."""

    def reducer_made(self, ddp: FeaturedDDP) -> None:
        """Thereafter."""

    def before_forward(self, ddp: FeaturedDDP) -> None:
        """Before DDP's own part of a forward."""

    def between_steps(self, ddp: FeaturedDDP) -> None:
        """In a forward that records gradients, where all ranks have the same buffers; not while some have joined."""

    def before_backward(self, ddp: FeaturedDDP) -> None:
        """After a forward that recorded gradients."""

    def group_replaced(self, ddp: FeaturedDDP, group: dist.ProcessGroup) -> None:
        """The reducer will average over this group from now on."""

    def before_renumbering(self, ddp: FeaturedDDP) -> None:
        """The reducer will get other parameters."""

    def renumbered(self, ddp: FeaturedDDP, renamed: Mapping[str, str]) -> None:
        """The reducer has other parameters. `renamed`: the earlier names of those that have new ones, by these."""

    def module_changed(self, ddp: FeaturedDDP) -> None:
        """The module has other parameters or buffers, with or without new ones in the reducer."""

    def join_is_over(self) -> None:
        """All ranks have run out of input, each after its own number of steps."""

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in self.made_with_reducer}


class Features:
    """Those of one RingDP, one of each class, in the order in which they act."""

    def __init__(self, *features: Feature) -> None:
        self._by_class = {type(one): one for one in features}

    def __iter__(self) -> Iterator[Feature]:
        return iter(self._by_class.values())

    def __getitem__(self, kind: type[Kind]) -> Kind:
        return cast(Kind, self._by_class[kind])

    def in_use(self, ddp: FeaturedDDP) -> dict[str, str]:
        """Those of `refusals.FEATURES` that the module and the arguments bring along."""
        return {key: name for one in self for key, name in one.in_use(ddp).items()}

    def settings(self) -> dict[str, str]:
        """By the name of the argument, the last feature's first: the ranks compare a text in this order."""
        return {key: value for one in reversed(self._by_class.values()) for key, value in one.settings().items()}


class FeaturedDDP(DistributedDataParallel):
    """RingDP as its features know it: torch's attributes, and these."""

    reducer: _C.Reducer  # type: ignore[assignment]  # torch's own class, for type checkers
    logger: ReducerLog
    ringdp_features: Features
    placement: Placement  # the devices of all ranks
