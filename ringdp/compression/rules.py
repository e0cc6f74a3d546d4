"""The compressor of each parameter: by its names, its size, or the modules it belongs to."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn

from ringdp import values
from ringdp.compression.auto import with_permission
from ringdp.compression.parameters import ModelParameter, clean_name
from ringdp.compression.protocol import Compressor, CompressorLike
from ringdp.compression.registry import get
from ringdp.errors import InvalidArgumentError

SMALL = 1024
UNMATCHED = ("error", "warn")

Condition: TypeAlias = str | range | type | Callable[[int], bool]
Rule: TypeAlias = tuple[Condition, CompressorLike]


@dataclasses.dataclass(frozen=True)
class Compression:
    """How a model's gradients are compressed: ``RingDP(net, compression=Compression("int8", warmup_steps=100))``.

    It only holds what you say: RingDP and `set_compression` check it where the ranks meet, so that a mistake of one
    rank is an error on all of them.

    Args:
        compressor: for parameters that no rule fits: a name, a compressor, or None for exact.
        rules: pairs of a condition and a name, a compressor or None; the first that fits is taken. A condition is a
            pattern of names as the shell has them (``"*.bias"``, ``"head.*"``), a range of sizes in elements
            (``range(0, 65536)``), a function of that size, or a type of module, whose own parameters are meant.
        warmup_steps: how many synchronised steps stay exact before compression begins.
        allow: what the compressor "auto" may choose among, as it measures: "exact", "near" (the default: bfloat16 and
            int8), "4bit", "aggressive" (also the largest 1 %).
        unmatched_rules: the treatment of a rule that no parameter of the model fits: ``"error"``, or ``"warn"`` where
            rules are meant for several models.

    A parameter has all names and modules under which the model has it; tied weights have several. A weight that is
    computed from other parameters (`torch.nn.utils.parametrize`, ``weight_norm``) stands for them: its name, and the
    module that has it, fit them too. The parts of names from `torch.compile`, torch's checkpoint wrapper and DDP are
    left out, in patterns as well.

    Without a rule of their own these stay exact: parameters of at most one dimension (biases, norms, the magnitudes of
    ``weight_norm``), those of normalisation layers, tensors under 1,024 elements, and tensors that are not dense, real
    and floating-point, of which rules cannot say otherwise.
    """

    compressor: CompressorLike = None
    rules: Iterable[Rule] = ()
    warmup_steps: int = 0
    allow: str | None = None
    unmatched_rules: str = "error"


class Rules:
    """A `Compression`, checked; ask `of` about a parameter.

    Raises:
        InvalidArgumentError: a compressor, condition or number that cannot be used.
    """

    def __init__(self, asked: CompressorLike | Compression) -> None:
        chosen = asked if isinstance(asked, Compression) else Compression(asked)
        values.choice("Compression", "unmatched_rules", chosen.unmatched_rules, UNMATCHED)
        values.whole("Compression", "warmup_steps", chosen.warmup_steps, 0)
        if not isinstance(chosen.rules, Iterable) or isinstance(chosen.rules, str):
            raise InvalidArgumentError(f"rules must be pairs of condition and compressor, not {chosen.rules!r}")
        pairs = tuple(map(_checked, chosen.rules))
        self.asked: Compression = dataclasses.replace(chosen, rules=pairs)
        self.pairs: tuple[tuple[Condition, Compressor | None], ...] = pairs
        self.compressor: Compressor | None = get(with_permission(chosen.compressor, chosen.allow))

    @property
    def need_names(self) -> bool:
        """Whether the rules need to know each parameter's name and module."""
        return any(isinstance(condition, str | type) for condition, _ in self.pairs)

    @property
    def compressors(self) -> tuple[Compressor | None, ...]:
        """That of parameters without a rule, then the rules'; None is exact."""
        return (self.compressor, *(compressor for _, compressor in self.pairs))

    @property
    def compress(self) -> bool:
        """Whether some parameter may be compressed."""
        return any(compressor is not None for compressor in self.compressors)

    def of(self, one: ModelParameter) -> Compressor | None:
        """The compressor of this parameter, or None for exact."""
        if why_always_exact(one) is not None:
            return None
        for number in self.fitting(one):
            return self.pairs[number][1]
        vector = one.parameter.dim() <= 1 or one.is_magnitude
        small = vector or one.parameter.numel() < SMALL
        if small or any(map(is_norm, one.owners)):
            return None
        return self.compressor

    def fitting(self, one: ModelParameter) -> Iterator[int]:
        """The places of the rules that this parameter fits, the first of which counts.

        Raises:
            InvalidArgumentError: a rule's function raises.
        """
        for number, (condition, _) in enumerate(self.pairs):
            try:
                fits = _fits(condition, one)
            except Exception as error:
                raise InvalidArgumentError(
                    f"{self.describe(number)}, raised {type(error).__name__} for {one.name!r} of"
                    f" {one.parameter.numel()} elements: {error}"
                ) from error
            if fits:
                yield number

    def describe(self, number: int) -> str:
        """A rule by its place and its condition: ``rule 2 of 3, '*.bias'``; the same on all ranks."""
        condition = self.pairs[number][0]
        if isinstance(condition, str | range):
            text = repr(condition)
        elif isinstance(condition, type):
            text = condition.__name__
        else:
            text = f"the function {getattr(condition, '__name__', type(condition).__name__)}"
        return f"rule {number + 1} of {len(self.pairs)}, {text}"


