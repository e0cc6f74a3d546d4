"""The state of compression, as RingDP and `ddp_hook` save it: exact for each rank, or one for any number of ranks.

Exact: ``{"format", "world_size", "steps", …, "ranks": {"2": {name: entry}}}``, with this rank's entries only, so that
torch.distributed.checkpoint keeps those of all ranks apart. Consolidated: ``"parameters": {name: entry}`` in place of
``"ranks"``, the same on all ranks.

An entry has ``"compressor"``, a description, and the states of the parameter, one tensor for all parts where that can
be, in row-major order: ``residual`` for the residual of error feedback (its plug-in names such tensors in ``owed``) of
any phase: float32 ``[numel]``. Other tensors with a value for each element: ``kind/phase/name``, ``[numel]``. All other
values belong to a part: ``kind/phase/part/name``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ringdp.compression.description import describe
from ringdp.compression.exchange.section import Phase, Section
from ringdp.compression.exchange.states import Key, Remembered
from ringdp.compression.feedback import EF21, ErrorFeedback
from ringdp.compression.methods.top_k import DGC
from ringdp.errors import InvalidArgumentError
from ringdp.text import number_of_ranks

Saved: TypeAlias = dict[str, Any]
_FORMAT = 1
_NOT_REMEMBERED = ("compressor", "order")
_KINDS = {int: "a whole number", str: "a text", Mapping: "a dict"}


@dataclasses.dataclass(frozen=True)
class State:
    """A compression state.

    Attributes:
        world_size: of the job that saved it.
        rank: that saved it; None: consolidated.
        entries: by parameter.
        steps: synchronised backwards so far.
        exact_until: the step at which warm-up ends.
        compressed_steps: backwards that compressors in Python have seen.
    """

    world_size: int
    rank: int | None
    entries: Mapping[str, Any]
    steps: int
    exact_until: int
    compressed_steps: int

    def as_dict(self) -> dict[str, Any]:
        state = {"format": _FORMAT}
        state |= {key: getattr(self, key) for key in ("world_size", "steps", "exact_until", "compressed_steps")}
        where = {"parameters": self.entries} if self.rank is None else {"ranks": {str(self.rank): self.entries}}
        return state | where

    @classmethod
    def read(cls, state: Any, rank: int, ranks: int) -> State:
        """The part of `state` for `rank` of `ranks`.

        Raises:
            InvalidArgumentError: it is not such a state, or an exact one of another rank or number of ranks.
        """
        if isinstance(state, Mapping) and state.get("format") != _FORMAT:
            raise InvalidArgumentError(
                f"not a ringdp compression state (format {state.get('format')!r}, expected {_FORMAT})"
            )
        saved_by = field(state, "world_size", int)
        steps, until, compressed = (field(state, key, int) for key in ("steps", "exact_until", "compressed_steps"))
        if "parameters" in state:
            return cls(saved_by, None, field(state, "parameters", Mapping), steps, until, compressed)
        by_rank = field(state, "ranks", Mapping)
        _check_rank(list(by_rank), saved_by, rank, ranks)
        entries = field(by_rank, str(rank), Mapping, "the compression state's ranks")
        return cls(saved_by, rank, entries, steps, until, compressed)


def _check_rank(saved_for: list[Any], saved_by: int, rank: int, ranks: int) -> None:
    if saved_by != ranks:
        raise InvalidArgumentError(
            f"this compression state was saved by {number_of_ranks(saved_by)}, one part each, and there are {ranks}"
            " now: save it with consolidated=True, which loads at any number of ranks",
            rank=rank,
        )
    if str(rank) not in saved_for:
        raise InvalidArgumentError(
            f"this compression state is of rank {', '.join(map(str, saved_for))}, and this is rank {rank}: each rank"
            " loads what it saved, or all of them one that was saved with consolidated=True",
            rank=rank,
        )


def check_compressor(name: str, entry: Any, described: str) -> None:
    """Raise InvalidArgumentError unless the entry of `name` has this description of its compressor."""
    if isinstance(entry, Mapping) and entry.get("order") == "memory":
        return  # it has no description
    compressor = field(entry, "compressor", str, f"the compression state's entry of {name!r}")
    if compressor != described:
        raise InvalidArgumentError(
            f"the compression state has {name!r} compressed by {compressor}, here it is {described}: give it the same"
            " compression and rules, or leave out the state",
            name=name,
        )


def entry_of(section: Section, parameter: Tensor, saved: Saved) -> Saved:
    """The result of `save`, in the form of a state."""
    return {"compressor": describe(section.compressor)} | {
        path: row_by_row(parameter, value) for path, value in saved.items()
    }


def from_entry(parameter: Tensor, entry: Mapping[str, Any]) -> Saved:
    """The reverse: the input of `load`."""
    as_it_is = entry.get("order") == "memory"
    return {
        path: value if as_it_is else _in_memory(parameter, value)
        for path, value in entry.items()
        if path not in _NOT_REMEMBERED
    }


def save(section: Section, remembered: Remembered) -> Saved:
    """A parameter's, with copies of the tensors."""
    saved: Saved = {} if remembered.residual is None else {"residual": remembered.residual.clone()}
    for key, state in remembered.dicts.items():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == (section.numel(key.part),):
                path = name if _is_residual(section, key, name) else f"{key.kind}/{key.phase}/{name}"
                if path not in saved:
                    saved[path] = torch.zeros(section.count, dtype=value.dtype, device=value.device)
                section.part_of(saved[path], key.part).copy_(value)
            else:
                path = f"{key.kind}/{key.phase}/{key.part}/{name}"
                saved[path] = value.clone() if isinstance(value, Tensor) else value
    return saved


