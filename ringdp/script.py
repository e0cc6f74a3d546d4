"""What makes a training script for one process one for several: `prepare`, `gather`, `print` and `main_first`.

Each of them works in a process that no launcher started, too: as a job of one rank.
"""

from __future__ import annotations

import builtins
import contextlib
from collections.abc import Iterator
from typing import Any, TypeVar, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ringdp import config, values
from ringdp.data.prepared import PreparedLoader, prepared
from ringdp.ddp.wrapper import RingDP
from ringdp.errors import InvalidArgumentError, MismatchError
from ringdp.job import process_group
from ringdp.job.backend import named
from ringdp.job.byte_collectives import all_gather_bytes, all_gather_single, alone, device_for, require_member
from ringdp.job.elastic import as_unit

_ROOM = 256  # bytes that describe a rank's tensor, or its error
Sample = TypeVar("Sample")


@overload
def prepare(thing: DataLoader[Sample], /, *, seed: int = 0) -> PreparedLoader[Sample]: ...
@overload
def prepare(thing: nn.Module, /, *, seed: int = 0) -> RingDP: ...
@overload
def prepare(*things: Any, seed: int = 0) -> Any: ...
def prepare(*things: Any, seed: int = 0) -> Any:
    """Make DataLoaders and models of a script for one process those of this rank; all ranks call it alike.

    A **DataLoader** becomes one that gives this rank's part of the samples in batches of the same size, through torch's
    DistributedSampler. Each pass over it has a new epoch by itself, and so another order where the loader shuffles. All
    ranks have the same number of batches: without ``drop_last`` a few samples are given twice where the ranks do
    not divide them, none is left out; `gather` knows them. Workers, collate function and the rest stay. A loader whose
    sampler is for this rank already (a DistributedSampler, a `ringdp.data.BalancedSampler`, one with the
    attributes ``rank`` and ``num_replicas``) keeps it. After the loss of a rank in an elastic job the next pass
    is divided among those that are left. ``set_epoch`` is for a job that goes on from a checkpoint.

    A **model** moves to this rank's device and is wrapped in `RingDP`. Optimizers and schedules need nothing.

    Args:
        things: DataLoaders and modules.
        seed: of the order of shuffled samples; a loader's own generator goes before it.

    Returns:
        The prepared thing; a tuple of them where several were given.

    Raises:
        InvalidArgumentError: something else was given, or a loader whose samples cannot be divided: one of an
            IterableDataset, or with a sampler of another kind.
        MismatchError: the ranks' datasets or settings differ; the message has both.
        InvalidStateError: a launcher started this process and `ringdp.init` was not called.
    """
    values.whole("ringdp.prepare", "seed", seed, 0)
    if not things:
        raise InvalidArgumentError("ringdp.prepare takes DataLoaders and models, and was given nothing")
    for thing in things:
        if not isinstance(thing, DataLoader | nn.Module):
            raise InvalidArgumentError(
                f"ringdp.prepare takes DataLoaders and models, not {type(thing).__name__}; optimizers and schedules"
                " stay as they are"
            )
    done = tuple(prepared(it, seed) if isinstance(it, DataLoader) else _prepared_model(it) for it in things)
    return done[0] if len(done) == 1 else done


def _prepared_model(model: nn.Module) -> nn.Module:
    if isinstance(model, RingDP):
        return model
    if alone("ringdp.prepare"):
        process_group.init()
    return RingDP(model.to(process_group.device()))


def gather(
    x: Tensor | float, loader: DataLoader[Any] | None = None, *, group: dist.ProcessGroup | None = None
) -> Tensor:
    """All ranks' rows, for metrics over everything: ``[rows, …]`` in the order of the ranks, the same on all ranks.

    The ranks may have different numbers of rows; every one has to call it, one without rows too. No gradient flows.

    With the `loader` that `prepare` returned, `x` has a row for each sample of the current batch, or of all batches
    of the pass up to it: the rows then come in the order in which one process would have had the samples, without
    those that `prepare` repeated to make the ranks even. So an accuracy over them is exact.

    Args:
        x: ``[rows, …]``; a number or a tensor without dimensions is one row.
        loader: where the rows' samples came from.
        group: a process group; the default group if None.

    Returns:
        A new tensor on the device of `x`.

    Raises:
        InvalidArgumentError: `x` or `loader` cannot be used; see above for the number of rows.
        MismatchError: another rank's `x` has another type or other dimensions after the first; has both sides'.
        InvalidStateError: several ranks and no process group, this process is not in ``group``, or the loader has given
            no batch yet.
    """
    rows = _rows(x)
    if loader is not None and not isinstance(loader, PreparedLoader):
        raise InvalidArgumentError(
            f"ringdp.gather: loader must be one that ringdp.prepare returned, not {type(loader).__name__}"
        )
    if group is None and alone("ringdp.gather"):
        parts = [rows.clone()]
    else:
        chosen = require_member(group, "ringdp.gather")
        with named("ringdp.gather"):
            parts = as_unit(chosen, "ringdp.gather", lambda: _all_rows(rows, chosen))
    return torch.cat(parts) if loader is None else loader.rows_in_order(parts)


