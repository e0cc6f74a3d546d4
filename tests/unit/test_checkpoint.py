"""ringdp/checkpoint.py: whole or not at all, the same one on all ranks, and every refusal on all of them."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import pickle
import random
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import ringdp
from ringdp import checkpoint
from ringdp.errors import InvalidArgumentError, InvalidStateError, MismatchError, SystemResourceError
from tests.train.harness import backends, run_ranks


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    ringdp.init("gloo")
    yield
    ringdp.shutdown()


def steps(folder: Path) -> list[int]:
    return sorted(int(path.name[5:17]) for path in folder.glob("step-*.pt"))


def state(step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    return {"weights": torch.randn(1000, generator=generator), "half": torch.ones(3).bfloat16(), "text": f"at {step}"}


def write_and_read(folder: Path) -> None:
    rank = dist.get_rank()
    assert checkpoint.load(folder) is None
    for step in (1, 2, 3):
        own = {"rank": rank, "noise": torch.full((rank + 1,), float(step))}
        checkpoint.save(folder, step, state(step) if rank == 0 else "only rank 0's is written", own, keep=2)
    found = checkpoint.load(folder)
    assert found is not None
    assert (found.step, found.world_size) == (3, dist.get_world_size())
    assert found.shared["weights"].equal(state(3)["weights"])
    assert found.shared["half"].dtype == torch.bfloat16
    assert found.shared["text"] == "at 3"
    assert found.own["rank"] == rank
    assert found.own["noise"].equal(torch.full((rank + 1,), 3.0))


@pytest.mark.parametrize("backend", backends())
def test_what_was_saved_comes_back_on_every_rank(backend: str, tmp_path: Path) -> None:
    run_ranks(write_and_read, tmp_path / "made" / "here", world_size=3, backend=backend)
    assert steps(tmp_path / "made" / "here") == [2, 3]
    plain = torch.load(next((tmp_path / "made" / "here").glob("*3.*")), weights_only=True)
    assert plain["shared"]["text"] == "at 3", "torch reads it too"


def read_from_own_disk(folder: Path) -> tuple[int, str]:
    """Each rank has a disk of its own; what rank 1 has is newer, and its newest is torn."""
    mine = folder / f"disk{dist.get_rank()}"
    found = checkpoint.load(mine)
    assert found is not None
    return found.step, found.shared["text"]


def save_alone(folder: Path, *chosen: int, keep: int = 9) -> None:
    for step in chosen:
        checkpoint.save(folder, step, state(step), keep=keep)


@pytest.mark.usefixtures("alone")
def test_ranks_with_different_folders_agree(tmp_path: Path) -> None:
    save_alone(tmp_path / "disk0", 5, 10)
    save_alone(tmp_path / "disk1", 5, 15, 20)
    newest = next((tmp_path / "disk1").glob("*20.*"))
    newest.write_bytes(newest.read_bytes()[:-1])
    assert run_ranks(read_from_own_disk, tmp_path, world_size=3) == [(15, "at 15")] * 3


@pytest.mark.usefixtures("alone")
def test_old_ones_go_newer_ones_stay_and_the_same_step_is_replaced(tmp_path: Path) -> None:
    save_alone(tmp_path, 10, 20, 30, 40)
    checkpoint.save(tmp_path, 25, state(25), keep=2)
    assert steps(tmp_path) == [20, 25, 30, 40]
    first = next(tmp_path.glob("*40.*"))
    checkpoint.save(tmp_path, 40, state(41), keep=1)
    assert steps(tmp_path) == [40]
    assert not first.exists()
    other = tmp_path / "my-notes.pt"
    other.touch()
    checkpoint.save(tmp_path, 50, state(50), keep=1)
    assert sorted(path.name[:17] for path in tmp_path.iterdir()) == ["my-notes.pt", "step-000000000050"]


class Program:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("it-ran"),))


@pytest.mark.usefixtures("alone")
def test_what_is_no_checkpoint_is_left_out_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "files"
    save_alone(folder, 1)

    def place(step: int, content: bytes) -> str:
        name = f"step-{step:012d}.{hashlib.sha256(content).hexdigest()[:16]}.pt"
        (folder / name).write_bytes(content)
        return name

    bomb, empty = place(9, pickle.dumps(Program())), place(8, b"")
    torch.save({"Program": Program()}, tmp_path / "zip")
    packed = place(7, (tmp_path / "zip").read_bytes())
    torch.save({"weights": torch.ones(2)}, tmp_path / "zip")
    foreign = place(6, (tmp_path / "zip").read_bytes())
    (folder / "step-000000000005.pt").touch()  # not even a name of ours
    with caplog.at_level(logging.WARNING, "ringdp.checkpoint"):
        found = checkpoint.load(folder)
    assert found is not None
    assert found.step == 1
    for name in (bomb, empty, packed, foreign):
        assert sum(name in record.message for record in caplog.records) == 1, name
    assert "Unsupported" in caplog.text
    assert "not a ringdp checkpoint of format" in caplog.text
    assert not Path("it-ran").exists()
    next(folder.glob("*1.*")).write_bytes(b"torn")
    with pytest.raises(InvalidArgumentError, match=r"none of the 5 checkpoints in .* is whole: move them away"):
        checkpoint.load(folder)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.eye(3).to_sparse_csr(),
        lambda: torch.ones(3).to(torch.float8_e4m3fn),
        lambda: torch.ones(3).to(torch.uint16),
    ],
)
def test_tensors_that_are_not_plain_come_back(tmp_path: Path, make: Callable[[], torch.Tensor]) -> None:
    checkpoint.save(tmp_path, 1, {"model": {"w": make()}})
    found = checkpoint.load(tmp_path)
    assert found is not None
    mine, wanted = found.shared["model"]["w"], make()
    assert (mine.layout, mine.dtype) == (wanted.layout, wanted.dtype)
    assert torch.equal(mine.to_dense().float(), wanted.to_dense().float())


@pytest.mark.usefixtures("alone")
def test_a_tensor_that_cannot_be_saved_is_named(tmp_path: Path) -> None:
    for odd in (torch.zeros(4, 4).to_mkldnn(), torch.zeros(3, dtype=torch.uint8).view(getattr(torch, "uint4"))):  # noqa: B009
        with pytest.raises(InvalidArgumentError, match=r"shared\['model'\]\[1\]"):
            checkpoint.save(tmp_path, 1, {"model": [torch.zeros(3), odd]})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("alone")
def test_a_full_disk_is_told_with_the_bytes_that_are_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.save(tmp_path, 1, state(1))
    before = sorted(path.name for path in tmp_path.iterdir())

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(SystemResourceError, match=r"No space left on device \(it needs 4,\d\d\d,\d\d\d bytes, and"):
        checkpoint.save(tmp_path, 2, {"w": torch.zeros(1_000_000)})
    assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.usefixtures("alone")
def test_what_could_not_be_read_again_is_not_written(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 1, state(1))
    with pytest.raises(InvalidArgumentError, match=r"shared holds something .* \(Unsupported global: .*Holder"):
        checkpoint.save(tmp_path, 2, {"x": Holder()})
    with pytest.raises(InvalidArgumentError, match="own holds something"):
        checkpoint.save(tmp_path, 2, {}, own=np.float64(3))
    assert [path.name[:17] for path in tmp_path.iterdir()] == ["step-000000000001"]
    for step, keep, words in ((-1, 3, "step must be"), (1.5, 3, "step must be"), (1, 0, "keep must be")):
        with pytest.raises(InvalidArgumentError, match=words):
            checkpoint.save(tmp_path, step, {}, keep=keep)  # type: ignore[arg-type]


class Holder:
    """A class of the user's own."""


