"""A store's state as whole tensors, which fits any number of ranks, and the file of the optimizer's part of it."""

from __future__ import annotations

import functools
import io
import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ringdp.errors import InvalidArgumentError, InvalidStateError, SystemResourceError
from ringdp.job.byte_collectives import all_gather_bytes, as_bytes, broadcast_bytes, together
from ringdp.job.whole_file import whole_file
from ringdp.kvstore.keys import Key, describe, flat
from ringdp.kvstore.table import Table
from ringdp.kvstore.updates import Optimizer

_FORMAT = 1


def state_dict(table: Table) -> dict[str, Any]:
    """On all ranks: tensors on the CPU or where the keys are, nothing but numbers, text and tensors in dicts."""
    table.settle()
    values = {name: [table.empty(name)] for name in sorted(table.keys)}
    table.pull(values)
    state: dict[str, Any] = {"ringdp_kvstore": _FORMAT, "values": {name: it[0] for name, it in values.items()}}
    if isinstance(table.update, Optimizer):
        state["optimizer"] = optimizer_state(table, table.update)
    if table.compression is not None:
        state["compression"] = table.compression.state_dict()
    return state


def load_state_dict(table: Table, state: Mapping[str, Any]) -> None:
    """Raises InvalidArgumentError, before anything has changed, where it does not fit; MismatchError on all ranks."""
    if not isinstance(state, Mapping) or state.get("ringdp_kvstore") != _FORMAT:
        raise InvalidArgumentError("load_state_dict: this is not the state of a key-value store")
    values: Mapping[str, Tensor] = state["values"]
    for name, value in values.items():
        if table.knows(name):
            table.check("load_state_dict", name, [value])
    if lacking := sorted(set(table.keys) - set(values)):
        raise InvalidArgumentError(f"load_state_dict: the state has no key {', '.join(map(repr, lacking))}")
    if "optimizer" in state:
        _require_optimizer(table, state["optimizer"])
    for name, value in values.items():
        if not table.knows(name):
            table.add(name, value)
    table.compare_later("the loaded state", f"checksum {_checksum(state):08x}")
    table.settle()
    for name, value in values.items():
        key = table.keys[name]
        table.slices[name].copy_(key.cut.slice_of(flat(value.to(key.device)), table.rank))
    if "optimizer" in state:
        load_optimizer_state(table, state["optimizer"])
    if "compression" in state and table.compression is not None:
        table.compression.load_state_dict(state["compression"])


def optimizer_state(table: Table, update: Optimizer) -> dict[str, Any]:
    """Of all keys: ``tensors`` of the key's shape, and ``numbers`` such as the step; on all ranks."""
    mine: dict[str, dict[str, Any]] = {}
    tensors: dict[str, dict[str, Tensor]] = {}
    for name in sorted(table.keys):
        fields: dict[str, Any] = {}
        for field, it in update.state_of(table.slices[name]).items():
            if isinstance(it, Tensor) and it.shape == table.slices[name].shape:
                tensors.setdefault(name, {})[field] = it
                fields[field] = str(it.dtype).removeprefix("torch.")
            elif isinstance(it, Tensor) and it.numel() == 1:
                fields[field] = [str(it.dtype).removeprefix("torch."), it.item()]
            elif isinstance(it, int | float):
                fields[field] = ["", it]
            elif it is not None:
                raise InvalidStateError(
                    f"{update.describe()} keeps {field} of key {name!r}, which cannot be saved by slices"
                )
        mine[name] = fields
    lines = [json.dumps(mine).encode()]
    group = table.group
    if group is not None:
        gather = functools.partial(all_gather_bytes, lines[0], group)
        lines = table.operations.run("structure of the optimizer's state", gather)
    merged: dict[str, dict[str, Any]] = {}
    for line in lines:
        for name, fields in json.loads(line).items():
            merged[name] = fields or merged.get(name, {})
    state: dict[str, dict[str, dict[str, Any]]] = {name: {"tensors": {}, "numbers": {}} for name in merged}
    groups: dict[tuple[str, str], list[str]] = {}
    for name, fields in merged.items():
        for field, it in fields.items():
            if isinstance(it, str):
                groups.setdefault((field, it), []).append(name)
            else:
                dtype, number = it
                state[name]["numbers"][field] = (
                    torch.tensor(number, dtype=getattr(torch, dtype), device="cpu") if dtype else number
                )
    for (field, dtype), names in sorted(groups.items()):
        empty = torch.empty(0, dtype=getattr(torch, dtype), device="cpu")
        for device in sorted({str(table.keys[name].device) for name in names}):
            there = [name for name in names if str(table.keys[name].device) == device]
            pieces = {name: tensors.get(name, {}).get(field, empty.to(device)) for name in there}
            for name, whole in table.gather(f"the optimizer's {field} of", pieces).items():
                state[name]["tensors"][field] = whole
    return {"name": update.name, "numbers": update.numbers(), "state": state}