def load(section: Section, saved: Saved, rank: int, *, consolidated: bool = False) -> Remembered:
    """The states of one rank, in tensors of its own.

    Args:
        consolidated: `saved` is the mean over ranks: the owner alone keeps the residual.

    Raises:
        InvalidArgumentError: a key that `save` does not give, a tensor that does not fit the parameter.
    """
    dicts: dict[Key, dict[str, Any]] = {}
    residual: Tensor | None = None
    for path, value in saved.items():
        words = path.split("/") if isinstance(path, str) else []
        if len(words) == 4 and _is_place(words) and words[2].isdecimal() and int(words[2]) < section.parts:
            key = Key(section.name, words[0], words[1], int(words[2]))
            dicts.setdefault(key, {})[words[3]] = value.clone() if isinstance(value, Tensor) else value
            continue
        if len(words) != 1 and not (len(words) == 3 and _is_place(words)):
            raise InvalidArgumentError(
                f"unknown entry {path!r} for {section.name!r} in the compression state",
                name=section.name,
            )
        check_elements(section.name, path, value, section.count, float32=_keeps_float32(section, words))
        for part in range(section.parts):
            piece = section.part_of(value, part)
            phase: Phase = "owner" if section.owners_encode and part == rank else "rank"
            if len(words) == 3:
                key, name = Key(section.name, words[0], words[1], part), words[2]
            elif consolidated and section.owners_encode and phase == "rank":
                continue
            elif path == "residual" and type(section.feedback_in(phase)) is ErrorFeedback:
                if residual is None:
                    residual = section.zeros()
                section.part_of(residual, part).copy_(piece)
                continue
            else:
                key, name = Key(section.name, "feedback", phase, part), path
            if piece.numel():
                dicts.setdefault(key, {})[name] = piece.to(section.device, copy=True)
    return Remembered(residual, dicts)


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


def share(section: Section, path: str, value: Tensor, rank: int, ranks: int) -> Tensor:
    """This rank's term of the mean over ranks: an n-th; of a residual see `share_of_residual`."""
    if "/" in path or not section.owners_encode:
        return value / ranks
    return share_of_residual(value, _owned_mask(section, rank), ranks)


def share_of_residual(residual: Tensor, owned: Tensor, ranks: int) -> Tensor:
    """This rank's term of the residual of the mean over ranks: an n-th, but all of the elements that it owns.

    A rank's residual reaches the mean divided by n, the owner's as it is, so the sum of all shares is the residual of
    the mean.
    """
    return torch.where(owned, residual, residual / ranks)


def carry(section: Section, following: Section, saved: Saved, before: tuple[int, int], now: tuple[int, int]) -> Saved:
    """What `save` gave for a rank of a group, for the same rank in the group that follows it.

    Kept are what a rank keeps of its own gradients, the residual of the means among it (`share_of_residual`), and
    everything where parts have no owners. A method that sends differences begins anew: its mean has the lost ranks'
    part.

    Args:
        before, now: the rank's number, and the number of ranks.
    """
    if section.parts == following.parts == 1 and section.result is None:
        return saved
    if section.result is not None:
        return {}
    carried = {path: it for path, it in saved.items() if path == "residual" or path.split("/")[1:2] == ["rank"]}
    carried = {path: it for path, it in carried.items() if path.count("/") < 3}
    if "residual" in carried and section.owners_encode:
        carried["residual"] = _times(carried["residual"], _owned_mask(section, before[0]), before[1])
    if "residual" in carried and following.owners_encode:
        carried["residual"] = _times(carried["residual"], _owned_mask(following, now[0]), 1.0 / now[1])
    return carried


def _times(x: Tensor, where: Tensor, factor: float) -> Tensor:
    return torch.where(where, x * factor, x)


def _is_residual(section: Section, key: Key, name: str) -> bool:
    plug_in = section.feedback_in("owner" if key.phase == "owner" else "rank")
    return key.kind == "feedback" and key.phase != "result" and name in getattr(plug_in, "owed", ())


def _is_place(words: list[str]) -> bool:
    """Whether the words begin with a kind and a phase."""
    return words[0] in ("feedback", "compressor") and words[1] in ("rank", "owner", "result")


def _keeps_float32(section: Section, words: list[str]) -> bool:
    """Whether it is kept by error feedback of this package; others keep what they like."""
    return (len(words) == 1 or words[0] == "feedback") and isinstance(section.feedback, ErrorFeedback | EF21 | DGC)


# States are row by row. Codes, and so the states of compressors, have the order of the parameter's memory, which may be
# another one (channels_last).


def row_by_row(parameter: Tensor, value: Any) -> Any:
    """`value` in row-major order, where it is a tensor with a value for each element, in the order of memory."""
    if not _is_flat(value, parameter) or not _is_dense(parameter):
        return value
    return value.as_strided(parameter.shape, parameter.stride()).reshape(-1)


def _in_memory(parameter: Tensor, value: Any) -> Any:
    if not _is_flat(value, parameter) or not _is_dense(parameter):
        return value
    flat = torch.empty_like(value)
    flat.as_strided(parameter.shape, parameter.stride()).copy_(value.view(parameter.shape))
    return flat


def _is_flat(value: Any, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == (parameter.numel(),)


def _is_dense(parameter: Tensor) -> bool:
    order = sorted(range(parameter.dim()), key=parameter.stride, reverse=True)
    return parameter.permute(order).is_contiguous()
