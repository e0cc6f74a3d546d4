"""Every environment variable ringdp reads at run time, and nothing else reads one.

`RingConfig` holds what the ring itself wants to know (the ``RINGDP_*`` variables), `LaunchEnvironment` what
a launcher told this process about its place in the job. Both validate themselves and say what is wrong in
words.
"""

from __future__ import annotations

import dataclasses
import difflib
import ipaddress
import logging
import os
import re
import socket
import stat
import warnings
import zlib
from collections.abc import Callable, Mapping
from typing import Any

from ringdp.errors import InvalidArgumentError, SystemResourceError

VARIABLES: Mapping[str, str] = {
    "RINGDP_SECRET_FILE": "path of a file of mode 0600 with 64 hexadecimal characters, the job's secret",
    "RINGDP_HOST_ID": "a name for this host, where ranks that share a kernel must count as several hosts",
    "RINGDP_IFACE": "network interfaces to use between hosts: eth0 | eth,ib | 10.0.0.0/8 | all but some: ^docker,br-",
    "RINGDP_ADVERTISE": "one more address or name[:port] under which the others can reach this rank (containers, NAT)",
    "RINGDP_PORT_RANGE": "ports to listen on, LOW-HIGH, for firewalls; any free port without it",
    "RINGDP_SPIN_US": "microseconds to poll before sleeping while waiting; 0 sleeps at once",
    "RINGDP_CONNECT_TIMEOUT": "seconds the ranks have to connect to each other",
    "RINGDP_STALL_NOTICE": "seconds between two log lines about an operation that does not move; 0 for none",
    "RINGDP_HOST_TIMEOUT": "seconds without an answer of its host after which a rank counts as lost, at least 4",
    "RINGDP_LOG_LEVEL": "debug, info, warning or error: what ringdp writes to stderr",
}
"""The variables of `RingConfig` with what they mean."""

_LOG_LEVELS = ("debug", "info", "warning", "error")
_HEX_SECRET = re.compile(rb"[0-9a-fA-F]{64}")


