"""Files of a sharded embedding: one for each rank, and an index that names those that count."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch

from ringdp.errors import InvalidArgumentError
from ringdp.job.whole_file import whole_file
from ringdp.nn.shards import Shard
from ringdp.nn.sparse_updates import SparseUpdate

_FORMAT = 1


def write(folder: Path, shard: Shard, update: SparseUpdate, shape: list[int], step: int, rank: int, ranks: int) -> None:
    """This rank's file of that step of all ranks. Raises SystemResourceError."""
    content = {
        "ringdp_sharded_embedding": _FORMAT,
        "shape": shape,
        "optimizer": update.name,
        "step": update.step,
        **shard.content(update.step),
    }
    with _writing(_file(folder, step, rank, ranks)) as file:
        torch.save(content, file)


def write_index(folder: Path, step: int, ranks: int) -> None:
    """When all files are written, on one rank: they count now, and others are removed."""
    with _writing(folder / "index") as file:
        file.write(f"{step} {ranks}\n".encode())
    current = {_file(folder, step, rank, ranks) for rank in range(ranks)}
    for path in set(folder.glob("rows-step-*-rank-*-of-*.pt")) - current:
        path.unlink(missing_ok=True)


def read(folder: Path, shard: Shard, update: SparseUpdate, shape: list[int], table: str) -> None:
    """This rank's rows of the files of all ranks that wrote.

    Raises:
        InvalidArgumentError: a file is of another table or optimizer; `table` names this one.
        OSError: a file cannot be read.
    """
    step, ranks = map(int, (folder / "index").read_text().split())
    contents: list[dict[str, Any]] = []
    for rank in range(ranks):
        path = _file(folder, step, rank, ranks)
        content = torch.load(path, weights_only=True, mmap=True, map_location="cpu")
        expected = [_FORMAT, shape, update.name]
        if [content.get(name) for name in ("ringdp_sharded_embedding", "shape", "optimizer")] != expected:
            raise InvalidArgumentError(f"{path} is not of this table: {table}")
        contents.append(content)
    shard.clear()
    for rank, content in enumerate(contents):
        shard.take(content, rank, ranks)
    update.step = step


def _file(folder: Path, step: int, rank: int, ranks: int) -> Path:
    return folder / f"rows-step-{step}-rank-{rank}-of-{ranks}.pt"


def _writing(path: Path) -> contextlib.AbstractContextManager[Any]:
    return whole_file(path, f"{path} could not be written", make_folder=True)
