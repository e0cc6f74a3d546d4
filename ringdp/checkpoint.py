"""Checkpoints that are either complete or absent, verified when they are read, and the same for all ranks.

    checkpoint.save("checkpoints", step, {"model": model.state_dict(), ...}, own=checkpoint.rng_state())
    found = checkpoint.load("checkpoints")                  # the newest whole one, or None

A checkpoint is one file that ``torch.load`` reads too, ``step-000000000120.<checksum>.pt``. Rank 0 writes it: under
another name, flushed to the disk, then renamed, so that neither a kill nor a power cut leaves half of one.
Nothing is unpickled but what ``torch.load(weights_only=True)`` lets through. Each file passes through the memory of
every rank; for models that do not fit there twice there is ``torch.distributed.checkpoint``, which ``ring`` carries.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import io
import logging
import os
import pickle
import random
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ringdp.errors import InvalidArgumentError, MismatchError, SystemResourceError
from ringdp.job.backend import named
from ringdp.job.byte_collectives import all_gather_bytes, as_bytes, as_tensor, broadcast_bytes, require_member, together
from ringdp.job.elastic import as_unit
from ringdp.text import number_of_ranks

_log = logging.getLogger("ringdp.checkpoint")
_NAME = re.compile(r"step-(\d{12})\.([0-9a-f]{16})\.pt")
_UNFINISHED = re.compile(r"\.step-\d{12}\.\d+\.unfinished")
_FORMAT = 1


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """What `load` found.

    Attributes:
        step: the number it was saved under.
        shared: rank 0's ``shared``; tensors on the CPU.
        own: what this rank gave as ``own``; None where another number of ranks saved it, which a warning says.
        world_size: how many ranks saved it.
        path: the file, on the host of the rank that read it.
    """

    step: int
    shared: Any
    own: Any
    world_size: int
    path: str


def save(
    folder: str | os.PathLike[str],
    step: int,
    shared: Any,
    own: Any = None,
    *,
    keep: int = 3,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write a checkpoint, return on every rank when it is on rank 0's disk, and delete old ones.

    Args:
        folder: made where it is missing. One job at a time may write there.
        step: a number from 0 on, the same on all ranks; a checkpoint of the same step is replaced.
        shared: values that are equal on all ranks, such as state dicts; only rank 0's are written.
        own: small values of this rank alone, such as `rng_state`.
        keep: how many checkpoints up to this step remain. Newer ones are left alone.
        group: a process group; the default group if None.

    Raises:
        SystemResourceError: it cannot be written, for example for want of space; raised on all ranks; earlier
            checkpoints stay.
        InvalidArgumentError: ``shared`` or ``own`` has types that cannot be loaded safely, or a number is wrong.
        MismatchError: another rank's arguments cannot be used, or the ranks are at different steps.
        InvalidStateError: before `ringdp.init`, or this process is not in ``group``.
    """
    members = require_member(group, "ringdp.checkpoint.save")

    def save_together() -> None:
        mine = together(lambda: _checked(step, keep, own), members, "ringdp.checkpoint.save")
        gathered = all_gather_bytes(mine, members)
        for rank, line in enumerate(gathered):
            if (other := int.from_bytes(line[:8], "little")) != step:
                raise MismatchError(f"ringdp.checkpoint.save: this rank is at step {step}, rank {rank} at {other}")
        content = {
            "ringdp_checkpoint": _FORMAT,
            "step": step,
            "world_size": members.size(),
            "shared": shared,
            "own": [as_tensor(line[8:]) for line in gathered],
        }

        def write() -> None:
            if members.rank() == 0:
                written = _write(Path(folder), step, content)
                _drop_old(Path(folder), written, keep)

        together(write, members, "ringdp.checkpoint.save")

    with named("ringdp.checkpoint.save"):
        as_unit(members, f"the checkpoint of step {step}", save_together)


def load(folder: str | os.PathLike[str], *, group: dist.ProcessGroup | None = None) -> Checkpoint | None:
    """The newest checkpoint that is whole, the same one on all ranks; None where no rank's folder has any.

    One that is torn or altered is named in a warning (logger ``ringdp.checkpoint``) and the one before is taken. The
    lowest rank that has the file reads it and sends it to the others, so a disk of rank 0 alone is enough.

    Raises:
        SystemResourceError: a folder or file is there and cannot be read, on all ranks.
        InvalidArgumentError: there are checkpoints, and none of them is whole.
        InvalidStateError: before `ringdp.init`, or this process is not in ``group``.
    """
    members = require_member(group, "ringdp.checkpoint.load")

    def load_together() -> Checkpoint | None:
        listed = together(lambda: _names(Path(folder)), members, "ringdp.checkpoint.load")
        everywhere = [line.decode().split() for line in all_gather_bytes(" ".join(listed).encode(), members)]
        candidates = sorted({name for names in everywhere for name in names}, reverse=True)
        for name in candidates:
            holder = next(rank for rank, names in enumerate(everywhere) if name in names)
            path = Path(folder, name)

            def read(path: Path = path, holder: int = holder) -> bytearray | None:
                return _read_whole(path) if members.rank() == holder else None

            content = together(read, members, "ringdp.checkpoint.load")
            whole = all_gather_bytes(b"y" if content is not None else b"", members, room=1)[holder]
            if whole:
                return _unpacked(broadcast_bytes(content, holder, members), str(path), members)
        if candidates:
            raise InvalidArgumentError(
                f"none of the {len(candidates)} checkpoints in {os.fspath(folder)} is whole: move them away to begin"
                " anew"
            )
        return None

    with named("ringdp.checkpoint.load"):
        return as_unit(members, "loading a checkpoint", load_together)


