"""Compressors by name."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

from ringdp.compression.feedback import feedback_of
from ringdp.compression.protocol import AGGREGATES, Compressor, CompressorLike
from ringdp.errors import InvalidArgumentError

Factory = TypeVar("Factory", bound=Callable[..., Any])
_factories: dict[str, Callable[..., Any]] = {}

_METHODS = {
    "compress": "compress(x, info) -> tuple of tensors",
    "decompress": "decompress(payload, info) -> tensor",
}
_MERGE = {"merge": "merge(payloads, info, divisor, residual, back) -> tuple of tensors"}
_METHODS_OF_ROUNDS = {"average": "average(xs, infos), a generator that returns the means"}


def register(*names: str) -> Callable[[Factory], Factory]:
    """A decorator: `get` calls the class or function for these names.

    A later one takes an earlier one's place, with a UserWarning unless it is the same one defined again (a notebook).

    Raises:
        InvalidArgumentError: a name that is not a text, or is empty.
    """

    def remember(factory: Factory) -> Factory:
        for name in names:
            if not isinstance(name, str) or not name:
                raise InvalidArgumentError(f"a compressor's name must be a text that is not empty, not {name!r}")
            if (before := _factories.get(name)) is not None and _place(before) != _place(factory):
                warnings.warn(
                    f"the compressor {name!r} was {_place(before)} and is {_place(factory)} from now on: "
                    "register it under another name if you want both",
                    stacklevel=2,
                )
            _factories[name] = factory
        return factory

    return remember


def _place(factory: Any) -> str:
    return ".".join(str(getattr(factory, it, type(factory).__name__)) for it in ("__module__", "__qualname__"))


def names() -> list[str]:
    """The names that `get` and ``compression=`` know, in alphabetical order."""
    return sorted(_factories)


def get(spec: CompressorLike, **options: Any) -> Compressor | None:
    """The compressor of `spec`: a registered name, a compressor, or None for exact gradients.

    Args:
        options: for the class or function behind a name, for example ``get("int8", block=128)``.

    Raises:
        InvalidArgumentError: the name is not registered, or the object is not a compressor; names the missing method.
    """
    if spec is None:
        return None
    made: Any = spec
    if isinstance(spec, str):
        if spec not in _factories:
            near = difflib.get_close_matches(spec, _factories, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise InvalidArgumentError(f"unknown compressor {spec!r}; the compressors are {', '.join(names())}{hint}")
        made = _factories[spec](**options)
    elif options:
        raise InvalidArgumentError(f"options {', '.join(options)} go with a name, not with {spec!r}")
    _check(made, spec)
    chosen: Compressor = made
    return chosen


def _check(made: Any, spec: Any) -> None:
    if isinstance(made, type):
        raise InvalidArgumentError(f"{made.__name__} is a class: pass an object, {made.__name__}()")
    aggregate = getattr(made, "aggregate", "owner")
    if aggregate not in AGGREGATES:
        raise InvalidArgumentError(f"{spec!r}: aggregate must be one of {', '.join(AGGREGATES)}, not {aggregate!r}")
    needed = _METHODS_OF_ROUNDS if aggregate == "rounds" else _METHODS | (_MERGE if aggregate == "merge" else {})
    missing = [method for method in needed if not callable(getattr(made, method, None))]
    if missing:
        raise InvalidArgumentError(
            f"{spec!r} is not a compressor: it has no method {' and no '.join(missing)}"
            f" ({', '.join(needed[method] for method in needed)})"
        )
    feedback_of(getattr(made, "error_feedback", None))