def assign(
    compression: CompressorLike | Compression,
    parameters: Mapping[str, Tensor],
    modules: Mapping[str, nn.Module] | None = None,
) -> dict[str, Compressor | None]:
    """The compressor of each parameter by name, None for exact; `modules` as ``named_modules()`` gives them."""
    chosen = Rules(compression)
    owners = modules or {}
    described = []
    for name, parameter in parameters.items():
        owner = owners.get(name.rpartition(".")[0])
        described.append(ModelParameter(parameter, (name,), owners=() if owner is None else (owner,)))
    return {one.name: chosen.of(one) for one in described}


def why_always_exact(one: ModelParameter) -> str | None:
    """The reason for which no rule can have this parameter compressed; None where one can."""
    if one.sparse:
        return "has sparse gradients"
    if not one.parameter.is_floating_point():
        return f"is of {str(one.parameter.dtype).removeprefix('torch.')}"
    if one.parameter.layout != torch.strided:
        return f"is laid out as {str(one.parameter.layout).removeprefix('torch.')}"
    return None


def is_norm(module: nn.Module) -> bool:
    """torch's normalisation layers, and other people's by the name of their class (LlamaRMSNorm)."""
    return any("Norm" in kind.__name__ for kind in type(module).__mro__)


def _checked(rule: object) -> tuple[Condition, Compressor | None]:
    if not isinstance(rule, Sequence) or isinstance(rule, str) or len(rule) != 2:
        raise InvalidArgumentError(f"a rule is a pair of condition and compressor, not {rule!r}")
    condition, spec = rule
    if not (isinstance(condition, str | range) or callable(condition)):
        raise InvalidArgumentError(
            "a rule's condition must be a pattern of names, a range of sizes, a function of the size or a"
            f" type of module, not {condition!r}"
        )
    return condition, get(spec)


def _fits(condition: Condition, one: ModelParameter) -> bool:
    if isinstance(condition, str):
        names = (*one.names, *one.aliases)
        return any(_is_like(name, pattern) for pattern in {condition, clean_name(condition)} for name in names)
    if isinstance(condition, range):
        return one.parameter.numel() in condition
    if isinstance(condition, type):
        return any(isinstance(owner, condition) for owner in one.owners)
    return bool(condition(one.parameter.numel()))


def _is_like(name: str, pattern: str) -> bool:
    """A name also fits itself, even where it has characters of patterns."""
    return name == pattern or fnmatch.fnmatchcase(name, pattern)
