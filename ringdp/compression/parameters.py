"""The parameters of a module as the reducer knows them: each once, with all its names and the modules that use it.

Names are those of the model itself. `torch.compile`, torch's checkpoint wrapper, FSDP and DDP put a module around
another one, and its attribute's name before the names inside; that part is left out, as `torch.distributed.checkpoint`
does. So rules, messages and saved states are the same for a compiled model and a plain one.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrize import ParametrizationList

from ringdp import _C

_WRAPPED = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
_MOST_NAMES = 64  # of one module: shared modules inside shared modules have exponentially many
_MADE_BY_HOOK = re.compile(r"(.+)_(?:g|v|orig)")  # torch.nn.utils.weight_norm, spectral_norm and prune


@dataclass(frozen=True)
class ModelParameter:
    """One parameter.

    Attributes:
        parameter: the tensor, shared by all its names.
        names: the first one as `torch.nn.Module.named_parameters` has it, but for wrappers; several where it is tied,
            or where its module has several.
        used_in: the modules that own it, for messages: ``encoder.linear (Linear)``.
        sparse: its gradients are sparse.
        owners: the modules that have it under one of its names, each once; also the module whose weight is computed
            from it (`torch.nn.utils.parametrize`).
        aliases: names of tensors that are computed from it: ``layer.weight`` for
            ``layer.parametrizations.weight.original0`` and for ``layer.weight_g``.
        is_magnitude: one number for each row of a weight (weight normalisation): a vector, though it has as many
            dimensions as the weight.
    """

    parameter: torch.Tensor
    names: tuple[str, ...]
    used_in: tuple[str, ...] = ()
    sparse: bool = False
    owners: tuple[torch.nn.Module, ...] = ()
    aliases: tuple[str, ...] = ()
    is_magnitude: bool = False

    @property
    def name(self) -> str:
        return self.names[0]

    def describe_use(self) -> str:
        """``layer (Linear)``; for a tied one ``a (Linear), b (Linear), under the names a.weight, b.weight``."""
        text = ", ".join(self.used_in)
        return text if len(self.names) == 1 else f"{text}, under the names {', '.join(self.names)}"

    def describe(self) -> _C.ModuleParameter:
        """For a reducer."""
        return _C.ModuleParameter(self.parameter, self.name, self.describe_use(), self.sparse)


def model_parameters(module: torch.nn.Module, *, ignored: Container[str] = ()) -> list[ModelParameter]:
    """All parameters of `module` that can require grad, frozen ones too, in the order in which DDP counts them.

    Args:
        module: what is wrapped.
        ignored: names to leave out, as `torch.nn.Module.named_parameters` has them; a tied parameter stays while one of
            its names does.
    """

    def reduced(name: str, parameter: torch.Tensor) -> bool:
        return name not in ignored and (parameter.is_floating_point() or parameter.is_complex())

    return _collect(module, reduced)


def never_reduced(module: torch.nn.Module, *, ignored: Container[str] = ()) -> list[ModelParameter]:
    """Those that are not `ignored` and can never require grad: integers."""
    if all(one.is_floating_point() or one.is_complex() for one in module.parameters()):
        return []
    reduced = model_parameters(module, ignored=ignored)
    known = {id(one.parameter) for one in reduced}
    return _collect(module, lambda name, parameter: name not in ignored and id(parameter) not in known)


def other_parameters(module: torch.nn.Module, known: Iterable[ModelParameter]) -> list[ModelParameter]:
    """Those of `module` that are not among the `known` ones: integers, and those that were left out."""
    names = {name for one in known for name in one.names}
    return [one for one in _collect(module, lambda name, parameter: True) if names.isdisjoint(one.names)]


def clean_name(name: str) -> str:
    """`name`, of a parameter or module, without the parts that wrappers put into it: ``0.weight`` for
    ``_orig_mod.0.weight``."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPED)


@dataclass(frozen=True)
class _Place:
    """A module under one of its names.

    Attributes:
        raw_path: as `torch.nn.Module.named_modules` has it.
        path: without wrappers.
        is_first: the name under which `named_modules` has the module.
    """

    raw_path: str
    path: str
    module: torch.nn.Module
    is_first: bool


@dataclass(frozen=True)
class _Use:
    """A parameter under one of its names."""

    place: _Place
    local_name: str

    @property
    def raw_name(self) -> str:
        return _join(self.place.raw_path, self.local_name)

    @property
    def name(self) -> str:
        return _join(self.place.path, self.local_name)


