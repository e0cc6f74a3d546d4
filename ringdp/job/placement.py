"""The devices on which the ranks of a group keep their models, from which all of them choose the same way for
gradients."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ringdp.errors import InvalidArgumentError
from ringdp.job.backend import BACKEND, backend_of, reaches_core

_NO_KERNELS = " without kernels"

_log = logging.getLogger("ringdp.rank_devices")


@dataclass(frozen=True)
class Placement:
    """The same on all ranks of a group.

    Attributes:
        kinds: by rank "cpu", "cuda", …; with " without kernels" where this build has no codecs for that device.
        backend: of the group, for this rank's kind of device.
        has_ring: the core moves the group's CPU tensors.
    """

    kinds: tuple[str, ...]
    backend: str
    has_ring: bool

    @classmethod
    def of(cls, kinds: tuple[str, ...], group: dist.ProcessGroup, device: torch.device) -> Placement:
        """`kinds`: what `kind_of` gave on each rank."""
        return cls(kinds, backend_of(group, device.type), reaches_core(group))

    @classmethod
    def alike(cls, group: dist.ProcessGroup, device: torch.device) -> Placement:
        """Without communication: the other ranks are taken to have this rank's kind of device."""
        return cls.of((kind_of(device),) * group.size(), group, device)

    @property
    def all_on_cpu(self) -> bool:
        return set(self.kinds) == {"cpu"}

    @property
    def mixed(self) -> bool:
        return len({kind.removesuffix(_NO_KERNELS) for kind in self.kinds}) > 1

    @property
    def host_control(self) -> bool:
        """Whether the reducers' messages besides gradients go over ring, from the CPU."""
        return self.has_ring and not self.all_on_cpu

    @property
    def core_reduces_codes(self) -> bool:
        """Whether the core's own compressed all-reduce is used."""
        return self.all_on_cpu and self.backend == BACKEND and self.has_ring

    @property
    def exchanges_codes(self) -> bool:
        """Whether the core's codecs are used, with codes sent by the group's all-to-all and all-gather.

        Raises:
            InvalidArgumentError: some ranks' devices have no kernels and other ranks have another kind of device, so
                that no way serves all.
        """
        if self.all_on_cpu:
            return False
        without = [rank for rank, kind in enumerate(self.kinds) if kind.endswith(_NO_KERNELS)]
        if without and self.mixed:
            raise InvalidArgumentError(
                f"ranks {', '.join(map(str, without))} have no kernels for codes on their device"
                f" ({self.kinds[without[0]].removesuffix(_NO_KERNELS)}), and other ranks are on another kind: build"
                " ringdp there with a CUDA torch and its nvcc, or leave compression out"
            )
        return not without

    def log_mixed(self, rank: int) -> None:
        """Rank 0 logs, once per wrapper, that the ranks have different kinds of devices."""
        if rank == 0 and self.mixed:
            by_kind = {
                kind: [r for r, other in enumerate(self.kinds) if other == kind] for kind in dict.fromkeys(self.kinds)
            }
            _log.info(
                "ranks on different devices average their gradients over %s: %s",
                self.backend,
                "; ".join(f"{kind}: rank {', '.join(map(str, ranks))}" for kind, ranks in by_kind.items()),
            )

    def warn_no_kernels(self, rank: int) -> None:
        """Rank 0 warns that torch operations compress, because there are no kernels."""
        if rank == 0 and any(kind.endswith(_NO_KERNELS) for kind in self.kinds):
            _log.warning(
                "this build has no kernels for codes on %s: torch operations compress there, more slowly; build ringdp"
                " with a CUDA torch and its nvcc",
                self.kinds[0].removesuffix(_NO_KERNELS),
            )


def kind_of(device: torch.device) -> str:
    """This rank's kind of device, as it gives it to the others."""
    from ringdp import _C

    return device.type if _C.has_device_codec(device.type) else device.type + _NO_KERNELS
