"""Metrics files and what reads them: nothing blocks, a disk that is full is told once, half a line is no line."""

from __future__ import annotations

import errno
import functools
import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ringdp import config, metrics
from ringdp.diagnosis.metrics_folder import read, read_last
from ringdp.diagnosis.records import JsonLines, Record, StepRecords
from ringdp.errors import InvalidArgumentError
from ringdp.tools import top
from tests.helpers import need


def record(step: int, **more: Any) -> Record:
    base = {"time": 1000.0 + step, "rank": 0, "world": 2, "host": "h0", "model": 0, "step": step, "step_s": 0.5}
    phases = {
        "between_s": 0.1,
        "forward_s": 0.1,
        "backward_s": 0.1,
        "after_s": 0.1,
        "exposed_s": 0.1,
        "other_wait_s": 0.0,
    }
    return base | phases | {"sent_bytes": 1 << 20, "sent_bytes_total": 5 << 20, "memory_bytes": 2 << 30} | more


def made(step: int) -> Callable[[], Record]:
    return functools.partial(record, step)


def test_records_are_written_with_what_was_logged_and_a_tensor_is_read_later(tmp_path: Path) -> None:
    records = StepRecords([JsonLines(tmp_path / "new" / "folder", 3)], 3)
    records.log({"loss": torch.tensor(0.5)})
    records.add(made(1))
    records.add(made(2))
    records.close()
    [file] = (tmp_path / "new" / "folder").iterdir()
    first, second = map(json.loads, file.read_text().splitlines())
    assert file.name == "rank_00003.jsonl"
    assert (first["step"], first["loss"], second["step"]) == (1, 0.5, 2)
    assert "loss" not in second
    assert first["memory_bytes"] > 1 << 20


def test_a_disk_that_takes_nothing_is_told_once_and_no_step_waits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    records = StepRecords([JsonLines(tmp_path / "file", 0)], 0)
    began = time.monotonic()
    with caplog.at_level(logging.WARNING, "ringdp.metrics"):
        for step in range(20_000):
            records.add(made(step))
        assert time.monotonic() - began < 2
        records._write()
        records.add(made(1))
        records.close()
    [line] = caplog.messages
    assert "metrics of rank 0 are lost: " in line
    assert "rank_00000.jsonl" in line


class Slow:
    """A disk that hangs."""

    def __init__(self) -> None:
        self.written = 0

    def describe(self) -> str:
        return "slow"

    def write(self, records: list[Record]) -> None:
        time.sleep(0.2)
        self.written += len(records)


def test_waiting_records_are_bounded() -> None:
    sink = Slow()
    records = StepRecords([sink], 0)
    for step in range(50_000):
        records.add(made(step))
    assert len(records._waiting) <= 10_000
    records.close()
    assert sink.written >= 10_000


def test_the_reader_leaves_out_half_a_line_and_what_was_before_a_restart(tmp_path: Path) -> None:
    file = tmp_path / "rank_00000.jsonl"
    lines = [json.dumps(record(step)) for step in (1, 2, 3, 1, 2)]
    file.write_text("\n".join(lines) + '\n{"time": 12')
    assert [one["step"] for one in read_last(file, 10)] == [1, 2]
    file.write_text("")
    assert read(tmp_path) == []
    file.write_text("\n".join(json.dumps(record(step, loss=0.25)) for step in range(2000)) + "\n")
    [state] = read(tmp_path)
    assert (state.last["step"], state.steps, state.steps_per_s, state.logged) == (1999, 20, 1.0, {"loss": 0.25})


