# Written by tools/stubs.py from the built module (make stubs); do not edit.
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from numpy.typing import NDArray
from typing_extensions import Buffer

class Store:
    """The key-value service of a rendezvous."""

class CallbackStore(Store):
    """A store kept in Python."""

    def __init__(self, set: Callable[[str, str], object], find: Callable[[str], str | bytes | None]) -> None: ...

class MemoryStore(Store):
    """A store for ranks that are threads."""

    def __init__(self) -> None: ...
    def get(self, key: str, *, timeout_ms: int = 10000) -> str | None:
        """The value, or None when it is not there in time."""

    def set(self, key: str, value: str) -> None: ...

class FlowTimes:
    """Bytes of one operation to or from one peer. Times: time.monotonic_ns(); 0: not yet."""

    @property
    def first_ns(self) -> int: ...
    @property
    def last_ns(self) -> int:
        """The last byte so far."""

    @property
    def moved(self) -> int:
        """Bytes so far."""

    @property
    def peer(self) -> int:
        """Rank in the job."""

    @property
    def sends(self) -> bool:
        """To the peer; otherwise from it."""

    @property
    def total(self) -> int:
        """Bytes in all."""

    @property
    def work_first_ns(self) -> int:
        """Work on its bytes began: encoding, adding, decoding, copying; 0: none was noted."""

    @property
    def work_last_ns(self) -> int:
        """And ended so far."""

    @property
    def work_ns(self) -> int:
        """Spent on it."""

class OperationRecord:
    """One operation of this rank. Times: time.monotonic_ns(); 0: that has not happened."""

    @property
    def algorithm(self) -> int:
        """Its number, see algorithms()."""

    @property
    def bytes(self) -> int:
        """Of one rank's input."""

    @property
    def call_site(self) -> int: ...
    @property
    def count(self) -> int:
        """Elements of one rank's input."""

    @property
    def dtype(self) -> str: ...
    @property
    def ended_ns(self) -> int: ...
    @property
    def ended_number(self) -> int:
        """Counts them as they ended; 0: it is in flight."""

    @property
    def flows(self) -> list[FlowTimes]: ...
    @property
    def flows_left_out(self) -> int: ...
    @property
    def group(self) -> int:
        """The number of a RecordedGroup."""

    @property
    def in_order(self) -> bool:
        """It has a place in the order of its group: not a message, not issued inside a callback."""

    @property
    def kind(self) -> str:
        """'all_reduce', …"""

    @property
    def name(self) -> str: ...
    @property
    def number(self) -> int:
        """Counts the operations of all groups as they were called."""

    @property
    def op(self) -> str: ...
    @property
    def queued_ns(self) -> int:
        """The call."""

    @property
    def root(self) -> int:
        """Or a message's tag, or the codec of a compressed all-reduce; -1: none."""

    @property
    def sequence(self) -> int:
        """In its group; the same on all members."""

    @property
    def started_ns(self) -> int:
        """Its turn came in its group."""

    @property
    def state(self) -> str:
        """'queued', 'started', 'done' or 'failed'."""

    @property
    def text(self) -> str: ...

class RecordedGroup:
    """A group of which operations are recorded."""

    @property
    def id(self) -> int: ...
    @property
    def members(self) -> list[int]:
        """Ranks in the job."""

    @property
    def name(self) -> str: ...
    @property
    def removed(self) -> bool: ...

class Runtime:
    """One rank: connections, engine, threads."""

    def __init__(
        self,
        store: Store,
        rank: int,
        world: int,
        *,
        timeout_ms: int = 30000,
        spin_us: int = 50,
        secret: str | bytes = b"",
        epoch: int = 0,
        stall_notice_ms: int = 10000,
        segment_bytes: int = 262144,
        fault_seed: int = 0,
        host_id: str = "",
        table: Mapping[str, int] = ...,
        table_source: str = "built in",
        transport: str = "auto",
        shm_ring_bytes: int = 0,
        rate_bytes_per_s: int = 0,
        checksums: bool = False,
        flip_within: int = 0,
        full_mesh_ranks: int = 16,
        site: str = "",
        dump_folder: str = "",
        streams: int = 0,
        congestion: str = "auto",
        heal_ms: int = 4000,
        tls: bool = False,
        door: str = "",
        host_name: str = "",
    ) -> None:
        """`segment_bytes` and `fault_seed` (not 0: short reads and writes, refusals) change timing, never results.
        With a `fault_seed`, one bit of the first `flip_within` bytes from each peer flips.
        """

    def bytes_received(self) -> int: ...
    def bytes_sent(self) -> int: ...
    def bytes_sent_to(self, peer: int) -> int: ...
    def operations(self) -> list[OperationRecord]:
        """The last operations, as they were called, those in flight among them."""

    def operations_since(self, cursor: int) -> tuple[list[OperationRecord], int, int]:
        """(records, cursor, lost): what has ended since the cursor of the last call (0: all that is remembered)."""

    def recorded_groups(self) -> list[RecordedGroup]: ...
    def set_farewell(self, reason: str) -> None: ...
    def shut_down(self) -> None: ...
    def transports(self) -> dict[int, str]:
        """What carries bytes to each other rank: {rank: name}."""

