"""Hosts as network namespaces, and ranks on them that are forked from one process which has imported torch already."""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWPID, CLONE_NEWNET = 0x00020000, 0x04000000, 0x20000000, 0x40000000
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18


def why_not() -> str | None:
    """What stands in the way of network namespaces, in words; None when nothing does."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "the command ip is not installed (apt-get install iproute2)"
    probe = f"rdp{os.getpid()}"
    done = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return f"network namespaces cannot be made here: {done.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", probe], check=True)
    return None


class Lab:
    """Two hosts or more without any network yet, called h0, h1, …; removed at the end of `with`."""

    def __init__(self, count: int = 2) -> None:
        self.name = f"rd{os.getpid()}"
        self.spaces = [f"{self.name}h{i}" for i in range(count)]
        self.middle = f"{self.name}sw"

    def __enter__(self) -> Lab:
        for space in self.spaces:
            run("ip", "netns", "add", space)
            run("ip", "-n", space, "link", "set", "lo", "up")
        return self

    def __exit__(self, *_: object) -> None:
        for space in (*self.spaces, self.middle):  # veth pairs and bridges inside go with them
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)

    def ip(self, host: int, words: str) -> None:
        run("ip", "-n", self.spaces[host], *words.split())

    def link(self, device: str, networks: Sequence[str], *, hosts: tuple[int, int] = (0, 1)) -> None:
        """A cable between two hosts; each gets address .1 or .2 (::1, ::2) of each network, as "10.1.0.{}/24"."""
        first, second = hosts
        peer = ["peer", "name", device, "netns", self.spaces[second]]
        run("ip", "link", "add", device, "netns", self.spaces[first], "type", "veth", *peer)
        for number, host in enumerate(hosts, start=1):
            for network in networks:
                nodad = " nodad" if ":" in network else ""
                self.ip(host, f"addr add {network.format(number)} dev {device}{nodad}")
            self.ip(host, f"link set {device} up")

    def switch(self, network: str) -> None:
        """Every host at a bridge of its own, these at one in the middle; host i has address i + 1 of "10.1.0.{}/24"."""
        run("ip", "netns", "add", self.middle)

        def middle(words: str) -> None:
            run("ip", "-n", self.middle, *words.split())

        middle("link add core type bridge")
        middle("link set core up")
        for host, space in enumerate(self.spaces):
            middle(f"link add br{host} type bridge")
            middle(f"link add up{host} type veth peer name down{host}")
            run("ip", "link", "add", "eth0", "netns", space, "type", "veth", "peer", f"p{host}", "netns", self.middle)
            for port, bridge in ((f"up{host}", f"br{host}"), (f"p{host}", f"br{host}"), (f"down{host}", "core")):
                middle(f"link set {port} master {bridge} up")
            middle(f"link set br{host} up")
            # As on a wire: otherwise a veth hands packets over before they are cut to the MTU.
            self.ip(host, "link set eth0 gso_max_segs 1")
            self.ip(host, f"addr add {network.format(host + 1)} dev eth0")
            self.ip(host, "link set eth0 up")

    def named(self, folder: Path, addresses: dict[str, str]) -> None:
        """Host i gets the i-th of these names; all are in /etc/hosts, and there is no name server. See `on`."""
        self.names = list(addresses)
        self.files = folder
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in addresses.items())]
        (folder / "hosts").write_text("\n".join(lines) + "\n")
        (folder / "resolv.conf").write_text("nameserver 127.0.0.1\n")  # refuses at once

    def on(self, host: int) -> list[str]:
        """What runs the command behind it on a host that `named` has named."""
        binds = "; ".join(f"mount --bind {self.files}/{name} /etc/{name}" for name in ("hosts", "resolv.conf"))
        setup = f'hostname {self.names[host]}; {binds}; exec "$@"'
        space = f"--net=/run/netns/{self.spaces[host]}"
        return ["nsenter", space, "unshare", "--uts", "--mount", "sh", "-c", setup, "sh"]

    def narrow(self, host: int, mtu: int, *, at_the_host: bool = False) -> None:
        """Larger packets from and to that host are dropped, without a word: between the bridges, or at the other end of
        its cable, where its own kernel notices."""
        for port in (f"p{host}",) if at_the_host else (f"up{host}", f"down{host}"):
            run("ip", "-n", self.middle, "link", "set", port, "mtu", str(mtu))

    def bridge(self, host: int, device: str, address: str) -> None:
        """An interface that leads nowhere, like docker0."""
        self.ip(host, f"link add {device} type bridge")
        self.ip(host, f"addr add {address} dev {device}")
        self.ip(host, f"link set {device} up")

    def drop_incoming(self, host: int, device: str, ports: str) -> None:
        """A firewall that swallows connections to these ports ("1-65534") without an answer."""
        for family in ("-4", "-6"):
            self.ip(host, f"{family} rule add pref 100 lookup local")
            self.ip(host, f"{family} rule del pref 0")
            self.ip(host, f"{family} rule add pref 10 iif {device} ipproto tcp dport {ports} blackhole")


def run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"


@dataclass
class RankSpec:
    rank: int
    world: int
    space: str = ""  # network namespace; empty: this one
    host_name: str = ""
    hosts_file: str = ""  # what /etc/hosts holds there
    own_pids: bool = False  # a process namespace of its own: others cannot look its process up
    variables: dict[str, str] = field(default_factory=dict)
    method: str = ""
    body: str = "tests.fault.hosts:meet_and_add"


def one_on_each(lab: Lab, folder: Path, body: str, variables: dict[str, str]) -> list[RankSpec]:
    """A rank on each host of the lab, which meet through a file in the folder."""
    return [
        RankSpec(
            rank,
            len(lab.spaces),
            space=space,
            host_name=f"h{rank}",
            variables=variables,
            method=f"file://{folder}/store",
            body=body,
        )
        for rank, space in enumerate(lab.spaces)
    ]


@dataclass
class Outcome:
    """What a rank tells: the error it met, or with whom it is connected and what was added up."""

    pid: int = 0
    seconds: float = 0.0
    at: float = 0.0  # time.monotonic()
    error: str = ""
    text: str = ""
    peer: int | None = None
    value: float = 0.0
    peers: list[str] = field(default_factory=list)  # addresses of the other ends
    listening: list[str] = field(default_factory=list)


class RankServer:
    """A process that has imported torch, and the modules of `preload`, and forks ranks. For one thread."""

    idle = True  # what was started has been finished

    def __init__(self, *preload: str) -> None:
        words = [sys.executable, "-m", "tests.fault.hosts", *preload]
        clean = {n: v for n, v in os.environ.items() if not n.startswith(("RINGDP_", "MASTER_", "RANK", "WORLD_SIZE"))}
        self.process = subprocess.Popen(
            words,
            cwd=ROOT,
            env=clean | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self, specs: Sequence[RankSpec], folder: Path) -> None:
        assert self.process.stdin is not None
        self.idle = False
        line = json.dumps({"folder": str(folder), "ranks": [asdict(it) for it in specs]})
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def finish(self) -> list[Outcome]:
        """One per rank; a rank that died without a word has the error "died"."""
        assert self.process.stdout is not None
        outcomes = [Outcome(**it) for it in json.loads(self.process.stdout.readline())]
        self.idle = True
        return outcomes

    def run(self, specs: Sequence[RankSpec], folder: Path) -> list[Outcome]:
        self.start(specs, folder)
        return self.finish()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)  # a loaded machine takes seconds to unload torch


_servers: list[RankServer] = []


def rank_server() -> RankServer:
    """The server that tests share; one that a test left in the middle of something is replaced."""
    if _servers and not (_servers[0].idle and _servers[0].process.poll() is None):
        left = _servers.pop().process
        left.kill()
        left.wait()
    if not _servers:
        _servers.append(RankServer())
        atexit.register(_servers[0].close)
    return _servers[0]


def meet_and_add(spec: RankSpec, outcome: Outcome) -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group("ring", init_method=spec.method, rank=spec.rank, world_size=spec.world)
    outcome.seconds = time.monotonic() - outcome.at
    ones = torch.full((1000,), float(spec.rank + 1))
    dist.all_reduce(ones)
    outcome.value = float(ones[0])
    outcome.peers, outcome.listening = sockets()
    dist.barrier()
    dist.destroy_process_group()


def sockets() -> tuple[list[str], list[str]]:
    """The other ends of this process's TCP connections, and what it listens on."""
    peers, listening = [], []
    for name in os.listdir("/proc/self/fd"):
        try:
            it = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue
        with it:
            if it.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            if it.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                listening.append(it.getsockname()[0])
            else:
                peers.append(it.getpeername()[0])
    return peers, listening


