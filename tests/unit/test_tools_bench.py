"""`python -m ringdp bench`: what it explains and measures, and what it says to mistakes."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from ringdp import __main__ as command  # noqa: E402
from ringdp import text  # noqa: E402
from ringdp.config.tuning import Tuning  # noqa: E402
from ringdp.costs import HostLayout  # noqa: E402
from ringdp.errors import InvalidArgumentError, SystemResourceError  # noqa: E402
from ringdp.tools import algorithm_table  # noqa: E402
from ringdp.tools.bench import collectives, measuring  # noqa: E402
from ringdp.tools.bench import command as bench_command  # noqa: E402
from tests.helpers import free_port, need  # noqa: E402

need("ringdp._C", "ringdp's extension, built with `make build`,")

# Two ranks and gloo's take minutes where compilers have the cores.
pytestmark = [pytest.mark.ci, pytest.mark.timeout(300)]
ROOT = Path(__file__).resolve().parents[2]
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
        timeout=280,
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
        (["--ranks", "0"], "-n must be 1 or more, not 0"),
        (["--hosts", "2"], "--hosts and --cores describe what --explain explains"),
        (["-H", "a", "--hostfile", "b"], "-H and --hostfile both name hosts"),
        (["--begin", "1k"], "--begin and --end go together"),
        (["-b", "1k", "-e", "1m", "-f", "1"], "sizes must grow"),
        (["-b", "8", "-e", "1g", "-i", "8"], "more than 64 sizes"),
        (["-b", "8", "-e", "1m", "--sizes", "4k"], "--sizes names all sizes"),
        (["--codec", "int8", "--dtype", "float16"], "--codec measures the all-reduce of float32"),
        (["--op", "avg", "--dtype", "int32"], "an average of whole numbers"),
        (["--backend", "nccl", "--device", "cpu"], "nccl moves CUDA tensors only"),
        (["--rounds", "0"], "--rounds must be 1 or more"),
        (["--explain", "--hosts", "3"], "--hosts must be 1 to 2"),
        (["--explain", "--cores", "0"], "--cores must be 1 or more"),
        (["--seconds", "0"], "--seconds must be above 0"),
        (["--seconds", "nan"], "--seconds must be above 0, and finite, not nan"),
        (["--seconds", "inf"], "--seconds must be above 0, and finite, not inf"),
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
        (["--collective", "all_sum"], "'all_sum' is not one of all, all_reduce,"),
        (["--backend", "ring,mpi"], "'mpi' is not one of ring, gloo, nccl"),
        (["--collective", ","], "',' is not one of all, all_reduce,"),
    ):
        with pytest.raises(SystemExit, match="2"):
            command.main(["bench", *options])
        assert problem in capsys.readouterr().err


def test_memory_that_is_not_there_is_said_with_rank_and_size() -> None:
    place = collectives.Place(2, 3, torch.float32, torch.device("cpu"))
    with pytest.raises(SystemResourceError, match="rank 2 cannot get 9000 GiB of memory"):
        place.empty(9000 << 28)


def test_sizes_and_times_in_words() -> None:
    assert [text.parse_size(word) for word in ("4k", "1MiB", "96")] == [4096, 1 << 20, 96]
    assert [text.format_size(size) for size in (10, 4096, 25 << 20)] == ["10 B", "4 KiB", "25 MiB"]
    assert [text.format_time(t) for t in (4.56e-6, 12.3e-3, 2.0)] == ["4.56 µs", "12.3 ms", "2 s"]


def test_sizes_step_as_nccl_tests_do() -> None:
    def sizes(*words: str) -> list[int]:
        parser = argparse.ArgumentParser()
        bench_command.add_parsers(parser.add_subparsers())
        return bench_command.sizes_of(parser.parse_args(["bench", *words]))

    assert sizes("-b", "1k", "-e", "8k") == [1024, 2048, 4096, 8192]
    assert sizes("-b", "1k", "-e", "64k", "-f", "8") == [1024, 8192, 65536]
    assert sizes("-b", "1k", "-e", "3k", "-i", "1k") == [1024, 2048, 3072]
    assert sizes("-b", "8", "-e", "40", "-f", "1.1") == [8, 16, 24, 32, 40]  # always multiples of 8, always larger
    assert sizes() == [4096, 65536, 1 << 20, 4 << 20, 25 << 20]


def test_it_measures_ranks_that_it_starts(tmp_path: Path) -> None:
    need("ringdp._C", "ringdp's extension, built with `make build`,")
    file = tmp_path / "out.json"
    done = bench("--ranks", "3", "--sizes", "8,1m", "--seconds", "0.01", "--dtype", "int32", "--json", str(file))
    assert done.returncode == 0, done.stderr
    assert "all-reduce, int32, SUM, 3 ranks on one host; table: built in" in done.stdout
    assert re.search(r"^8 B +2 +int32 +sum +-1 +[\d.]+ [µm]?s .* 0 +fold$", done.stdout, re.MULTILINE), done.stdout
    rows = json.loads(file.read_text())["rows"]
    assert [row["size_bytes"] for row in rows] == [8, 1 << 20]
    for row in rows:
        assert row["wrong"] == 0
        assert row["busbw"] == pytest.approx(row["algbw"] * 4 / 3)
        assert row["algbw"] == pytest.approx(row["size_bytes"] / row["time_s"])


@pytest.mark.slow
def test_all_collectives_beside_gloo_and_compressors_without_numpy(tmp_path: Path) -> None:
    need("ringdp._C", "ringdp's extension, built with `make build`,")
    (tmp_path / "numpy.py").write_text("raise ModuleNotFoundError('no numpy here')")
    words = ["-n", "2", "--collective", "all", "--backend", "ring,gloo", "--codec", "int8,topk", "--sizes", "24,64k"]
    done = bench(
        *words,
        "--iters",
        "2",
        "--rounds",
        "1",
        "--warmup",
        "0",
        "--check",
        "--json",
        "-",
        PYTHONPATH=f"{tmp_path}:{ROOT}",
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert {row["collective"] for row in rows} == set(bench_command.NAMES)
    exact = [row for row in rows if "+" not in row["contender"]]
    assert len(exact) == 2 * (2 * 9 + 1)  # a barrier has one size
    for row in exact:
        assert row["wrong"] == 0
        assert row["time_s"] > 0
    compressed = {
        row["contender"]: row for row in rows if "+" in row["contender"] and row["collective"] == "all_reduce"
    }
    assert set(compressed) == {"ring+int8", "ring+topk"}
    assert compressed["ring+int8"]["error"] < 0.02
    assert 3 < compressed["ring+int8"]["ratio"] < 4.2
    assert 0.5 < compressed["ring+topk"]["error"] < 1
    assert not [row for row in rows if "+" in row["contender"] and row["collective"] != "all_reduce"]


def test_a_wrong_result_is_not_timed_and_ends_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    """A backend that adds one to the last element: only the check can see that."""
    need("ringdp._C", "ringdp's extension, built with `make build`,")
    import ringdp
    from ringdp.tools.bench import contenders, output

    class Broken(contenders.Plain):
        def work(self, collective: Any, size_bytes: int, place: Any) -> Any:
            made = super().work(collective, size_bytes, place)
            right = made.task.call

            def wrong(group: Any) -> None:
                right(group)
                made.task.expected[0][0][-1] += 1

            made.task.call = wrong
            return made

    ringdp.init()
    try:
        world = torch.distributed.group.WORLD
        made = [contenders.Plain("ring", world), Broken("broken", world)]
        place = collectives.Place(0, 1, torch.float32, torch.device("cpu"))
        plan = measuring.Plan(rounds=2, warm_up=1, calls=2)
        [rows] = measuring.measure("all_reduce", [1024], made, place, plan)
    finally:
        ringdp.shutdown()
    good, bad = rows
    assert (good.wrong, bad.wrong) == (0, 1)
    assert good.time_s
    assert bad.time_s is None
    assert "–" in output.text(rows, {})
    assert output.remarks(rows) == [
        "WRONG: all_reduce of 1 KiB float32 by broken: 1 elements are not as they have to be; it was not timed"
    ]


@pytest.mark.parametrize("name", bench_command.NAMES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64"])
def test_a_result_that_never_came_is_wrong(name: str, dtype: str) -> None:
    """Each collective's check sees a call that does nothing, on every rank that has to get something."""
    for rank in range(3):
        place = collectives.Place(rank, 3, getattr(torch, dtype), torch.device("cpu"))
        task = collectives.COLLECTIVES[name].task(4096, place)
        task.fill()
        got = sum(tensor.numel() for tensor, _ in task.expected)
        if name == "broadcast" and rank == place.root:
            assert task.wrong() == 0  # it has what all others must get
        elif got:
            assert task.wrong() > got / 2


