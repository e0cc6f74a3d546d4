"""The parameters of a module as the reducer knows them: each once, with all its names and the modules that use it."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ModelParameter:
    """One parameter.

    Attributes:
        parameter: the tensor, shared by all its names.
        names: as `torch.nn.Module.named_parameters` has them, the first one first; several where it is tied.
        used_in: the modules that own it, for messages: ``encoder.linear (Linear)``.
        sparse: its gradients are sparse.
        owner: the module that has it under its first name.
    """

    parameter: torch.nn.Parameter
    names: tuple[str, ...]
    used_in: tuple[str, ...]
    sparse: bool
    owner: torch.nn.Module

    @property
    def name(self) -> str:
        return self.names[0]

    def describe_use(self) -> str:
        """``layer (Linear)``; for a tied one ``a (Linear), b (Linear), under the names a.weight, b.weight``."""
        text = ", ".join(self.used_in)
        return text if len(self.names) == 1 else f"{text}, under the names {', '.join(self.names)}"


def model_parameters(module: torch.nn.Module, *, ignored: Container[str] = ()) -> list[ModelParameter]:
    """All parameters of `module` that can require grad, frozen ones too, in the order in which DDP counts them.

    Args:
        module: what is wrapped.
        ignored: names to leave out; a tied parameter stays while one of its names does.
    """
    found: dict[torch.nn.Parameter, ModelParameter] = {}
    for path, owner in module.named_modules():
        sparse = isinstance(owner, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and owner.sparse
        place = f"{path or 'the module itself'} ({type(owner).__name__})"
        for local_name, parameter in owner.named_parameters(recurse=False):
            name = f"{path}.{local_name}" if path else local_name
            if name in ignored or not (parameter.is_floating_point() or parameter.is_complex()):
                continue
            before = found.get(parameter)
            found[parameter] = ModelParameter(
                parameter=parameter,
                names=(*(before.names if before else ()), name),
                used_in=(*(before.used_in if before else ()), place),
                sparse=sparse or (before is not None and before.sparse),
                owner=before.owner if before else owner,
            )
    return list(found.values())