def rng_state() -> dict[str, Any]:
    """The state of this process's random generators, for `save`: Python's, torch's, and where they are used those of
    the current GPU and of NumPy (its global one)."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    if (numpy := sys.modules.get("numpy")) is not None:
        name, key, *rest = numpy.random.get_state()
        state["numpy"] = [name, key.tolist(), *rest]
    return state


def set_rng_state(state: dict[str, Any] | None) -> None:
    """Put the generators where `rng_state` found them.

    None leaves them as they are: `Checkpoint.own` is None where another number of ranks saved, whose states would not
    fit these ranks. Seed them by rank and step then, if this run is to draw other numbers than the one before. The
    state of a GPU or of NumPy is ignored where this process has none.
    """
    if state is None:
        return
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    if "numpy" in state:
        with contextlib.suppress(ImportError):
            import numpy

            numpy.random.set_state(tuple(state["numpy"]))


# On one rank.


def _checked(step: int, keep: int, own: Any) -> bytes:
    """This rank's step and its own state, eight bytes and the rest."""
    if not isinstance(step, int) or not 0 <= step < 10**12:
        raise InvalidArgumentError(f"step must be a whole number from 0 to 10**12 - 1, not {step!r}")
    if not isinstance(keep, int) or keep < 1:
        raise InvalidArgumentError(f"keep must be a whole number of at least 1, not {keep!r}")
    buffer = io.BytesIO()
    with _what_cannot_be_pickled("own", own):
        torch.save(own, buffer)
    buffer.seek(0)
    _require_loadable(buffer, "own", own)
    return step.to_bytes(8, "little") + buffer.getvalue()


# What torch raises for values that it cannot write or read, such as tensors whose memory it does not know.
_NOT_SAVED = (pickle.PicklingError, pickle.UnpicklingError, AttributeError, TypeError, KeyError, NotImplementedError)


@contextlib.contextmanager
def _what_cannot_be_pickled(what: str, values: Any) -> Iterator[None]:
    try:
        yield
    except _NOT_SAVED as error:
        raise InvalidArgumentError(
            f"{what} holds something that torch.save cannot write{_place(what, values)}: keep to tensors, numbers, text"
            f" and containers of them ({_reason(error)})"
        ) from None


def _require_loadable(file: Any, what: str, values: Any) -> None:
    try:
        _look_into(file)
    except _NOT_SAVED as error:
        raise InvalidArgumentError(
            f"{what} holds something that torch.load(weights_only=True) refuses{_place(what, values)}, so it could be"
            " written but never read: keep to tensors, numbers, text and containers of them, or name a class with"
            f" torch.serialization.add_safe_globals ({_reason(error)})"
        ) from None


def _look_into(file: Any) -> Any:
    """The result of `torch.load` on the content, without the memory of the tensors where that is possible."""
    begin = file.tell()
    try:
        return torch.load(file, weights_only=True, map_location="meta")
    except NotImplementedError:  # quantized tensors cannot be loaded without memory
        file.seek(begin)
        return torch.load(file, weights_only=True, map_location="cpu")


def _place(what: str, values: Any) -> str:
    """The place of the value that cannot be saved, where it is inside containers: `` at shared['model']['weight']``."""
    found = _path_to_unsaved(values)
    return f" at {what}{found}" if found else ""


def _path_to_unsaved(values: Any) -> str:
    if isinstance(values, Mapping | list | tuple):
        for key, value in values.items() if isinstance(values, Mapping) else enumerate(values):
            if not _can_be_saved(value):
                return f"[{key!r}]{_path_to_unsaved(value)}"
    return ""


def _can_be_saved(value: Any) -> bool:
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        _look_into(file)
    except (RuntimeError, *_NOT_SAVED):
        return False
    return True


def _reason(error: Exception) -> str:
    """torch's error without its paragraphs of advice."""
    text = str(error)
    found = re.search(r"WeightsUnpickler error: (.*?)(\. |\n|$)", text)
    return found[1] if found else text.partition("\n")[0]


class _Writer:
    """A file for torch.save that keeps the system's OSError, which torch replaces with a RuntimeError of its own."""

    def __init__(self, file: io.BufferedWriter) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            self._digest.update(data)
            return self._file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        self._file.flush()

    def checksum(self) -> str:
        return self._digest.hexdigest()[:16]


