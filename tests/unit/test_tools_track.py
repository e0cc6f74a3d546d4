"""`python -m ringdp track`: each step is given once, in order, with the script's own names."""

from __future__ import annotations

import importlib
import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ringdp.__main__ import main
from tests.helpers import need


def written(folder: Path, *steps: int) -> None:
    with open(folder / "rank_00000.jsonl", "a") as file:
        for step in steps:
            record = {"time": 1.0, "rank": 0, "world": 2, "host": "a", "model": 0, "step": step, "step_s": 0.5}
            file.write(json.dumps(record | {"loss": 1 / step, "verdict": "slow"}) + "\n")
            file.write(json.dumps(record | {"model": 1, "loss": -1.0}) + "\n")


class Tracker:
    """Has the calls of wandb's run and of mlflow."""

    def __init__(self) -> None:
        self.given: list[tuple[int, dict[str, float]]] = []
        self.ended = 0
        self.name = ""

    def log(self, values: dict[str, float], step: int) -> None:
        self.given.append((step, values))

    log_metrics = log

    def finish(self) -> None:
        self.ended += 1

    end_run = finish

    def init(self, project: str) -> Any:
        self.name = project
        return self

    def set_experiment(self, name: str) -> None:
        self.name = name

    def start_run(self) -> None:
        pass


@pytest.mark.parametrize("to", ["wandb", "mlflow"])
def test_each_step_is_given_once_by_the_scripts_names(
    to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tracker = Tracker()
    monkeypatch.setitem(sys.modules, to, tracker)
    written(tmp_path, 1, 2)
    assert main(["track", str(tmp_path), "--to", to, "--name", "digits", "--once"]) == 0
    assert tracker.given == [(1, {"ringdp/step_s": 0.5, "loss": 1.0}), (2, {"ringdp/step_s": 0.5, "loss": 0.5})]
    assert (tracker.name, tracker.ended) == ("digits", 1)
    assert capsys.readouterr().err == f"ringdp: gave 2 steps up to step 2 to {to}, as 'digits'\n"


def test_new_steps_follow_until_it_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = Tracker()
    monkeypatch.setitem(sys.modules, "wandb", tracker)
    looks = iter([lambda: written(tmp_path, 1, 2), lambda: None, lambda: written(tmp_path, 3)])

    def sleep(seconds: float) -> None:
        try:
            next(looks)()
        except StopIteration:
            raise KeyboardInterrupt from None

    monkeypatch.setattr("ringdp.tools.track.time", SimpleNamespace(sleep=sleep))
    assert main(["track", str(tmp_path), "--to", "wandb"]) == 0
    assert [step for step, _ in tracker.given] == [1, 2, 3]
    assert tracker.ended == 1


def test_no_step_is_left_out_where_the_file_is_long_or_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker = Tracker()
    monkeypatch.setitem(sys.modules, "wandb", tracker)
    file = tmp_path / "rank_00000.jsonl"
    written(tmp_path, *range(1, 2000))
    file.rename(f"{file}.1")
    written(tmp_path, *range(2000, 3000))

    def begin_anew() -> None:
        written(tmp_path, 3000)
        file.rename(f"{file}.1")
        written(tmp_path, 3001)

    looks = iter([begin_anew, lambda: None])

    def sleep(seconds: float) -> None:
        try:
            next(looks)()
        except StopIteration:
            raise KeyboardInterrupt from None

    monkeypatch.setattr("ringdp.tools.track.time", SimpleNamespace(sleep=sleep))
    assert main(["track", str(tmp_path), "--to", "wandb"]) == 0
    assert [step for step, _ in tracker.given] == list(range(1, 3002))


def test_what_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert main(["track", str(tmp_path), "--to", "wandb", "--once"]) == 2
    assert "wandb is not installed: pip install wandb" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "mlflow", Tracker())
    assert main(["track", str(tmp_path), "--to", "mlflow", "--once"]) == 1
    assert "rank_00000.jsonl has no step" in capsys.readouterr().err


def test_a_tracker_that_does_not_begin_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def init(project: str) -> Any:
        raise ValueError("no key")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    assert main(["track", str(tmp_path), "--to", "wandb", "--once"]) == 2
    assert capsys.readouterr().err == "python -m ringdp track: wandb does not begin: no key\n"


def records_of(file: Path) -> Iterator[bytes]:
    """Of wandb's own file: a head of 7 bytes, then LevelDB's log, blocks of 32 KiB with parts of 7 bytes and more."""
    data, at, record = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (rest := -at % 32768) and rest < 7:
            at += rest
        _, length, kind = struct.unpack_from("<IHB", data, at)
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def test_wandb_itself_gets_the_steps_without_a_network(tmp_path: Path) -> None:
    need("wandb")
    Record = importlib.import_module("wandb.proto.wandb_internal_pb2").Record

    written(tmp_path, 1, 2)
    environ = {**os.environ, "WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}
    words = [sys.executable, "-m", "ringdp", "track", str(tmp_path), "--to", "wandb", "--name", "digits", "--once"]
    done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stderr) == (0, "ringdp: gave 2 steps up to step 2 to wandb, as 'digits'\n")
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    records = [Record.FromString(raw) for raw in records_of(file)]
    assert [it.run.project for it in records if it.HasField("run")][:1] == ["digits"]
    steps = [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in it.history.item}
        for it in records
        if it.HasField("history")
    ]
    assert [(it["_step"], it["loss"], it["ringdp/step_s"]) for it in steps] == [(1, 1.0, 0.5), (2, 0.5, 0.5)]
