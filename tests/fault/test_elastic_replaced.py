"""Launchers of elastic jobs: they replace ranks that die, and start ranks that join from elsewhere."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ringdp.launcher import joining
from tests.fault.launch_jobs import Job, script, wait_until
from tests.helpers import free_port
from tests.train.harness import ring_is_built

pytestmark = pytest.mark.skipif(not ring_is_built(), reason="ringdp is not built")

TRAIN = """
    import os, signal, sys, time
    import torch
    import ringdp

    ringdp.init(device="cpu")
    first = "RINGDP_JOIN" not in os.environ
    torch.manual_seed(1)
    model = ringdp.RingDP(torch.nn.Linear(10, 1), weight="samples")
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    job = ringdp.elastic.Job(model, optimizer)
    data = torch.utils.data.TensorDataset(torch.randn(240, 10), torch.randn(240, 1))
    loader = job.loader(data, global_batch=12)
    for epoch in job.epochs(1000):
        for x, y in loader:
            if first and ringdp.rank() == 1 and job.step == 3 and "kill" in sys.argv:
                os.kill(os.getpid(), signal.SIGKILL)
            if first and ringdp.rank() == 1 and job.step == 3 and "raise" in sys.argv:
                raise ValueError("a bad label")
            if not first and "again" in sys.argv:
                os.kill(os.getpid(), signal.SIGKILL)
            (model(x) - y).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.01)
        done = ringdp.metrics.mean(float(not first or (job.step > 200 and "again" in sys.argv)))
        if done > 0:
            job.close()
            break
    print(f"rank {ringdp.rank()} of {ringdp.world_size()}: {float(model.module.weight.sum()).hex()}", flush=True)
"""


def ends(job: Job) -> set[str]:
    return set(re.findall(r"rank \d of 3: (-?0x[0-9a-f.]+p[-+]\d+)", job.out))


def secret_in(folder: Path, pair: str = "ab") -> Path:
    (path := folder / "secret").write_text(pair * 32)
    path.chmod(0o600)
    return path


def until_finish(folder: Path) -> str:
    """TRAIN, until there is a file "finish"."""
    return re.sub(r"float\(not first .*\)$", f"float(os.path.exists('{folder}/finish')))", TRAIN, flags=re.MULTILINE)


def run(jobs: list[Job], folder: Path, *arguments: str | Path) -> Job:
    job = Job(folder, *arguments)
    jobs.append(job)
    return job


def test_a_rank_that_was_killed_is_replaced(tmp_path: Path, jobs: list[Job]) -> None:
    job = run(jobs, tmp_path, "--elastic", "-n", "3", "--console", "all", script(tmp_path, TRAIN), "kill")
    job.wait(60)
    assert job.process.returncode == 0, job.err
    assert "was killed by SIGKILL" in job.err
    assert re.search(r"ringrun: another process takes the place of rank 1, its log in \S+/1-2\n", job.err), job.err
    assert re.search(r"ringdp: step \d+: rank 3 joined: 3 ranks go on as view 3; 0\.\d+ s", job.err), job.err
    assert re.search(r"finished after .* without rank 1 \(SIGKILL, replaced\), lost on the way", job.err), job.err
    assert job.out.count(" of 3: ") == 3
    assert len(ends(job)) == 1


@pytest.mark.parametrize(("log_dir", "known"), [("mine", True), ("/dev/null", False)])
def test_a_users_logs_specs_say_where_output_goes(tmp_path: Path, jobs: list[Job], log_dir: str, known: bool) -> None:
    """Those of the process that was replaced go on; and that of one that keeps nothing is not known."""
    where = ("--logs-specs", "default", "--log-dir", log_dir, "--redirects", "2")
    (temporary := tmp_path / "temporary").mkdir()
    environ = {"TMPDIR": str(temporary)}
    job = Job(tmp_path, "--elastic", "-n", "3", *where, script(tmp_path, TRAIN), "raise", environ=environ)
    jobs.append(job)
    job.wait(60)
    assert job.process.returncode == 0, job.err
    said = re.findall(r"ringrun: rank 1 on host \S+ (.*)\n", job.err)
    if known:
        [log] = tmp_path.glob("mine/*/attempt_0/1/stderr.log")
        short = log.relative_to(tmp_path)
        assert said == [f"raised ValueError: a bad label; the other ranks go on without it; log: {short}"], job.err
        text = log.read_text()
        assert text.index("a bad label") < text.index("joined as rank")
    else:
        assert said == ["ended with exit code 1; the other ranks go on without it"], job.err
    assert "ringrun: another process takes the place of rank 1\n" in job.err
    assert re.search(r"finished after .* steps? without rank 1 \(.*, replaced\), lost on the way\n", job.err), job.err
    assert not (tmp_path / "logs").exists()
    assert not list(temporary.glob("ringdp-*"))
    assert job.out.count(" of 3: ") == 3
    assert len(ends(job)) == 1


def test_one_that_fails_in_the_same_way_again_is_not_replaced_again(tmp_path: Path, jobs: list[Job]) -> None:
    job = run(jobs, tmp_path, "--elastic", "-n", "2", "--console", "all", script(tmp_path, TRAIN), "kill", "again")
    job.wait(60)
    assert job.process.returncode == 0, job.err
    assert job.err.count("another process takes the place of rank 1") == 1
    assert "ringrun: rank 1: its replacement has ended in the same way within 60 s, so it gets no other one" in job.err


def test_nothing_takes_the_place_of_a_rank_where_that_is_not_wanted(tmp_path: Path, jobs: list[Job]) -> None:
    text = TRAIN.replace("not first or", "job.step > 40 or")
    job = run(jobs, tmp_path, "--elastic", "--max-replacements", "0", "-n", "2", script(tmp_path, text), "kill")
    job.wait(60)
    assert job.process.returncode == 0, job.err
    assert "takes the place" not in job.err


def test_ranks_join_from_another_launcher(tmp_path: Path, jobs: list[Job]) -> None:
    secret = secret_in(tmp_path)
    endpoint = f"127.0.0.1:{free_port()}"
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    common = ["--secret-file", str(secret), "--console", "all"]
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "here"]
    program = script(tmp_path, TRAIN)
    first = run(jobs, tmp_path / "first", "--elastic", "-n", "2", *common, *meeting, program)
    wait_until(lambda: "ranks 0-1 of 2" in first.err, "the first ranks")
    second = run(jobs, tmp_path / "second", "--join", endpoint, "-n", "1", *common, program)
    for job in (first, second):
        job.wait(60)
        assert job.process.returncode == 0, job.err
    assert "joined as rank 2 of 3" in second.err
    assert ends(first) == ends(second)
    assert len(ends(first)) == 1


APART = """
            if os.path.exists(sys.argv[-1]) and not open(sys.argv[-1]).read():
                open(sys.argv[-1], "w").write("done")
                os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("replacements", ["3", "0"])
