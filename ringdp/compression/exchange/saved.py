"""What compression remembers of a parameter, as a checkpoint keeps it: one tensor for all parts wherever that can be.

Keys: ``residual`` for what error feedback still owes (its plug-in names such tensors in ``owed``), whichever phase left
it: float32 ``[count]``. Other tensors with a value for each element: ``kind/phase/name``, ``[count]``. What else
there is belongs to a part: ``kind/phase/part/name``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ringdp.compression.exchange.section import Section
from ringdp.compression.exchange.states import Key
from ringdp.compression.feedback import EF21, ErrorFeedback
from ringdp.compression.methods.top_k import DGC
from ringdp.compression.parameters import clean_name
from ringdp.errors import InvalidArgumentError

Saved: TypeAlias = dict[str, Any]
_KINDS = {int: "a whole number", str: "a text", Mapping: "a dict"}


def save(section: Section, states: Mapping[Key, dict[str, Any]]) -> Saved:
    """A parameter's, with copies of the tensors."""
    saved: Saved = {}
    for key, state in states.items():
        if key.phase == "whole":
            saved |= {name: value.clone() for name, value in state.items()}
            continue
        for name, value in state.items():
            edges = section.edges
            if isinstance(value, Tensor) and value.shape == (section.numel(key.part),):
                path = name if _is_residual(section, key, name) else f"{key.kind}/{key.phase}/{name}"
                if path not in saved:
                    saved[path] = torch.zeros(section.count, dtype=value.dtype, device=value.device)
                saved[path][edges[key.part] : edges[key.part + 1]] = value
            else:
                path = f"{key.kind}/{key.phase}/{key.part}/{name}"
                saved[path] = value.clone() if isinstance(value, Tensor) else value
    return saved


def load(
    section: Section, saved: Saved, rank: int, *, consolidated: bool = False, whole: bool = False
) -> dict[Key, dict[str, Any]]:
    """The states on one rank, in tensors of their own.

    Args:
        whole: the residual must be one tensor, for the core.
        consolidated: `saved` is the mean over ranks: the owner alone keeps the residual.

    Raises:
        InvalidArgumentError: a key that `save` does not give, a tensor that does not fit the parameter.
    """
    states: dict[Key, dict[str, Any]] = {}
    for path, value in saved.items():
        words = path.split("/") if isinstance(path, str) else []
        if len(words) == 4 and _is_place(words) and words[2].isdecimal() and int(words[2]) < section.parts:
            key = Key(section.name, words[0], words[1], int(words[2]))
            states.setdefault(key, {})[words[3]] = value.clone() if isinstance(value, Tensor) else value
            continue
        if len(words) != 1 and not (len(words) == 3 and _is_place(words)):
            raise InvalidArgumentError(
                f"unknown entry {path!r} for {section.name!r} in the compression state",
                name=section.name,
            )
        check_elements(section.name, path, value, section.count, float32=_keeps_float32(section, words))
        if whole and len(words) == 1:
            states[Key(section.name, "feedback", "whole", 0)] = {
                path: _own_residual(section, value, rank, consolidated)
            }
            continue
        for part in range(section.parts):
            piece = value[section.edges[part] : section.edges[part + 1]].to(section.device, copy=True)
            if len(words) == 1:
                kind, phase, name = "feedback", "owner" if _is_owner(section, part, rank) else "rank", path
                if consolidated and section.owners_encode and phase == "rank":
                    continue
            else:
                kind, phase, name = words
            if piece.numel():
                states.setdefault(Key(section.name, kind, phase, part), {})[name] = piece
    return states


def by_known_name(entries: Mapping[Any, Any], known: Container[str]) -> tuple[dict[Any, Any], dict[str, str]]:
    """The entries by the names that are known, and the other names under which some of them were saved.

    Those are names with what `torch.compile` and other wrappers put into them, which older states have.

    Raises:
        InvalidArgumentError: two entries of one parameter.
    """
    renamed: dict[Any, Any] = {}
    saved_as: dict[str, str] = {}
    for key, entry in entries.items():
        name = key if key in known or not isinstance(key, str) else clean_name(key)
        if name in renamed:
            raise InvalidArgumentError(f"the compression state has {name!r} twice, also as {saved_as.get(name, key)!r}")
        renamed[name] = entry
        if name != key:
            saved_as[name] = key
    return renamed, saved_as


