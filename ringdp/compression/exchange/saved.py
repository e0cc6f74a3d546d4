"""What compression remembers of a parameter, as a checkpoint keeps it: one tensor for all parts wherever that can be.

Keys: ``residual`` for what error feedback still owes (its plug-in names such tensors in ``owed``), whichever phase left
it: float32 ``[count]``. Other tensors with a value for each element: ``kind/phase/name``, ``[count]``. What else
there is belongs to a part: ``kind/phase/part/name``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ringdp.compression.exchange.section import Section
from ringdp.compression.exchange.states import Key
from ringdp.errors import InvalidArgumentError

Saved = dict[str, Any]


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
                path = name if _is_owed(section, key, name) else f"{key.kind}/{key.phase}/{name}"
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
    """The states on one rank.

    Args:
        whole: what is owed is to be one tensor, for the core.
        consolidated: `saved` is the mean over ranks: what is owed is the owner's to pay, and nobody else's.

    Raises:
        InvalidArgumentError: a tensor has another number of elements than the parameter.
    """
    states: dict[Key, dict[str, Any]] = {}
    for path, value in saved.items():
        words = path.split("/")
        if len(words) == 4:
            key = Key(section.name, words[0], words[1], int(words[2]))
            states.setdefault(key, {})[words[3]] = value.clone() if isinstance(value, Tensor) else value
            continue
        if value.shape != (section.count,):
            raise InvalidArgumentError(
                f"{section.name} has {section.count} elements, its {path} in the checkpoint is {list(value.shape)}",
                name=section.name,
            )
        if whole and len(words) == 1:
            states[Key(section.name, "feedback", "whole", 0)] = {path: _owed_by(section, value, rank, consolidated)}
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


def _owed_by(section: Section, value: Tensor, rank: int, consolidated: bool) -> Tensor:
    owed = value.to(section.device, copy=True)
    if consolidated and section.owners_encode:
        owed[: section.edges[rank]] = 0
        owed[section.edges[rank + 1] :] = 0
    return owed


def share(section: Section, path: str, value: Tensor, rank: int, ranks: int) -> Tensor:
    """What this rank adds to the mean over ranks: an n-th, but all of what its own parts owe.

    What a rank owes reaches the mean divided by n, what the owner owes as it is, so the sum of all shares is what the
    mean still owes.
    """
    part = value / ranks
    if "/" not in path and section.owners_encode:
        own = slice(section.edges[rank], section.edges[rank + 1])
        part[own] = value[own]
    return part


def owed(section: Section, states: Mapping[Key, dict[str, Any]]) -> list[Tensor]:
    """The tensors of error feedback that hold what a parameter's gradients still lack, of all its parts and phases."""
    return [value for key, state in states.items() for name, value in state.items() if _is_owed(section, key, name)]


def _is_owed(section: Section, key: Key, name: str) -> bool:
    plug_in = section.feedback_in("owner" if key.phase == "owner" else "rank")
    return key.kind == "feedback" and key.phase != "result" and name in getattr(plug_in, "owed", ())


def _is_owner(section: Section, part: int, rank: int) -> bool:
    return section.owners_encode and part == rank