class NamedScope:
    """A name for the operations of this thread, see ringdp.named."""

    def __init__(self) -> None: ...
    def enter(self, name: str, bulk: bool = False) -> None: ...
    def exit(self) -> None: ...

class Reconfiguration:
    """One rank's part in meetings by handles, without a store."""

    def __init__(
        self,
        *,
        secret: str | bytes = b"",
        transport: str = "auto",
        checksums: bool = False,
        interface: str = "",
        tls: bool = False,
    ) -> None: ...
    def handle(self) -> str: ...
    def meet(
        self, uuid: int, handles: Sequence[str], *, ordered: bool = True, timeout_ms: int = 30000
    ) -> tuple[int, int, Runtime]:
        """Blocks until all are connected: (rank, world, Runtime)."""

class Work:
    """An operation in flight."""

    def done(self) -> bool: ...
    def source(self) -> int:
        """Of a message received: the sender's rank in the group; -1 before it is known."""

    def wait(self, timeout_ms: int = 0) -> None: ...

class FiniteReport:
    """What an all-reduce saw of infinities and NaNs; read when it is done."""

    @property
    def finite(self) -> bool: ...
    @property
    def own(self) -> tuple[int, int] | None:
        """(buffer, element) of this rank's first input that was not finite, or None."""

class Group:
    """Collectives of some ranks of a Runtime."""

    def __init__(
        self,
        runtime: Runtime,
        name: str,
        members: Sequence[int],
        *,
        timeout_ms: int = 30000,
        table: Mapping[str, int] | None = None,
    ) -> None:
        """`table`: the Runtime's, unless another is given."""

    def add_in_rank_order(self) -> None:
        """For all-reduces from now on."""

    def all_gather(
        self, input: Buffer | NDArray[Any], outputs: Sequence[Buffer | NDArray[Any]], dtype: str
    ) -> Work: ...
    def all_reduce(
        self, buffer: Buffer | NDArray[Any], dtype: str, op: str = "SUM", *, factors: Sequence[float] = ...
    ) -> Work:
        """`factors`: of each rank, by which its float32 or float64 input is multiplied first; the same on all ranks."""

    def all_reduce_compressed(
        self,
        buffers: Sequence[Buffer | NDArray[Any]],
        owner_offsets: Sequence[int],
        codec: str,
        *,
        residuals: Sequence[Buffer | NDArray[Any]] = ...,
        new_residuals: Sequence[Buffer | NDArray[Any]] = ...,
        loss_scale: float = 1.0,
        divisor: int | None = None,
    ) -> tuple[Work, FiniteReport]:
        """Mean over all ranks of float32 buffers, one for each parameter, as codes on the wire; (Work,
        FiniteReport).
        """

    def all_reduce_watched(
        self, buffer: Buffer | NDArray[Any], dtype: str, op: str = "SUM"
    ) -> tuple[Work, FiniteReport]:
        """As all_reduce: (Work, FiniteReport)."""

    def all_to_all(
        self, inputs: Sequence[Buffer | NDArray[Any]], outputs: Sequence[Buffer | NDArray[Any]], dtype: str
    ) -> Work: ...
    def barrier(self) -> Work: ...
    def broadcast(self, buffer: Buffer | NDArray[Any], dtype: str, root: int) -> Work: ...
    def close(self) -> None: ...
    def gather(
        self, input: Buffer | NDArray[Any], outputs: Sequence[Buffer | NDArray[Any]], dtype: str, root: int
    ) -> Work: ...
    def receive(self, buffer: Buffer | NDArray[Any], dtype: str, source: int, *, tag: int = 0) -> Work:
        """From rank `source`, or from any rank with -1; see Work.source."""

    def reduce(self, buffer: Buffer | NDArray[Any], dtype: str, root: int, op: str = "SUM") -> Work: ...
    def reduce_scatter(
        self, inputs: Sequence[Buffer | NDArray[Any]], output: Buffer | NDArray[Any], dtype: str, op: str = "SUM"
    ) -> Work: ...
    def scatter(
        self, inputs: Sequence[Buffer | NDArray[Any]], output: Buffer | NDArray[Any], dtype: str, root: int
    ) -> Work: ...
    def send(self, buffer: Buffer | NDArray[Any], dtype: str, to: int, *, tag: int = 0) -> Work: ...
    def time_all_reduce(
        self, buffer: Buffer | NDArray[Any], dtype: str, count: int, *, watched: bool = False
    ) -> list[float]:
        """All-reduce (SUM, in place) `count` times and wait for each, all in C++; the seconds of each."""

    @property
    def hosts(self) -> list[int]:
        """hosts[r]: number of rank r's host; hosts are numbered as they first appear."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...

class SlowDevice:
    """A device whose copies are late and out of order, as the seed says."""

    def __init__(self, seed: int) -> None: ...
    def hold(self, still: bool) -> None:
        """While true, no copy gets done."""

    def queues(self) -> object:
        """What `_C.stage_cpu_tensors` takes."""

def algorithms() -> list[dict[str, Any]]:
    """The algorithms of collectives, a dict each: name, number (on the wire), all_reduce (whether all-reduces
    use it; these are in the order in which they are asked whether they fit).
    """

def all_reduce_algorithm(
    world: int,
    dtype: str,
    bytes: int,
    *,
    table: Mapping[str, int] = ...,
    hosts: Sequence[int] | None = None,
    rank_order: bool = False,
) -> str:
    """Name of the algorithm taken; `hosts[r]` is the number of rank r's host, by default all are on one."""