def test_a_launcher_whose_last_rank_dies_stays_for_those_of_others(
    tmp_path: Path, jobs: list[Job], replacements: str
) -> None:
    """It keeps their store; its rank is replaced, and so is the only one of the launcher that has joined."""
    text = TRAIN.replace("        for x, y in loader:\n", "        for x, y in loader:" + APART, 1)
    text = text.replace("float(not first or (job.step > 200", f"float(os.path.exists('{tmp_path}/finish') or (False")
    program, endpoint = script(tmp_path, text), f"127.0.0.1:{free_port()}"
    launched: list[Job] = []
    common = ["--secret-file", str(secret_in(tmp_path)), "--console", "all", "-n", "1", "--max-replacements"]
    meeting = ["--elastic", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint]
    for name, options in (("first", meeting), ("second", ["--join", endpoint])):
        (tmp_path / name).mkdir()
        if launched:
            wait_until(lambda: joining.running("127.0.0.1", int(endpoint.rpartition(":")[2]), "none"), "the job")
        launched.append(run(jobs, tmp_path / name, *options, *common, replacements, program, tmp_path / f"kill-{name}"))
    first, second = launched
    wait_until(lambda: "joined as rank 1 of 2" in second.err, "the second rank", 30)
    (tmp_path / "kill-first").touch()
    wait_until(lambda: "was killed by SIGKILL" in first.err, "the end of the first rank", 30)
    if replacements != "0":
        wait_until(lambda: "joined as rank 1 of 2" in first.err, "its replacement", 30)
        (tmp_path / "kill-second").touch()
        wait_until(lambda: second.err.count("joined as rank 1 of 2") == 2, "the replacement of the second", 30)
    (tmp_path / "finish").touch()
    for job in launched:
        assert job.wait(30) == 0, job.err


