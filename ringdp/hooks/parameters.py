"""What a hook calls the parameters of its buckets: their state belongs to a name."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ringdp.hooks.names import known_name


class Parameters:
    """Names by identity: from the model where one is given, else what RingDP noted, else a number in order of arrival.

    Args:
        model: a module or the DDP around it.
        named: names and parameters, in place of a model.
    """

    def __init__(self, model: nn.Module | None = None, *, named: Iterable[tuple[str, Tensor]] = ()) -> None:
        bare = model.module if isinstance(model, DistributedDataParallel) else model
        self._modules: dict[str, nn.Module] = dict(bare.named_modules()) if bare is not None else {}
        named = bare.named_parameters() if bare is not None else named
        # The parameter is kept: its id must not become another's.
        self._names: dict[int, tuple[str, Tensor]] = {id(parameter): (name, parameter) for name, parameter in named}

    def name(self, parameter: torch.Tensor) -> str:
        if id(parameter) not in self._names:
            name = known_name(parameter) or f"parameter {len(self._names)}"
            self._names[id(parameter)] = (name, parameter)
        return self._names[id(parameter)][0]

    def known(self) -> list[tuple[str, Tensor]]:
        """All that have a name so far."""
        return list(self._names.values())

    def module(self, name: str) -> nn.Module | None:
        """The one a parameter belongs to, where the model is known."""
        return self._modules.get(name.rpartition(".")[0])