def _write(folder: Path, step: int, content: dict[str, Any]) -> str:
    """Returns the name of the file."""
    unfinished = folder / f".step-{step:012d}.{os.getpid()}.unfinished"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for left in os.listdir(folder):
            if _UNFINISHED.fullmatch(left):  # of a process that was killed
                (folder / left).unlink()
        with open(unfinished, "xb") as file:
            writer = _Writer(file)
            try:
                with _what_cannot_be_pickled("shared", content["shared"]):
                    torch.save(content, writer)  # type: ignore[arg-type]  # write() and flush() are all it needs
                file.flush()
            except RuntimeError:
                if writer.error is None:
                    raise
                raise writer.error from None
            os.fsync(file.fileno())
        with open(unfinished, "rb") as file:
            _require_loadable(file, "shared", content["shared"])
        name = f"step-{step:012d}.{writer.checksum()}.pt"
        os.replace(unfinished, folder / name)
        _flush_folder(folder)
        return name
    except OSError as error:
        _remove(unfinished)  # frees its space before the free space is measured
        raise SystemResourceError(
            f"the checkpoint of step {step} could not be written to {folder}: {error.strerror}"
            f"{_room(error, folder, content)}; the ones before are as they were"
        ) from error
    finally:
        _remove(unfinished)


def _remove(file: Path) -> None:
    with contextlib.suppress(OSError):
        file.unlink(missing_ok=True)


class _Counter:
    """A file for torch.save that only counts."""

    def __init__(self) -> None:
        self.size = 0

    def write(self, data: Any) -> int:
        count = memoryview(data).nbytes
        self.size += count
        return count

    def flush(self) -> None:
        pass


def _room(error: OSError, folder: Path, content: dict[str, Any]) -> str:
    """The needed and the free bytes, where the disk was full."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return ""
    counter = _Counter()
    try:
        torch.save(content, counter)  # type: ignore[arg-type]
        disk = os.statvfs(folder)
    except (OSError, RuntimeError):
        return ""
    return f" (it needs {counter.size:,} bytes, and {disk.f_bavail * disk.f_frsize:,} are free there)"


def _flush_folder(folder: Path) -> None:
    """A new name is safe only when its folder has reached the disk (fsync(2))."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _drop_old(folder: Path, written: str, keep: int) -> None:
    """All but the newest `keep` up to this step, and others of this step, which a resumed run has written anew."""
    older = [name for name in _names(folder) if _step(name) < _step(written)]
    remain = sorted({_step(name) for name in older}, reverse=True)[: keep - 1]
    replaced = [name for name in _names(folder) if _step(name) == _step(written) and name != written]
    for name in [*replaced, *(name for name in older if _step(name) not in remain)]:
        try:
            (folder / name).unlink(missing_ok=True)
        except OSError as error:
            _log.warning("the old checkpoint %s cannot be removed: %s", folder / name, error.strerror)


def _step(name: str) -> int:
    match = _NAME.fullmatch(name)
    assert match is not None
    return int(match[1])


def _names(folder: Path) -> list[str]:
    try:
        return sorted(name for name in os.listdir(folder) if _NAME.fullmatch(name))
    except FileNotFoundError:
        return []


def _read_whole(path: Path) -> bytearray | None:
    """The bytes of a checkpoint, or None and a warning that says why it cannot be one."""
    with open(path, "rb") as file:
        content = bytearray(os.fstat(file.fileno()).st_size)
        del content[file.readinto(content) :]
    expected = path.name.split(".")[1]
    if (found := hashlib.sha256(content).hexdigest()[:16]) != expected:
        reason = f"its checksum is {found}, not the {expected} of its name: it was torn or altered"
    else:
        try:
            loaded = _look_into(io.BytesIO(content))
            if isinstance(loaded, dict) and loaded.get("ringdp_checkpoint") == _FORMAT:
                return content
            reason = f"it is not a ringdp checkpoint of format {_FORMAT}"
        except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
            reason = f"torch.load refuses it: {_reason(error)}"
    _log.warning("checkpoint %s is left out, the one before it is taken: %s", path, reason)
    return None


def _unpacked(content: bytes | bytearray, path: str, group: dist.ProcessGroup) -> Checkpoint:
    loaded = torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")
    alike = loaded["world_size"] == group.size()
    mine = io.BytesIO(as_bytes(loaded["own"][group.rank() if alike else 0]))
    own = torch.load(mine, weights_only=True, map_location="cpu")
    if not alike and own is not None:
        if group.rank() == 0:
            _log.warning(
                "checkpoint %s was saved by %s and these are %d: no rank gets the state that each rank kept for"
                " itself (own is None), so random generators stay as they are",
                path,
                number_of_ranks(loaded["world_size"]),
                group.size(),
            )
        own = None
    return Checkpoint(loaded["step"], loaded["shared"], own, loaded["world_size"], path)
