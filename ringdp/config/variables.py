"""Every environment variable that ringdp reads at run time. No other file reads one.

`RingConfig` holds the settings of the ring (the ``RINGDP_*`` variables), `LaunchEnvironment`
(ringdp/config/environments) the place in the job that a launcher set. Both validate themselves: an InvalidArgumentError
names the variable or field.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib.util
import logging
import os
import re
import socket
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from ringdp.config import inheritance, tuning
from ringdp.config.console_log import ConsoleLog
from ringdp.config.environments import optional_integer, several_hosts, whole_number
from ringdp.config.parse import (
    check_interfaces,
    milliseconds,
    read_address,
    read_door,
    read_port_range,
    read_rate,
    read_streams,
    switch,
)
from ringdp.config.secret import read_secret
from ringdp.errors import InvalidArgumentError, SystemResourceError

VARIABLES: Mapping[str, str] = {
    "RINGDP_SECRET_FILE": "path of a file of mode 0600 with 64 hexadecimal characters, the job's secret",
    "RINGDP_TLS": "1: ranks speak TLS 1.3 over TCP, keyed by the job's secret (ringrun --tls sets it); 0: they do not",
    "RINGDP_TLS_CERT": "path of this rank's certificate (PEM), where a certificate is to prove who a rank is, too",
    "RINGDP_TLS_KEY": "path of the private key of RINGDP_TLS_CERT (PEM)",
    "RINGDP_TLS_CA": "path of the certificates (PEM) that must have signed those of the other ranks",
    "RINGDP_HOST_ID": "a name for this host, where ranks that share a kernel must count as several hosts",
    "RINGDP_SITE": "a name for where this host stands (paris), where hosts of several places are far apart",
    "RINGDP_IFACE": "network interfaces to use between hosts: eth0 | eth,ib | 10.0.0.0/8 | all but some: ^docker,br-",
    "RINGDP_ADVERTISE": "one more address or name[:port] under which the others can reach this rank (containers, NAT)",
    "RINGDP_PORT_RANGE": "ports to listen on, LOW-HIGH, for firewalls; any free port without it",
    "RINGDP_CUDA": "what carries CUDA tensors: nccl, ring (through the host's memory), or auto: measure both at start",
    "RINGDP_TRANSPORT": "auto: shared memory inside a host where it can be had, else TCP; shm: or fail; tcp: never",
    "RINGDP_STREAMS": "connections that two ranks have over TCP, 1 to 32; auto: 1, more where they are far apart",
    "RINGDP_CONGESTION": "congestion control of TCP: auto (bbr on long paths where allowed), system, or a name",
    "RINGDP_FULL_MESH_RANKS": "jobs of up to so many ranks (16) connect all pairs at the start, others when needed",
    "RINGDP_CHECKSUM": "1: what crosses TCP carries a CRC32C, so that a flipped bit is an error; 0: it does not",
    "RINGDP_RATE": "what this host sends over TCP at most, to try a slower network: 1gbit | 100mbit | 125MB/s",
    "RINGDP_SPIN_US": "microseconds to poll before sleeping while waiting; 0 sleeps at once",
    "RINGDP_CONNECT_TIMEOUT": "seconds the ranks have to connect to each other",
    "RINGDP_STALL_NOTICE": "seconds between two log lines about an operation that does not move; 0 for none",
    "RINGDP_HOST_TIMEOUT": "seconds without an answer of its host after which a rank counts as lost, at least 4",
    "RINGDP_HEAL": "seconds (4) in which a TCP connection that broke is made again; 0: its rank counts as lost at once",
    "RINGDP_GRADIENT_POOL": "1: RingDP keeps memory for gradients on the CPU (gradient_pool); 0: it does not",
    "RINGDP_TUNING": "path of a JSON table of algorithms, the same on all ranks (python -m benchmarks tune)",
    "RINGDP_REPORT_EVERY": "steps (20) after which the ranks exchange how they spent them; 0: never",
    "RINGDP_REDUCE_ALONE": "1: one rank alone sends its buckets, too (to try NCCL on one GPU); 0: it does not",
    "RINGDP_DUMP_DIR": "folder for dumps of operations and stacks of stalled ranks (ringrun sets it); empty: none",
    "RINGDP_METRICS_DIR": "folder in which each rank writes a line of JSON for each step (ringrun --metrics-dir)",
    "RINGDP_TENSORBOARD": "1: the same for TensorBoard, in the folder's tensorboard/ (ringrun --tensorboard)",
    "RINGDP_TIMELINE": "folder in which each rank writes a timeline at its end (python -m ringdp timeline merges them)",
    "RINGDP_ELASTIC": "1: the job goes on without ranks that are lost (ringrun --elastic sets it); 0: it does not",
    "RINGDP_MIN_RANKS": "of ringdp.elastic.Job: with fewer ranks the others wait for newcomers (ringrun --min-ranks)",
    "RINGDP_MAX_RANKS": "of ringdp.elastic.Job: nobody is let in beyond so many (ringrun --max-ranks)",
    "RINGDP_JOIN": "HOST:PORT of a running elastic job that this process joins (ringrun --join sets it)",
    "RINGDP_DOOR": "folder of this host's launcher, in a job with one open port (ringrun --door and --join set it)",
    "RINGDP_RANK_PROCESS": "set by ringdp: a process that a rank has started reads there that it is not a rank",
    "RINGDP_LOG_LEVEL": "debug, info, warning or error: what ringdp writes to stderr",
}
"""The variables that ringdp reads, with what they mean."""

_BETWEEN_OURSELVES = ("RINGDP_REPORT_FILE",)  # ringrun to its ranks

CHECKSUM_BY_DEFAULT = False
"""Whether frames over TCP carry a checksum where RINGDP_CHECKSUM is not set (docs/how-to/failures.md says why)."""

TLS_LIBRARY = "libssl.so.3"
"""The library of OpenSSL that RINGDP_TLS loads."""

FULL_MESH_RANKS = 16
"""Jobs of up to so many ranks connect all pairs when they meet, where RINGDP_FULL_MESH_RANKS is not set."""

REPORT_EVERY = 20
"""Steps between two reports, where RINGDP_REPORT_EVERY is not set."""

ELASTIC_MARK = "elastic"
"""The file beside a rank's report which says that the job can do without ranks that die from now on."""