def written(folder: Path, rank: int, *records: Any) -> None:
    (folder / f"rank_{rank:05d}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))


def test_a_file_begins_anew_and_the_readers_have_the_steps_before(tmp_path: Path) -> None:
    sink = JsonLines(tmp_path, 0, most_bytes=6_000)
    for step in range(1, 200):
        sink.write([record(step)])
        [state] = read(tmp_path)
        assert state.last["step"] == step
        assert state.steps == min(step, 20)
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 13_000
    assert {file.name for file in tmp_path.iterdir()} <= {"rank_00000.jsonl", "rank_00000.jsonl.1"}


def test_a_line_that_was_cut_costs_no_other_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = JsonLines(tmp_path, 0)
    sink.write([record(1)])
    file = tmp_path / "rank_00000.jsonl"

    def cut(*_: Any, **__: Any) -> None:
        with file.open("ab") as opened:
            opened.write(b'{"time": 12')
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr("builtins.open", cut)
        with pytest.raises(OSError, match="No space left"):
            sink.write([record(2)])
    sink.write([record(3)])
    assert [one["step"] for one in read_last(file, 10)] == [1, 3]


def test_lines_that_are_not_records_are_left_out(tmp_path: Path) -> None:
    wrong = [{"model": 0}, record(2, rank="x"), record(3, time=None), [], record(4) | {"step": "4"}]
    written(tmp_path, 0, record(1), *wrong)
    written(tmp_path, 1, record(1, rank=1), record(2, rank=1, step_s="much"))
    (tmp_path / "rank_00001.jsonl").open("a").write("[" * 50_000 + "\n")
    assert [(one.rank, one.last["step"]) for one in read(tmp_path)] == [(0, 1), (1, 2)]


def test_a_model_that_is_not_the_processs_first_is_shown_once_the_first_makes_no_steps(tmp_path: Path) -> None:
    written(tmp_path, 0, record(1), *(record(step, model=1) for step in range(5)))
    assert read(tmp_path)[0].last["model"] == 0
    written(tmp_path, 0, record(1), *(record(step, model=1) for step in range(25)))
    assert read(tmp_path)[0].last["step"] == 24


def test_ranks_that_the_newest_job_does_not_have_are_left_out(tmp_path: Path) -> None:
    for rank in range(4):
        written(tmp_path, rank, record(5, rank=rank, world=4))
    for file, rank in ((2, 1), (3, 0)):  # two are left, with other numbers
        written(tmp_path, file, record(9, rank=rank, world=2))
    assert [(one.rank, one.last["step"]) for one in read(tmp_path)] == [(0, 9), (1, 9)]


def test_a_folder_without_steps_and_a_file_that_cannot_be_read_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    need("rich", "rich")
    from ringdp.__main__ import main

    assert main(["top", str(tmp_path), "--once"]) == 0
    assert "no rank has written a step yet" in capsys.readouterr().out
    (tmp_path / "rank_00000.jsonl").mkdir()
    assert main(["top", str(tmp_path), "--once"]) == 1
    assert "python -m ringdp top: " in (told := capsys.readouterr().err)
    assert "rank_00000.jsonl" in told


def test_a_value_that_cannot_be_read_is_said_once_and_the_others_are_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    records = StepRecords([JsonLines(tmp_path, 0)], 0)
    with caplog.at_level(logging.WARNING):
        for step in (1, 2):
            records.log({"lost": torch.zeros((), device="meta"), "loss": 0.5})
            records.add(made(step))
        records.close()
    lines = [json.loads(line) for line in (tmp_path / "rank_00000.jsonl").read_text().splitlines()]
    assert [(one["step"], one["loss"], one["lost"]) for one in lines] == [(1, 0.5, None), (2, 0.5, None)]
    assert [one.getMessage() for one in caplog.records if "'lost' of ringdp.metrics.log" in one.getMessage()] != []
    assert len(caplog.records) == 1


def test_a_folder_that_is_not_there_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    need("rich", "rich")
    from ringdp.__main__ import main

    assert main(["top", str(tmp_path / "no"), "--once"]) == 1
    assert "is not a folder: give the one of ringrun --metrics-dir" in capsys.readouterr().err


def test_top_marks_the_rank_that_the_others_wait_for_in_80_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    need("rich", "rich")
    from ringdp.__main__ import main

    monkeypatch.setenv("COLUMNS", "80")
    host = "a-rather-long-host-name.example.org"
    for rank in range(3):
        peer = {"slow_peer": 1, "slow_peer_s": 0.2 if rank != 1 else 0.0, "exposed_s": 0.25 if rank != 1 else 0.0}
        lines = [record(step, rank=rank, world=3, host=host, time=time.time(), loss=0.125, **peer) for step in range(5)]
        (tmp_path / f"rank_{rank:05d}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    assert main(["top", str(tmp_path), "--once"]) == 0
    shown = capsys.readouterr().out
    assert "3 of 3 ranks, step 4" in shown
    assert "loss 0.125" in shown
    assert "the others wait for rank 1" in shown
    assert " !1" in shown
    assert "200 ms (1)" in shown
    assert max(len(line.rstrip()) for line in shown.splitlines()) <= 80
    assert top.stragglers(read(tmp_path)) == {1}


def test_prometheus_gets_all_ranks(tmp_path: Path) -> None:
    need("prometheus_client", "prometheus_client")
    import urllib.request

    from ringdp.diagnosis.exporter import serve

    for rank in range(2):
        (tmp_path / f"rank_{rank:05d}.jsonl").write_text(json.dumps(record(7, rank=rank, loss=0.5, slow_peer=1)) + "\n")
    port = serve(tmp_path, 0)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        text = answer.read().decode()
    assert 'ringdp_steps_total{host="h0",rank="1"} 7.0' in text
    assert 'ringdp_sent_bytes_total{host="h0",rank="0"} 5.24288e+06' in text
    assert "# TYPE ringdp_sent_bytes_total counter" in text
    assert 'ringdp_phase_seconds{host="h0",phase="backward",rank="0"} 0.1' in text
    assert 'ringdp_logged{host="h0",name="loss",rank="0"} 0.5' in text


def test_a_file_that_cannot_be_read_keeps_no_other_rank_from_prometheus(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    need("prometheus_client", "prometheus_client")
    from prometheus_client import CollectorRegistry, generate_latest

    from ringdp.diagnosis.exporter import Collector

    (tmp_path / "rank_00000.jsonl").mkdir()
    (tmp_path / "rank_00001.jsonl").write_text(json.dumps(record(7, rank=1)) + "\n")
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Collector(tmp_path))
    caplog.clear()
    texts = [generate_latest(registry).decode() for _ in range(2)]
    for text in texts:
        assert 'ringdp_steps_total{host="h0",rank="1"} 7.0' in text
        assert 'ringdp_unreadable_file{file="rank_00000.jsonl",reason="Is a directory"} 1.0' in text
    assert len(caplog.records) <= 1  # once; the registry may have asked before
    (tmp_path / "rank_00000.jsonl").rmdir()
    assert 'file="rank_00000.jsonl"' not in generate_latest(registry).decode()


def test_the_dashboard_shows_what_is_served_and_nothing_else(tmp_path: Path) -> None:
    need("prometheus_client", "prometheus_client")
    import re

    from ringdp.diagnosis.exporter import Collector

    (tmp_path / "rank_00000.jsonl").write_text(json.dumps(record(7, slow_peer=1)) + "\n")
    served = {f"{it.name}{'_total' * (it.type == 'counter')}" for it in Collector(tmp_path).collect()}
    dashboard = json.loads((Path(__file__).parents[2] / "examples" / "grafana_dashboard.json").read_text())
    shown = {
        name
        for panel in dashboard["panels"]
        for it in panel["targets"]
        for name in re.findall(r"ringdp_\w+", it["expr"])
    }
    assert shown <= served
    assert served - shown == {"ringdp_last_step_timestamp_seconds", "ringdp_unreadable_file"}


def test_grafanas_schema_knows_every_field_of_the_dashboard() -> None:
    """Read by Grafana's own types and written again: what they do not know would be lost."""
    need("grafana_foundation_sdk", "grafana-foundation-sdk")
    from grafana_foundation_sdk.cog import encoder, plugins
    from grafana_foundation_sdk.models.dashboard import Dashboard

    plugins.register_default_plugins()
    given = json.loads((Path(__file__).parents[2] / "examples" / "grafana_dashboard.json").read_text())
    got = json.loads(encoder.JSONEncoder().encode(Dashboard.from_json(given)))
    assert _fields(given) <= _fields(got)


def _fields(value: Any, path: str = "") -> set[str]:
    """All that is in it, as path = value."""
    if isinstance(value, dict):
        return {one for key, item in value.items() for one in _fields(item, f"{path}/{key}")}
    if isinstance(value, list):
        return {one for at, item in enumerate(value) for one in _fields(item, f"{path}/{at}")}
    return {f"{path} = {value!r}"}


@pytest.mark.parametrize("value", ["three", None, torch.zeros(2), 1j, torch.zeros(1, device="meta")])
def test_what_is_not_a_number_cannot_be_logged(value: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="loss must be a number"):
        metrics.log(loss=value)


def test_a_name_of_the_metrics_own_cannot_be_logged_and_without_metrics_nothing_happens() -> None:
    with pytest.raises(InvalidArgumentError, match="step_s is a metric already"):
        metrics.log(step_s=1.0)
    metrics.log(loss=1.0, other=torch.tensor(2))


def test_a_whole_number_that_no_float_holds_is_infinite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = StepRecords([JsonLines(tmp_path, 0)], 0)
    monkeypatch.setattr(metrics, "step_records", lambda: records)
    metrics.log(most=10**400, least=-(10**400))
    records.add(made(1))
    records.close()
    assert '"most": Infinity, "least": -Infinity' in (tmp_path / "rank_00000.jsonl").read_text()


def test_settings_that_cannot_be_used_are_said() -> None:
    with pytest.raises(InvalidArgumentError, match="RINGDP_REPORT_EVERY"):
        config.report_every({"RINGDP_REPORT_EVERY": "often"})
    with pytest.raises(InvalidArgumentError, match="up to 1000"):
        config.report_every({"RINGDP_REPORT_EVERY": "5000"})
    with pytest.raises(InvalidArgumentError, match="set RINGDP_METRICS_DIR"):
        config.tensorboard({"RINGDP_TENSORBOARD": "1"})
    assert config.report_every({}) == 20
