"""What the benchmarks share: sizes, statistics, ranks, hosts; and two of them run, and check before they time.

No time measured here decides anything.
"""

from __future__ import annotations

import json
import os
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

from benchmarks.collectives import allreduce, ceiling, tune  # noqa: E402
from benchmarks.lib import hosts, measure, models, mpi, plots, ranks, session  # noqa: E402
from benchmarks.training import memory, reducer, step  # noqa: E402
from ringdp.tools.bench import collectives, measuring  # noqa: E402
from tests.helpers import need  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.nightly


def run_tool(name: str, *options: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "benchmarks", name, *options]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)


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


def test_a_busy_machine_is_said_to_be_busy() -> None:
    quiet = measure.Quiet.start()
    quiet.stop(ranks_s=0.0)
    quiet.load_before, quiet.others_share, quiet.steal_share = 0.0, 0.0, 0.0
    assert quiet.warnings() == []
    quiet.load_before, quiet.others_share, quiet.steal_share = 2.0, 0.5, 0.5
    assert len(quiet.warnings()) == 3


@pytest.mark.parametrize("name", models.NAMES)
def test_models_are_the_same_on_every_rank_and_batches_are_not(name: str) -> None:
    ours, theirs = models.make(name, rank=0), models.make(name, rank=1)
    pairs = zip(ours.module.parameters(), theirs.module.parameters(), strict=True)
    assert all(torch.equal(mine, other) for mine, other in pairs)
    assert not torch.equal(ours.batch[0], theirs.batch[0])


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


_RANKS = "ranks.run_commands([ranks.Command(['sleep', '60'], {}, str(i)) for i in (0, 1)], timeout_s=60, echo=print)"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("body", ["with measure.busy_processes(2): time.sleep(60)", _RANKS])
def test_what_a_tool_started_ends_with_it(body: str, number: signal.Signals) -> None:
    words = [sys.executable, "-c", f"import time\nfrom benchmarks.lib import measure, ranks\n{body}"]
    run = subprocess.Popen(words, cwd=ROOT)
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


# --- all-reduces and steps


@pytest.mark.parametrize("where", [("--ranks", "2"), ("--hosts", "2")])
@pytest.mark.usefixtures("namespaces")
def test_allreduce_prints_and_writes_what_it_promises(tmp_path: Path, where: tuple[str, str]) -> None:
    path, several = tmp_path / "out.json", where[0] == "--hosts"
    peers = "gloo,mpi,core" if several else "gloo,mpi,ceiling,core"
    options = [*where, "--sizes", "4k,64k", "--peers", peers, "--compressed", "int8", "--iperf-seconds", "0"]
    done = run_tool("allreduce", *quick(*options, "--json", str(path)))
    assert done.returncode == 0, done.stderr
    for word in ("median", "p99", "algbw", "busbw", "time / ring", "load average"):
        assert word in done.stdout
    assert ("not installed" in done.stdout) == (mpi.why_not() is not None)
    result = json.loads(path.read_text())
    names = ["ring", "ring+int8", *(name for name in peers.split(",") if name not in result["missing"])]
    assert [row["backend"] for row in result["rows"]] == names * 2
    for row in result["rows"]:
        assert row["busbw"] == row["algbw"] == row["size_bytes"] / row["time"]["median_s"]
        assert len(row["sent_bytes_per_call"]) == (2 if several else 0)
        assert (row["error"] is not None) == (row["backend"] == "ring+int8")
    if several:
        assert 1.0 <= result["rows"][len(names)]["sent_over_theory"] < 1.3


def test_a_wrong_sum_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the engine, by a group of one rank."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
    try:
        place = collectives.Place(0, 1, torch.float32, torch.device("cpu"))
        made = [allreduce.InPlace("right", lambda x: x), allreduce.InPlace("wrong", lambda x: x.add_(1))]
        ((right, wrong),) = measuring.measure("all_reduce", [64], made, place, measuring.Plan(rounds=1, seconds=0.01))
        assert (right.wrong, wrong.wrong) == (0, 16)
        assert right.time_s is not None
        assert wrong.time_s is None
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("ranks", [2, 3, 8])
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
                x = torch.arange(count, dtype=torch.float32).remainder(97) + rank
                wanted = (x - rank) * ranks + sum(range(ranks))
                own.all_reduce(x)
                assert torch.equal(x, wanted)

        for each in [threads.submit(run, rank) for rank in range(ranks)]:
            each.result(timeout=60)


def test_step_prints_and_writes_what_it_promises(tmp_path: Path) -> None:
    path, modes = tmp_path / "out.json", ["bare", "ddp-gloo", "ringdp", "ringdp-topk-dgc", "ddp-ring-powersgd"]
    options = quick("--models", "small", "--modes", ",".join(modes), "--zero-grad", "keep", "--json", str(path))
    done = run_tool("step", *options)
    assert done.returncode == 0, done.stderr
    for word in ("p99", "/ ringdp", "exposed", "hidden", "load average"):
        assert word in done.stdout
    rows = json.loads(path.read_text())["rows"]
    assert [row["mode"] for row in rows] == modes
    for row in rows[1:]:
        assert sum(row["bucket_bytes"]) == 4 * row["numel"] == 1200 * (32 * 32 + 32)