FIRST_MARK = "rank_0"
"""The file beside a rank's report which says that this process has become rank 0 of an elastic job. It has the sizes of
its standard output and error then, where these are files; else 0."""

ADMITS_MARK = "admits"
"""The file beside a rank's report which says that its script lets newcomers in (`ringdp.elastic.Job`)."""

JOB_START = "ringdp/elastic"
"""The key, in the store of an elastic job's ranks, of its newest start: the start's number, and how many ranks it had.
The keys of a start have this, and its number, in front."""

JOB_OVER = "over"
"""The key of a start which says that the training has ended."""

STORE_KEPT = "ringdp/kept"
"""The key that a store has where `python -m ringdp store` keeps it, and no launcher; its value is the job's name, or
"" before there is one."""

JOB_STORE = "ringdp/job_store"
"""The key, in the store of the launchers' rendezvous, of the elastic jobs that have met there, by line; with a name of
these behind it, that of the store of its ranks."""

MEMBER_MARK = "member"
"""The file beside a rank's report which says that it is a member of its elastic job, not a newcomer any more."""

_SIMILAR = 0.75  # from here on names look like misspellings of each other
# What is an argument, and often sought here.
_ARGUMENTS = {
    "RINGDP_COMPRESSION": "RingDP(compression=…)",
    "RINGDP_TIMEOUT": "ringdp.init(timeout=…)",
    "RINGDP_BACKEND": "ringdp.init(backend)",
    "RINGDP_BUCKET_CAP_MB": "RingDP(bucket_cap_mb=…)",
}
_CUDA_CHOICES = ("nccl", "ring", "auto")
_LOG_LEVELS = ("debug", "info", "warning", "error")