def under_new_name(section: Section, saved: Saved, saved_as: str, rank: int) -> Saved:
    """An exact state that was saved under another name, by which the ranks may own other elements of the parameter.

    What the mean lacks stays the same: an owner owes all of it, every other rank an n-th.

    Raises:
        InvalidArgumentError: it has what only the owners under the other name can go on from.
    """
    before = dataclasses.replace(section, name=saved_as)
    if before.edges == section.edges or not section.owners_encode:
        return saved
    moved: Saved = {}
    for path, value in saved.items():
        if not isinstance(path, str) or "/" in path:
            raise InvalidArgumentError(
                f"the compression state has {path!r} of {saved_as!r}, which is {section.name!r} now, and its ranks own"
                " other elements: save it with consolidated=True, or leave it out",
                name=section.name,
            )
        check_elements(section.name, path, value, section.count, float32=_keeps_float32(section, [path]))
        moved[path] = rescaled(value, _owned_mask(before, rank), _owned_mask(section, rank), section.parts)
    return moved


def rescaled(residual: Tensor, owned_before: Tensor, owned_now: Tensor, ranks: int) -> Tensor:
    """A rank's residual, after the elements that it owns have changed; see `share`."""
    there = torch.where(owned_before, residual * ranks, residual / ranks)
    return torch.where(owned_before == owned_now, residual, there)


def _owned_mask(section: Section, rank: int) -> Tensor:
    mask = torch.zeros(section.count, dtype=torch.bool, device=section.device)
    mask[section.edges[rank] : section.edges[rank + 1]] = True
    return mask


def check_elements(name: str, path: str, value: Any, count: int, *, float32: bool = True) -> None:
    """Raise InvalidArgumentError unless `value` is a tensor with a value for each of a parameter's `count` elements."""
    if isinstance(value, Tensor) and value.shape == (count,) and (value.dtype == torch.float32 or not float32):
        return
    given = type(value).__name__
    if isinstance(value, Tensor):
        given = f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    raise InvalidArgumentError(
        f"the compression state's {path} of {name!r} is {given}, not {'float32 ' * float32}[{count}]", name=name
    )


def field(state: Any, key: str, kind: Any, where: str = "the compression state") -> Any:
    """``state[key]``, where that is an ``int``, a ``str`` or a ``Mapping``, as `kind` says.

    Raises:
        InvalidArgumentError: `state` is not a dict, has no such key, or has a value there that is not of that kind.
    """
    if not isinstance(state, Mapping):
        raise InvalidArgumentError(f"{where} must be a dict, not {type(state).__name__}")
    if key not in state:
        raise InvalidArgumentError(f"{where} has no {key!r}")
    value = state[key]
    if not isinstance(value, kind) or isinstance(value, bool):
        raise InvalidArgumentError(f"{key!r} of {where} must be {_KINDS[kind]}, not {type(value).__name__}")
    return value


def _own_residual(section: Section, value: Tensor, rank: int, consolidated: bool) -> Tensor:
    residual = value.to(section.device, copy=True)
    if consolidated and section.owners_encode:
        residual[: section.edges[rank]] = 0
        residual[section.edges[rank + 1] :] = 0
    return residual


def share(section: Section, path: str, value: Tensor, rank: int, ranks: int) -> Tensor:
    """This rank's term of the residual of the mean over ranks: an n-th, but all of its own parts' residual.

    A rank's residual reaches the mean divided by n, the owner's as it is, so the sum of all shares is the residual of
    the mean.
    """
    part = value / ranks
    if "/" not in path and section.owners_encode:
        own = slice(section.edges[rank], section.edges[rank + 1])
        part[own] = value[own]
    return part


def residual_tensors(section: Section, states: Mapping[Key, dict[str, Any]]) -> list[Tensor]:
    """The tensors of error feedback that hold what a parameter's gradients still lack, of all its parts and phases."""
    return [value for key, state in states.items() for name, value in state.items() if _is_residual(section, key, name)]


def _is_residual(section: Section, key: Key, name: str) -> bool:
    plug_in = section.feedback_in("owner" if key.phase == "owner" else "rank")
    return key.kind == "feedback" and key.phase != "result" and name in getattr(plug_in, "owed", ())


def _is_owner(section: Section, part: int, rank: int) -> bool:
    return section.owners_encode and part == rank


def _is_place(words: list[str]) -> bool:
    """Whether the words begin with a kind and a phase."""
    return words[0] in ("feedback", "compressor") and words[1] in ("rank", "owner", "result")


def _keeps_float32(section: Section, words: list[str]) -> bool:
    """Whether it is kept by error feedback of this package; others keep what they like."""
    return (len(words) == 1 or words[0] == "feedback") and isinstance(section.feedback, ErrorFeedback | EF21 | DGC)
