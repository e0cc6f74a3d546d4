"""Which compressor a parameter gets: by its name, its size, or the module it belongs to."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ringdp.compression.protocol import Compressor
from ringdp.compression.registry import get
from ringdp.errors import InvalidArgumentError

SMALL = 1024

Condition = str | range | type | Callable[[int], bool]
Rule = tuple[Condition, Any]


@dataclasses.dataclass(frozen=True)
class Rules:
    """The rules of one model, checked; ask `of` about a parameter.

    Args:
        compression: for what no rule speaks of: a name, a compressor, or None for exact.
        rules: pairs of a condition and a name, a compressor or None; the first that fits is taken. A condition is a
            pattern of names as the shell has them (``"*.bias"``, ``"head.*"``), a range of sizes in elements
            (``range(0, 65536)``), a function of that size, or a type of module, whose own parameters are meant.

    Without a rule of their own these stay exact: parameters of at most one dimension (biases, norms), those of
    normalisation layers, tensors under 1,024 elements, and what is not a dense real floating-point tensor, whatever
    the rules say of that last kind.

    Raises:
        InvalidArgumentError: a condition or compressor that cannot be used.
    """

    compression: Any
    rules: Sequence[Rule] = ()

    def __post_init__(self) -> None:
        checked = []
        for rule in self.rules:
            if not isinstance(rule, Sequence) or isinstance(rule, str) or len(rule) != 2:
                raise InvalidArgumentError(f"a rule is a pair of condition and compressor, not {rule!r}")
            condition, spec = rule
            if not (isinstance(condition, str | range) or callable(condition)):
                raise InvalidArgumentError(
                    "a rule's condition must be a pattern of names, a range of sizes, a function of the size or a"
                    f" type of module, not {condition!r}"
                )
            checked.append((condition, get(spec)))
        object.__setattr__(self, "compression", get(self.compression))
        object.__setattr__(self, "rules", tuple(checked))

    @property
    def need_names(self) -> bool:
        """Whether somebody must say which name and module a parameter has."""
        return any(isinstance(condition, str | type) for condition, _ in self.rules)

    @property
    def compress(self) -> bool:
        """Whether some parameter may be compressed."""
        return self.compression is not None or any(compressor is not None for _, compressor in self.rules)

    def of(self, name: str, parameter: Tensor, module: nn.Module | None = None, *, sparse: bool = False) -> Any:
        """The compressor of this parameter, or None for exact; `module` is the one it belongs to, where known."""
        if sparse or not parameter.is_floating_point() or parameter.layout != torch.strided:
            return None
        for condition, compressor in self.rules:
            if _fits(condition, name, parameter.numel(), module):
                return compressor
        small = parameter.dim() <= 1 or parameter.numel() < SMALL
        return None if small or is_norm(module) else self.compression


def assign(
    compression: Any,
    rules: Iterable[Rule],
    parameters: Mapping[str, Tensor],
    modules: Mapping[str, nn.Module] | None = None,
) -> dict[str, Compressor | None]:
    """The compressor of each parameter by name, None for exact; `modules` as ``named_modules()`` gives them."""
    chosen = Rules(compression, tuple(rules))
    owners = modules or {}
    return {name: chosen.of(name, one, owners.get(name.rpartition(".")[0])) for name, one in parameters.items()}


def is_norm(module: nn.Module | None) -> bool:
    """torch's normalisation layers, and other people's by the name of their class (LlamaRMSNorm)."""
    return module is not None and any("Norm" in kind.__name__ for kind in type(module).__mro__)


def _fits(condition: Condition, name: str, numel: int, module: nn.Module | None) -> bool:
    if isinstance(condition, str):
        return fnmatch.fnmatchcase(name, condition)
    if isinstance(condition, range):
        return numel in condition
    if isinstance(condition, type):
        return isinstance(module, condition)
    return bool(condition(numel))