def _rows(x: Tensor | float) -> Tensor:
    if isinstance(x, Tensor) and (x.layout is not torch.strided or hasattr(x, "full_tensor") or x.is_quantized):
        raise InvalidArgumentError(f"ringdp.gather: x must be a dense tensor, not {type(x).__name__}, {x.layout}")
    if not isinstance(x, Tensor | bool | int | float):
        raise InvalidArgumentError(f"ringdp.gather: x must be a tensor or a number, not {type(x).__name__}")
    rows = (
        x.detach()
        if isinstance(x, Tensor)
        else torch.tensor(x, dtype=torch.get_default_dtype() if isinstance(x, float) else None, device="cpu")
    )
    return rows.unsqueeze(0) if rows.dim() == 0 else rows


def _all_rows(rows: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """By rank. Bytes travel, so that every type does; the shorter ones are filled up."""
    kind = f"{str(rows.dtype).removeprefix('torch.')}{list(rows.shape[1:])}"
    lines = [line.decode() for line in all_gather_bytes(f"{len(rows)} {kind}".encode()[:_ROOM], group, room=_ROOM)]
    counts, kinds = zip(*(line.split(" ", 1) for line in lines), strict=True)
    for rank, other in enumerate(kinds):
        if other != kinds[0]:
            raise MismatchError(
                f"ringdp.gather: x has rows of {kinds[0]} on rank 0 and of {other} on rank {rank}: the type and all"
                " dimensions but the first must be the same on all ranks",
                peer=rank,
            )
    lengths = [int(count) for count in counts]
    padded = rows.new_zeros((max(lengths), *rows.shape[1:]))
    padded[: len(rows)] = rows
    mine = padded.flatten().view(torch.uint8).to(device_for(group, rows.device))
    everything = mine.new_empty(len(lengths) * mine.numel())
    if mine.numel():
        all_gather_single(everything, mine, group=group)
    found = everything.to(rows.device).view(rows.dtype).view(len(lengths), *padded.shape)
    return [found[rank, :length] for rank, length in enumerate(lengths)]


def print(*args: Any, **kwargs: Any) -> None:
    """Python's `print` on rank 0, nothing on the others; before `ringdp.init` the launcher's number counts."""
    if dist.is_available() and dist.is_initialized():
        rank = dist.get_rank()
    else:
        launch = config.launch_environment()
        rank = 0 if launch is None else launch.rank
    if rank == 0:
        builtins.print(*args, **kwargs)  # noqa: T201


@contextlib.contextmanager
def main_first(*, local: bool = False) -> Iterator[None]:
    """Let rank 0 run the block of a `with` first and the others after it: the first one downloads, the others read.

    Args:
        local: the first rank of each host goes first, where the hosts do not share the disk.

    Raises:
        MismatchError: the block of a rank that goes first raised; the others get this error instead of running theirs.
        InvalidStateError: a launcher started this process and `ringdp.init` was not called.
    """
    if alone("ringdp.main_first"):
        yield
        return
    group = require_member(None, "ringdp.main_first")
    first = (process_group.local_rank() if local else dist.get_rank()) == 0
    failed: Exception | None = None
    if first:
        try:
            yield
        except Exception as error:
            failed = error
    problem = b"" if failed is None else f"{type(failed).__name__}: {failed}".encode()[:_ROOM]
    with named("ringdp.main_first"):
        problems = all_gather_bytes(problem, group, room=_ROOM)
    if failed is not None:
        raise failed
    for rank, text in enumerate(problems):
        if text:
            raise MismatchError(
                f"ringdp.main_first: rank {rank}, which went first, raised {text.decode(errors='replace')}", peer=rank
            )
    if not first:
        yield
