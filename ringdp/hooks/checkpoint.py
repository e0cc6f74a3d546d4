"""The state of compression between steps and between runs: by parameter name, exact or as the mean over ranks."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Container, Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from ringdp.compression import saved
from ringdp.compression.description import describe
from ringdp.compression.exchange import Remembered, Section, States
from ringdp.errors import InvalidArgumentError, InvalidStateError
from ringdp.job.byte_collectives import all_gather_bytes

_log = logging.getLogger("ringdp.hooks")


@dataclasses.dataclass(frozen=True)
class LoadedMemory:
    """The content of a state, in the form in which `Memory` keeps it."""

    step: int
    remembered: dict[str, Remembered]
    waiting: dict[str, saved.Saved]
    consolidated: bool


class Memory:
    """States by parameter, and the states that a checkpoint held of parameters not seen yet.

    Attributes:
        step: backwards that synchronised.
        members: this rank's number and the number of ranks when `follow` was called last; of none before that.
    """

    def __init__(self) -> None:
        self.states: States = States()
        self.step: int = 0
        self._fresh = False  # a checkpoint was loaded, and no bucket was exchanged since
        self._compared_in: int | None = None
        self.members: tuple[int, int] = (0, 0)
        self._known: dict[str, tuple[Section, Tensor]] = {}
        self._waiting: dict[str, saved.Saved] = {}  # entries
        self._consolidated = False  # what waits

    def know(self, parameters: Iterable[tuple[Section, Tensor]], rank: int) -> None:
        """Give these parameters their loaded states. The state of a parameter with another compressor is dropped."""
        for section, parameter in parameters:
            name = section.name
            if name in self._known and self._known[name][0].compressor != section.compressor:
                self.states.forget(name)
            self._known[name] = section, parameter
            if name in self._waiting:
                entry = self._waiting.pop(name)
                try:
                    saved.check_compressor(name, entry, describe(section.compressor))
                except InvalidArgumentError as error:
                    _log.warning("%s begins without memory: %s", name, error)
                    continue
                self.states.put(name, self._remembered(name, entry, rank, self._consolidated))

    def is_fresh(self, step: int) -> bool:
        """Whether `step` is the first one since a checkpoint was loaded in which buckets are exchanged."""
        if self._fresh:
            self._compared_in, self._fresh = step, False
        return self._compared_in == step

    def entries(self, group: dist.ProcessGroup, *, consolidated: bool) -> dict[str, saved.Saved]:
        """Of all parameters, as a state has them; with `consolidated` all ranks must call.

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
        entries = dict(self._waiting)
        for name, (section, parameter) in self._known.items():
            held = saved.save(section, self.states.of(name))
            if consolidated:
                held = self._mean(section, held, group)
            entries[name] = saved.entry_of(section, parameter, held)
        return entries

    def read(self, state: saved.State, rank: int) -> LoadedMemory:
        """The part of `state` for this memory, for `take`; nothing changes yet.

        Raises:
            InvalidArgumentError: it does not fit the parameters that are known.
        """
        consolidated = state.rank is None
        remembered: dict[str, Remembered] = {}
        waiting: dict[str, saved.Saved] = {}
        for name in state.entries:
            entry = dict(saved.field(state.entries, name, Mapping))
            if name not in self._known:
                waiting[name] = entry
                continue
            saved.check_compressor(name, entry, describe(self._known[name][0].compressor))
            remembered[name] = self._remembered(name, entry, rank, consolidated)
        return LoadedMemory(state.compressed_steps, remembered, waiting, consolidated)

    def take(self, checkpoint: LoadedMemory) -> None:
        """Replace the memory by that."""
        self.step = checkpoint.step
        self.states.clear()
        for name, remembered in checkpoint.remembered.items():
            self.states.put(name, remembered)
        self._waiting, self._consolidated = checkpoint.waiting, checkpoint.consolidated
        self._fresh = True

    def residual_norm(self, name: str) -> Tensor | None:
        """The norm of a parameter's residual, without the loss scale; None without error feedback."""
        if name not in self._known or not getattr(self._known[name][0].feedback, "owed", ()):
            return None
        held = saved.save(self._known[name][0], self.states.of(name))
        vectors = [value for path, value in held.items() if "/" not in path]
        return (
            torch.stack([it.norm() for it in vectors]).norm()
            if vectors
            else torch.zeros((), dtype=torch.float32, device="cpu")
        )

    def follow(self, group: dist.ProcessGroup) -> bool:
        """Whether the group has other members than at the last call (elastic jobs). What a rank's gradients lack stays
        with it; the means have other owners now. Other states of parts, and those of differences to what the lost ranks
        had sent, begin anew."""
        before, now = self.members, (group.rank(), group.size())
        if before == now:
            return False
        self.members = now
        for name, (section, parameter) in self._known.items() if before[1] else ():
            following = section.with_ranks(now[1])
            held = saved.save(section, self.states.of(name))
            self._known[name] = following, parameter
            self.states.put(name, saved.load(following, saved.carry(section, following, held, before, now), now[0]))
        return True

    def keep_only(self, names: Container[str]) -> None:
        """Forget all other parameters."""
        for name in [name for name in (*self._known, *self._waiting) if name not in names]:
            self.states.forget(name)
            self._known.pop(name, None)
            self._waiting.pop(name, None)

    def take_residual(self, name: str) -> Tensor | None:
        """Remove and return the residual of the parameter, float32 ``[numel]`` or None."""
        self._waiting.pop(name, None)
        if name not in self._known:
            return None
        held = saved.save(self._known[name][0], self.states.of(name))
        self.states.forget(name)
        return held.get("residual")

    def give_residual(self, name: str, residual: Tensor, group: dist.ProcessGroup) -> None:
        """Set the residual that is added to the parameter's next gradient, in the order of its memory."""
        entry = {"order": "memory", "residual": residual}
        if name in self._known:
            self.states.put(name, self._remembered(name, entry, group.rank(), consolidated=False))
        else:
            self._waiting[name] = entry

    def _remembered(self, name: str, entry: saved.Saved, rank: int, consolidated: bool) -> Remembered:
        section, parameter = self._known[name]
        return saved.load(section, saved.from_entry(parameter, entry), rank, consolidated=consolidated)

    def _mean(self, section: Section, held: saved.Saved, group: dist.ProcessGroup) -> saved.Saved:
        """Over the ranks, of tensors with a value for each element: the others belong to a part of this world."""
        whole = {path: it for path, it in held.items() if path.count("/") < 3}
        if group.size() == 1:
            return whole
        gathered = all_gather_bytes(json.dumps(sorted(whole)).encode(), group)
        paths = sorted({path for line in gathered for path in json.loads(line)})
        means: saved.Saved = {}
        for path in paths:
            value: Tensor = whole.get(path, section.zeros())
            means[path] = saved.share(section, path, value, group.rank(), group.size())
            dist.all_reduce(means[path], group=group)
        return means
