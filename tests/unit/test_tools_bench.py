"""`python -m ringdp bench`: what it explains and measures, and what it says to mistakes."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from ringdp import __main__ as command
from ringdp.ddp import words
from ringdp.job.tuning import Tuning
from ringdp.tools import algorithm_table
from ringdp.tools.cost_model import HostLayout
from tests.helpers import need

need("ringdp._core", "ringdp's extension, built with `make build`,")

LAUNCHER = re.compile(r"(RANK|WORLD_SIZE|LOCAL_|MASTER_|OMPI_|PMIX_|SLURM_|TORCHELASTIC_|RINGDP_)")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if LAUNCHER.match(name):
            monkeypatch.delenv(name)


def bench(*options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not LAUNCHER.match(name)}
    return subprocess.run(
        [sys.executable, "-m", "ringdp", "bench", *options],
        env=clean | variables,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_explain_says_what_runs_where_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["bench", "--explain", "--ranks", "2", "--sizes", "4k,25m"]) == 0
    text = capsys.readouterr().out
    assert "all-reduce of float32, 2 ranks on one host" in text
    assert "layout one_host: all ranks on one host; table: built in" in text
    assert re.search(r"^  up to .*: fold\n  above: ring$", text, re.MULTILINE)
    assert re.search(r"^4 KiB +fold +[\d.]+ µs +4 KiB", text, re.MULTILINE)
    assert re.search(r"^25 MiB +ring +[\d.]+ ms +25 MiB", text, re.MULTILINE)
    assert "over a host's link" not in text  # there is none
    assert "adding a byte" in text


def test_explain_counts_bytes_on_each_hosts_link(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["bench", "--explain", "--ranks", "4", "--hosts", "4", "--sizes", "8m"]) == 0
    text = capsys.readouterr().out
    assert "4 ranks on 4 hosts (1 on each)" in text
    assert re.search(r"^8 MiB +ring +[\d.]+ m?s +12 MiB +12 MiB", text, re.MULTILINE)  # 2(h-1)/h
    assert "between hosts" in text


def test_explain_reads_the_tuning_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "t.json"
    limits = {"one_host": {"fold_two_ranks_bytes": 8192}}
    file.write_text(json.dumps({"ringdp_tuning": 1, "layouts": limits, "costs": {"gamma_ns_per_byte": 0.5}}))
    monkeypatch.setenv("RINGDP_TUNING", str(file))
    assert command.main(["bench", "--explain"]) == 0
    text = capsys.readouterr().out
    assert "  up to 8 KiB: fold\n" in text
    assert f"table: RINGDP_TUNING={file}" in text
    assert "constants (from the file)" in text
    assert "adding a byte 0.5 ns" in text
    monkeypatch.setenv("RINGDP_TUNING", str(tmp_path / "nowhere"))
    assert command.main(["bench", "--explain"]) == 1
    assert "cannot be read" in capsys.readouterr().err


def test_ranges_cover_every_size_as_the_core_chooses() -> None:
    for place in (HostLayout((2,), 2), HostLayout((4,), 2), HostLayout((1, 1, 1), 2), HostLayout((2, 2), 2)):
        for dtype in ("float32", "float16"):
            found = algorithm_table.ranges(place, dtype, Tuning())
            assert found[0].first == 0
            assert found[-1].last is None
            for one, following in pairwise(found):
                assert one.last is not None
                assert following.first == one.last + 1
                assert one.algorithm != following.algorithm
                assert algorithm_table.algorithm(place, dtype, one.last, Tuning()) == one.algorithm
                assert algorithm_table.algorithm(place, dtype, following.first, Tuning()) == following.algorithm


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--ranks", "0"], "--ranks must be 1 or more, not 0"),
        (["--hosts", "2"], "--hosts and --cores describe what --explain explains"),
        (["--explain", "--hosts", "3"], "--hosts must be 1 to 2"),
        (["--explain", "--cores", "0"], "--cores must be 1 or more"),
        (["--seconds", "0"], "--seconds must be above 0"),
        (["--sizes", "12"], "multiple of 8 bytes"),
    ],
)
def test_mistakes_are_explained(options: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["bench", *options]) == 2
    assert problem in capsys.readouterr().err


def test_what_argparse_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    for options, problem in (
        (["--sizes", "4x"], "'4x' is not a size"),
        (["--dtype", "int4"], "invalid choice: 'int4'"),
    ):
        with pytest.raises(SystemExit, match="2"):
            command.main(["bench", *options])
        assert problem in capsys.readouterr().err


def test_sizes_and_times_in_words() -> None:
    assert [words.parse_size(word) for word in ("4k", "1MiB", "96")] == [4096, 1 << 20, 96]
    assert [words.format_size(size) for size in (10, 4096, 25 << 20)] == ["10 B", "4 KiB", "25 MiB"]
    assert [words.format_time(t) for t in (4.56e-6, 12.3e-3, 2.0)] == ["4.56 µs", "12.3 ms", "2 s"]


def test_it_measures_ranks_that_it_starts() -> None:
    need("ringdp._C", "ringdp's extension, built with `make build`,")
    done = bench("--ranks", "3", "--sizes", "8,1m", "--seconds", "0.01", "--dtype", "int32")
    assert done.returncode == 0, done.stderr
    assert "all-reduce, int32, SUM, 3 ranks on one host; table: built in" in done.stdout
    assert re.search(r"^8 B +[\d.]+ [µm]?s .* fold$", done.stdout, re.MULTILINE), done.stdout
    row = re.search(r"^1 MiB .* ([\d.]+) +([\d.]+) +\d+ +ring$", done.stdout, re.MULTILINE)
    assert row, done.stdout
    assert float(row[2]) == pytest.approx(float(row[1]) * 4 / 3, rel=0.02)


def test_it_measures_the_ranks_of_a_launcher() -> None:
    """As a rank of a launcher it starts none; a world of one is enough to see that."""
    need("ringdp._C", "ringdp's extension, built with `make build`,")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    done = bench("--ranks", "5", "--sizes", "64", "--seconds", "0.01", **place)
    assert done.returncode == 0, done.stderr
    assert "1 rank on one host" in done.stdout