class _Fields(dict[str, Any]):
    def __repr__(self) -> str:
        return repr({name: value for name, value in self.items() if name != "secret"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class RingConfig:
    """What the ring backend can be told; `from_environment` fills it from the ``RINGDP_*`` variables.

    Also accepted as ``pg_options`` of ``torch.distributed.init_process_group("ring", pg_options=...)``.

    Attributes:
        secret: 32 bytes that every rank of the job knows; None lets rank 0 make them and publish them in the
            store.
        host_id: a name that tells hosts apart which share a kernel; empty where nobody needs one.
        host_name: how messages call this host.
        iface: interfaces to use between hosts, a list of names (or beginnings of names; ``=eth0`` is that name
            only), addresses and networks in the order of preference, or, with ``^`` in front, all but those;
            empty takes all that are up.
        advertise: address or name, perhaps with a port, given to the peers before the interfaces' own; empty
            for none.
        port_range: lowest and highest port to listen on; None takes any free one.
        connect_timeout_ms: how long the ranks have to connect to each other.
        spin_us: how long a wait polls before it sleeps.
        stall_notice_ms: how often a log line says who an operation waits for that does not move; 0 for never.
        host_silence_ms: how long a rank's host may leave everything unanswered before the rank counts as lost. A
            stopped or busy process does not: its kernel answers.
        epoch: how often the launcher restarted the job; ranks of another epoch are turned away.
        several_hosts: the launcher says that the job runs on several hosts: a rank need not wait for another to
            know that it must listen on more than loopback.

    Raises:
        InvalidArgumentError: a value cannot be used; the message names the field.
    """

    secret: bytes | None = dataclasses.field(default=None, repr=False)
    host_id: str = ""
    host_name: str = dataclasses.field(default_factory=socket.gethostname)
    iface: str = ""
    advertise: str = ""
    port_range: tuple[int, int] | None = None
    connect_timeout_ms: int = 120_000
    spin_us: int = 50
    stall_notice_ms: int = 10_000
    host_silence_ms: int = 4_000
    epoch: int = 0
    several_hosts: bool = False

    def __post_init__(self) -> None:
        if self.secret is not None and len(self.secret) != 32:
            raise InvalidArgumentError(f"secret must be 32 bytes, not {len(self.secret)}")
        for field, limit in (("host_id", 256), ("host_name", 256), ("iface", 512), ("advertise", 255)):
            text = getattr(self, field)
            if len(text) > limit or any(c.isspace() or not c.isprintable() for c in text):
                raise InvalidArgumentError(
                    f"{field} must be at most {limit} printable characters without blanks, not {text!r}"
                )
        _check_iface(self.iface)
        if self.port_range is not None:
            low, high = self.port_range
            if not 1 <= low <= high <= 65535:
                raise InvalidArgumentError(
                    f"port_range must be two ports between 1 and 65535, the lower one first, not {low}-{high}"
                )
        if self.connect_timeout_ms <= 0:
            raise InvalidArgumentError(f"connect_timeout_ms must be above 0, not {self.connect_timeout_ms}")
        if not 0 <= self.spin_us <= 1_000_000:
            raise InvalidArgumentError(f"spin_us must be between 0 and 1000000, not {self.spin_us}")
        if self.stall_notice_ms < 0:
            raise InvalidArgumentError(f"stall_notice_ms must be 0 or more, not {self.stall_notice_ms}")
        if not 4_000 <= self.host_silence_ms <= 3_600_000:
            raise InvalidArgumentError(f"host_silence_ms must be between 4000 and 3600000, not {self.host_silence_ms}")
        if not 0 <= self.epoch < 2**32:
            raise InvalidArgumentError(f"epoch must be between 0 and {2**32 - 1}, not {self.epoch}")

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> RingConfig:
        """Read the ``RINGDP_*`` variables; an empty one counts as not set.

        Unknown ``RINGDP_*`` variables are warned about, with the nearest known name.

        Raises:
            InvalidArgumentError: a value cannot be used; the message names the variable.
            SystemResourceError: the secret's file cannot be read.
        """
        environ = os.environ if environ is None else environ
        warn_about_unknown(environ)
        fields: dict[str, Any] = {
            "epoch": _optional_integer(environ, "TORCHELASTIC_RESTART_COUNT") or 0,
            "several_hosts": _several_hosts(environ),
        }
        for variable, (field, parse) in _READERS.items():
            if text := environ.get(variable, "").strip():
                fields[field] = parse(text)
        try:
            return cls(**fields)
        except InvalidArgumentError as error:
            field = str(error).split()[0]
            names = [variable for variable, (name, _) in _READERS.items() if name == field]
            raise InvalidArgumentError(": ".join([*names, str(error)])) from None

    def as_dict(self) -> dict[str, Any]:
        """The fields as the C++ side takes them; its repr leaves the secret out, so that no traceback shows it."""
        return _Fields({field.name: getattr(self, field.name) for field in dataclasses.fields(self)})


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchEnvironment:
    """This process's place in the job, as its launcher put it into the environment.

    Attributes:
        launcher: which family of variables was read: ``torchrun`` (and everything that sets the same),
            ``mpirun``, ``srun``.
        rank: rank in the job.
        world_size: number of ranks in the job.
        local_rank: rank on this host; None where the launcher does not say.
        local_world_size: ranks on this host; None where the launcher does not say.
        init_method: where the ranks meet, ``tcp://host:port``.
        agent_store: the launcher itself keeps the store there; otherwise rank 0 does.
    """

    launcher: str
    rank: int
    world_size: int
    local_rank: int | None
    local_world_size: int | None
    init_method: str
    agent_store: bool = False

    def __post_init__(self) -> None:
        if self.world_size < 1 or not 0 <= self.rank < self.world_size:
            raise InvalidArgumentError(
                f"{self.launcher} says rank {self.rank} of {self.world_size}: a rank lies between 0 and the world size"
            )
        if self.local_rank is not None and self.local_rank < 0:
            raise InvalidArgumentError(f"{self.launcher} says local rank {self.local_rank}, which is below 0")

    @classmethod
    def read(cls, environ: Mapping[str, str] | None = None) -> LaunchEnvironment | None:
        """What the launcher said, or None where there is no launcher.

        torchrun's variables come first, then Open MPI's, then those of a Slurm job step.

        Raises:
            InvalidArgumentError: only some of a family's variables are set (the message names the missing
                ones), one is no number, or the ranks cannot know where to meet.
        """
        environ = os.environ if environ is None else environ
        family = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        if "RANK" in environ or "WORLD_SIZE" in environ:
            _require_all(environ, family, also=("LOCAL_RANK",))
            return cls(
                launcher="torchrun",
                rank=_integer("RANK", environ["RANK"]),
                world_size=_integer("WORLD_SIZE", environ["WORLD_SIZE"]),
                local_rank=_optional_integer(environ, "LOCAL_RANK"),
                local_world_size=_optional_integer(environ, "LOCAL_WORLD_SIZE"),
                init_method=_tcp(environ["MASTER_ADDR"], _integer("MASTER_PORT", environ["MASTER_PORT"])),
                agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            )
        if "OMPI_COMM_WORLD_SIZE" in environ:
            return _from_open_mpi(environ)
        if "SLURM_STEP_NUM_TASKS" in environ and "SLURM_PROCID" in environ:
            return _from_slurm(environ)
        if any(name in environ for name in (*family, "LOCAL_RANK")):
            _require_all(environ, family, also=("LOCAL_RANK",))
        return None


def visible_cuda_devices(environ: Mapping[str, str] | None = None) -> str | None:
    """CUDA_VISIBLE_DEVICES as it is set, for messages; None where it is not."""
    return (os.environ if environ is None else environ).get("CUDA_VISIBLE_DEVICES")


def host_identity(host_id: str = "") -> str:
    """What tells this host apart: the kernel's boot id, the network namespace, and ``host_id``.

    Two containers with a network of their own count as two hosts although they share a kernel.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}/{host_id}"
    except OSError as error:
        raise SystemResourceError(f"cannot tell which host this is ({error}): is /proc mounted?") from error


def read_secret(path: str) -> bytes:
    """The 32 bytes of the job's secret in the file at ``path`` (64 hexadecimal characters).

    Raises:
        SystemResourceError: the file is not there or cannot be read.
        InvalidArgumentError: it is no regular file, others may read it, or its contents are no secret.
    """
    make = f"make one with: (umask 077; openssl rand -hex 32 > {path})"
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise SystemResourceError(f"RINGDP_SECRET_FILE={path}: {error.strerror}; {make}") from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise InvalidArgumentError(f"RINGDP_SECRET_FILE={path} is not a regular file; {make}")
        if status.st_mode & 0o077:
            raise InvalidArgumentError(
                f"RINGDP_SECRET_FILE={path} has mode {stat.S_IMODE(status.st_mode):04o}, so others may read"
                f" the secret: chmod 600 {path}, and make a new secret if this host is shared"
            )
        if status.st_uid not in (os.geteuid(), 0):
            raise InvalidArgumentError(
                f"RINGDP_SECRET_FILE={path} belongs to user {status.st_uid}, not to you (user {os.geteuid()})"
            )
        content = os.read(descriptor, 4096).strip()
    finally:
        os.close(descriptor)
    if not _HEX_SECRET.fullmatch(content):
        # The content itself is never shown: it may be most of a secret.
        raise InvalidArgumentError(
            f"RINGDP_SECRET_FILE={path} holds {len(content)} characters where 64 hexadecimal ones are expected; {make}"
        )
    return bytes.fromhex(content.decode())


def warn_about_unknown(environ: Mapping[str, str]) -> None:
    """Warn about ``RINGDP_*`` variables that nothing reads, most likely misspelt."""
    for name in sorted(environ):
        if name.startswith("RINGDP_") and name not in VARIABLES and not name.startswith("RINGDP_BUILD_"):
            near = difflib.get_close_matches(name, VARIABLES, n=1, cutoff=0.0)[0]
            warnings.warn(f"{name} is not a variable ringdp knows; did you mean {near}?", stacklevel=2)


def apply_log_level(environ: Mapping[str, str] | None = None) -> None:
    """Set the level of logger ``ringdp`` from RINGDP_LOG_LEVEL, with a handler to stderr where it has none.

    Raises:
        InvalidArgumentError: the level is not one of debug, info, warning, error.
    """
    environ = os.environ if environ is None else environ
    level = environ.get("RINGDP_LOG_LEVEL", "").strip().lower()
    if not level:
        return
    if level not in _LOG_LEVELS:
        raise InvalidArgumentError(f"RINGDP_LOG_LEVEL={level} is not one of {', '.join(_LOG_LEVELS)}")
    logger = logging.getLogger("ringdp")
    logger.setLevel(level.upper())
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s: %(message)s"))
        logger.addHandler(handler)


def _check_iface(text: str) -> None:
    items = text.split(",") if text else []
    if any(not item.strip("^=") for item in items):
        raise InvalidArgumentError(f"iface has an empty item: {text!r}")
    if items and not items[0].startswith("^") and any(item.startswith("^") for item in items):
        raise InvalidArgumentError(
            f"iface {text!r} mixes interfaces to use with some to leave out: ^ goes first, for all"
        )
    for item in items:
        if "/" in item:
            try:
                ipaddress.ip_network(item.lstrip("^"), strict=False)
            except ValueError as error:
                raise InvalidArgumentError(f"iface {text!r}: {error}; a network looks like 10.0.0.0/8") from None


def _several_hosts(environ: Mapping[str, str]) -> bool:
    """Whether the launcher put fewer ranks on this host than the job has; False where it does not say."""
    for local, world in (("LOCAL_WORLD_SIZE", "WORLD_SIZE"), ("OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_SIZE")):
        counts = environ.get(local, ""), environ.get(world, "")
        if all(count.isdigit() for count in counts):
            return int(counts[0]) < int(counts[1])
    return False


def _port_range(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,5})\s*[-:]\s*(\d{1,5})|(\d{1,5})", text)
    if match is None:
        raise InvalidArgumentError(f"RINGDP_PORT_RANGE={text} is not LOW-HIGH, for example 29600-29699")
    low, high, single = match.groups()
    return (int(single), int(single)) if single else (int(low), int(high))


def _spin_us(text: str) -> int:
    return _integer("RINGDP_SPIN_US", text)


def _milliseconds(variable: str) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            return int(float(text) * 1000)
        except (ValueError, OverflowError):
            raise InvalidArgumentError(f"{variable}={text} is not a number of seconds") from None

    return parse


def _integer(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise InvalidArgumentError(f"{name}={text} is not a whole number") from None


def _optional_integer(environ: Mapping[str, str], name: str) -> int | None:
    return _integer(name, environ[name]) if environ.get(name) else None


def _require_all(environ: Mapping[str, str], names: tuple[str, ...], *, also: tuple[str, ...] = ()) -> None:
    missing = [name for name in names if not environ.get(name)]
    if missing:
        present = [f"{name}={environ[name]}" for name in (*names, *also) if environ.get(name)]
        raise InvalidArgumentError(
            f"the environment says {', '.join(present) or 'nothing usable'} but lacks {', '.join(missing)}:"
            " start the script with ringrun or torchrun, set all of them, or unset them all to run on one"
            " rank"
        )


def _from_open_mpi(environ: Mapping[str, str]) -> LaunchEnvironment:
    names = (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    )
    _require_all(environ, names)
    rank, world_size, local_rank, local_size = (_integer(name, environ[name]) for name in names)
    job = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid") or ""
    return LaunchEnvironment(
        launcher="mpirun",
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_size,
        init_method=_meeting_point(
            environ,
            first_host="127.0.0.1" if local_size == world_size else None,
            job=job,
            advice="pass -x MASTER_ADDR=<host of rank 0> -x MASTER_PORT=<free port> to mpirun",
        ),
    )


def _from_slurm(environ: Mapping[str, str]) -> LaunchEnvironment:
    # SLURM_STEP_NUM_TASKS is set by srun only; SLURM_NTASKS is also there in a batch script that runs as one
    # process.
    names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
    _require_all(environ, names)
    rank, world_size, local_rank = (_integer(name, environ[name]) for name in names)
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or ""
    return LaunchEnvironment(
        launcher="srun",
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=None,
        init_method=_meeting_point(
            environ,
            first_host=_first_slurm_host(nodes),
            job=f"{environ.get('SLURM_JOB_ID', '')}.{environ.get('SLURM_STEP_ID', '')}",
            advice="export MASTER_ADDR=<host of rank 0> and MASTER_PORT=<free port> before srun",
        ),
    )


def _meeting_point(environ: Mapping[str, str], *, first_host: str | None, job: str, advice: str) -> str:
    """``tcp://host:port`` for launchers without a store: what the user set, else the first host and a port that
    every rank computes from the job's name (20000 to 29999, below the ports the kernel hands out)."""
    host = environ.get("MASTER_ADDR") or first_host
    port = environ.get("MASTER_PORT")
    if not host or not (port or job.strip(".")):
        missing = [n for n, v in (("MASTER_ADDR", host), ("MASTER_PORT", port or job.strip("."))) if not v]
        raise InvalidArgumentError(f"the ranks cannot know where to meet, {' and '.join(missing)} is not set: {advice}")
    number = _integer("MASTER_PORT", port) if port else 20000 + zlib.crc32(job.encode()) % 10000
    return _tcp(host, number)


def _tcp(host: str, port: int) -> str:
    if not 0 < port < 65536:
        raise InvalidArgumentError(f"MASTER_PORT={port} is not between 1 and 65535")
    return f"tcp://{f'[{host}]' if ':' in host else host}:{port}"


def _first_slurm_host(nodes: str) -> str | None:
    """The first name in Slurm's list notation: ``node[003-005,9],gpu1`` is ``node003``."""
    match = re.match(r"([^,\[]+)(?:\[(\d+)[^\]]*\]([^,\[]*))?", nodes)
    return "".join(part or "" for part in match.groups()) if match else None


_READERS: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    "RINGDP_SECRET_FILE": ("secret", read_secret),
    "RINGDP_HOST_ID": ("host_id", str),
    "RINGDP_IFACE": ("iface", str),
    "RINGDP_ADVERTISE": ("advertise", str),
    "RINGDP_PORT_RANGE": ("port_range", _port_range),
    "RINGDP_SPIN_US": ("spin_us", _spin_us),
    "RINGDP_CONNECT_TIMEOUT": ("connect_timeout_ms", _milliseconds("RINGDP_CONNECT_TIMEOUT")),
    "RINGDP_STALL_NOTICE": ("stall_notice_ms", _milliseconds("RINGDP_STALL_NOTICE")),
    "RINGDP_HOST_TIMEOUT": ("host_silence_ms", _milliseconds("RINGDP_HOST_TIMEOUT")),
}
