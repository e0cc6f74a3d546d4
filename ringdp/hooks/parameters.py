"""The names of the parameters in a hook's buckets, to which their states belong."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable

from torch import Tensor, nn

from ringdp.compression.parameters import ModelParameter, model_parameters
from ringdp.hooks.names import name_of

_log = logging.getLogger("ringdp.hooks")


class Parameters:
    """Names by identity: from the model where one is given, else from RingDP, else a number in order of arrival.

    Args:
        model: a module or the DDP around it.
        named: names and parameters, in place of a model.
    """

    def __init__(self, model: nn.Module | None = None, *, named: Iterable[tuple[str, Tensor]] = ()) -> None:
        self.of_model: list[ModelParameter] = [] if model is None else model_parameters(model)
        self._has_model = model is not None
        known = self.of_model or [ModelParameter(parameter, (name,)) for name, parameter in named]
        # The parameter is kept: its id must not become another's.
        self._known: dict[int, ModelParameter] = {id(one.parameter): one for one in known}

    def of(self, parameter: Tensor) -> ModelParameter:
        """The parameter with its names."""
        if id(parameter) not in self._known:
            self._known[id(parameter)] = self._stranger(parameter)
        return self._known[id(parameter)]

    def name(self, parameter: Tensor) -> str:
        return self.of(parameter).name

    def known(self) -> list[tuple[str, Tensor]]:
        """All that have a name so far."""
        return [(one.name, one.parameter) for one in self._known.values()]

    def _stranger(self, parameter: Tensor) -> ModelParameter:
        name = name_of(parameter)
        for one in self.of_model:
            if one.name == name:  # what RingDP reduces in place of a DTensor
                return dataclasses.replace(one, parameter=parameter)
        if self._has_model:
            _log.warning(
                "a bucket has a parameter of shape %s that is not in the model given to ddp_hook(model=...): no rule by"
                " name or type of module fits it. Give ddp_hook the model that DDP has, as it is when DDP wraps it",
                list(parameter.shape),
            )
        return ModelParameter(parameter, (name or f"parameter {len(self._known)}",))