@pytest.mark.parametrize("told", ["rank", "launcher"])
def test_the_first_ranks_leave_and_those_of_another_launcher_go_on(tmp_path: Path, jobs: list[Job], told: str) -> None:
    """SIGTERM to the only rank of the first launcher, which stays and keeps the store for the others; or to that
    launcher, with which the store goes."""
    text = until_finish(tmp_path)
    here = f"open(f'{tmp_path}/pid-{{int(first)}}', 'w').write(str(os.getpid()))"
    text = text.replace("    for epoch in", f"    {here}\n    for epoch in")
    program, endpoint = script(tmp_path, text), f"127.0.0.1:{free_port()}"
    common = ["--secret-file", str(secret_in(tmp_path)), "--console", "all", "-n", "1", "--max-replacements", "0"]
    meeting = ["--elastic", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint]
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    first = run(jobs, tmp_path / "first", *meeting, *common, program)
    wait_until(lambda: joining.running("127.0.0.1", int(endpoint.rpartition(":")[2]), "none"), "the job")
    second = run(jobs, tmp_path / "second", "--join", endpoint, *common, program)
    wait_until(lambda: "joined as rank 1 of 2" in second.err, "the second rank", 60)
    pid = first.process.pid if told == "launcher" else int((tmp_path / "pid-1").read_text())
    os.kill(pid, signal.SIGTERM)
    wait_until(lambda: "left (SIGTERM)" in second.err, "the leave", 60)
    time.sleep(3.0)
    assert second.process.poll() is None, second.err
    (tmp_path / "finish").touch()
    assert second.wait(60) == 0, second.err
    assert "rank 0 of 1: " in second.out
    assert first.wait(60) == (0 if told == "rank" else 128 + signal.SIGTERM), first.err


def test_a_store_that_does_not_answer_once_is_not_the_end_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher that keeps it goes on while ranks of others may do so: for 10 s without an answer."""
    server = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    server.add(joining._GUESTS, 1)
    guests, opened = joining.Guests("127.0.0.1", server.port), joining._open
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)

    def silent(*_: object) -> TCPStore:
        raise dist.DistNetworkError("timed out")

    monkeypatch.setattr(joining, "_open", silent)
    assert guests.go_on()
    now_s += 9.0
    assert guests.go_on()
    monkeypatch.setattr(joining, "_open", opened)
    assert guests.go_on()
    now_s += 9.0
    assert guests.go_on(), "their count has stood still for less than 10 s"
    now_s += 2.0
    assert not guests.go_on()
    lost = joining.Guests("127.0.0.1", server.port)
    monkeypatch.setattr(joining, "_open", silent)
    assert lost.go_on()
    now_s += 11.0
    assert not lost.go_on()


def test_a_store_on_a_host_of_its_own_outlives_the_first_host(tmp_path: Path, jobs: list[Job]) -> None:
    """All of the first host is gone, its launcher and rank: the others go on, and ranks still come."""
    text = until_finish(tmp_path)
    program, port = script(tmp_path, text), free_port()
    for name in ("first", "second", "third", "other"):
        (tmp_path / name).mkdir()
    secret = secret_in(tmp_path)
    keeper = subprocess.Popen([sys.executable, "-m", "ringdp", "store", "--port", str(port)], stdout=subprocess.PIPE)
    try:
        assert keeper.stdout is not None
        assert b"the store of one job, at " in keeper.stdout.readline()
        at = ["--elastic", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id"]
        common = ["--secret-file", str(secret), "--console", "all", "-n", "1", "--max-replacements", "0"]
        two = [
            run(jobs, tmp_path / name, *at, "job", "--nnodes", "2", *common, program) for name in ("first", "second")
        ]
        wait_until(lambda: any("ringrun: rank 0 of 2" in job.err for job in two), "the ranks", 60)
        first, second = sorted(two, key=lambda job: "ringrun: rank 1 of 2" in job.err)
        wait_until(lambda: joining.running("127.0.0.1", port, "job"), "the job")
        wait_until(lambda: "admits" in {it.name for it in first.run_folder().rglob("*")}, "the first step")
        first.kill()
        wait_until(lambda: "1 of 2 ranks go on" in second.err, "the loss", 30)
        third = run(jobs, tmp_path / "third", "--join", f"127.0.0.1:{port}", *common, program)
        wait_until(lambda: "joined as rank 1 of 2" in third.err, "the newcomer", 60)
        other = run(jobs, tmp_path / "other", *at, "another", *common, program)
        assert other.wait(30) == 1
        assert f"the store at 127.0.0.1:{port} is that of the job job: start one for each job" in other.err
        (tmp_path / "finish").touch()
        for job in (second, third):
            assert job.wait(30) == 0, job.err
    finally:
        keeper.terminate()
        assert keeper.wait(10) == 0


STOPS = """
    import os, signal
    from ringdp.elastic import transfer

    place = transfer._place_for

    def stop(*given):
        transfer._place_for = place
        if "RINGDP_JOIN" in os.environ:
            os.kill(os.getpid(), signal.SIGSTOP)
        return place(*given)

    transfer._place_for = stop