def test_reductions_are_what_torch_computes() -> None:
    for ranks in (1, 2, 3, 7, 80):
        for operation in collectives.OPERATIONS:
            place = collectives.Place(0, ranks, torch.float64, torch.device("cpu"), operation)
            inputs = torch.stack([place.pattern(rank, 5, 20) for rank in range(ranks)])
            right = {"sum": inputs.sum(0), "avg": inputs.mean(0), "max": inputs.amax(0), "min": inputs.amin(0)}
            assert torch.allclose(place.reduced(5, 20), right[operation]), (ranks, operation)


def test_a_file_that_cannot_be_written_is_an_error_in_words(tmp_path: Path) -> None:
    args = argparse.Namespace(json=str(tmp_path / "no" / "out.json"))
    with pytest.raises(InvalidArgumentError, match=r"cannot be written to \S+out\.json: .*No such file"):
        bench_command._write(args, HostLayout((2,), 2), [])


def test_nccl_without_a_gpu_is_a_sentence(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    need("ringdp._C", "ringdp's extension, built with `make build`,")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }.items():
        monkeypatch.setenv(name, value)
    assert command.main(["bench", "--backend", "ring,nccl"]) == 2
    assert "rank 0: nccl needs a GPU, and torch sees none" in capsys.readouterr().err


def test_it_measures_the_ranks_of_a_launcher() -> None:
    """As a rank of a launcher it starts none; a world of one is enough to see that."""
    need("ringdp._C", "ringdp's extension, built with `make build`,")
    place = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    done = bench("--ranks", "5", "--sizes", "64", "--seconds", "0.01", **place)
    assert done.returncode == 0, done.stderr
    assert "1 rank on one host" in done.stdout


def test_it_starts_ranks_on_hosts() -> None:
    """By ringrun -H; this host alone needs no ssh."""
    need("ringdp._C", "ringdp's extension, built with `make build`,")
    done = bench("-H", "localhost:2", "--sizes", "64", "--seconds", "0.01")
    assert done.returncode == 0, done.stderr
    assert "2 ranks on one host" in done.stdout
