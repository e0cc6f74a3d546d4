"""The memory of compression between steps and between runs: by parameter name, exact or as the mean over ranks."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Container, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringdp.compression.exchange import Key, Section, States, saved
from ringdp.errors import InvalidArgumentError, InvalidStateError
from ringdp.job.byte_collectives import all_gather_bytes

_VERSION = 1


@dataclasses.dataclass(frozen=True)
class LoadedMemory:
    """What a state holds, in the form in which `Memory` keeps it."""

    step: int
    states: dict[Key, dict[str, Any]]
    waiting: dict[str, saved.Saved]
    consolidated: bool


class Memory:
    """States by parameter, and the states that a checkpoint held of parameters not seen yet.

    Attributes:
        step: backwards that synchronised.
    """

    def __init__(self) -> None:
        self.states: States = States()
        self.step: int = 0
        self._fresh = False  # a checkpoint was loaded, and no bucket was exchanged since
        self._compared_in: int | None = None
        self._sections: dict[str, Section] = {}
        self._in_core: set[str] = set()
        self._waiting: dict[str, saved.Saved] = {}
        self._consolidated = False  # what waits

    def know(self, sections: Iterable[Section], rank: int, in_core: Container[str]) -> None:
        """These take up what was loaded for them. A parameter with another compressor than before forgets.

        Args:
            in_core: names of those for which the core keeps the residual, in one tensor.
        """
        for section in sections:
            name, whole = section.name, section.name in in_core
            before = self._sections.get(name)
            if before is not None and before.compressor != section.compressor:
                self.states.forget(name)
            elif before is not None and whole != (name in self._in_core):
                held = saved.save(before, self.states.of(name))
                self.states.forget(name)
                self.states.take(saved.load(section, held, rank, whole=whole))
            if name in self._waiting:
                held = self._waiting[name]
                self.states.take(saved.load(section, held, rank, consolidated=self._consolidated, whole=whole))
                del self._waiting[name]
            self._sections[name] = section
            (self._in_core.add if whole else self._in_core.discard)(name)

    def is_fresh(self, step: int) -> bool:
        """Whether `step` is the first one since a checkpoint was loaded in which buckets are exchanged."""
        if self._fresh:
            self._compared_in, self._fresh = step, False
        return self._compared_in == step

    def state_dict(self, group: dist.ProcessGroup, *, consolidated: bool) -> dict[str, Any]:
        """For `load_state_dict`; with `consolidated` all ranks must call.

        Raises:
            InvalidStateError: a state of the other kind was loaded, and not all its parameters have come up since.
        """
        if self._waiting and self._consolidated != consolidated:
            loaded, wanted = ("a consolidated", "an exact") if self._consolidated else ("an exact", "a consolidated")
            raise InvalidStateError(
                f"{loaded} compression state was loaded with {', '.join(sorted(self._waiting))}, of which this hook has"
                f" had no gradient yet: {wanted} one can be saved after their first gradient, or where ddp_hook was"
                " given model="
            )
        parameters = dict(self._waiting)
        for name, section in self._sections.items():
            held = saved.save(section, self.states.of(name))
            if consolidated:
                held = self._mean(section, held, group)
            if held:
                parameters[name] = held
        return {
            "version": _VERSION,
            "step": self.step,
            "world_size": group.size(),
            "rank": None if consolidated else group.rank(),
            "parameters": parameters,
        }

    def load_state_dict(self, state: Mapping[str, Any], group: dist.ProcessGroup) -> None:
        """Forget everything, and go on from there.

        Raises:
            InvalidArgumentError: it does not fit; nothing is forgotten then.
        """
        version = saved.field(state, "version", int)
        if version != _VERSION:
            raise InvalidArgumentError(f"a compression state of version {version}, not {_VERSION}")
        consolidated = "rank" in state and state["rank"] is None
        step, parameters = saved.field(state, "step", int), saved.field(state, "parameters", Mapping)
        if not consolidated:
            rank, ranks = saved.field(state, "rank", int), saved.field(state, "world_size", int)
            if (rank, ranks) != (group.rank(), group.size()):
                raise InvalidArgumentError(
                    f"this compression state is rank {rank}'s of {ranks}, this is rank {group.rank()} of"
                    f" {group.size()}: save it with consolidated=True to load it at any world size",
                    rank=group.rank(),
                )
        self.take(self.read(parameters, step, group.rank(), consolidated=consolidated))

    def read(
        self,
        parameters: Mapping[str, Any],
        step: int,
        rank: int,
        *,
        consolidated: bool,
        names_before: Mapping[str, str] | None = None,
    ) -> LoadedMemory:
        """What `state_dict` gave as parameters, for `take`; nothing changes yet.

        Args:
            names_before: what some parameters were called when that was saved, where `parameters` does not say it.

        Raises:
            InvalidArgumentError: it does not fit the parameters that are known.
        """
        states: dict[Key, dict[str, Any]] = {}
        waiting: dict[str, saved.Saved] = {}
        parameters, saved_as = saved.by_known_name(parameters, self._sections)
        saved_as |= names_before or {}
        for name in parameters:
            held = dict(saved.field(parameters, name, Mapping))
            if name in self._sections:
                whole = name in self._in_core
                if name in saved_as and not consolidated:
                    held = saved.under_new_name(self._sections[name], held, saved_as[name], rank)
                states |= saved.load(self._sections[name], held, rank, consolidated=consolidated, whole=whole)
            else:
                waiting[name] = held
        return LoadedMemory(step, states, waiting, consolidated)

    def take(self, checkpoint: LoadedMemory) -> None:
        """Forget everything but that."""
        self.step = checkpoint.step
        self.states.replace(checkpoint.states)
        self._waiting, self._consolidated = checkpoint.waiting, checkpoint.consolidated
        self._fresh = True

    def residual_norm(self, name: str) -> Tensor | None:
        """The norm of a parameter's residual, without the loss scale; None without error feedback."""
        section = self._sections.get(name)
        if section is None or not getattr(section.feedback, "owed", ()):
            return None
        vectors = saved.residual_tensors(section, self.states.of(name))
        return torch.stack([it.norm() for it in vectors]).norm() if vectors else torch.zeros(())

    def keep_only(self, names: Container[str]) -> None:
        """Forget all other parameters."""
        for name in [name for name in (*self._sections, *self._waiting) if name not in names]:
            self.states.forget(name)
            self._sections.pop(name, None)
            self._in_core.discard(name)
            self._waiting.pop(name, None)

    def take_residual(self, name: str) -> Tensor | None:
        """What error feedback owes the parameter, float32 ``[numel]`` or None; it is forgotten here."""
        self._waiting.pop(name, None)
        section = self._sections.get(name)
        if section is None:
            return None
        held = saved.save(section, self.states.of(name))
        self.states.forget(name)
        return held.get("residual")

    def give_residual(self, name: str, residual: Tensor, group: dist.ProcessGroup) -> None:
        """The next gradient of the parameter begins with this."""
        if name in self._sections:
            self.states.take(saved.load(self._sections[name], {"residual": residual}, group.rank()))
        else:
            self._waiting[name] = {"residual": residual}

    def _mean(self, section: Section, held: saved.Saved, group: dist.ProcessGroup) -> saved.Saved:
        """Over the ranks, of tensors with a value for each element: the others belong to a part of this world."""
        whole = {path: it for path, it in held.items() if path.count("/") < 3}
        if group.size() == 1:
            return whole
        told = all_gather_bytes(json.dumps(sorted(whole)).encode(), group)
        paths = sorted({path for line in told for path in json.loads(line)})
        means: saved.Saved = {}
        for path in paths:
            value: Tensor = whole.get(path, section.zeros())
            means[path] = saved.share(section, path, value, group.rank(), group.size())
            dist.all_reduce(means[path], group=group)
        return means