"""


def test_one_that_is_stopped_while_it_gets_the_state_is_killed(tmp_path: Path, jobs: list[Job]) -> None:
    """The others go on without it, two seconds later."""
    text = textwrap.dedent(STOPS) + textwrap.dedent(until_finish(tmp_path))
    job = run(jobs, tmp_path, "--elastic", "-n", "3", "--console", "all", script(tmp_path, text), "kill")
    wait_until(lambda: "nobody joined" in job.err, "the end of the entry")
    (tmp_path / "finish").touch()
    job.wait(60)
    assert job.process.returncode == 0, job.err
    words = (
        r"rank 1 on host \S+ was killed by SIGKILL \(it had been stopped for 2\.\d+ s: the others may not wait longer"
    )
    assert len(re.findall(words, job.err)) == 1, job.err
    [waited_s] = re.findall(r"step \d+: nobody joined: 2 ranks go on as view 4; (\d+\.\d+) s\n", job.err)
    assert 2.0 < float(waited_s) < 4.0
    assert "rank 1 of 2: " in job.out


def test_a_second_job_of_the_same_endpoint_and_name(tmp_path: Path, jobs: list[Job]) -> None:
    """On one host it is refused; as a host of several it would join, which its secret does not allow."""
    port = free_port()
    common = ["--elastic", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "-n", "1"]
    program, launched = script(tmp_path, TRAIN), []
    for name, more in (("first", []), ("second", []), ("third", ["--nnodes", "2"]), ("fourth", ["--nnodes", "2"])):
        (folder := tmp_path / name).mkdir()
        secret_in(folder, "cd" if name == "third" else "ab")
        launched.append(run(jobs, folder, *common, *more, "--secret-file", "secret", "--console", "all", program))
        if name == "first":
            wait_until(lambda: joining.running("127.0.0.1", port, "none"), "the job")
        elif name != "fourth":
            launched[-1].wait(60)
    first, second, third, fourth = launched
    assert second.process.returncode == 2
    assert len(second.err.splitlines()) == 1
    assert re.match(
        r"ringrun: an elastic job with --rdzv-id none runs at \S+ already: give this one another", second.err
    )
    assert third.process.returncode == 1
    assert "MismatchError: the running job does not let this process in: its secret is not the job's" in third.err
    assert first.err.count("cannot join: its secret is not the job's") == 1
    for job in (first, fourth):
        assert job.wait(60) == 0, job.err
    assert "joined as rank 1 of 2" in fourth.err


def test_a_notice_lets_the_ranks_of_a_host_leave(tmp_path: Path, jobs: list[Job]) -> None:
    text = TRAIN.replace("not first or", "False or")
    wait = f"while [ ! -e {tmp_path}/notice ]; do sleep 0.1; done"
    job = run(jobs, tmp_path, "--elastic", "-n", "2", "--console", "all", "--notice-cmd", wait, script(tmp_path, text))
    wait_until(lambda: "ringdp:" in job.err, "the first report")
    (tmp_path / "notice").touch()
    job.wait(60)
    assert job.process.returncode == 0, job.err
    assert "ringrun: --notice-cmd has ended: this host's ranks leave the job" in job.err
    assert "of 2:" not in job.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--join", "node1"], "--join 'node1' is no HOST:PORT"),
        (["--join", "node1:29400", "--nnodes", "2"], "--join names the job"),
        (["--elastic", "--nnodes", "1:2"], "needs --rdzv-backend c10d"),
        (["--elastic", "--max-replacements", "-1"], "a number from 0 on"),
        (["--min-ranks", "2"], "--min-ranks and --max-ranks need --elastic"),
        (["--elastic", "--max-ranks", "0"], "--max-ranks 0 must be a number of ranks, at least 1"),
        (["--elastic", "--min-ranks", "3", "--max-ranks", "2"], "--max-ranks 2 is below --min-ranks 3"),
    ],
)
def test_flags_that_cannot_be(tmp_path: Path, jobs: list[Job], arguments: list[str], words: str) -> None:
    job = run(jobs, tmp_path, *arguments, script(tmp_path, TRAIN))
    job.wait(30)
    assert job.process.returncode == 2
    assert words in job.err


def test_nobody_is_at_the_address(tmp_path: Path, jobs: list[Job]) -> None:
    job = run(jobs, tmp_path, "--join", f"127.0.0.1:{free_port()}", "-n", "1", script(tmp_path, TRAIN))
    job.wait(60)
    assert job.process.returncode == 1
    assert "there is no job at 127.0.0.1:" in job.err