def load_optimizer_state(table: Table, saved: Mapping[str, Any]) -> None:
    """Raises InvalidArgumentError where it does not fit the keys or the optimizer."""
    update = _require_optimizer(table, saved)
    if unknown := sorted(set(saved["state"]) - set(table.keys)):
        raise InvalidArgumentError(f"the state has keys that the store does not have: {', '.join(unknown)}")
    for name, entry in saved["state"].items():
        key = table.keys[name]
        if not entry["tensors"] and not entry["numbers"]:
            continue
        mine: dict[str, Any] = {}
        for field, whole in entry["tensors"].items():
            mine[field] = key.cut.slice_of(flat(whole.to(key.device)), table.rank)
        for field, number in entry["numbers"].items():
            mine[field] = number.clone() if isinstance(number, Tensor) else number
        if table.slices[name].numel():
            update.set_state(table.slices[name], mine)
    update.set_numbers(saved["numbers"])


def save_optimizer(table: Table, path: str | os.PathLike[str]) -> None:
    """Rank 0 writes under another name, flushes, renames."""
    assert isinstance(table.update, Optimizer)
    table.settle()
    content = {"ringdp_kvstore_optimizer": _FORMAT, "optimizer": optimizer_state(table, table.update)}

    group = table.group

    def write() -> None:
        if group is None or group.rank() == 0:
            with whole_file(Path(path), f"the optimizer's state could not be written to {path}") as file:
                torch.save(content, file)

    if group is None:
        write()
        return
    table.operations.run(
        "saving of the optimizer's state", functools.partial(together, write, group, "save_optimizer_states")
    )


def load_optimizer(table: Table, path: str | os.PathLike[str]) -> None:
    """Rank 0 reads, all load."""
    table.settle()
    group = table.group

    def read() -> bytes:
        if group is not None and group.rank() != 0:
            return b""
        try:
            return Path(path).read_bytes()
        except OSError as error:
            raise SystemResourceError(f"load_optimizer_states: {path}: {error.strerror}") from error

    def read_and_send() -> bytes | bytearray:
        return read() if group is None else broadcast_bytes(together(read, group, "load_optimizer_states"), 0, group)

    content = table.operations.run("loading of the optimizer's state", read_and_send)
    try:
        saved = torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")
    except Exception as error:
        raise InvalidArgumentError(f"load_optimizer_states: torch.load refuses {path}: {error}") from None
    if not isinstance(saved, dict) or saved.get("ringdp_kvstore_optimizer") != _FORMAT:
        raise InvalidArgumentError(f"load_optimizer_states: {path} is not a file of save_optimizer_states")
    load_optimizer_state(table, saved["optimizer"])


def _require_optimizer(table: Table, saved: Mapping[str, Any]) -> Optimizer:
    update = table.update
    if not isinstance(update, Optimizer):
        raise InvalidArgumentError("the state has an optimizer, and the store none: call set_optimizer first")
    if saved["name"] != update.name:
        raise InvalidArgumentError(f"the state is of {saved['name']}, and the store's optimizer is {update.name}")
    for name, entry in saved["state"].items():
        key: Key | None = table.keys.get(name)
        for field, whole in entry["tensors"].items():
            if key is not None and tuple(whole.shape) != key.shape:
                raise InvalidArgumentError(
                    f"the state's {field} of key {describe(name, whole.shape, whole.dtype)} does not"
                    f" fit {key.describe()}"
                )
    return update


def _checksum(state: Any, before: int = 0) -> int:
    if isinstance(state, Tensor):
        return zlib.crc32(as_bytes(state.detach().contiguous().view(-1).view(torch.uint8)), before)
    if isinstance(state, Mapping):
        for name in state:
            before = _checksum(state[name], zlib.crc32(str(name).encode(), before))
        return before
    if isinstance(state, list | tuple):
        for one in state:
            before = _checksum(one, before)
        return before
    return zlib.crc32(repr(state).encode(), before)
