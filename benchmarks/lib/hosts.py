"""Several hosts on one machine: network namespaces joined by a bridge, each behind a link of the given speed.

    hosts run   --hosts 4 --rate 1gbit [--per-host 1] [--timeout 300] -- python train.py
        make the hosts, start the command once per rank with the variables torchrun sets, print what the ranks print
        with the rank before it, remove the hosts; the exit code is 1 when a rank failed
    hosts up    --hosts 2 --rate 1gbit --name lab     make the hosts and leave them
    hosts exec  --name lab --host 1 -- ping -c1 h0    run a command on one of them
    hosts cut   --name lab --host 1                   take a host's link down; `heal` brings it up again
    hosts down  --name lab                            remove the hosts and end what still runs on them
    hosts clean                                       remove what runs that were killed left behind

Needs root and iproute2. Each host has an address (10.77.0.1, … called h0, …), a host name and a loopback
of its own; nothing outside is reachable. Hosts share a kernel and a file system, so RINGDP_HOST_ID tells them apart.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from benchmarks.lib.ranks import (
    Command,
    RanksFailed,
    Unavailable,
    run_commands,
    signals_later,
    signals_unwind,
    threads_per_rank,
    torchrun_env,
)

PORT = 29500  # free in every namespace: each has its own ports
INTERFACE = "eth0"
BURST = "256k"  # several packets of 64 KiB, so that a fast link does not hang on the timer's resolution
LOCKS = Path("/run/ringdp-hosts")
NETNS_ETC = Path("/etc/netns")  # ip-netns(8): files here stand in for those of /etc inside the namespace
MAX_HOSTS = 64


class HostsError(Unavailable):
    """The hosts cannot be made or reached; the message says what to do."""


def why_not() -> str | None:
    """What stands in the way of making hosts here, in words; None when nothing does."""
    if not sys.platform.startswith("linux"):
        return "network namespaces exist on Linux only"
    if os.geteuid() != 0:
        return "making network namespaces needs root: run this with sudo"
    for tool, package in (("ip", "iproute2"), ("tc", "iproute2"), ("unshare", "util-linux")):
        if shutil.which(tool) is None:
            return f"the command {tool!r} is missing: install the package {package}"
    return None


class Hosts:
    """Hosts that exist from `with` to its end, or until `remove(name)` once `keep()` was called. For one thread."""

    def __init__(self, count: int, *, rate: str = "1gbit", name: str | None = None) -> None:
        """`rate` is tc's (1gbit, 200mbit, …) for each direction of each host's link, or "none"; raises HostsError."""
        reason = why_not()
        if reason is not None:
            raise HostsError(reason)
        if not 1 <= count <= MAX_HOSTS:
            raise HostsError(f"between 1 and {MAX_HOSTS} hosts can be made, not {count}")
        self.count = count
        self.rate = rate
        self._lock_fd, self.name = _claim(name)

    def __enter__(self) -> Hosts:
        try:
            self._make()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End what runs on the hosts and remove them. Can be repeated."""
        if self._lock_fd >= 0:
            remove(self.name)
            os.close(self._lock_fd)
            self._lock_fd = -1

    def keep(self) -> None:
        """Leave the hosts standing when this object, or this process, ends."""
        (LOCKS / self.name).write_text("keep", encoding="ascii")
        os.close(self._lock_fd)
        self._lock_fd = -1

    def address(self, host: int) -> str:
        return f"10.77.0.{host + 1}"

    def command(self, host: int, words: Sequence[str]) -> list[str]:
        """`words` as a command that runs on that host, under its host name."""
        return on_host(self.name, host, words)

    def rank_env(self, *, rank: int, per_host: int) -> dict[str, str]:
        """A rank's environment: this process's own, torchrun's variables, and what tells torch which way is out."""
        world_size = self.count * per_host
        return {
            "OMP_NUM_THREADS": str(threads_per_rank(world_size)),
            **os.environ,
            **torchrun_env(rank=rank, world_size=world_size, address=self.address(0), port=PORT, per_host=per_host),
            **self.host_env(rank // per_host),
        }

    def host_env(self, host: int) -> dict[str, str]:
        """What is the same for all ranks of one host."""
        return {
            "RINGDP_HOST_ID": namespace(self.name, host),
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "TP_SOCKET_IFNAME": INTERFACE,
        }

    def set_rate(self, rate: str, *, only: int | None = None) -> None:
        """Links that were made with a speed get another one, or `only` that host's; what is under way is not lost."""
        for host in range(self.count) if only is None else (only,):
            for where, device in ((["-n", namespace(self.name, host)], INTERFACE), ([], f"{self.name}v{host}")):
                tool("tc", *where, "class", "change", "dev", device, *_class(rate))
        if only is None:
            self.rate = rate

    def _make(self) -> None:
        bridge = f"{self.name}b"
        _ip("link", "add", bridge, "type", "bridge")
        _ip("link", "set", bridge, "up")
        for host in range(self.count):
            space, outer = namespace(self.name, host), f"{self.name}v{host}"
            self._write_names(space)
            _ip("netns", "add", space)
            _ip("link", "add", outer, "type", "veth", "peer", "name", INTERFACE, "netns", space)
            _ip("link", "set", outer, "master", bridge)
            _ip("link", "set", outer, "up")
            _ip("-n", space, "addr", "add", f"{self.address(host)}/24", "dev", INTERFACE)
            _ip("-n", space, "link", "set", INTERFACE, "up")
            _ip("-n", space, "link", "set", "lo", "up")
            if self.rate != "none":  # what the host sends, and what the switch sends it
                self._shape(["-n", space], INTERFACE)
                self._shape([], outer)

    def _shape(self, where: Sequence[str], device: str) -> None:
        tool("tc", *where, "qdisc", "add", "dev", device, "root", "handle", "1:", "htb", "default", "1")
        tool("tc", *where, "class", "add", "dev", device, *_class(self.rate))

    def _write_names(self, space: str) -> None:
        folder = NETNS_ETC / space
        folder.mkdir(parents=True)
        lines = ["127.0.0.1 localhost", *(f"{self.address(host)} h{host}" for host in range(self.count))]
        (folder / "hosts").write_text("\n".join(lines) + "\n", encoding="ascii")


def _class(rate: str) -> list[str]:
    limit = ["rate", rate, "burst", BURST, "cburst", BURST]
    return ["parent", "1:", "classid", "1:1", "htb", *limit]


def namespace(name: str, host: int) -> str:
    """What `ip netns` calls that host."""
    return f"{name}h{host}"


def on_host(name: str, host: int, words: Sequence[str]) -> list[str]:
    """`words` as a command that runs on a host of the hosts called `name`, under its host name (h0, h1, …)."""
    rename = 'echo "$0" > /proc/sys/kernel/hostname; exec "$@"'
    return ["ip", "netns", "exec", namespace(name, host), "unshare", "--uts", "sh", "-c", rename, f"h{host}", *words]


def set_link(name: str, host: int, state: str) -> None:
    """Take a host's link "down" or "up" again. Raises HostsError where there is no such host."""
    _ip("-n", namespace(name, host), "link", "set", INTERFACE, state)


def remove(name: str) -> None:
    """End what runs on the hosts called `name`, then remove them and everything made for them. Can be repeated."""
    with signals_later():
        for space in _namespaces(name):
            _end_processes(space)
            _ip("netns", "del", space, check=False)
        devices = re.compile(rf"{re.escape(name)}(v\d+|b)")
        for device in sorted(os.listdir("/sys/class/net"), reverse=True):  # the links before their bridge
            if devices.fullmatch(device):
                _ip("link", "del", device, check=False)
        for folder in NETNS_ETC.glob(f"{name}h*"):
            if re.fullmatch(rf"{re.escape(name)}h\d+", folder.name):
                shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            NETNS_ETC.rmdir()  # only when it is empty
        (LOCKS / name).unlink(missing_ok=True)


def clean() -> list[str]:
    """Remove the hosts of runs that no longer exist and return their names. Hosts made by `up` stay."""
    gone = []
    for path in sorted(LOCKS.glob("*")) if LOCKS.is_dir() else []:
        with contextlib.suppress(FileNotFoundError, BlockingIOError), open(path, "r+", encoding="ascii") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # its owner holds it as long as it lives
            if file.read() != "keep":
                remove(path.name)
                gone.append(path.name)
    return gone


def _claim(name: str | None) -> tuple[int, str]:
    """Reserve a name nobody else uses: (descriptor of its lock, the name). The lock ends with this process."""
    LOCKS.mkdir(parents=True, exist_ok=True)
    clean()
    if name is not None and not re.fullmatch(r"[a-z][a-z0-9]{0,9}", name):  # Linux allows an interface 15 characters
        raise HostsError(f"the name {name!r} must be 1 to 10 lower-case letters and digits, the first a letter")
    tries = [name] if name is not None else [f"rd{os.getpid()}{letter}" for letter in "abcdefghijklmnopqrstuvwxyz"]
    for word in tries:
        fd = os.open(LOCKS / word, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            same_file = os.stat(LOCKS / word).st_ino == os.fstat(fd).st_ino  # clean() may have removed it in between
            if same_file and not os.read(fd, 4) and not _namespaces(word):
                return fd, word
        except (BlockingIOError, FileNotFoundError):
            pass
        os.close(fd)
    raise HostsError(
        f"hosts called {tries[0]!r} exist already: remove them with `python -m benchmarks hosts down --name {tries[0]}`"
    )


def _namespaces(name: str) -> list[str]:
    pattern = re.compile(rf"{re.escape(name)}h\d+")
    words = (line.split()[0] for line in _ip("netns", "list").splitlines() if line.strip())
    return [word for word in words if pattern.fullmatch(word)]


def _end_processes(space: str) -> None:
    deadline = time.monotonic() + 5.0
    while pids := [int(word) for word in _ip("netns", "pids", space, check=False).split()]:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            return
        time.sleep(0.02)


def _ip(*words: str, check: bool = True) -> str:
    return tool("ip", *words, check=check)


def tool(*words: str, check: bool = True) -> str:
    """What it prints. Raises HostsError where it fails and `check` says so."""
    # A session of its own: a Ctrl-C must not end the command that cleans up.
    done = subprocess.run(words, capture_output=True, text=True, start_new_session=True, check=False)
    if check and done.returncode != 0:
        raise HostsError(f"`{' '.join(words)}` failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def run_ranks(hosts: Hosts, words: Sequence[str], *, per_host: int, timeout_s: float) -> None:
    """The command once per rank, each on its host; prints what they print. Raises RanksFailed."""
    commands = [
        Command(hosts.command(rank // per_host, words), hosts.rank_env(rank=rank, per_host=per_host), f"rank {rank}")
        for rank in range(hosts.count * per_host)
    ]

    def echo(label: str, line: str) -> None:
        sys.stdout.write(f"[{label.removeprefix('rank ')}] {line if line.endswith(chr(10)) else line + chr(10)}")
        sys.stdout.flush()

    run_commands(commands, timeout_s=timeout_s, echo=echo)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks hosts", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    made = argparse.ArgumentParser(add_help=False)
    made.add_argument("--hosts", type=int, default=2, help="how many (default 2)")
    made.add_argument("--rate", default="1gbit", help="speed of each link and direction, tc's words, or none")
    named = argparse.ArgumentParser(add_help=False)
    named.add_argument("--name", default="lab", help="which hosts (default lab)")
    one = argparse.ArgumentParser(add_help=False)
    one.add_argument("--host", type=int, required=True, help="index of the host, from 0")
    run = verbs.add_parser("run", parents=[made], help="make hosts, run a command per rank, remove the hosts")
    run.add_argument("--per-host", type=int, default=1, help="ranks on each host (default 1)")
    run.add_argument("--timeout", type=float, default=300.0, help="seconds before everything is ended (default 300)")
    for verb, parents, words in (
        ("up", [made, named], "make hosts and leave them"),
        ("exec", [named, one], "run a command on a host"),
        ("cut", [named, one], "take a host's link down"),
        ("heal", [named, one], "bring a host's link up again"),
        ("down", [named], "remove hosts"),
        ("clean", [], "remove what killed runs left behind"),
    ):
        verbs.add_parser(verb, parents=parents, help=words)
    return parser


def _act(args: argparse.Namespace, words: Sequence[str]) -> None:
    if args.verb == "run":
        with signals_unwind(), Hosts(args.hosts, rate=args.rate) as hosts:
            run_ranks(hosts, words, per_host=args.per_host, timeout_s=args.timeout)
    elif args.verb == "up":
        with signals_unwind(), Hosts(args.hosts, rate=args.rate, name=args.name) as hosts:
            hosts.keep()
    elif args.verb == "exec":
        command = on_host(args.name, args.host, words)
        os.execvp(command[0], command)
    elif args.verb in ("cut", "heal"):
        set_link(args.name, args.host, "down" if args.verb == "cut" else "up")
    elif args.verb == "down":
        remove(args.name)
    else:
        for name in clean():
            print(f"removed {name}")


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options, and the words of the command after `--`."""
    cut = argv.index("--") if "--" in argv else len(argv)
    parser, words = _parser(), list(argv[cut + 1 :])
    args = parser.parse_args(argv[:cut])
    if args.verb in ("run", "exec") and not words:
        parser.error("which command? write it after --")
    return args, words


def main(argv: Sequence[str]) -> int:
    args, words = parse(argv)
    try:
        if (reason := why_not()) is not None:
            raise HostsError(reason)
        _act(args, words)
    except (HostsError, RanksFailed) as error:
        print(f"hosts: {error}", file=sys.stderr)
        return 2 if isinstance(error, HostsError) else 1
    except KeyboardInterrupt:
        return 130
    return 0