def built_in_table() -> dict[str, int]:
    """The limits of the built-in algorithm table: {'one_host.fold_sent_bytes': bytes, …}."""

def codec_broken_promises(codec: str) -> list[str]:
    """What the codec does against its contract, a sentence each."""

def codec_bytes(codec: str, numel: int) -> int:
    """Bytes of the code of `numel` elements."""

def codec_compress(codec: str, x: Buffer | NDArray[Any]) -> bytes:
    """The code of float32 elements."""

def codec_compress_with_feedback(
    codec: str, x: Buffer | NDArray[Any], residual: Buffer | NDArray[Any], factor: float = 1.0
) -> tuple[bytes, bytes]:
    """(code, new residual) of x + factor * residual, both bytes; residuals are float32."""

def codec_decompress(codec: str, code: Buffer | NDArray[Any], numel: int) -> bytes:
    """The float32 elements of a code, as bytes."""

def codec_finite(codec: str, code: Buffer | NDArray[Any], numel: int) -> bool:
    """Whether all that the code stands for is finite."""

def codec_specs() -> list[dict[str, Any]]:
    """The built-in codecs in the order of their numbers on the wire, a dict each: name, number, block (elements
    that share a scale; 1: none does), bits (of an element's code), scale_bytes, lowest, highest (whole
    numbers that are multiplied with the scale), levels (those that have a code; empty: all).
    """

def dtypes() -> list[str]: ...
def isa() -> str:
    """The instruction set in use."""

def load_codec(path: str) -> str:
    """The name of the codec of the shared library at `path`, which this module knows from now on."""

def network_interfaces(spec: str | None = None) -> list[dict[str, Any]]:
    """The addresses of this host, a dict each: name, ip, prefix_bits, loopback, running (has a carrier). `spec`:
    those
    that RINGDP_IFACE=spec chooses, in its order; None: all.
    """

def openssl_version(library: str = "") -> str:
    """Of the OpenSSL that RINGDP_TLS would use. Raises SystemResourceError where there is none."""

def owner_weights(rates: Sequence[int]) -> list[int]:
    """How much of a buffer each host owns, by the rates of the hosts' links; empty: all own alike."""

def reduction_supported(dtype: str, op: str) -> bool: ...
def registered_transports() -> list[dict[str, Any]]:
    """All transports, in the order in which RINGDP_TRANSPORT=auto prefers them: a dict for each."""

def set_log_sink(sink: Callable[[int, str], object] | None) -> None:
    """Where log lines go, called with (level, text) and levels 0 to 3 for debug to error; None drops them."""