def disk_is_full(folder: Path) -> list[str]:
    """Rank 0 may not write files above 20 kB for a while: what the system says is as with a full disk."""
    rank = dist.get_rank()
    told = []
    checkpoint.save(folder, 1, state(1))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        checkpoint.save(folder, 2, {"large": torch.ones(20_000)})
    except SystemResourceError as error:
        told.append(f"{error} {error.peer}")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    try:
        checkpoint.save(folder, 3 + rank, {})
    except MismatchError as error:
        told.append(str(error))
    try:
        checkpoint.save(folder, 3, {}, own=Holder() if rank == 1 else None)
    except (MismatchError, InvalidArgumentError) as error:
        told.append(f"{type(error).__name__}: {error}")
    try:
        checkpoint.save(folder, 3, {"unheard of": lambda: None})
    except Exception as error:
        told.append(f"{type(error).__name__}: {error}")
    found = checkpoint.load(folder)
    assert found is not None
    assert found.step == 1, "what was there is as it was"
    checkpoint.save(folder, 2, state(2))
    return told


@pytest.mark.parametrize("backend", backends())
def test_a_full_disk_and_other_failures_are_known_to_all_ranks(backend: str, tmp_path: Path) -> None:
    results = run_ranks(disk_is_full, tmp_path, world_size=2, backend=backend)
    words = f"the checkpoint of step 2 could not be written to {tmp_path}: File too large; the ones before are as"
    assert results[0][0] == f"{words} they were None"
    assert results[1][0] == f"ringdp.checkpoint.save failed on rank 0: {words} they were 0"
    assert results[0][1] == "ringdp.checkpoint.save: this rank is at step 3, rank 1 at 4"
    assert results[1][1] == "ringdp.checkpoint.save: this rank is at step 4, rank 0 at 3"
    assert "MismatchError: ringdp.checkpoint.save failed on rank 1: own holds something" in results[0][2]
    assert "InvalidArgumentError: own holds something" in results[1][2]
    assert "InvalidArgumentError: shared holds something that torch.save cannot write" in results[0][3]
    assert "Can't pickle" in results[0][3]
    assert "MismatchError: ringdp.checkpoint.save failed on rank 0:" in results[1][3]
    assert steps(tmp_path) == [1, 2]
    assert not list(tmp_path.glob(".*")), "nothing unfinished is left"


@pytest.mark.usefixtures("alone")
def test_other_numbers_of_ranks_get_what_is_shared(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run_ranks(write_and_read, tmp_path, world_size=3)
    found = checkpoint.load(tmp_path)
    assert found is not None
    assert (found.shared["text"], found.own, found.world_size) == ("at 3", None, 3)
    [line] = caplog.messages
    assert "was saved by 3 ranks and these are 1: no rank gets the state that each rank kept for itself" in line
    before = torch.get_rng_state()
    checkpoint.set_rng_state(found.own)
    assert torch.get_rng_state().equal(before)


def test_random_generators_go_on_where_they_were() -> None:
    def draw() -> list[float]:
        return [random.random(), random.gauss(0, 1), float(torch.rand(())), float(np.random.rand()), np.random.randn()]

    draw()
    kept = checkpoint.rng_state()
    first = draw()
    draw()
    checkpoint.set_rng_state(kept)
    assert draw() == first


def test_it_needs_a_process_group(tmp_path: Path) -> None:
    with pytest.raises(InvalidStateError, match=r"ringdp.checkpoint.load\(\) needs a process group"):
        checkpoint.load(tmp_path)