def test_derived_numbers_of_a_step() -> None:
    def row(mode: str, step_s: float, backward_s: float, alone_s: float | None) -> dict[str, Any]:
        row = {"model": "m", "mode": mode, "wire_bytes": 4000, "sent_bytes_per_step": [4200]}
        row |= {"step": {"median_s": step_s}, "backward": {"median_s": backward_s}}
        return row | {"all_reduce": {"median_s": alone_s} if alone_s else None}

    rows = [row("bare", 10.0, 6.0, None), row("ddp-gloo", 20.0, 16.0, 10.0), row("ringdp", 12.0, 8.0, 4.0)]
    bare, gloo, ours = step.add_derived(rows, session.Place(ranks=2, hosts=2))
    assert "hidden" not in bare
    assert gloo["hidden"] == 0.0
    assert (ours["hidden"], ours["exposed_s"], ours["sent_over_theory"]) == ((6.0 + 4.0 - 8.0) / 4.0, 2.0, 1.05)


def test_wrong_gradients_are_not_timed() -> None:
    bare = reducer.Measured(reducer.Rows(3, 2), torch.ones(3, 2))
    module = reducer.Rows(3, 2)
    other = reducer.Measured(module, torch.ones(3, 2))
    reducer.compare("same", other, bare)
    module.rows[2].register_hook(lambda gradient: gradient * 2)
    with pytest.raises(ranks.Failed, match="ddp: the gradient of parameter 2 is not the bare module's"):
        reducer.compare("ddp", other, bare)


def test_where_there_is_no_ceiling_it_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "one host only" in str(ceiling.why_not(ranks=2, hosts=2))
    assert "2 to 16 ranks" in str(ceiling.why_not(ranks=17, hosts=0))
    monkeypatch.setenv("PATH", "/nowhere")
    assert "no C++ compiler" in str(ceiling.why_not(ranks=2, hosts=0))


def test_the_peak_of_tensors_is_what_they_take_at_once() -> None:
    def action() -> None:
        first = torch.zeros(1 << 18)
        del first
        kept = [torch.zeros(1 << 18), torch.zeros(1 << 19)]
        del kept

    assert memory.peak_of_tensors(action) == 4 * ((1 << 18) + (1 << 19))


# --- tune and plots


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
    from ringdp.config import tuning

    path = tmp_path / "tuning.json"
    options = ["--sizes", "4k,16k", "--rounds", "1", "--block-seconds", "0.005", "--output", str(path)]
    for count in ("2", "3"):
        done = run_tool("tune", *options, "--ranks", count)
        assert done.returncode == 0, done.stderr
        assert f"written to {path}" in done.stdout
    found = tuning.read(str(path))
    assert set(found.limits) == {f"one_host.{name}" for name in tuning.MEASURED_LIMITS}
    assert set(found.limits.values()) <= {0, 4096, 8192, 16384, 32768}
    assert set(found.costs) == {"alpha_local_us", "beta_local_ns_per_byte", "gamma_ns_per_byte"}
    path.write_text('{"ringdp_tuning": 2}')
    assert run_tool("tune", "--output", str(path)).returncode == 2  # not overwritten


def test_plots_are_drawn_from_what_was_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    need("matplotlib")

    def draw(name: str) -> int:
        return session.main(plots, "plots", [name, "--draw", "--folder", str(tmp_path)])

    assert [draw("busbw"), draw("model")] == [2, 2]
    assert capsys.readouterr().err.count("nothing was measured yet") == 2

    def result(ranks: int, hosts: int) -> dict[str, Any]:
        rows: list[dict[str, Any]] = [
            {"size_bytes": size, "backend": name, "busbw": 1e9, "time": {"median_s": size / 1e9}}
            for size in (4096, 1 << 20)
            for name in ("ring", "gloo", "ceiling")
        ]
        place = {"ranks": ranks, "hosts": hosts, "words": str(session.Place(ranks=ranks, hosts=hosts))}
        return {"place": place, "machine": {"cores": 2}, "rows": rows, "goodput_bytes_per_s": None}

    (tmp_path / "busbw.json").write_text(json.dumps([result(2, 0), result(4, 0)]))
    (tmp_path / "hosts.json").write_text(json.dumps([result(2, 2), result(4, 4)]))
    for name in ("busbw", "hosts", "model"):
        assert draw(name) == 0
        picture = (tmp_path / f"{name}.svg").read_text()
        assert draw(name) == 0
        assert (tmp_path / f"{name}.svg").read_text() == picture  # the same file again


# --- hosts


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
    done = run_tool("hosts", "run", "--hosts", "2", "--per-host", "2", "--", "sh", "-c", script)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "[0] 0/4 0 0 10.77.0.1 eth0 h0",
        "[1] 1/4 1 0 10.77.0.1 eth0 h0",
        "[2] 2/4 0 1 10.77.0.1 eth0 h1",
        "[3] 3/4 1 1 10.77.0.1 eth0 h1",
    ]
    identity = run_tool("hosts", "run", "--hosts", "2", "--", "sh", "-c", "echo $RINGDP_HOST_ID")
    assert len({line.split()[1] for line in identity.stdout.splitlines()}) == 2
    assert run_tool("hosts", "run", "--", "false").returncode == 1


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
    words = [sys.executable, "-m", "benchmarks", "hosts", "run", "--", "sh", "-c", "echo up; exec sleep 90"]
    run = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True)
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
