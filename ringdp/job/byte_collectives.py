"""Bytes between ranks over any backend, without pickle: what `metrics`, `checkpoint` and `model_check` agree by."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ringdp import config
from ringdp.errors import InvalidStateError, MismatchError, RingError, SystemResourceError

_MOST_TEXT_BYTES = 1 << 30
Result = TypeVar("Result")

# torch 2.13 gave it another name, and warns of the old one.
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""``(out, mine, group=...)``: the ranks' tensors of one shape, in rank order."""


def alone(what: str) -> bool:
    """Whether this process is a world of one: no launcher started it, and it has no process group.

    Raises:
        InvalidStateError: a launcher started it as one of several ranks, and it has not joined them; names `what`.
    """
    if dist.is_available() and dist.is_initialized():
        return False
    launch = config.launch_environment()
    if launch is not None and launch.world_size > 1:
        raise InvalidStateError(
            f"{what}: this is rank {launch.rank} of {launch.world_size} and has not joined the others:"
            " call ringdp.init() first"
        )
    return True


def require_member(group: dist.ProcessGroup | None, what: str) -> dist.ProcessGroup:
    """The group itself, or the default one; `what` is the function that was called.

    Raises:
        InvalidStateError: there is no process group, or this process is not in it.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise InvalidStateError(f"{what}() needs a process group: call ringdp.init() first")
    chosen = dist.group.WORLD if group is None else group
    if not isinstance(chosen, dist.ProcessGroup):  # torch's mark for a group this process is not in
        raise InvalidStateError(f"{what}(): this process is not in the group")
    return chosen


def device_for(group: dist.ProcessGroup, wanted: torch.device | None = None) -> torch.device:
    """`wanted` where the group carries tensors of its kind, else cpu, else the group's own kind of device."""
    kinds = {device.type for device in group._device_types}
    if wanted is not None and wanted.type in kinds:
        return wanted
    if "cpu" in kinds:
        return torch.device("cpu")
    kind = next(iter(sorted(kinds)))
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def all_gather_bytes(
    data: bytes, group: dist.ProcessGroup, *, room: int | None = None, device: torch.device | None = None
) -> list[bytes]:
    """Every rank's bytes, in rank order.

    Args:
        data: this rank's bytes, of any length.
        room: the most bytes any rank gives, the same on all ranks: one operation then, two without.
        device: where to put the tensors that travel, if the group carries those; see `device_for`.
    """
    if room is None:
        lengths = all_gather_bytes(len(data).to_bytes(8, "little"), group, room=8, device=device)
        room = max(int.from_bytes(length, "little") for length in lengths)
    if len(data) > room:
        raise ValueError(f"{len(data)} bytes do not fit into {room}")
    padded = len(data).to_bytes(8, "little") + data.ljust(room, b"\0")
    mine = as_tensor(padded).to(device_for(group, device))
    all_ranks = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(all_ranks, mine, group=group)
    received = [as_bytes(tensor) for tensor in all_ranks]
    return [row[8 : 8 + int.from_bytes(row[:8], "little")] for row in received]


def all_gather_where_different(
    text: bytes, group: dist.ProcessGroup, *, what: str, device: torch.device | None = None
) -> list[bytes] | None:
    """Every rank's text, in rank order; None where all are equal. Equal texts cost the exchange of a hash alone.

    Args:
        text: this rank's description of its `what`.

    Raises:
        MismatchError: a rank's description has a length that cannot be one.
    """
    digest = hashlib.sha256(text).digest()
    if all(other == digest for other in all_gather_bytes(digest, group, room=len(digest), device=device)):
        return None
    lengths = all_gather_bytes(len(text).to_bytes(8, "little"), group, room=8, device=device)
    longest = max(int.from_bytes(length, "little") for length in lengths)
    if longest > _MOST_TEXT_BYTES:
        raise MismatchError(f"a rank's description of its {what} has {longest} bytes")
    return all_gather_bytes(text, group, room=longest, device=device)


def broadcast_bytes(data: bytes | bytearray | None, source: int, group: dist.ProcessGroup) -> bytes | bytearray:
    """The bytes of rank `source` of the group, which alone gives any."""
    device = device_for(group)
    length = torch.tensor([len(data or b"")], dtype=torch.int64, device=device)
    dist.broadcast(length, group=group, group_src=source)
    if group.rank() == source:
        assert data is not None
        content = as_tensor(data).to(device)
    else:
        content = torch.empty(int(length), dtype=torch.uint8, device=device)
    if content.numel():
        dist.broadcast(content, group=group, group_src=source)
    return data if group.rank() == source and data is not None else as_bytes(content)


def together(work: Callable[[], Result], group: dist.ProcessGroup, what: str) -> Result:
    """Do this rank's work and raise on every rank where one failed, so that none waits for it."""
    error: Exception | None = None
    result: Result | None = None
    try:
        result = work()
    except OSError as raised:
        error = raised if isinstance(raised, RingError) else SystemResourceError(f"{what}: {raised}")
    except Exception as raised:
        error = raised
    kind = b"" if error is None else b"S" if isinstance(error, OSError) else b"O"
    gathered = all_gather_bytes(kind + str(error).encode()[:1000] if kind else b"", group, room=1001)
    if error is not None:
        raise error
    for rank, line in enumerate(gathered):
        if line:
            failed = SystemResourceError if line.startswith(b"S") else MismatchError
            raise failed(f"{what} failed on rank {rank}: {line[1:].decode(errors='replace')}", peer=rank)
    return result  # type: ignore[return-value]


def as_tensor(data: bytes | bytearray) -> Tensor:
    """uint8 ``[len(data)]`` on the CPU; a bytearray is shared with it, bytes are copied."""
    if not data:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(data if isinstance(data, bytearray) else bytearray(data), dtype=torch.uint8)


def as_bytes(tensor: Tensor) -> bytes:
    """What a uint8 tensor holds. By ctypes: bytes() of a storage takes 20 µs a byte, and ringdp does not need numpy."""
    on_host = tensor.cpu().contiguous()
    return ctypes.string_at(on_host.data_ptr(), on_host.numel()) if on_host.numel() else b""