class _Fields(dict[str, Any]):
    def __repr__(self) -> str:
        return repr({name: value for name, value in self.items() if name != "secret"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class RingConfig:
    """Settings of the backend ``ring``; `from_environment` fills them from the ``RINGDP_*`` variables.

    Also accepted as ``pg_options`` of ``torch.distributed.init_process_group("ring", pg_options=...)``.

    Attributes:
        secret: 32 bytes that every rank of the job knows; None lets rank 0 make them and publish them in the
            store.
        tls: ranks encrypt what goes over TCP, with TLS 1.3, and detect any change of it; needs ``secret``. The same on
            all ranks. Shared memory stays as it is.
        tls_cert, tls_key, tls_ca: files of PEM with this rank's certificate, its key, and those that must have signed
            the other ranks' certificates; all three, or empty.
        host_id: a name that tells hosts apart which share a kernel; empty where none is needed.
        site: a name for where this host stands; empty where all hosts are near. Ranks of one site count as one host
            for the algorithms: compressed gradients are added up inside a site and coded between sites only. All
            ranks name theirs, or none does.
        host_name: how messages call this host.
        iface: interfaces to use between hosts, a list of names (or beginnings of names; ``=eth0`` is that name
            only), addresses and networks in the order of preference, or, with ``^`` in front, all but those;
            empty takes all that are up.
        advertise: address or name, perhaps with a port, given to the peers before the interfaces' own; empty
            for none.
        port_range: lowest and highest port to listen on; None takes any free one.
        transport: what carries bytes between ranks of one host: ``auto`` takes shared memory where it can be had,
            else TCP, and says why; ``shm`` makes that an error on all ranks; ``tcp`` never tries. It changes no
            result. Between hosts it is always TCP.
        streams: connections that two ranks have over TCP, 1 to 32; 0 takes one between hosts that are near and more
            between those that are far apart, where one alone is slow after each lost packet. The same on all ranks.
        congestion: the congestion control of connections over TCP: ``auto`` asks for bbr on long paths, where the
            system allows it; ``system`` leaves them as they are; else a name.
        checksum: frames over TCP carry a CRC32C, and one that does not arrive as it was sent is an error on all ranks
            of its group; the same on all ranks. Shared memory has none, and needs none.
        full_mesh_ranks: in a job of up to so many ranks, all pairs connect when the ranks meet; in a larger one each
            rank connects with some others, and a pair that is missing when it is first needed. The same on all ranks.
        connect_timeout_ms: how long the ranks have to connect to each other.
        rate_bytes_per_s: what the ranks of this host together send over TCP at most, each an equal share of it, as
            through a network card of that speed; 0 for no limit. Shared memory is not limited.
        spin_us: how long a wait polls before it sleeps.
        stall_notice_ms: time between two log lines that name the ranks for which a stalled operation waits; 0 for
            never.
        host_silence_ms: how long a rank's host may leave everything unanswered before the rank counts as lost. A
            stopped or busy process does not: its kernel answers.
        heal_ms: how long a rank tries to make a TCP connection again that broke, before it counts the peer as lost; 0
            for not at all. A host may be silent for that long, too. Nothing is lost or done twice when it succeeds.
        tuning: which algorithm runs from which size on, `ringdp.config.tuning`; the same on all ranks.
        epoch: how often the launcher restarted the job; ranks of another epoch are turned away.
        dump_dir: folder for dumps and stacks; empty for none.
        several_hosts: the launcher says that the job runs on several hosts: a rank need not wait for another to
            know that it must listen on more than loopback.
        door: of a job with a door (``ringrun --door``): the folder of this host's launcher, the port of loopback at
            which that takes connections for ranks of other hosts, the number of this host, and the microseconds of a
            round trip to the door. None: there is none.

    Raises:
        InvalidArgumentError: a value cannot be used; the message names the field.
    """

    secret: bytes | None = dataclasses.field(default=None, repr=False)
    tls: bool = False
    tls_cert: str = ""
    tls_key: str = ""
    tls_ca: str = ""
    host_id: str = ""
    site: str = ""
    host_name: str = dataclasses.field(default_factory=socket.gethostname)
    iface: str = ""
    advertise: str = ""
    port_range: tuple[int, int] | None = None
    transport: str = "auto"
    streams: int = 0
    congestion: str = "auto"
    checksum: bool = CHECKSUM_BY_DEFAULT
    full_mesh_ranks: int = FULL_MESH_RANKS
    rate_bytes_per_s: int = 0
    connect_timeout_ms: int = 120_000
    spin_us: int = 50
    stall_notice_ms: int = 10_000
    host_silence_ms: int = 4_000
    heal_ms: int = 4_000
    tuning: tuning.Tuning = dataclasses.field(default_factory=tuning.Tuning)
    dump_dir: str = ""
    epoch: int = 0
    several_hosts: bool = False
    door: tuple[str, int, int, int] | None = None

    def __post_init__(self) -> None:
        if self.secret is not None and len(self.secret) != 32:
            raise InvalidArgumentError(f"secret must be 32 bytes, not {len(self.secret)}")
        self._check_tls()
        for field, limit in (("host_id", 256), ("site", 256), ("host_name", 256), ("iface", 512), ("advertise", 255)):
            text = getattr(self, field)
            if len(text) > limit or any(c.isspace() or not c.isprintable() for c in text):
                raise InvalidArgumentError(
                    f"{field} must be at most {limit} printable characters without blanks, not {text!r}"
                )
        check_interfaces(self.iface)
        if self.port_range is not None:
            low, high = self.port_range
            if not 1 <= low <= high <= 65535:
                raise InvalidArgumentError(
                    f"port_range must be two ports between 1 and 65535, the lower one first, not {low}-{high}"
                )
        if self.transport != "auto" and self.transport not in (names := _transport_names()):
            raise InvalidArgumentError(f"transport must be one of auto, {', '.join(names)}, not {self.transport!r}")
        if self.rate_bytes_per_s != 0 and not 1_000 <= self.rate_bytes_per_s <= 10**12:
            raise InvalidArgumentError(
                f"rate_bytes_per_s must be 0 (no limit) or between 1000 and 10^12, not {self.rate_bytes_per_s}"
            )
        if not 0 <= self.streams <= 32:
            raise InvalidArgumentError(f"streams must be auto (0) or 1 to 32, not {self.streams}")
        if not re.fullmatch(r"[a-z0-9_-]{1,15}", self.congestion):
            raise InvalidArgumentError(
                f"congestion must be auto, system or the name of a congestion control, not {self.congestion!r}"
            )
        if not 1 <= self.full_mesh_ranks < 2**31:
            raise InvalidArgumentError(f"full_mesh_ranks must be 1 or more, not {self.full_mesh_ranks}")
        if self.connect_timeout_ms <= 0:
            raise InvalidArgumentError(f"connect_timeout_ms must be above 0, not {self.connect_timeout_ms}")
        if not 0 <= self.spin_us <= 1_000_000:
            raise InvalidArgumentError(f"spin_us must be between 0 and 1000000, not {self.spin_us}")
        if self.stall_notice_ms < 0:
            raise InvalidArgumentError(f"stall_notice_ms must be 0 or more, not {self.stall_notice_ms}")
        if not 4_000 <= self.host_silence_ms <= 3_600_000:
            raise InvalidArgumentError(f"host_silence_ms must be between 4000 and 3600000, not {self.host_silence_ms}")
        if self.heal_ms != 0 and not 100 <= self.heal_ms <= 3_600_000:
            raise InvalidArgumentError(f"heal_ms must be 0 (never) or between 100 and 3600000, not {self.heal_ms}")
        if not 0 <= self.epoch < 2**32:
            raise InvalidArgumentError(f"epoch must be between 0 and {2**32 - 1}, not {self.epoch}")

    def _check_tls(self) -> None:
        files = {"tls_cert": self.tls_cert, "tls_key": self.tls_key, "tls_ca": self.tls_ca}
        missing = [name for name, path in files.items() if not path]
        if given := [name for name, path in files.items() if path]:
            if not self.tls:
                raise InvalidArgumentError(f"{given[0]} is given, and TLS is off: RINGDP_TLS=1 switches it on")
            if missing:
                raise InvalidArgumentError(
                    f"{missing[0]} is missing: RINGDP_TLS_CERT, RINGDP_TLS_KEY and RINGDP_TLS_CA go together"
                )
        if self.tls and self.secret is None:
            raise InvalidArgumentError(
                "tls needs the job's secret in a file on every host (RINGDP_SECRET_FILE, ringrun --secret-file):"
                " without one, rank 0 publishes a secret in the store, where whoever reaches that can read it"
            )

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> RingConfig:
        """Read the ``RINGDP_*`` variables; an empty one counts as not set.

        Unknown ``RINGDP_*`` variables are warned about, with the nearest known name.

        Raises:
            InvalidArgumentError: a value cannot be used; the message names the variable.
            SystemResourceError: the secret's file cannot be read.
        """
        environ = _of_this_job(environ)
        warn_about_unknown(environ)
        fields: dict[str, Any] = {
            "epoch": optional_integer(environ, "TORCHELASTIC_RESTART_COUNT") or 0,
            "several_hosts": several_hosts(environ),
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
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        table: tuning.Tuning = fields.pop("tuning")
        return _Fields(fields, table=dict(table.limits), table_source=table.source, tls_library=TLS_LIBRARY)


def _transport_names() -> list[str]:
    """Of the core's table (transport/registry.cpp); the extension comes with the first process group anyway."""
    from ringdp import _build

    _build.check()
    from ringdp import _C

    return [transport["name"] for transport in _C.registered_transports()]


def _of_this_job(environ: Mapping[str, str] | None) -> Mapping[str, str]:
    """The environment without what belongs to the job of a rank that has started this process."""
    return inheritance.without_places(os.environ if environ is None else environ)


def mark_rank(rank: int, world_size: int, meet: str | None) -> None:
    """This process is a rank from now on, for those that it starts.

    Args:
        rank, world_size: its place.
        meet: where the ranks meet; None for a world of one that meets nowhere.
    """
    for name in os.environ.keys() - inheritance.without_places(os.environ).keys():
        del os.environ[name]
    os.environ[inheritance.MARK] = inheritance.mark(
        os.environ, pid=os.getpid(), rank=rank, world_size=world_size, meet=meet
    )


def unmark_rank() -> None:
    """This process is no longer a rank: a process that it starts from now on may take its place."""
    origin = inheritance.origin(os.environ)
    if origin is None or not origin.is_this_process:
        return
    if "TORCHELASTIC_RUN_ID" in os.environ:  # it has a launcher still
        os.environ[inheritance.MARK] = inheritance.mark(
            os.environ, pid=0, rank=origin.rank, world_size=origin.world_size, meet=None
        )
    else:
        del os.environ[inheritance.MARK]


def refuse_inside_rank(meet: str | None) -> None:
    """Raises InvalidStateError in a process that a rank has started and that is about to meet as that rank."""
    inheritance.refuse_inside_rank(os.environ, meet)


def has_own_agent() -> bool:
    """Whether torchrun's variables name this process's own agent, and not that of a rank that started this process."""
    return inheritance.has_own_agent(os.environ)


def report_file(environ: Mapping[str, str] | None = None) -> str | None:
    """The file in which the launcher expects this rank's report; None where it expects none."""
    return _of_this_job(environ).get("RINGDP_REPORT_FILE") or None


def report_every(environ: Mapping[str, str] | None = None) -> int:
    """RINGDP_REPORT_EVERY, the same on all ranks.

    Raises:
        InvalidArgumentError: it is not a number from 0 to 1000.
    """
    text = (os.environ if environ is None else environ).get("RINGDP_REPORT_EVERY", "").strip()
    every = whole_number("RINGDP_REPORT_EVERY", text) if text else REPORT_EVERY
    if not 0 <= every <= 1000:
        raise InvalidArgumentError(f"RINGDP_REPORT_EVERY={text} must be a number of steps up to 1000, or 0 for never")
    return every


def metrics_dir(environ: Mapping[str, str] | None = None) -> str | None:
    """RINGDP_METRICS_DIR; None where it is not set."""
    return _of_this_job(environ).get("RINGDP_METRICS_DIR", "").strip() or None


def timeline_dir(environ: Mapping[str, str] | None = None) -> str | None:
    """RINGDP_TIMELINE; None where it is not set."""
    return _of_this_job(environ).get("RINGDP_TIMELINE", "").strip() or None


def _switch(name: str, environ: Mapping[str, str] | None, *, default: bool) -> bool:
    choice = _of_this_job(environ).get(name, "").strip()
    return switch(name, choice) if choice else default


def tensorboard(environ: Mapping[str, str] | None = None) -> bool:
    """RINGDP_TENSORBOARD: whether metrics are written for TensorBoard, too.

    Raises:
        InvalidArgumentError: it is neither 0 nor 1, or 1 without RINGDP_METRICS_DIR or the package tensorboard.
    """
    on = _switch("RINGDP_TENSORBOARD", environ, default=False)
    if on and metrics_dir(environ) is None:
        raise InvalidArgumentError("RINGDP_TENSORBOARD=1 needs a folder to write to: set RINGDP_METRICS_DIR")
    if on and importlib.util.find_spec("tensorboard") is None:
        raise InvalidArgumentError("RINGDP_TENSORBOARD=1 needs the package tensorboard: pip install tensorboard")
    return on


def visible_cuda_devices(environ: Mapping[str, str] | None = None) -> str | None:
    """CUDA_VISIBLE_DEVICES as it is set, for messages; None where it is not."""
    return (os.environ if environ is None else environ).get("CUDA_VISIBLE_DEVICES")


def cuda_choice(environ: Mapping[str, str] | None = None) -> str:
    """RINGDP_CUDA: ``nccl``, ``ring``, ``auto``, or '' where it is not set.

    Raises:
        InvalidArgumentError: it is something else.
    """
    choice = (os.environ if environ is None else environ).get("RINGDP_CUDA", "").strip().lower()
    if choice and choice not in _CUDA_CHOICES:
        raise InvalidArgumentError(f"RINGDP_CUDA={choice} is not one of {', '.join(_CUDA_CHOICES)}")
    return choice


def gradient_pool(environ: Mapping[str, str] | None = None) -> bool:
    """RINGDP_GRADIENT_POOL: whether RingDP may keep memory for gradients; True where it is not set.

    Raises:
        InvalidArgumentError: it is neither 0 nor 1.
    """
    return _switch("RINGDP_GRADIENT_POOL", environ, default=True)


def reduce_alone(environ: Mapping[str, str] | None = None) -> bool:
    """RINGDP_REDUCE_ALONE: whether one rank by itself reduces its buckets; False where it is not set.

    Raises:
        InvalidArgumentError: it is neither 0 nor 1.
    """
    return _switch("RINGDP_REDUCE_ALONE", environ, default=False)


def elastic(environ: Mapping[str, str] | None = None) -> bool:
    """RINGDP_ELASTIC: whether the job goes on without ranks that are lost; False where it is not set, unless this
    process joins a job that does (RINGDP_JOIN).

    Raises:
        InvalidArgumentError: it is neither 0 nor 1.
    """
    return joins(environ) is not None or _switch("RINGDP_ELASTIC", environ, default=False)


def min_ranks(environ: Mapping[str, str] | None = None) -> int:
    """RINGDP_MIN_RANKS: with fewer ranks an elastic job waits; 1 where it is not set.

    Raises:
        InvalidArgumentError: it is no number from 1 on.
    """
    return _ranks("RINGDP_MIN_RANKS", environ) or 1


def max_ranks(environ: Mapping[str, str] | None = None) -> int | None:
    """RINGDP_MAX_RANKS: the most ranks of an elastic job; None where it is not set.

    Raises:
        InvalidArgumentError: it is no number from 1 on, or below `min_ranks`.
    """
    most, least = _ranks("RINGDP_MAX_RANKS", environ), min_ranks(environ)
    if most is not None and most < least:
        raise InvalidArgumentError(f"RINGDP_MAX_RANKS={most} is below RINGDP_MIN_RANKS={least}")
    return most


def _ranks(name: str, environ: Mapping[str, str] | None) -> int | None:
    text = _of_this_job(environ).get(name, "").strip()
    if text and (number := whole_number(name, text)) < 1:
        raise InvalidArgumentError(f"{name}={text} must be a number of ranks, at least 1")
    return number if text else None


def joins(environ: Mapping[str, str] | None = None) -> tuple[str, int, str] | None:
    """RINGDP_JOIN: host and port where this process finds the job that it joins, and that job's name, or ""; None: it
    is there from the start.

    Raises:
        InvalidArgumentError: it is no HOST:PORT.
    """
    value = _of_this_job(environ).get("RINGDP_JOIN", "")
    if not value:
        return None
    where, _, name = value.partition("/")
    try:
        return *read_address(where), name
    except ValueError as error:
        raise InvalidArgumentError(f"RINGDP_JOIN={error}") from None


def host_identity(host_id: str = "") -> str:
    """The identity of this host: the kernel's boot id, the network namespace, and ``host_id``.

    Two containers with a network of their own count as two hosts although they share a kernel.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}/{host_id}"
    except OSError as error:
        raise SystemResourceError(f"this host cannot be identified ({error}): is /proc mounted?") from error


_DDP_LOGS = ("MASTER_PORT", "MASTER_ADDR", "CUDA_VISIBLE_DEVICES", "TORCH_DISTRIBUTED_DEBUG")
_DDP_LOGS_OF_BACKEND = {
    "gloo": ("GLOO_SOCKET_IFNAME", "GLOO_DEVICE_TRANSPORT"),
    "nccl": (
        "NCCL_SOCKET_IFNAME", "TORCH_NCCL_BLOCKING_WAIT", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_DEBUG",
        "NCCL_NTHREADS", "NCCL_IB_TIMEOUT",
    ),
}  # fmt: skip


def ddp_environment(backend: str, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables that DistributedDataParallel keeps in its logging data, under their names there; N/A: not set."""
    environ = os.environ if environ is None else environ
    names = _DDP_LOGS + _DDP_LOGS_OF_BACKEND.get(backend, ())
    return {name.replace("TORCH_NCCL", "NCCL").lower(): environ.get(name, "N/A") for name in names}


def warn_about_unknown(environ: Mapping[str, str]) -> None:
    """Warn about ``RINGDP_*`` variables that ringdp does not read, most likely misspelt."""
    for name, near in unknown_variables(environ).items():
        meant = [_ARGUMENTS[name]] if name in _ARGUMENTS else [one for one in near if _similar(name, one)]
        guess = f"; did you mean {' or '.join(meant)}?" if meant else "; docs/reference/settings.md has all"
        warnings.warn(f"{name} is not a variable ringdp knows{guess}", stacklevel=2)


def _similar(name: str, known: str) -> bool:
    """Whether somebody may have meant `known`: a misspelling, or with a word less or more."""
    words, others = (text.removeprefix("RINGDP_").split("_") for text in (name, known))
    words, others = ([word.removesuffix("S") for word in one] for one in (words, others))
    misspelt = difflib.SequenceMatcher(None, "".join(words), "".join(others)).ratio() >= _SIMILAR
    return misspelt or set(words) < set(others) or set(others) < set(words)


def unknown_variables(environ: Mapping[str, str]) -> dict[str, list[str]]:
    """The ``RINGDP_*`` variables that ringdp does not read, each with the known ones of the most similar names."""
    return {
        name: difflib.get_close_matches(name, VARIABLES, n=6, cutoff=0.0)
        for name in sorted(environ)
        if name.startswith("RINGDP_")
        and name not in (*VARIABLES, *_BETWEEN_OURSELVES)
        and not name.startswith("RINGDP_BUILD_")
    }


def apply_log_level(environ: Mapping[str, str] | None = None, *, rank: int | None = None) -> None:
    """Set the level of logger ``ringdp`` from RINGDP_LOG_LEVEL, and have it shown on the console.

    Args:
        environ: the variables; None takes this process's.
        rank: of this process, once it is known.

    Raises:
        InvalidArgumentError: the level is not one of debug, info, warning, error.
    """
    environ = os.environ if environ is None else environ
    level = environ.get("RINGDP_LOG_LEVEL", "").strip().lower()
    if level and level not in _LOG_LEVELS:
        raise InvalidArgumentError(f"RINGDP_LOG_LEVEL={level} is not one of {', '.join(_LOG_LEVELS)}")
    logger = logging.getLogger("ringdp")
    console = next((one for one in logger.handlers if isinstance(one, ConsoleLog)), None)
    if console is None:
        logger.addHandler(console := ConsoleLog())
    console.rank = console.rank if rank is None else rank
    if level:
        logger.setLevel(level.upper())
        console.setLevel(level.upper())
        console.detailed = True


_READERS: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    "RINGDP_SECRET_FILE": ("secret", read_secret),
    "RINGDP_TLS": ("tls", functools.partial(switch, "RINGDP_TLS")),
    "RINGDP_TLS_CERT": ("tls_cert", os.path.abspath),
    "RINGDP_TLS_KEY": ("tls_key", os.path.abspath),
    "RINGDP_TLS_CA": ("tls_ca", os.path.abspath),
    "RINGDP_HOST_ID": ("host_id", str),
    "RINGDP_SITE": ("site", str),
    "RINGDP_IFACE": ("iface", str),
    "RINGDP_ADVERTISE": ("advertise", str),
    "RINGDP_PORT_RANGE": ("port_range", read_port_range),
    "RINGDP_TRANSPORT": ("transport", str.lower),
    "RINGDP_STREAMS": ("streams", read_streams),
    "RINGDP_CONGESTION": ("congestion", str.lower),
    "RINGDP_CHECKSUM": ("checksum", functools.partial(switch, "RINGDP_CHECKSUM")),
    "RINGDP_FULL_MESH_RANKS": ("full_mesh_ranks", functools.partial(whole_number, "RINGDP_FULL_MESH_RANKS")),
    "RINGDP_RATE": ("rate_bytes_per_s", read_rate),
    "RINGDP_SPIN_US": ("spin_us", functools.partial(whole_number, "RINGDP_SPIN_US")),
    "RINGDP_CONNECT_TIMEOUT": ("connect_timeout_ms", milliseconds("RINGDP_CONNECT_TIMEOUT")),
    "RINGDP_STALL_NOTICE": ("stall_notice_ms", milliseconds("RINGDP_STALL_NOTICE")),
    "RINGDP_HOST_TIMEOUT": ("host_silence_ms", milliseconds("RINGDP_HOST_TIMEOUT")),
    "RINGDP_HEAL": ("heal_ms", milliseconds("RINGDP_HEAL")),
    "RINGDP_TUNING": ("tuning", tuning.read),
    "RINGDP_DUMP_DIR": ("dump_dir", os.path.abspath),
    "RINGDP_DOOR": ("door", read_door),
}
