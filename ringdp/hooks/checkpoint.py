"""The memory of compression between steps and between runs: by parameter name, exact or as the mean over ranks."""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringdp.compression.exchange import Section, States, saved
from ringdp.errors import InvalidArgumentError, InvalidStateError
from ringdp.exchange import all_gather_bytes
from ringdp.hooks.native import serves

_VERSION = 1


class Memory:
    """States by parameter, and what a checkpoint held of parameters that have not come up yet.

    Attributes:
        step: backwards that synchronised.
    """

    def __init__(self) -> None:
        self.states = States()
        self.step = 0
        self._sections: dict[str, Section] = {}
        self._waiting: dict[str, saved.Saved] = {}
        self._consolidated = False  # what waits

    def know(self, sections: Iterable[Section], group: dist.ProcessGroup) -> None:
        """These take up what was loaded for them. A parameter with another compressor than before forgets."""
        for section in sections:
            before = self._sections.get(section.name)
            if before is not None and before.compressor != section.compressor:
                self.states.forget(section.name)
            self._sections[section.name] = section
            if section.name in self._waiting:
                held, whole = self._waiting.pop(section.name), serves(section, group)
                states = saved.load(section, held, group.rank(), consolidated=self._consolidated, whole=whole)
                self.states.take(states)

    def state_dict(self, group: dist.ProcessGroup, *, consolidated: bool) -> dict[str, Any]:
        """For `load_state_dict`; with `consolidated` all ranks must call.

        Raises:
            InvalidStateError: a state of the other kind was loaded, and not all its parameters have come up since.
        """
        if self._waiting and self._consolidated != consolidated:
            kind = "consolidated" if self._consolidated else "exact"
            raise InvalidStateError(
                f"the compression state was loaded from a {kind} one, which {', '.join(sorted(self._waiting))} has not"
                f" taken up yet: run a backward first, or save a {kind} one"
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

    def load_state_dict(self, state: dict[str, Any], group: dist.ProcessGroup) -> None:
        """Forget everything, and go on from there."""
        if state.get("version") != _VERSION:
            raise InvalidArgumentError(f"a compression state of version {state.get('version')}, not {_VERSION}")
        rank, ranks = state["rank"], state["world_size"]
        if rank is not None and (rank, ranks) != (group.rank(), group.size()):
            raise InvalidArgumentError(
                f"this compression state is rank {rank}'s of {ranks}, this is rank {group.rank()} of {group.size()}:"
                " save it with consolidated=True to load it at any world size",
                rank=group.rank(),
            )
        self.step = state["step"]
        self.replace(state["parameters"], group, consolidated=rank is None)

    def replace(self, parameters: Mapping[str, saved.Saved], group: dist.ProcessGroup, *, consolidated: bool) -> None:
        """Forget everything but these, as `state_dict` has them."""
        self.states.replace({})
        self._consolidated = consolidated
        self._waiting = {name: dict(held) for name, held in parameters.items()}
        self.know(list(self._sections.values()), group)

    def owed_length(self, name: str) -> Tensor | None:
        """Of the vector that error feedback still owes of a parameter, without the loss scale; None where none does."""
        section = self._sections.get(name)
        if section is None or not getattr(section.feedback, "owed", ()):
            return None
        vectors = saved.owed(section, self.states.of(name))
        return torch.stack([it.norm() for it in vectors]).norm() if vectors else torch.zeros(())

    def keep_only(self, names: Container[str]) -> None:
        """Forget all other parameters."""
        for name in [name for name in (*self._sections, *self._waiting) if name not in names]:
            self.states.forget(name)
            self._sections.pop(name, None)
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
