"""The benchmark tools run, check results before timing, print what they promise and leave nothing behind.

No time measured here decides anything.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.helpers import need  # noqa: E402

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(FOLDER))  # the tools are scripts: they find each other beside themselves

import allreduce  # noqa: E402
import allreduce_rank  # noqa: E402
import ceiling  # noqa: E402
import goodput  # noqa: E402
import hosts  # noqa: E402
import measure  # noqa: E402
import memory  # noqa: E402
import models  # noqa: E402
import mpi  # noqa: E402
import plots  # noqa: E402
import ranks  # noqa: E402
import reducer  # noqa: E402
import session  # noqa: E402
import step  # noqa: E402
import tune  # noqa: E402

pytestmark = pytest.mark.nightly


def run_tool(name: str, *options: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, str(FOLDER / name), *options]
    return subprocess.run(words, capture_output=True, text=True, timeout=100, check=False)


def quick(*options: str) -> list[str]:
    return ["--rounds", "2", "--block-seconds", "0.01", *options]


@pytest.fixture
def namespaces() -> Iterator[None]:
    """Skip where hosts cannot be made, and fail a test that leaves any of its own."""
    if reason := hosts.why_not():
        pytest.skip(reason)
    try:
        with hosts.Hosts(1):
            pass
    except hosts.HostsError as error:
        pytest.skip(f"namespaces cannot be made here: {error}")
    yield
    assert mine() == []


def mine() -> list[str]:
    """What exists of hosts whose runs are gone, or belong to this process."""
    found = [path.name for path in hosts.LOCKS.glob("*") if not Path(f"/proc/{owner(path.name)}").exists()]
    return found + [path.name for path in hosts.LOCKS.glob(f"rd{os.getpid()}*")]


def owner(name: str) -> str:
    return "".join(letter for letter in name if letter.isdigit())


# --- numbers and words


@pytest.mark.parametrize(
    ("text", "size"), [("4096", 4096), ("4k", 4096), ("4KiB", 4096), ("25m", 25 << 20), ("1G", 1 << 30), (" 8 B", 8)]
)
def test_sizes_are_read_as_people_write_them(text: str, size: int) -> None:
    assert measure.parse_size(text.replace(" B", "B")) == size


@pytest.mark.parametrize("text", ["", "k", "4x", "-4", "4.5m", "mk"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        measure.parse_size(text)


def test_percentile_interpolates() -> None:
    values = [4.0, 1.0, 3.0, 2.0]
    assert measure.percentile(values, 0.0) == 1.0
    assert measure.percentile(values, 0.5) == 2.5
    assert measure.percentile(values, 1.0) == 4.0
    with pytest.raises(ValueError, match="no values"):
        measure.percentile([], 0.5)


def test_the_slowest_rank_counts() -> None:
    fast, slow = measure.Summary.of([1.0, 2.0, 3.0]), measure.Summary.of([2.0, 4.0])
    slowest = measure.Summary.slowest([fast, slow])
    assert (slowest.median_s, slowest.min_s, slowest.count) == (3.0, 2.0, 2)


def test_a_table_lines_up() -> None:
    lines = measure.table(["size", "time"], [["4 KiB", "1 s"], ["1 MiB", "12.5 ms"]]).splitlines()
    assert lines[0] == "size      time"
    assert lines[3] == "1 MiB  12.5 ms"


def test_a_busy_machine_is_said_to_be_busy() -> None:
    quiet = measure.Quiet.start()
    quiet.stop(ranks_s=0.0)
    quiet.load_before, quiet.others_share, quiet.steal_share = 0.0, 0.0, 0.0
    assert quiet.warnings() == []
    quiet.load_before, quiet.others_share, quiet.steal_share = 2.0, 0.5, 0.5
    assert len(quiet.warnings()) == 3


def test_derived_numbers_of_a_step() -> None:
    def row(mode: str, step_s: float, backward_s: float, alone_s: float | None) -> dict[str, Any]:
        alone = {"median_s": alone_s} if alone_s else None
        return {
            "model": "m",
            "mode": mode,
            "numel": 1000,
            "wire_bytes": 4000,
            "step": {"median_s": step_s},
            "backward": {"median_s": backward_s},
            "all_reduce": alone,
            "sent_bytes_per_step": [4200],
        }

    rows = [row("bare", 10.0, 6.0, None), row("ddp-gloo", 20.0, 16.0, 10.0), row("ringdp", 12.0, 8.0, 4.0)]
    bare, gloo, ours = step.add_derived(rows, session.Place(ranks=2, hosts=2))
    assert "hidden" not in bare
    assert gloo["hidden"] == 0.0
    assert ours["hidden"] == (6.0 + 4.0 - 8.0) / 4.0
    assert (ours["over_ddp_gloo"], ours["over_bare"], ours["exposed_s"]) == (0.6, 1.2, 2.0)
    assert ours["sent_over_theory"] == 1.05


@pytest.mark.parametrize("name", models.NAMES)
def test_models_are_the_same_on_every_rank_and_batches_are_not(name: str) -> None:
    ours, theirs = models.make(name, rank=0), models.make(name, rank=1)
    pairs = zip(ours.module.parameters(), theirs.module.parameters(), strict=True)
    assert all(torch.equal(mine, other) for mine, other in pairs)
    assert not torch.equal(ours.batch[0], theirs.batch[0])


# --- a wrong result is not timed


def test_a_wrong_sum_is_refused_with_its_place() -> None:
    right = torch.arange(10.0)
    allreduce_rank.check("ring", right.clone(), right, rank=1, exact=True)
    wrong = right.clone()
    wrong[7] += 1
    for exact in (True, False):
        with pytest.raises(allreduce_rank.WrongResult, match="ring gave a wrong sum on rank 1: element 7 of 10"):
            allreduce_rank.check("ring", wrong, right, rank=1, exact=exact)


@pytest.mark.parametrize(("world_size", "count"), [(1, 5), (2, 250), (3, 7), (8, 100)])
def test_the_sum_at_the_end_of_a_block_is_known(world_size: int, count: int) -> None:
    def call(x: Any) -> None:  # as if all ranks had held the same
        x.mul_(world_size)

    source = torch.tensor([1.0, -3.0, 48.0])
    x, measured = torch.empty_like(source), allreduce_rank.Measured()
    growth = allreduce_rank.timed_block(allreduce_rank.timed_calls(call), x, source, count, world_size, measured)
    assert torch.isfinite(x).all()
    allreduce_rank.check("fake", x, source * world_size * growth, rank=0, exact=False)
    assert len(measured.seconds) == count
    assert measured.calls > count


# --- processes


def test_ranks_that_fail_are_named_and_the_others_ended(tmp_path: Path) -> None:
    still_there = tmp_path / "pid"
    commands = [
        ranks.Command(["sh", "-c", f"echo $$ > {still_there}; echo waiting; exec sleep 60"], os.environ, "rank 0"),
        ranks.Command(["sh", "-c", f"while [ ! -s {still_there} ]; do :; done; echo no; exit 3"], os.environ, "rank 1"),
    ]
    with pytest.raises(ranks.RanksFailed, match=r"(?s)rank 1 ended with exit code 3.*no"):
        ranks.run_commands(commands, timeout_s=50, grace_s=0.1, echo=lambda label, line: None)
    assert not Path(f"/proc/{still_there.read_text().strip()}").exists()


def test_ranks_that_hang_are_given_up() -> None:
    command = ranks.Command(["sleep", "60"], os.environ, "rank 0")
    with pytest.raises(ranks.RanksFailed, match="not finished after 0 s: rank 0"):
        ranks.run_commands([command], timeout_s=0.2, echo=lambda label, line: None)


_BUSY = "measure.busy_processes(2)", "diagnosis._busy(2)"
_RANKS = "ranks.run_commands([ranks.Command(['sleep', '60'], {}, str(i)) for i in (0, 1)], timeout_s=60, echo=print)"
_HANG = "diagnosis_hangs.run_case('stuck', 1)"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("body", [*(f"with {busy}: time.sleep(60)" for busy in _BUSY), _RANKS, _HANG])
def test_what_a_tool_started_ends_with_it(body: str, number: signal.Signals) -> None:
    words = [sys.executable, "-c", f"import time, diagnosis, diagnosis_hangs, measure, ranks\n{body}"]
    run = subprocess.Popen(words, cwd=FOLDER)
    try:
        _until(lambda: len(_children(run.pid)) == 2)
        started = _children(run.pid)
        run.send_signal(number)
        run.wait(10)
        _until(lambda: not any(_runs(pid) for pid in started))
    finally:
        run.kill()
        run.wait()


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


# --- allreduce.py and step.py


def backends_here() -> list[str]:
    return ["gloo"] if session.why_no_ringdp() else ["ring", "gloo"]


def test_allreduce_prints_and_writes_what_it_promises(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    without = [] if "ring" in backends_here() else ["--without-ring"]
    done = run_tool("allreduce.py", *quick("--sizes", "4,4k", "--peers", "gloo,mpi", "--json", str(path), *without))
    assert done.returncode == 0, done.stderr
    for word in ("median", "p99", "algbw", "busbw", "time / ring", "load average"):
        assert word in done.stdout
    assert ("not installed" in done.stdout) == (mpi.why_not() is not None)
    result = json.loads(path.read_text())
    expected = backends_here() + ([] if mpi.why_not() else ["mpi"])
    assert [(row["size_bytes"], row["backend"]) for row in result["rows"]] == [
        (size, name) for size in (4, 4096) for name in expected
    ]
    row = result["rows"][-1]
    assert row["busbw"] == row["algbw"] == 4096 / row["time"]["median_s"]
    assert len(row["block_medians_s"]) == 2


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_the_ceiling_adds_up(ranks: int) -> None:
    """Ranks as threads, sizes on both sides of each of its limits, one call after another."""
    if reason := ceiling.why_not(ranks=ranks, hosts=0):
        pytest.skip(reason)
    with ceiling.prepared() as paths, ThreadPoolExecutor(ranks) as threads:
        ready = threading.Barrier(ranks)

        def run(rank: int) -> None:
            own = ceiling.Ceiling(Path(paths["library"]), Path(paths["memory"]), rank=rank, ranks=ranks)
            ready.wait(10)
            for count in (1, 1000, 8192, 8193, 65536, 65537, 300_001):
                x = allreduce_rank.values(rank, count)
                own.all_reduce(x)
                expected = sum(allreduce_rank.values(r, count) for r in range(ranks))
                assert isinstance(expected, torch.Tensor)
                allreduce_rank.check("ceiling", x, expected, rank=rank, exact=True)

        for each in [threads.submit(run, rank) for rank in range(ranks)]:
            each.result(timeout=60)


def test_the_ceiling_is_measured_beside_the_others(tmp_path: Path) -> None:
    if reason := ceiling.why_not(ranks=2, hosts=0):
        pytest.skip(reason)
    path = tmp_path / "out.json"
    options = ["--sizes", "4,3m", "--peers", "gloo,ceiling", "--without-ring", "--huge-pages", "--json", str(path)]
    done = run_tool("allreduce.py", *quick(*options))
    assert done.returncode == 0, done.stderr
    assert [row["backend"] for row in json.loads(path.read_text())["rows"]] == ["gloo", "ceiling"] * 2
    assert not list(Path("/dev/shm").glob("ringdp-ceiling-*"))


def test_the_core_is_timed_without_torch_beside_busy_processes(tmp_path: Path) -> None:
    if "ring" not in backends_here():
        pytest.skip("ringdp is not built")
    path = tmp_path / "out.json"
    options = ["--sizes", "4k", "--peers", "none", "--core", "--percentiles", "0,99.9", "--busy", "1"]
    done = run_tool("allreduce.py", *quick(*options, "--busy-cores", "0", "--json", str(path)))
    assert done.returncode == 0, done.stderr
    assert "beside 1 busy processes, pinned to cores [0]" in done.stdout
    assert "p99.9" in done.stdout
    rows = json.loads(path.read_text())["rows"]
    assert [row["backend"] for row in rows] == ["ring", "core"]
    for row in rows:
        assert row["percentiles_s"]["0"] == row["time"]["min_s"]
        assert row["percentiles_s"]["99.9"] >= row["time"]["median_s"]


def test_where_there_is_no_ceiling_it_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "one host only" in str(ceiling.why_not(ranks=2, hosts=2))
    assert "2 to 16 ranks" in str(ceiling.why_not(ranks=17, hosts=0))
    monkeypatch.setenv("PATH", "/nowhere")
    assert "no C++ compiler" in str(ceiling.why_not(ranks=2, hosts=0))


def test_step_prints_and_writes_what_it_promises(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    modes = ["bare", "ddp-gloo"] + (["ringdp", "ddp-ring"] if "ring" in backends_here() else [])
    options = quick("--models", "small", "--modes", ",".join(modes), "--zero-grad", "keep", "--json", str(path))
    done = run_tool("step.py", *options)
    assert done.returncode == 0, done.stderr
    for word in ("p99", "/ ddp-gloo", "/ bare", "exposed", "hidden", "load average"):
        assert word in done.stdout
    rows = json.loads(path.read_text())["rows"]
    assert [row["mode"] for row in rows] == modes
    assert all(row["numel"] == 300 * (32 * 32 + 32) for row in rows)
    for row in rows[1:]:
        assert sum(row["bucket_bytes"]) == 4 * row["numel"]


def test_reducer_prints_and_writes_what_it_promises(tmp_path: Path) -> None:
    if "ring" not in backends_here():
        pytest.skip("ringdp is not built")
    path = tmp_path / "out.json"
    options = ["--parameters", "20", "--rounds", "2", "--steps", "1", "--modes", "ddp,ddp-view,ringdp,ringdp-static"]
    done = run_tool("reducer.py", *options, "--json", str(path))
    assert done.returncode == 0, done.stderr
    for word in ("added", "quartiles", "/ ddp", "load average"):
        assert word in done.stdout
    modes = ["bare", "ddp", "ddp-view", "ringdp", "ringdp-static"]
    rows = json.loads(path.read_text())["rows"]
    assert [(row["case"], row["mode"]) for row in rows] == [(case, mode) for case in reducer.CASES for mode in modes]
    assert [len(row["step_added_quartiles_s"]) for row in rows] == [2] * len(rows)


def test_wrong_gradients_are_not_timed() -> None:
    bare = reducer.Measured(reducer.Rows(3, 2), torch.ones(3, 2))
    module = reducer.Rows(3, 2)
    other = reducer.Measured(module, torch.ones(3, 2))
    reducer.check("same", other, bare)
    module.rows[2].register_hook(lambda gradient: gradient * 2)
    with pytest.raises(reducer.WrongResult, match="ddp: the gradient of parameter 2 is not the bare module's"):
        reducer.check("ddp", other, bare)


def test_the_wrappers_cost_is_compared_with_ddp_of_the_same_settings() -> None:
    added = {"bare": 0.0, "ddp": 4.0, "ddp-view": 3.0, "ddp-static": 8.0, "ringdp": 1.5, "ringdp-strict": 0.75}
    added |= {"ringdp-static": 2.0, "ringdp-unused": 1.0}
    rows = reducer.add_derived([{"case": "alone", "mode": mode, "step_added_s": s} for mode, s in added.items()])
    shares = {row["mode"]: row["over_ddp"] for row in rows if "over_ddp" in row}
    assert shares == {"ringdp": 0.5, "ringdp-strict": 0.25, "ringdp-static": 0.25}


def test_memory_prints_and_writes_what_it_promises(tmp_path: Path) -> None:
    if "ring" not in backends_here():
        pytest.skip("ringdp is not built")
    path = tmp_path / "out.json"
    options = ["--models", "small", "--repeats", "1", "--modes", "ringdp", "--json", str(path)]
    done = run_tool("memory.py", *options)
    assert done.returncode == 0, done.stderr
    assert "resident / ddp-ring-view" in done.stdout
    (row,) = json.loads(path.read_text())["rows"]
    assert row["tensors"] >= 4 * row["numel"]  # its gradients at the least


def test_memory_is_compared_with_ddp_where_that_was_measured() -> None:
    def row(mode: str, model: str, amount: int) -> dict[str, Any]:
        return {"model": model, "mode": mode} | dict.fromkeys(memory.COUNTS, amount)

    ours, _, alone = memory.add_derived([row("ringdp", "a", 3), row(memory.PEER, "a", 4), row("ringdp", "b", 3)])
    assert ours["resident_over_ddp"] == ours["tensors_over_ddp"] == 0.75
    assert "resident_over_ddp" not in alone


def test_the_peak_of_tensors_is_what_they_take_at_once() -> None:
    def action() -> None:
        first = torch.zeros(1 << 18)
        del first
        kept = [torch.zeros(1 << 18), torch.zeros(1 << 19)]
        del kept

    assert memory.peak_of_tensors(action) == 4 * ((1 << 18) + (1 << 19))


@pytest.mark.skipif(session.why_no_ringdp() is None, reason="ringdp is built here")
@pytest.mark.parametrize("tool", ["allreduce.py", "step.py", "reducer.py", "memory.py"])
def test_without_ringdp_the_tools_say_so(tool: str) -> None:
    done = run_tool(tool)
    assert done.returncode == 2
    assert "make build" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("parse", "options"),
    [
        (allreduce.parse, ["--sizes", "4q"]),
        (allreduce.parse, ["--sizes", "6"]),
        (allreduce.parse, ["--peers", "nccl"]),
        (allreduce.parse, ["--ranks", "3", "--hosts", "2"]),
        (allreduce.parse, ["--ranks-per-host", "2"]),
        (allreduce.parse, ["--ranks", "4", "--hosts", "2", "--ranks-per-host", "2"]),
        (allreduce.parse, ["--rounds", "0"]),
        (allreduce.parse, ["--busy", "-1"]),
        (allreduce.parse, ["--percentiles", "101"]),
        (step.parse, ["--modes", "horovod"]),
        (tune.parse, ["--ranks", "1"]),
        (tune.parse, ["--ranks", "3", "--hosts", "2"]),
        (plots.parse, ["pie"]),
        (step.parse, ["--models", "bert"]),
        (reducer.parse, ["--modes", "ddp,horovod"]),
        (reducer.parse, ["--cases", "crowd"]),
        (reducer.parse, ["--parameters", "0"]),
        (memory.parse, ["--models", "bert"]),
        (memory.parse, ["--repeats", "0"]),
        (hosts.parse, ["run", "--hosts", "2"]),
    ],
)
def test_what_makes_no_sense_is_refused(
    parse: Callable[[list[str]], Any], options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(options)
    assert ended.value.code == 2
    assert "error:" in capsys.readouterr().err


def test_strangers_at_a_running_job_are_all_refused() -> None:
    done = run_tool("strangers.py", "--size", "4k", "--blocks", "1", "--rate", "200")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"under [1-9]\d* attempts .*, ratio \d", done.stdout)


# --- tune.py and plots.py


def test_the_limit_is_where_going_over_costs_least() -> None:
    assert tune.best_limit({"1024": [1.0, 2.0], "2048": [2.0, 2.5], "4096": [4.0, 3.0]}) == 2048
    assert tune.best_limit({"1024": [1.0, 2.0], "2048": [2.6, 2.5], "4096": [3.0, 4.0]}) == 4096  # one odd value
    assert tune.best_limit({"1024": [2.0, 1.0], "2048": [2.0, 1.0]}) == 0


def tuned(hosts: list[str], limits: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    costs = {"message_s": 2e-6, "large_s": 2 * 2e-6 + 3.5, "add_s_per_byte": 1e-6}
    return {"hosts": hosts, "limits": limits, "costs": costs, "large_bytes": 1_000_000}


def test_the_limit_of_a_large_group_is_that_of_its_tree() -> None:
    """The table takes a tree up to n/64 of the limit."""
    many = tuned(["a"] * 40, {"fold_sent_bytes": {"65536": [1.0, 2.0]}})
    limit = tune.limits_of(many)["fold_sent_bytes"]
    assert limit // 64 * 40 >= 65536 > (limit // 64 - 1) * 40


def test_the_file_keeps_what_was_not_measured() -> None:
    before = {"layouts": {"one_host": {"fold_sent_bytes": 5}, "several_ranks_per_host": {}}, "costs": {"x": 1.0}}
    two = tuned(["a", "a"], {"fold_two_ranks_bytes": {"4096": [1.0, 2.0]}})
    three = tuned(["a", "b", "c"], {"fold_sent_bytes": {"4096": [1.0, 2.0]}})
    after = tune.merged(before, [two, three], "here")
    assert after["layouts"] == {
        "one_host": {"fold_sent_bytes": 5, "fold_two_ranks_bytes": 4096},
        "one_rank_per_host": {"fold_sent_bytes": 8192},
        "several_ranks_per_host": {},
    }
    # 3.5 s for 1 MB sent and half of it added at 1 µs a byte leave 3 µs a byte.
    costs = {"x": 1.0, "alpha_local_us": 2.0, "beta_local_ns_per_byte": 3000.0, "gamma_ns_per_byte": 1000.0}
    assert after["costs"] == costs


def test_tune_writes_a_file_that_ringdp_reads(tmp_path: Path) -> None:
    if "ring" not in backends_here():
        pytest.skip("ringdp is not built")
    from ringdp.config import tuning

    path = tmp_path / "tuning.json"
    options = ["--ranks", "2,3", "--sizes", "4k,16k", "--rounds", "1", "--block-seconds", "0.005"]
    done = run_tool("tune.py", *options, "--output", str(path))
    assert done.returncode == 0, done.stderr
    assert f"written to {path}" in done.stderr
    found = tuning.read(str(path))
    assert set(found.limits) == {f"one_host.{name}" for name in tuning.MEASURED_LIMITS}
    assert set(found.limits.values()) <= {0, 4096, 8192, 16384, 32768}
    assert set(found.costs) == {"alpha_local_us", "beta_local_ns_per_byte", "gamma_ns_per_byte"}
    path.write_text('{"ringdp_tuning": 2}')
    assert tune.main(["--output", str(path)]) == 2  # not overwritten


def test_plots_are_drawn_from_what_was_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    need("matplotlib")
    need("ringdp._C", "ringdp's extension, built with `make build`,")
    assert plots.main(["busbw", "--draw", "--folder", str(tmp_path)]) == 2
    assert plots.main(["model", "--folder", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("nothing was measured yet") == 2

    def result(ranks: int, hosts: int) -> dict[str, Any]:
        place = session.Place(ranks=ranks, hosts=hosts)
        names = ["ring", "gloo", "ceiling"]
        rows: list[dict[str, Any]] = [
            {"size_bytes": size, "backend": name, "busbw": 1e9, "time": {"median_s": size / 1e9}}
            for size in (4096, 1 << 20)
            for name in names
        ]
        words = {"ranks": ranks, "hosts": hosts, "words": str(place)}
        return {"place": words, "machine": {"cores": 2}, "rows": rows, "goodput_bytes_per_s": None}

    (tmp_path / "busbw.json").write_text(json.dumps([result(2, 0), result(4, 0)]))
    (tmp_path / "hosts.json").write_text(json.dumps([result(2, 2), result(4, 4)]))
    for name in plots.PLOTS:
        assert plots.main([name, "--draw", "--folder", str(tmp_path)]) == 0
        picture = (tmp_path / f"{name}.svg").read_text()
        assert plots.main([name, "--draw", "--folder", str(tmp_path)]) == 0
        assert (tmp_path / f"{name}.svg").read_text() == picture  # the same file again


# --- hosts.py


def test_without_root_or_iproute2_hosts_says_what_is_needed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert hosts.main(["up"]) == 2
    assert "needs root" in capsys.readouterr().err
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "/nowhere")
    assert hosts.main(["run", "--", "true"]) == 2
    assert "install the package iproute2" in capsys.readouterr().err


@pytest.mark.usefixtures("namespaces")
def test_hosts_run_starts_each_rank_in_its_place() -> None:
    script = 'echo "$RANK/$WORLD_SIZE $LOCAL_RANK $GROUP_RANK $MASTER_ADDR $GLOO_SOCKET_IFNAME $(hostname)"'
    done = run_tool("hosts.py", "run", "--hosts", "2", "--per-host", "2", "--", "sh", "-c", script)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "[0] 0/4 0 0 10.77.0.1 eth0 h0",
        "[1] 1/4 1 0 10.77.0.1 eth0 h0",
        "[2] 2/4 0 1 10.77.0.1 eth0 h1",
        "[3] 3/4 1 1 10.77.0.1 eth0 h1",
    ]
    identity = run_tool("hosts.py", "run", "--hosts", "2", "--", "sh", "-c", "echo $RINGDP_HOST_ID")
    assert len({line.split()[1] for line in identity.stdout.splitlines()}) == 2
    assert run_tool("hosts.py", "run", "--", "false").returncode == 1


@pytest.mark.usefixtures("namespaces")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_hosts_are_gone_after_ctrl_c(number: signal.Signals) -> None:
    run = _start_sleepers()
    names = [path.name for path in hosts.LOCKS.glob(f"rd{run.pid}*")]
    assert len(names) == 1
    run.send_signal(number)
    run.communicate(timeout=60)  # tens of `ip` commands, each of which waits for its turn beside a compiler
    assert run.returncode == 128 + number
    _assert_gone(names[0])


@pytest.mark.usefixtures("namespaces")
def test_what_a_killed_run_left_is_cleaned_up_by_the_next() -> None:
    run = _start_sleepers()
    names = [path.name for path in hosts.LOCKS.glob(f"rd{run.pid}*")]
    run.kill()
    run.wait(timeout=20)
    assert run.stdout is not None
    run.stdout.close()
    assert hosts._namespaces(names[0])
    with hosts.Hosts(1):
        _assert_gone(names[0])


def _start_sleepers() -> subprocess.Popen[str]:
    """hosts.py with a rank on each of two hosts that has said that it runs."""
    words = [sys.executable, str(FOLDER / "hosts.py"), "run", "--", "sh", "-c", "echo up; exec sleep 90"]
    run = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    assert sorted(run.stdout.readline() for _ in range(2)) == ["[0] up\n", "[1] up\n"]
    return run


def _assert_gone(name: str) -> None:
    assert hosts._namespaces(name) == []
    assert not list(hosts.LOCKS.glob(f"{name}*"))
    assert not list(hosts.NETNS_ETC.glob(f"{name}*"))
    assert not [device for device in os.listdir("/sys/class/net") if device.startswith(name)]


@pytest.mark.usefixtures("namespaces")
def test_named_hosts_stay_until_they_are_removed(capsys: pytest.CaptureFixture[str]) -> None:
    name = f"t{os.getpid()}"
    try:
        assert hosts.main(["up", "--hosts", "2", "--name", name, "--rate", "none"]) == 0
        assert hosts.main(["up", "--name", name]) == 2
        assert "exist already" in capsys.readouterr().err
        hosts.clean()
        assert len(hosts._namespaces(name)) == 2
        link = ["ip", "-n", f"{name}h1", "-br", "link", "show", "eth0"]
        assert hosts.main(["cut", "--name", name, "--host", "1"]) == 0
        assert "DOWN" in subprocess.run(link, capture_output=True, text=True, check=True).stdout
        assert hosts.main(["heal", "--name", name, "--host", "1"]) == 0
        assert "DOWN" not in subprocess.run(link, capture_output=True, text=True, check=True).stdout
        assert hosts.main(["cut", "--name", name, "--host", "2"]) == 2
    finally:
        assert hosts.main(["down", "--name", name]) == 0
    _assert_gone(name)


@pytest.mark.usefixtures("namespaces")
def test_allreduce_between_hosts_counts_bytes(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    without = [] if "ring" in backends_here() else ["--without-ring"]
    options = quick("--hosts", "2", "--sizes", "1m", "--peers", "gloo,mpi", "--iperf-seconds", "0", *without)
    done = run_tool("allreduce.py", *options, "--json", str(path))
    assert done.returncode == 0, done.stderr
    assert "sent / theory" in done.stdout
    rows = json.loads(path.read_text())["rows"]
    assert [row["backend"] for row in rows] == backends_here() + ([] if mpi.why_not() else ["mpi"])
    for row in rows:
        assert len(row["sent_bytes_per_call"]) == 2
        assert 1.0 <= row["sent_over_theory"] < 1.2


@pytest.mark.usefixtures("namespaces")
def test_iperf3_says_what_the_line_carries(monkeypatch: pytest.MonkeyPatch) -> None:
    with hosts.Hosts(2, rate="200mbit") as two:
        monkeypatch.setattr(shutil, "which", lambda tool: None)
        assert goodput.measure(two, seconds=1) is None
        monkeypatch.undo()
        line = goodput.measure(two, seconds=1)
        if line is None:
            pytest.skip("iperf3 is not installed")
        assert line.both_ways > 0
        assert 0 < line.one_way < 25e6 * 1.1  # 200 Mbit/s are 25 MB/s
