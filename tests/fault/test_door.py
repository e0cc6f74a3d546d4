"""One open port: hosts that nobody can connect to train together through ``ringrun --door``."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.fault.hosts import Lab, run, why_not
from tests.fault.launch_jobs import ROOT, Job, script, unbroken, wait_until
from tests.fault.relay import Relay

pytestmark = [pytest.mark.timeout(120), pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]
DOOR = 29600
TRAIN = """
    import hashlib, os, sys, time
    import ringdp, torch

    ringdp.init(device="cpu")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    net = torch.nn.Sequential(torch.nn.Linear(32, 300), torch.nn.Tanh(), torch.nn.Linear(300, 1))
    model = ringdp.RingDP(net, reproducible=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(int(sys.argv[1])):
        x = torch.randn(8, 32, generator=torch.Generator().manual_seed(100 * step + ringdp.rank()))
        model(x).square().mean().backward()
        optimizer.step(), optimizer.zero_grad()
        if len(sys.argv) > 2:
            time.sleep(float(sys.argv[2]))
        if step == 4:
            print("has begun", flush=True)
    bits = b"".join(it.detach().numpy().tobytes() for it in model.parameters())
    print("bits", hashlib.sha256(bits).hexdigest(), ringdp.transports(), flush=True)
"""


class Hosts:
    """Hosts at one switch, each with a launcher; those behind a wall take no connections."""

    def __init__(self, lab: Lab, folder: Path, walled: Sequence[int]) -> None:
        self.lab, self._folder = lab, folder
        self.count = len(lab.spaces)
        lab.switch("10.77.0.{}/24")
        names = folder / "names"
        names.mkdir()
        lab.named(names, {f"n{host}": f"10.77.0.{host + 1}" for host in range(self.count)})
        for host in range(self.count):
            self._sysctl(host, "net.ipv4.ip_local_port_range=60000 61000")
        for host in walled:
            lab.drop_incoming(host, "eth0", "1-59999")
        self.secret = folder / "secret"
        self.secret.write_text("ab" * 32)
        self.secret.chmod(0o600)
        self.jobs: list[Job] = []

    def _sysctl(self, host: int, words: str) -> None:
        run("nsenter", f"--net=/run/netns/{self.lab.spaces[host]}", "sysctl", "-qw", words)

    def start(self, host: int, *words: str | Path, **environ: str) -> Job:
        folder = self._folder / f"{host}_{len(self.jobs)}"
        folder.mkdir()
        environ = {"RINGDP_PORT_RANGE": "30000-30100", "PYTHONPATH": str(ROOT)} | environ
        command = [*self.lab.on(host), sys.executable, "-m", "ringdp.launch"]
        job = Job(folder, "--secret-file", self.secret, "--console", "all", *words, command=command, environ=environ)
        self.jobs.append(job)
        return job

    def listening(self, host: int) -> set[tuple[str, int]]:
        words = ["nsenter", f"--net=/run/netns/{self.lab.spaces[host]}", "ss", "-Hltn"]
        lines = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
        found = (line.split()[3].rpartition(":") for line in lines)
        return {(address, int(port)) for address, _, port in found}


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Callable[..., Hosts]]:
    labs: list[Lab] = []
    made: list[Hosts] = []

    def make(count: int, walled: Sequence[int]) -> Hosts:
        labs.append(Lab(count).__enter__())
        made.append(Hosts(labs[-1], tmp_path, walled))
        return made[-1]

    yield make
    for one in made:
        for job in one.jobs:
            job.kill()
    for lab in labs:
        lab.__exit__()


def bits(jobs: Sequence[Job]) -> set[str]:
    return {it for job in jobs for it in re.findall(r"bits (\w{64})", job.out)}


def carried(job: Job) -> str:
    [found] = re.findall(r"bits \w{64} (\{.*\})", job.out)
    return str(found)


def begun(job: Job) -> None:
    wait_until(lambda: "has begun" in job.out, "the training", 60)


def alone(tmp_path: Path, ranks: int, steps: str) -> set[str]:
    (folder := tmp_path / "alone").mkdir()
    job = Job(folder, "-n", str(ranks), "--console", "all", script(folder, TRAIN), steps)
    job.wait(60)
    return bits([job])


@pytest.mark.parametrize("tls", [pytest.param(False, marks=pytest.mark.slow), True], ids=["plain", "TLS"])
def test_hosts_that_take_no_connections_train_with_the_same_bits(
    hosts: Callable[..., Hosts], tmp_path: Path, tls: bool
) -> None:
    """Two of three are behind walls; one pair of them is relayed. torch's store is in nobody's reach."""
    lab = hosts(3, [1, 2])
    program = script(tmp_path, TRAIN)
    words: list[str | Path] = [*(["--tls"] if tls else []), "-n", "1", program, "12", "0.05"]
    head = lab.start(0, "--door", str(DOOR), "--nnodes", "3", *words)
    others = [lab.start(host, "--join", f"n0:{DOOR}", *words) for host in (1, 2)]
    begun(head)
    for host in range(3):
        reachable = {port for address, port in lab.listening(host) if not address.startswith("127.")}
        expected = {DOOR} if host == 0 else set()
        assert reachable - set(range(30000, 30101)) == expected
    assert [job.wait(60) for job in (head, *others)] == [0, 0, 0], [job.err for job in (head, *others)]
    assert len(bits([head, *others])) == 1
    assert bits([head]) == alone(tmp_path, 3, "12")
    assert carried(head).count("relayed") == 0
    assert carried(others[0]).count("relayed") == 1
    assert all(carried(job).count("TLS 1.3") == 2 * tls for job in (head, *others))
    assert re.search(r"ringrun: n[12] has come through the door, as node 1, 1 more to come", head.err)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(4))
@pytest.mark.parametrize("reachable", [0, 2])
def test_any_host_may_be_the_first_rank(
    hosts: Callable[..., Hosts], tmp_path: Path, first: int, reachable: int
) -> None:
    """Pairs of which one side can be reached connect by themselves, whichever has the lower rank."""
    lab = hosts(4, [host for host in range(4) if host != reachable])
    program = script(tmp_path, TRAIN)
    numbers = {host: (host - first) % 4 for host in range(4)}
    jobs = []
    for host in range(4):
        way = ["--door", str(DOOR), "--nnodes", "4"] if host == reachable else ["--join", f"n{reachable}:{DOOR}"]
        jobs.append(lab.start(host, *way, "--node-rank", str(numbers[host]), "-n", "1", program, "6"))
    assert [job.wait(90) for job in jobs] == [0] * 4, [job.err for job in jobs]
    assert bits(jobs) == alone(tmp_path, 4, "6")
    assert "relayed" not in carried(jobs[reachable])
    for host in set(range(4)) - {reachable}:
        assert carried(jobs[host]).count("relayed") == 2


@pytest.mark.slow
def test_the_doctor_says_why_a_pair_is_relayed(hosts: Callable[..., Hosts]) -> None:
    lab = hosts(3, [1, 2])
    words = ("-n", "1", "-m", "ringdp", "doctor", "--seconds", "1")
    head = lab.start(0, "--door", str(DOOR), "--nnodes", "3", *words)
    others = [lab.start(host, "--join", f"n0:{DOOR}", *words) for host in (1, 2)]
    assert [job.wait(100) for job in (head, *others)] == [0, 0, 0], [head.out, head.err]
    said = " ".join(head.out.split())
    assert re.search(
        r"rank 1 \(n[12]\) and rank 2 \(n[12]\) are relayed through the door, since neither reaches the other: there"
        r"( \[rank 0\])? 10.77.0.[23]:30\d{3}: no answer within 3 s; back 10.77.0.[23]:30\d{3}: no answer within 3 s",
        said,
    ), head.out
    assert re.search(r"rank 0 \(n0\) does not reach rank 1 \(n[12]\), which dials it", said)
    assert "ok ring met in" in said
    assert "RINGDP_DOOR differs" not in said


@pytest.mark.slow
def test_a_newcomer_comes_through_the_door(hosts: Callable[..., Hosts], tmp_path: Path) -> None:
    text = """
        import ringdp, sys, time, torch

        ringdp.init(device="cpu")
        model = ringdp.RingDP(torch.nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        job = ringdp.elastic.Job(model, optimizer)
        data = torch.utils.data.TensorDataset(torch.randn(64, 8, generator=torch.Generator().manual_seed(0)))
        loader = job.loader(data, global_batch=8)
        seen = 0
        for epoch in job.epochs(10_000):
            for (x,) in loader:
                model(x).square().mean().backward()
                optimizer.step(), optimizer.zero_grad()
                seen += ringdp.world_size() == 3
                if job.step == 4:
                    print("has begun", flush=True)
                time.sleep(0.02)
            if ringdp.elastic.unit(lambda: ringdp.metrics.mean(float(seen))) > 40:
                break
        job.close()
        print("ends with", ringdp.world_size(), ringdp.transports(), flush=True)
    """
    lab = hosts(3, [1, 2])
    program = script(tmp_path, text)
    jobs = [lab.start(0, "--elastic", "--door", str(DOOR), "--nnodes", "2", "-n", "1", program)]
    jobs.append(lab.start(1, "--join", f"n0:{DOOR}", "-n", "1", program))
    begun(jobs[0])
    jobs.append(lab.start(2, "--join", f"n0:{DOOR}", "-n", "1", program))
    assert [job.wait(60) for job in jobs] == [0, 0, 0], [job.err for job in jobs]
    assert all("ends with 3" in job.out for job in jobs)


@pytest.mark.slow
def test_the_end_of_the_door_is_named(hosts: Callable[..., Hosts], tmp_path: Path) -> None:
    """With its launcher end the ranks there; the others say so within the heal window."""
    lab = hosts(3, [1, 2])
    program = script(tmp_path, TRAIN)
    head = lab.start(0, "--door", str(DOOR), "--nnodes", "3", "-n", "1", program, "10000", "0.05")
    others = [lab.start(host, "--join", f"n0:{DOOR}", "-n", "1", program, "10000", "0.05") for host in (1, 2)]
    begun(head)
    began_s = time.monotonic()
    for pid in head.processes():
        os.kill(pid, signal.SIGKILL)
    for job in others:
        assert job.wait(30) == 1
        assert re.search(r"PeerLostError|cannot reach|the connection with the door", unbroken(job.err)), job.err
    assert time.monotonic() - began_s < 20


@pytest.mark.slow
def test_an_elastic_job_goes_on_without_a_host_that_is_cut_off(hosts: Callable[..., Hosts], tmp_path: Path) -> None:
    """It had a relayed connection with one of the others, and a direct one with the host of the door."""
    lab = hosts(3, [1, 2])
    program = script(tmp_path, TRAIN)
    words: list[str | Path] = ["-n", "1", program, "300", "0.05"]
    jobs = [lab.start(0, "--elastic", "--door", str(DOOR), "--nnodes", "3", *words)]
    jobs += [lab.start(host, "--join", f"n0:{DOOR}", *words) for host in (1, 2)]
    for job in jobs:
        begun(job)
    lab.lab.ip(2, "link set eth0 down")
    assert [job.wait(90) for job in jobs[:2]] == [0, 0], [job.err for job in jobs]
    assert len(bits(jobs[:2])) == 1
    assert all("2 of 3 ranks go on" in unbroken(job.err) for job in jobs[:2]), [job.err for job in jobs]


# Command lines, and who is not let in.


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--door", "29500", "--nnodes", "2"], "--door needs --secret-file"),
        (["--door", "29500", "--secret-file", "S"], "--door with one host and without --elastic lets nobody in"),
        (["--door", "29500", "--nnodes", "1:4", "--secret-file", "S"], "--door needs the number of hosts"),
        (["--door", "70000", "--nnodes", "2", "--secret-file", "S"], "--door must be a port up to 65535, got 70000"),
        (["--door", "1", "--nnodes", "2", "--rdzv-endpoint", "a:1"], "--door is where the launchers meet: leave out"),
        (["--door", "1", "--nnodes", "2", "--join", "a:1"], "--join"),
    ],
    ids=str,
)
def test_a_command_line_that_says_two_things(tmp_path: Path, words: list[str], said: str) -> None:
    secret = tmp_path / "S"
    secret.write_text("ab" * 32)
    secret.chmod(0o600)
    job = Job(tmp_path, *words, script(tmp_path, "pass"), environ={"RINGDP_SECRET_FILE": ""})
    assert job.wait() == 2
    assert said in job.err


def test_who_is_not_let_in_is_told_why(tmp_path: Path) -> None:
    program = script(tmp_path, textwrap.dedent("import ringdp; ringdp.init(device='cpu'); print('met')"))

    def start(name: str, secret: str, *words: str) -> Job:
        (folder := tmp_path / name).mkdir()
        (folder / "secret").write_text(secret * 32)
        (folder / "secret").chmod(0o600)
        return Job(folder, *words, "--secret-file", "secret", "-n", "1", program)

    head = start("head", "ab", "--door", "0", "--nnodes", "2")
    wait_until(lambda: "the door is at port" in head.err, "the door")
    [port] = re.findall(r"the door is at port (\d+)", head.err)
    stranger = start("stranger", "cd", "--join", f"127.0.0.1:{port}", "--rdzv-timeout", "8")
    assert stranger.wait(40) == 1
    assert "waits for the door at 127.0.0.1" in stranger.err
    assert f"127.0.0.1:{port} does not let this host in: it closed the connection. Is it the port" in stranger.err
    wanting = start("wanting", "ab", "--join", f"127.0.0.1:{port}", "--node-rank", "0")
    assert wanting.wait() == 1
    assert "it wants to be node 0 (--node-rank), which is another host" in wanting.err
    second = start("second", "ab", "--join", f"127.0.0.1:{port}")
    wait_until(lambda: "rank 1 of 2" in second.err, "the second host")
    third = start("third", "ab", "--join", f"127.0.0.1:{port}")
    assert third.wait() == 1
    assert "the job has all of its 2 hosts, and is not elastic (--elastic)" in third.err
    assert [head.wait(), second.wait()] == [0, 0]
    nobody = start("nobody", "ab", "--join", f"127.0.0.1:{port}", "--rdzv-timeout", "2")
    assert nobody.wait() == 1
    assert re.search(rf"nobody opens the door at 127.0.0.1:{port}: .*Connection refused", nobody.err)


def test_a_forwarder_that_closes_connections_is_waited_for(tmp_path: Path) -> None:
    """It accepts before the door is open, as a load balancer does, and `ssh -L`."""
    (tmp_path / "secret").write_text("ab" * 32)
    (tmp_path / "secret").chmod(0o600)
    program = script(tmp_path, "import ringdp; ringdp.init(device='cpu'); print('met', ringdp.world_size())")

    def start(name: str, *words: str) -> Job:
        (folder := tmp_path / name).mkdir()
        return Job(folder, *words, "--secret-file", tmp_path / "secret", "-n", "1", program)

    forwarder = Relay(None)
    try:
        second = start("second", "--join", f"127.0.0.1:{forwarder.port}")
        wait_until(lambda: "waits for the door" in second.err, "a notice")
        assert re.search(
            r"since \d s: (it closed the connection. Is it the port of --door|.*reset by peer)", second.err
        )
        head = start("head", "--door", "0", "--nnodes", "2")
        wait_until(lambda: "the door is at port" in head.err, "the door")
        [port] = re.findall(r"the door is at port (\d+)", head.err)
        forwarder.to = ("127.0.0.1", int(port))
        assert [head.wait(60), second.wait(60)] == [0, 0], (head.err, second.err)
    finally:
        forwarder.close()
    assert "met 2" in head.out
