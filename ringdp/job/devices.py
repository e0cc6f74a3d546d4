"""The GPU on which each rank computes, and whether NCCL or ring carries CUDA tensors: the same decision on all ranks.

The ranks exchange the devices they see (`VisibleDevices`) before there is a process group. The functions here depend on
these alone; only `race` communicates.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ringdp import config
from ringdp.errors import InvalidArgumentError
from ringdp.job.backend import BACKEND

NCCL_BESIDE_RING = "cpu:ring,cuda:nccl"
_RACE_BYTES = 16 << 20
_RACE_WARM_UP = 2
_RACE_ROUNDS = 5
_log = logging.getLogger("ringdp.process_group")


@dataclasses.dataclass(frozen=True)
class VisibleDevices:
    """The devices of one rank, as it gives them to the others."""

    host: str  # its name, for messages
    local_rank: int
    kind: str  # cuda or cpu
    gpus: Sequence[str]  # the UUIDs of those it sees, in torch's order
    asked: int | None  # the number of the one that the user asked for
    nccl: bool  # its torch has NCCL
    choice: str  # RINGDP_CUDA: nccl, ring, auto, or '' for no wish


@dataclasses.dataclass(frozen=True)
class Choice:
    """What carries the tensors."""

    backend: str  # for torch.distributed.init_process_group
    reason: str  # one line; '' where there was nothing to choose
    wanted: bool = True  # it is what the user or the GPUs ask for, not what is left
    measure: bool = False  # `race` decides between this and ring


def visible() -> list[str]:
    """The UUIDs of the GPUs that torch sees."""
    return [str(torch.cuda.get_device_properties(number).uuid) for number in range(torch.cuda.device_count())]


def kind_of(backend: str | None, wanted: torch.device | str | None) -> str:
    """``cpu`` or ``cuda``, before it is known which of this host's devices is whose.

    Raises:
        InvalidArgumentError: the device that is wanted is neither, or torch sees none such.
    """
    if wanted is not None:
        kind = torch.device(wanted).type
        if kind not in ("cpu", "cuda"):
            raise InvalidArgumentError(f"device must be cpu or cuda, not {kind}")
        if kind == "cuda" and not torch.cuda.is_available():
            raise InvalidArgumentError(
                f"device={wanted} was asked for and torch {torch.__version__} sees no CUDA device"
                f" (CUDA_VISIBLE_DEVICES={config.visible_cuda_devices()})"
            )
        return kind
    if backend is not None and ":" in backend and "cuda:" not in backend:
        return "cpu"
    return "cuda" if torch.cuda.is_available() else "cpu"


def default_backend(kind: str) -> str:
    """The backend for this kind of device where another library makes the group, so that the other ranks' devices are
    unknown."""
    if kind == "cuda" and dist.is_nccl_available() and config.cuda_choice() != BACKEND:
        return NCCL_BESIDE_RING
    return BACKEND


def gpu_of(ranks: Sequence[VisibleDevices], rank: int) -> int | None:
    """The number of the GPU that this rank uses, among those it sees; None for a rank on the CPU.

    The one it asked for, else one after the other by local rank, where there are fewer GPUs than ranks from the first
    again. A launcher that shows each rank a GPU of its own leaves it number 0.

    Raises:
        InvalidArgumentError: it asked for one that it does not see.
    """
    mine = ranks[rank]
    if mine.kind != "cuda":
        return None
    if mine.asked is None:
        return mine.local_rank % len(mine.gpus)
    if mine.asked >= len(mine.gpus):
        raise InvalidArgumentError(
            f"rank {rank} on {mine.host} asked for device cuda:{mine.asked}, and its torch sees {len(mine.gpus)} CUDA"
            f" device{'s' if len(mine.gpus) != 1 else ''}"
        )
    return mine.asked


def choose(ranks: Sequence[VisibleDevices], backend: str | None) -> Choice:
    """What all ranks use; they must agree on `backend` (what the caller of `init` asked for) and on RINGDP_CUDA.

    Raises:
        InvalidArgumentError: NCCL was asked for and would refuse these ranks; the message names them.
    """
    obstacle = obstacle_to_nccl(ranks)
    if backend is not None:
        if obstacle and _on_cuda(backend) == "nccl" and all(each.kind == "cuda" for each in ranks):
            raise InvalidArgumentError(f"backend={backend!r} and {obstacle}; NCCL would refuse them: {_ADVICE}")
        return Choice(backend, "")
    if all(each.kind == "cpu" for each in ranks):
        return Choice(BACKEND, "")
    wish = ranks[0].choice
    if wish == "nccl" and obstacle:
        raise InvalidArgumentError(f"RINGDP_CUDA=nccl and {obstacle}; NCCL would refuse them: {_ADVICE}")
    if wish == "ring":
        return Choice(BACKEND, "RINGDP_CUDA=ring")
    if obstacle:
        return Choice(BACKEND, obstacle, wanted=False)
    reason = "RINGDP_CUDA=nccl" if wish == "nccl" else "each rank has a GPU of its own"
    return Choice(NCCL_BESIDE_RING, reason, measure=wish == "auto" and len(ranks) > 1)


def obstacle_to_nccl(ranks: Sequence[VisibleDevices]) -> str:
    """The reason for which NCCL cannot join these ranks; '' where it can."""
    for rank, each in enumerate(ranks):
        if each.kind != "cuda":
            return f"rank {rank} on {each.host} computes on the CPU"
    for rank, each in enumerate(ranks):
        if not each.nccl:
            return f"the torch of rank {rank} on {each.host} was built without NCCL"
    users: dict[str, list[int]] = {}
    for rank, each in enumerate(ranks):
        users.setdefault(each.gpus[gpu_of(ranks, rank) or 0], []).append(rank)
    shared = {gpu: together for gpu, together in users.items() if len(together) > 1}
    if not shared:
        return ""
    gpu, together = next(iter(shared.items()))
    more = f" (and so do others, {len(shared)} GPUs in all)" if len(shared) > 1 else ""
    names = ", ".join(map(str, together[:-1])) + f" and {together[-1]}"
    return f"ranks {names} on {ranks[together[0]].host} share GPU {gpu}{more}"


_ADVICE = (
    "start at most as many ranks on a host as it has GPUs, or let ring carry CUDA tensors (RINGDP_CUDA=ring, or leave"
    " the choice to ringdp.init())"
)


def log_choice(choice: Choice, rank: int) -> None:
    """On rank 0, once in the job; a warning where ring carries CUDA tensors although the user did not choose it."""
    if rank == 0 and choice.reason and not choice.measure:
        level = logging.INFO if choice.wanted else logging.WARNING
        way = "ring, through the host's memory" if choice.backend == BACKEND else "NCCL"
        _log.log(level, "CUDA tensors go over %s: %s", way, choice.reason)


def race(device: torch.device) -> bool:
    """Whether all-reduces through ring are faster here than through the default group's backend for CUDA tensors.

    Every rank calls it and all get the same answer: the slowest rank's time counts. Each side's time is the median of
    a few all-reduces of 16 MiB; one that fails loses.
    """
    tensor = torch.zeros(_RACE_BYTES // 4, device=device, dtype=torch.float32)
    seconds = torch.tensor(
        [_all_reduce_seconds(kind, tensor) for kind in ("cuda", "cpu")], dtype=torch.float64, device="cpu"
    )
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    theirs, ours = seconds.tolist()
    if dist.get_rank() == 0:
        _log.info(
            "RINGDP_CUDA=auto: 16 MiB take %.3g ms over NCCL and %.3g ms over ring, so CUDA tensors go over %s",
            theirs * 1e3,
            ours * 1e3,
            "ring" if ours < theirs else "NCCL",
        )
    return ours < theirs


def _all_reduce_seconds(kind: str, tensor: torch.Tensor) -> float:
    """The median time of an all-reduce of `tensor` by the default group's backend for this kind of device."""
    backend: Any = dist.group.WORLD._get_backend(torch.device(kind))  # type: ignore[union-attr]
    seconds = []
    try:
        for _ in range(_RACE_WARM_UP + _RACE_ROUNDS):
            _synchronize(tensor)
            begin = time.perf_counter()
            backend.allreduce([tensor]).wait()
            _synchronize(tensor)
            seconds.append(time.perf_counter() - begin)
    except dist.DistBackendError as error:
        _log.warning("RINGDP_CUDA=auto: NCCL fails here: %s", error)
        return math.inf
    return statistics.median(seconds[_RACE_WARM_UP:])


def _synchronize(tensor: torch.Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


def _on_cuda(backend: str) -> str:
    """The backend for CUDA tensors in what init_process_group takes."""
    parts = dict(part.split(":", 1) for part in backend.split(",") if ":" in part)
    return parts.get("cuda", "" if parts else backend)
