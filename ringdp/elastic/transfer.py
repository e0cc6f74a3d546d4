"""The state of the training on its way to newcomers: from all members at once, over the connections of training.

One member says which tensors there are, and their hashes; each member sends a part of the bytes. What is not a tensor
(numbers, names, the place in the data) comes from that member in the same message, without pickle's power to run code.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import mmap
import pickle
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from ringdp.errors import MismatchError
from ringdp.job.byte_collectives import all_gather_bytes, broadcast_bytes

_log = logging.getLogger("ringdp.elastic")
_SMALL = 1 << 16  # bytes; tensors below travel together
_LARGE = 4 << 20
_TAG = 7001
_WORDS = 500  # bytes
_MARK = "ringdp: tensor"
_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")


def send(
    state: Mapping[str, Any] | None,
    group: dist.ProcessGroup,
    newcomers: Sequence[int],
    *,
    into: Mapping[str, Tensor] | None = None,
    of_one: Callable[[str], bool] = lambda name: False,
    one: int = 0,
) -> dict[str, Any]:
    """All ranks call it, as a unit's body. Returns the state of the members, on a newcomer from these.

    Args:
        state: nested dicts and lists of tensors and plain values, the same on all members; None on a newcomer.
        newcomers: their ranks; all others are members, which have lower ones.
        into: on a newcomer, tensors that receive the values in place, by "part/name" of the state's keys.
        of_one: whether members may have the tensor of such a name different, or not at all, and that of the rank `one`
            counts: those of buffers.
        one: the member that describes the state; the same on all ranks.

    Raises:
        MismatchError: on a newcomer: a member has another tensor than that one, or one with other bits; names it and
            who sent it.
    """
    rank, members = group.rank(), group.size() - len(newcomers)
    new = rank in newcomers
    found: dict[str, Tensor] = {}
    if state is not None:
        for path, leaf in pytree.tree_flatten_with_path(dict(state))[0]:
            if isinstance(leaf, Tensor):
                name = "/".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path)
                while name in found:  # keys 1 and "1"
                    name += "'"
                if rank == one or not of_one(name):
                    found[name] = leaf.detach()
    described = _describe(state, found, of_one) if rank == one else None
    content = _read(bytes(broadcast_bytes(described, one, group)))
    if _is_unlike("" if new else _unlike(found, content, one), group, new=new):
        assert state is not None
        return dict(state)
    names, shapes, dtypes = content["names"], content["shapes"], content["dtypes"]
    if new:
        places = zip(names, shapes, dtypes, strict=True)
        tensors = [_place_for(name, shape, dtype, into or {}) for name, shape, dtype in places]
    else:
        tensors = [found.get(name, _NOTHING) for name in names]  # what `one` sends alone, others need not have
    flat = [tensor if tensor.is_contiguous() and tensor.is_cpu else tensor.cpu().contiguous() for tensor in tensors]
    works = []
    received: list[tuple[Tensor, list[Tensor]]] = []
    for donor in range(members) if new else (rank,):
        for piece in _pieces(flat, content["of_one"], donor, members, one):
            together = len(piece) > 1
            if not new:
                data = torch.cat(piece) if together else piece[0]
                works += [group.send([data], newcomer, _TAG) for newcomer in newcomers]
            else:
                data = torch.empty(sum(map(len, piece)), dtype=torch.uint8, device="cpu") if together else piece[0]
                works.append(group.recv([data], donor, _TAG))
                if together:
                    received.append((data, piece))
    hashes = _hashes(flat) if rank == one else b""
    for work in works:
        work.wait()
    for data, piece in received:
        for part, of in zip(piece, data.split([len(one) for one in piece]), strict=True):
            part.copy_(of)
    hashes = bytes(broadcast_bytes(hashes, one, group))
    wrong = _difference(hashes, flat, names, content["of_one"], members, one) if new else ""
    _tell(wrong, group, one)
    if not new:
        assert state is not None
        return dict(state)
    with torch.no_grad():
        for tensor, on_host in zip(tensors, flat, strict=True):
            if tensor is not on_host:
                tensor.copy_(on_host)
    result: dict[str, Any] = _filled(content["state"], tensors)
    return result


def _unlike(found: Mapping[str, Tensor], content: Mapping[str, Any], one: int) -> str:
    """The first tensor of this member that rank `one` has not so; "" where all are alike."""
    described = zip(*(content[key] for key in ("names", "shapes", "dtypes", "of_one")), strict=True)
    theirs = {
        name: f"{name} {tuple(shape)} of {dtype}"
        for name, shape, dtype, alone in described
        if name in found or not alone
    }
    mine = {name: f"{name} {tuple(it.shape)} of {it.dtype}" for name, it in found.items()}
    if mine == theirs:
        return ""
    name = next(it for it in [*mine, *theirs] if mine.get(it) != theirs.get(it))
    return f"it has {mine.get(name, f'no {name}')}, where rank {one} has {theirs.get(name, 'none')}"


def _is_unlike(mine: str, group: dist.ProcessGroup, *, new: bool) -> bool:
    """Whether a member has another state than the one that describes it; raises MismatchError on a newcomer."""
    found = _said(mine, group)
    for rank, words in found.items():
        message = f"rank {rank} cannot send its part of the state: {words}"
        if new:
            raise MismatchError(f"{message}. Only parts that all ranks have alike can be sent", peer=rank)
        _log.error("a newcomer gets no state: %s", message)
    return bool(found)


def _filled(part: Any, tensors: Sequence[Tensor]) -> Any:
    """With its tensors in the places of their marks."""
    if isinstance(part, dict):
        if part.keys() == {_MARK}:
            return tensors[part[_MARK]]
        for key, value in part.items():
            part[key] = _filled(value, tensors)
        return part
    if type(part) in (list, tuple):
        return type(part)(_filled(one, tensors) for one in part)
    return part


def cannot_carry(state: Mapping[str, Any]) -> str | None:
    """Why newcomers cannot be sent this state; None: they can."""
    try:
        _read(_describe(state, {}, bool))
    except (pickle.PickleError, TypeError, AttributeError) as error:
        found = re.search(r"GLOBAL (\S+)", str(error))
        return f"it has a {found[1]}" if found else str(error).splitlines()[0]
    return None


def _describe(state: Any, found: Mapping[str, Tensor], of_one: Callable[[str], bool]) -> bytes:
    numbers = count()
    content = {
        "state": pytree.tree_map(
            lambda leaf: {_MARK: next(numbers)} if isinstance(leaf, Tensor) else leaf, dict(state)
        ),
        "names": list(found),
        "of_one": [of_one(name) for name in found],
        "shapes": [list(tensor.shape) for tensor in found.values()],
        "dtypes": [tensor.dtype for tensor in found.values()],
    }
    out = io.BytesIO()
    torch.save(content, out)
    return out.getvalue()


def _read(data: bytes) -> dict[str, Any]:
    content: dict[str, Any] = torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    return content


def _place_for(name: str, shape: Sequence[int], dtype: torch.dtype, into: Mapping[str, Tensor]) -> Tensor:
    mine = into.get(name)
    if mine is not None and list(mine.shape) == list(shape) and mine.dtype == dtype:
        return mine.detach()
    return _empty(shape, dtype)


def _empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """In huge pages where it is large, which torch does not ask for: the members wait while what they send meets pages
    that are new."""
    numel = math.prod(shape)
    if numel * dtype.itemsize < _LARGE:
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")
    memory = mmap.mmap(-1, numel * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(tuple(shape))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _donor(number: int, tensor: Tensor, of_one: Sequence[bool], donors: int, one: int) -> int | None:
    """The rank that sends all of this tensor; None: each sends a part. `of_one`: which tensors rank `one` sends."""
    if of_one[number]:
        return one
    return number % donors if tensor.nbytes < _SMALL else None


def _pieces(
    tensors: Sequence[Tensor], of_one: Sequence[bool], donor: int, donors: int, one: int
) -> Iterator[list[Tensor]]:
    """The bytes that this donor sends, the same on all ranks: its parts of tensors that all send, and what it sends
    alone, together."""
    alone: list[Tensor] = []
    for number, tensor in enumerate(tensors):
        data, sender = _bytes(tensor), _donor(number, tensor, of_one, donors, one)
        if sender is None:
            yield [data[len(data) * donor // donors : len(data) * (donor + 1) // donors]]
        elif sender == donor and len(data):
            alone.append(data)
    if alone:
        yield alone


def _hashes(tensors: Sequence[Tensor]) -> bytes:
    from ringdp import _C

    each = _C.ReplicaHash(list(tensors)).each() if tensors else []
    return b"".join((one & (2**64 - 1)).to_bytes(8, "little") for one in each)


def _difference(
    expected: bytes, tensors: Sequence[Tensor], names: Sequence[str], of_one: Sequence[bool], members: int, one: int
) -> str:
    """The first tensor that has not the expected hash, and who sent it; "" where all have it."""
    if (mine := _hashes(tensors)) == expected:
        return ""
    at = next(i for i in range(len(names)) if mine[8 * i : 8 * i + 8] != expected[8 * i : 8 * i + 8])
    donor = _donor(at, tensors[at], of_one, members, one)
    sent = f"ranks 0 to {members - 1}" if donor is None else f"rank {donor}"
    return f"{names[at]} has other values than on rank {one}; {sent} sent it"


def _tell(wrong: str, group: dist.ProcessGroup, one: int) -> None:
    """Raises MismatchError where something is wrong; the other ranks log it."""
    for rank, words in _said(wrong, group).items():
        if rank == group.rank():
            raise MismatchError(
                f"the state that rank {rank} got is not that of rank {one}: {words}. The replicas of the job differ, or"
                " a connection changed bytes (RINGDP_CHECKSUM=1 tells)",
                peer=rank,
            )
        _log.error("the state that rank %d got is not that of rank %d: %s", rank, one, words)


def _said(words: str, group: dist.ProcessGroup) -> dict[int, str]:
    """By rank, the words of those that have some. On all ranks."""
    gathered = all_gather_bytes(words.encode()[:_WORDS], group, room=_WORDS)
    return {rank: said.decode(errors="replace") for rank, said in enumerate(gathered) if said}