def _enter(spec: RankSpec, folder: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)

    def check(result: int, what: str) -> None:
        if result != 0:
            raise OSError(ctypes.get_errno(), what)

    if spec.space:
        descriptor = os.open(f"/run/netns/{spec.space}", os.O_RDONLY)
        check(libc.setns(descriptor, CLONE_NEWNET), "setns")
        os.close(descriptor)
    if spec.host_name:
        check(libc.unshare(CLONE_NEWUTS), "unshare")
        socket.sethostname(spec.host_name)
    if spec.hosts_file:
        path = Path(folder, f"hosts-{spec.rank}")
        path.write_text(spec.hosts_file)
        check(libc.unshare(CLONE_NEWNS), "unshare")
        check(libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None), "mount")
        check(libc.mount(bytes(path), b"/etc/hosts", None, MS_BIND, None), "mount")
    if spec.own_pids:
        check(libc.unshare(CLONE_NEWPID), "unshare")
        if child := os.fork():
            os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)
    os.environ.update(spec.variables)


def _be_rank(spec: RankSpec, folder: str) -> None:
    outcome = Outcome(at=time.monotonic())
    try:
        _enter(spec, folder)
        outcome.pid = os.getpid()
        module, name = spec.body.split(":")
        body: Callable[[RankSpec, Outcome], None] = getattr(__import__(module, fromlist=[name]), name)
        outcome.at = time.monotonic()
        body(spec, outcome)
    except BaseException as error:
        outcome.seconds = time.monotonic() - outcome.at
        outcome.error, outcome.text = type(error).__name__, str(error)
        outcome.peer = getattr(error, "peer", None)
        if not hasattr(error, "advice"):
            traceback.print_exc()
    outcome.at = time.monotonic()
    path = Path(folder, f"outcome-{spec.rank}")
    path.with_suffix(".new").write_text(json.dumps(asdict(outcome)))
    path.with_suffix(".new").rename(path)


def _serve() -> None:
    import torch.distributed  # noqa: F401  the point of this process

    import ringdp  # noqa: F401
    from ringdp import _C  # noqa: F401

    for module in sys.argv[1:]:
        __import__(module)
    for line in sys.stdin:
        job: dict[str, Any] = json.loads(line)
        specs = [RankSpec(**it) for it in job["ranks"]]
        children = []
        for spec in specs:
            child = os.fork()
            if child == 0:
                _be_rank(spec, job["folder"])
                sys.stderr.flush()
                os._exit(0)
            children.append(child)
        outcomes = []
        ended: dict[int, tuple[float, int]] = {}
        while len(ended) < len(children):
            child, status = os.wait()
            ended[child] = time.monotonic(), os.waitstatus_to_exitcode(status)
        for spec, child in zip(specs, children, strict=True):
            path = Path(job["folder"], f"outcome-{spec.rank}")
            at, code = ended[child]
            died = asdict(Outcome(pid=child, at=at, error="died", text=f"code {code}"))
            outcomes.append(json.loads(path.read_text()) if path.exists() else died)
        sys.stdout.write(json.dumps(outcomes) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _serve()