def _collect(module: torch.nn.Module, wanted: Callable[[str, torch.Tensor], bool]) -> list[ModelParameter]:
    """The parameters of which `wanted` says True to one of the names that `named_parameters` has."""
    places = _places(module)
    uses: dict[torch.Tensor, list[_Use]] = {}
    for place in (it for it in places if it.is_first):
        for local_name, parameter in place.module.named_parameters(recurse=False):
            use = _Use(place, local_name)
            if wanted(use.raw_name, parameter):
                uses.setdefault(parameter, []).append(use)
    for place in places:
        for local_name, parameter in place.module.named_parameters(recurse=False, remove_duplicate=False):
            use = _Use(place, local_name)
            if parameter in uses and use not in uses[parameter] and wanted(use.raw_name, parameter):
                uses[parameter].append(use)
    clean: dict[str, set[int]] = defaultdict(set)
    for one, its_uses in uses.items():
        for use in its_uses:
            clean[use.name].add(id(one))
    ambiguous = {name for name, of in clean.items() if len(of) > 1}
    computed = _parametrized(places)
    return [_described(one, its_uses, ambiguous, computed) for one, its_uses in uses.items()]


def _described(
    parameter: torch.Tensor,
    uses: Sequence[_Use],
    ambiguous: Container[str],
    computed: dict[int, list[_Use]],
) -> ModelParameter:
    modules = [use.place.module for use in uses]
    tensors = [tensor for use in uses for tensor in (*computed.get(id(use.place.module), ()), *_made_by_hook(use))]
    return ModelParameter(
        parameter=parameter,
        names=_each_once(use.raw_name if use.name in ambiguous else use.name for use in uses),
        used_in=_each_once(
            f"{use.place.path or 'the module itself'} ({type(use.place.module).__name__})" for use in uses
        ),
        sparse=any(isinstance(it, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and it.sparse for it in modules),
        owners=tuple({id(it): it for it in (*modules, *(use.place.module for use in tensors))}.values()),
        aliases=_each_once(use.name for use in tensors),
        is_magnitude=any(_is_magnitude(use, parameter) for use in uses),
    )


def _places(root: torch.nn.Module) -> list[_Place]:
    """All modules in the order of `named_modules`, each under all its names, of which there may be `_MOST_NAMES`."""
    visits: Counter[int] = Counter()
    places: list[_Place] = []

    def visit(raw_path: str, path: str, module: torch.nn.Module, above: frozenset[int]) -> None:
        if id(module) in above or visits[id(module)] == _MOST_NAMES:  # in a circle, or in too many places
            return
        visits[id(module)] += 1
        places.append(_Place(raw_path, path, module, visits[id(module)] == 1))
        for name, child in module._modules.items():
            if child is not None:
                is_wrapped = name in _WRAPPED or (name == "module" and isinstance(module, DistributedDataParallel))
                inner = path if is_wrapped else _join(path, name)
                visit(_join(raw_path, name), inner, child, above | {id(module)})

    visit("", "", root, frozenset())
    return places


def _parametrized(places: Iterable[_Place]) -> dict[int, list[_Use]]:
    """By the id of a ParametrizationList: the tensors that it computes."""
    computed: dict[int, list[_Use]] = defaultdict(list)
    for place in places:
        lists = place.module._modules.get("parametrizations")
        for name, one in {} if lists is None else lists._modules.items():
            if isinstance(one, ParametrizationList):
                computed[id(one)].append(_Use(place, name))
    return computed


def _made_by_hook(use: _Use) -> list[_Use]:
    """The tensor that a hook computes before each forward, which is a plain attribute of the parameter's module."""
    match = _MADE_BY_HOOK.fullmatch(use.local_name)
    made = match is not None and isinstance(vars(use.place.module).get(match[1]), torch.Tensor)
    return [_Use(use.place, match[1])] if match is not None and made else []


def _is_magnitude(use: _Use, parameter: torch.Tensor) -> bool:
    """Whether this is the magnitude of weight normalisation, of shape [n, 1, …]."""
    module, long = use.place.module, sum(length > 1 for length in parameter.shape)
    if isinstance(module, ParametrizationList):
        return long <= 1 and use.local_name == "original0" and hasattr(module, "original1")
    return long <= 1 and use.local_name.endswith("_g") and bool(_made_by_hook(use))


def _each_once(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(texts))


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
