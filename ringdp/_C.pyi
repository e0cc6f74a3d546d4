# Written by tools/stubs.py from the built module (make stubs); do not edit.
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.futures
import torch.nn
from torch._C._distributed_c10d import Backend, BuiltinCommHookType, GradBucket, ProcessGroup, Store, Work

class RingFuture(torch.futures.Future[Any]):
    def add_done_callback(self, callback: Callable[[RingFuture], object]) -> None: ...
    def then(self, callback: Callable[[RingFuture], object]) -> RingFuture: ...

class RingWork(Work):
    def get_future(self) -> RingFuture: ...

class CompleteFutures:
    """In its block futures of operations are complete."""

    def __enter__(self) -> None: ...
    def __exit__(self, arg0: Any, arg1: Any, arg2: Any, /) -> None: ...
    def __init__(self) -> None: ...

class PendingMesh:
    """The connections after the rendezvous; each rank has the `hello` of all others."""

    def __init__(
        self,
        *,
        store: Store,
        rank: int,
        size: int,
        hello: str,
        timeout: timedelta,
        first_notice_s: float,
        config: dict[str, Any],
    ) -> None: ...
    def close(self, reason: str = "") -> None:
        """Leave, unless a process group has taken the connections, and send the reason to the others; idempotent."""

    def hellos(self) -> list[str]: ...

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

class NamedScope:
    """A name for the operations of this thread, see ringdp.named."""

    def __init__(self) -> None: ...
    def enter(self, name: str, bulk: bool = False) -> None: ...
    def exit(self) -> None: ...

class Relay:
    """Moves bytes between pairs of sockets, in a thread of its own."""

    def __init__(self) -> None: ...
    def join(self, one: int, other: int) -> None:
        """Takes both descriptors over."""

    @property
    def bytes(self) -> int: ...
    @property
    def pairs(self) -> int: ...

class TlsBridge:
    """Moves bytes between plain sockets and connections that speak TLS."""

    def __init__(self, config: dict[str, Any]) -> None: ...
    def join(self, plain: int, connection: int, key: bytes, dialled: bool) -> None:
        """Takes both descriptors over. `key`: the same at both ends, 32 bytes."""

class BackendWatchdog:
    """Aborts a backend that moves device tensors when the ring beside it fails."""

    @property
    def aborted(self) -> bool: ...
    @property
    def backend(self) -> str: ...
    @property
    def failed(self) -> bool: ...

class Reduction:
    """How the gradients of some parameters are reduced."""

    enabled: bool

    @property
    def name(self) -> str: ...

class CodecReduction(Reduction):
    """By one of the core's codecs."""

    def __init__(self, codec: str, feedback: bool = False) -> None: ...
    @property
    def feedback(self) -> bool: ...

class AutoReduction(Reduction):
    """Exactly, or by the reduction that Reducer.choose gave the bucket; `feedback`: some of those keep
    residuals.
    """

    def __init__(self, feedback: bool) -> None: ...
    @property
    def feedback(self) -> bool: ...

class PythonReduction(Reduction):
    """By a communication hook, hook(state, bucket) -> Future. Its state may have `finite` (a bool, or a method
    that
    returns one), commit(finite, unused=names), and `divisor`, which is set to the number of ranks with input.
    """

    def __init__(
        self, state: Any, hook: Callable[[Any, GradBucket], torch.futures.Future[Any]], name: str = "hook"
    ) -> None: ...

class ModuleParameter:
    """A parameter of a module, as a Reducer gets it."""

    def __init__(self, tensor: torch.Tensor, name: str, used_in: str, sparse: bool = False) -> None: ...

class ReducerOptions:
    """What a Reducer is made with."""

    alone: bool
    average: bool
    gradient_pool: bool
    graph_shows_unused: bool
    host_control: bool
    names_compared: bool
    own_gradients: bool
    reduce_dtype: torch.dtype | None
    skip_unused: bool
    weighted: bool

    def __init__(self) -> None: ...
    def expect_unused(self, expected: bool) -> None:
        """DDP's find_unused_parameters was given, with this value."""

    @property
    def caps_bytes(self) -> list[int]: ...
    @caps_bytes.setter
    def caps_bytes(self, arg0: Sequence[int], /) -> None: ...
    @property
    def report_every(self) -> int: ...
    @report_every.setter
    def report_every(self, arg0: int, /) -> None: ...

class ReducerPlan:
    """Which gradient is in which bucket."""

    def bucket_bytes(self) -> list[int]: ...
    def bucket_names(self) -> list[str]: ...
    def find(self, tensors: Sequence[torch.Tensor]) -> list[int]: ...
    def layout(self) -> list[list[int]]: ...
    def rebuilt(self) -> bool: ...

class ReducerOverflow:
    """Whether gradients were finite."""

    def finite(self) -> bool | None: ...
    def non_finite(self) -> list[int]: ...
    def own_non_finite(self) -> int: ...
    def watch(self, watching: bool) -> None: ...

class ReducerCompression:
    """Residuals, and the loss scale that they are measured in."""

    def give_residuals(self, residuals: Mapping[int, torch.Tensor]) -> None: ...
    def residuals(self) -> dict[int, torch.Tensor]: ...
    def set_loss_scale(self, scale: float) -> None: ...
    def set_residuals(self, residuals: Mapping[int, torch.Tensor]) -> None: ...
    def take_residuals(self, parameters: Sequence[int]) -> dict[int, torch.Tensor]: ...

class ReducerForwards:
    """The forwards since the last step."""

    def begin_closure(self) -> None:
        """An optimizer evaluates a closure from now on, which may run several backwards."""

    def end_closure(self) -> None: ...
    def note_of(self, training: bool) -> str:
        """What the name of an operation in a forward ends in; nearly always nothing."""

class ReducerReport:
    """What the steps have cost."""

    def bucket_rows(self) -> list[dict[str, Any]]: ...
    def note_forward(self) -> int: ...
    def set_facts(self, facts: bytes) -> None: ...
    def stats(self) -> dict[str, Any]: ...
    def steps(self) -> int:
        """How many backwards have synchronised."""

    def take_window(self) -> list[bytes] | None: ...
    def times(self) -> dict[str, int]: ...

class ReducerJoin:
    """What a rank without input repeats."""

    def divide_by(self, ranks_with_input: int) -> None: ...
    def shadow_used_map(self) -> None: ...
    def shadow_weight(self) -> None: ...

class Reducer:
    """Averages gradients during backward; see RingDP."""

    def __init__(
        self, parameters: Sequence[ModuleParameter], process_group: ProcessGroup, options: ReducerOptions
    ) -> None: ...
    def _autograd_hook(self, index: int) -> None: ...
    def _check_reducer_finalized(self) -> None: ...
    def _get_zeros_like_grad_buckets(self) -> list[GradBucket]: ...
    def _install_post_backward_futures(self, futures: Sequence[torch.futures.Future[Any]]) -> None: ...
    def _push_all_rebuilt_params(self) -> None: ...
    def _rebuild_buckets(self) -> bool: ...
    def _remove_autograd_hooks(self) -> None: ...
    def _reset_state(self) -> None: ...
    def _run_allreduce_hook(self, bucket: GradBucket) -> torch.futures.Future[Any]: ...
    def _run_comm_hook(self, bucket: GradBucket) -> torch.futures.Future[Any]: ...
    def _set_forward_pass_work_handle(self, work: Work, use_static_world_size: bool) -> None: ...
    def _set_optimizer_in_backward(self) -> None: ...
    def _set_static_graph(self) -> None: ...
    def _update_process_group(self, process_group: ProcessGroup, *, average: bool, names_compared: bool) -> None: ...
    def announce_weight(self, weight: float, sync: bool, training: bool | None = None) -> None: ...
    def arrivals(self) -> list[int]: ...
    def begin_again(self, step: int) -> None:
        """The elastic job has new members: its steps are counted from this one, with buckets that are not ordered."""

    def called_in_backward(self) -> None:
        """A forward that is repeated inside a backward begins: checkpointing does that."""

    def choose(self, reduction_of_bucket: Sequence[int]) -> None: ...
    def error(self) -> str: ...
    def has_unaveraged(self) -> bool:
        """Whether a gradient stayed in some .grad that was not averaged."""

    def incoming_factor(self) -> float: ...
    def last_step(self) -> tuple[int, int, bool | None, list[float]]: ...
    def prepare_for_backward(
        self, outputs: Sequence[torch.Tensor], sync: bool | None = None, training: bool | None = None
    ) -> None: ...
    def prepare_for_forward(self) -> None: ...
    def register_builtin_comm_hook(self, hook: BuiltinCommHookType) -> None: ...
    def register_comm_hook(self, state: Any, hook: Callable[[Any, GradBucket], torch.futures.Future[Any]]) -> None: ...
    def repeat_batch(self) -> None:
        """The forwards up to the end of this step are of the batch whose forward has failed."""

    def replace_parameters(self, parameters: Sequence[ModuleParameter]) -> None: ...
    def set_reductions(
        self,
        reductions: Sequence[Reduction],
        reduction_of: Sequence[int],
        owner_offsets: Sequence[int],
        exchange_codes: bool = False,
    ) -> None: ...
    def unaveraged(self) -> tuple[list[tuple[int, bool, bool]], int, int]:
        """Each: (parameter, under no_sync, .grad changed since); then their bytes, and the bytes sent since, or -1."""

    def view(self) -> int:
        """In an elastic job the number of the view whose members' gradients the last step has averaged; else 0."""

    def when_counted(self, call: Callable[[], None]) -> None:
        """In an elastic job: `call()` at the end of each backward whose step counts."""

    def zero_gradients(self) -> None: ...
    @property
    def compression(self) -> ReducerCompression: ...
    @property
    def forwards(self) -> ReducerForwards: ...
    @property
    def join(self) -> ReducerJoin: ...
    @property
    def overflow(self) -> ReducerOverflow: ...
    @property
    def plan(self) -> ReducerPlan: ...
    @property
    def report(self) -> ReducerReport: ...

class FiniteReport:
    """Whether an all-reduce found infinities or NaNs; read when its Work is done."""

    @property
    def finite(self) -> bool: ...
    @property
    def own(self) -> int:
        """Index in the buffer of this rank's first input that was not finite; -1: none was."""

class Residuals:
    """What compression left out of gradients, by parameter: float32 [numel], without loss scale. A step
    writes it anew beside the one that counts, and `commit` says whether the new one counts.
    """

    def __init__(self) -> None: ...
    def clear(self) -> None: ...
    def commit(self, finite: bool, unused: Sequence[str] = ...) -> None:
        """The step counts, except for parameters that no rank used; or it was not finite, and counts for none."""

    def current(self, name: str) -> torch.Tensor | None:
        """The one that counts; None where no step has left one."""

    def drop(self, name: str) -> None: ...
    def set(self, name: str, current: torch.Tensor) -> None:
        """Copies."""

    def write(self, name: str, numel: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """(the one that counts, zeros at first; memory for the next one, all of which this step fills)."""

class CodecLibrary:
    """A codec from a shared library, which stays loaded."""

    @property
    def abi_version(self) -> int: ...
    @property
    def block(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def path(self) -> str: ...
    @property
    def sha256(self) -> str: ...

class SmallSum:
    """A pushpull of one small key without an optimizer, over ring."""

    def __call__(self, value: Any, out: Any) -> bool:
        """Put the sum of all ranks' values into `out`, or into `value`; False where a tensor needs preparation: then
        nothing was done.
        """

    def __init__(
        self,
        *,
        group: ProcessGroup,
        shape: Sequence[int],
        slice: torch.Tensor,
        parts: Sequence[tuple[int, int, int]],
        average: bool,
        name: str,
    ) -> None: ...

class RowDirectory:
    """Which ids of a growing table have a row on this rank."""

    def __init__(self, admit_after: int, evict_after: int) -> None: ...
    def add(self, entries: torch.Tensor) -> torch.Tensor:
        """Take over such entries; the rows they get here, int32."""

    def count(self, clock: int) -> int:
        """How many ids have a row."""

    def entries(self, clock: int) -> torch.Tensor:
        """int64 [n, 4], by id: id, step of its last occurrence, how often it occurred, its row or -1."""

    def look_up(self, pairs: torch.Tensor, clock: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(rows, new ids, new rows) of pairs of an id and how often it occurs now; a row of -1: there is none."""

    @property
    def capacity(self) -> int:
        """One above the largest row there ever was."""

class Mailbox:
    """Messages of a header and a payload between the members of a group, over ring."""

    def __init__(self, *, group: ProcessGroup, name: str, most_bytes: int) -> None:
        """`name`: the same on all members, never used before. `most_bytes`: of a payload that comes."""

    def answer(
        self, source: int, timeout_ms: int, *, serves: bool
    ) -> tuple[bool, int, bytes | None, torch.Tensor | None] | None:
        """(False, member, header, payload) of that member's next answer, or, if this rank `serves`, what `request`
        returns, whichever comes first. Raises PeerLostError where the member is lost.
        """

    def close(self) -> None:
        """Idempotent."""

    def expect(self, source: int, *, answers: bool) -> None:
        """Take one more request of that member when it comes; or, from now on, its answers."""

    def land(self, source: int, memory: torch.Tensor) -> None:
        """That member's next answer is received into this memory, if it has its size."""

    def request(self, timeout_ms: int) -> tuple[bool, int, bytes | None, torch.Tensor | None] | None:
        """(True, member, header, payload) of the next request; None after the time, or when it is closed. A member
        that is lost: (True, member, None, None), once.
        """

    def require(self, member: int) -> None:
        """Raise the error by which that member was lost."""

    def send(self, to: int, header: bytes, payload: torch.Tensor | None, *, answers: bool, waits: bool) -> int:
        """Send a request or an answer; its payload is read until the member has taken it. `waits`: first until
        little is on its way to it. Returns for how many nanoseconds.
        """

class Parcel:
    """How parts of several flat tensors lie in a payload, behind a head."""

    def __init__(self, head: bytes, spans: Sequence[tuple[int, int, int, int]], total: int) -> None:
        """`spans`: (tensor, its first byte, bytes, place in the payload), by place; `total`: without the head."""

    def pack(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """The head and the parts: a new tensor, uint8."""

    def unpack(self, body: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
        """Copy the parts at the end of a payload into the tensors."""

class GradientMarks:
    """Which gradients are still what a backward left."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None: ...
    def finite(self) -> list[bool]: ...
    def note(self, finite: bool) -> None: ...
    def renew(self, parameters: Sequence[int]) -> None: ...

class ModuleSnapshot:
    """Which parameters a module has where, to be compared later."""

    def __init__(self, module: torch.nn.Module) -> None: ...
    def differs(self, module: torch.nn.Module) -> bool: ...

class ReplicaHash:
    """64-bit hashes of tensors that all ranks should have alike."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None: ...
    def each(self) -> list[int]:
        """Of each tensor."""

    def part(self, part: int, parts: int) -> int:
        """Of the bytes of all tensors, one after the other: of the `part`-th of `parts` about equal ones."""

    def tensors_in(self, part: int, parts: int) -> tuple[int, int]:
        """The tensors with bytes in that part: the index of the first, and one past the last."""

    @property
    def bytes(self) -> int: ...

def add_in_rank_order(process_group: ProcessGroup) -> None:
    """From now on all-reduces of the group over ring add each element in rank order: its bits do not depend on
    what else
    the tensor holds, on hosts and transports. All members call it between the same two operations.
    """

def adds_in_rank_order(process_group: ProcessGroup) -> bool:
    """Whether add_in_rank_order was called for it."""

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

def all_reduce_compressed(
    process_group: ProcessGroup,
    buffer: torch.Tensor,
    offsets: Sequence[int],
    counts: Sequence[int],
    owner_offsets: Sequence[int],
    residuals: Sequence[torch.Tensor | None],
    new_residuals: Sequence[torch.Tensor | None],
    codec: str,
    loss_scale: float,
    divisor: int,
    exchange: bool = False,
) -> tuple[Work, FiniteReport]:
    """Mean over all ranks of sections of a float32 buffer, in place, as codes on the wire: (Work, FiniteReport).
    Section i is elements offsets[i] to offsets[i] + counts[i], one parameter; owner_offsets[i] is zlib.crc32
    of its
    name. residuals, new_residuals: float32 [counts[i]], or None in both for no error feedback. The buffer is
    `loss_scale` times larger than residuals; the sum is divided by `divisor`. `exchange`: the
    codes go by the group's all-to-all and all-gather, whatever its backend. Raises ValueError.
    """

def ask_hashed(ids: torch.Tensor, ranks: int, count: bool) -> tuple[torch.Tensor, list[int], torch.Tensor]:
    """(asked, per owner, inverse): the distinct `ids`, any int64, as pairs [n, 2] of an id and how often it
    occurs, 0 with count=False; owner by owner.
    """

def ask_rows(ids: torch.Tensor, rows: int, factor: int, ranks: int) -> tuple[torch.Tensor, list[int], torch.Tensor]:
    """(asked, per owner, inverse): the distinct `ids`, int64, of a table whose row id * factor % rows = place
    is row place // ranks of rank place % ranks, as int32 rows of their owners, owner by owner.
    """

def before_first_unit(process_group: ProcessGroup) -> bool:
    """Whether no unit was completed in the present view, which is not the first: ranks may have entered it at
    different places of the program, so operations of later units wait for the first one.
    """

def before_unit(body: Callable[[], object]) -> None:
    """Calls `body()`, whose operations belong to a later unit, which waits for them."""

def carried(process_group: ProcessGroup) -> dict[int, tuple[int, float, float, int]]:
    """By rank in the group, of the peers reached over TCP: bytes that have arrived there, the seconds in which
    there was something to carry, the round trip in seconds, and bytes a second lately.
    """

def codec_broken_promises(codec: str) -> list[str]:
    """A sentence for each broken rule of the codec's contract. After one, do not use the codec: it may corrupt
    memory.
    """

def codec_bytes(codec: str, numel: int) -> int:
    """Bytes of the code of `numel` elements."""

def codec_compress(codec: str, x: torch.Tensor) -> torch.Tensor:
    """The code of float32 elements, uint8 [codec_bytes(codec, x.numel())]."""

def codec_decompress(codec: str, code: torch.Tensor, numel: int) -> torch.Tensor:
    """float32 [numel]. Raises ValueError for a code of another length."""

def create_process_group(
    *,
    store: Store,
    rank: int,
    size: int,
    timeout: timedelta,
    group_id: str,
    global_ranks: Sequence[int],
    config: dict[str, Any],
    pending: PendingMesh | None = None,
    elastic: bool = False,
) -> Backend:
    """`elastic`: the default group continues after the loss of members; its store must outlive them."""

def create_reconfigurable_process_group(
    *, rank: int, size: int, timeout: timedelta, group_id: str, is_default: bool, config: dict[str, Any]
) -> Backend:
    """A group without members, which connect by handles: see torch's reconfigure."""

def cuda_commit(which: Sequence[torch.Tensor], non_finite: torch.Tensor | None = None) -> None:
    """which[i] = 1 - which[i] (int32 [1]), unless non_finite."""

def cuda_decode_set(
    codec: str, outs: Sequence[torch.Tensor], codes: Sequence[torch.Tensor], non_finite: torch.Tensor | None = None
) -> None:
    """outs[i] = decode(codes[i]). Raises ValueError."""

def cuda_encode(
    codec: str,
    xs: Sequence[torch.Tensor],
    codes: Sequence[torch.Tensor],
    feedback: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None] = ...,
    loss_scale: float = 1.0,
    non_finite: torch.Tensor | None = None,
) -> None:
    """codes[i] (uint8) = encode(xs[i] (float32)); feedback[i]: (residual, residual, which of them counts) or
    None; non_finite (int32 [1]) becomes 1 where a block is not finite. Raises ValueError.
    """

def cuda_find_non_finite(values: torch.Tensor, found: torch.Tensor) -> None:
    """found (int32 [1]) becomes 1 where a value is infinite or NaN. Raises ValueError."""

def cuda_kernels() -> bool:
    """Whether this build has kernels for CUDA devices."""

def cuda_reduce_codes(
    codec: str,
    xs: Sequence[torch.Tensor],
    sources: Sequence[torch.Tensor],
    codes: Sequence[torch.Tensor],
    own: int,
    divisor: float,
    feedback: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None] = ...,
    loss_scale: float = 1.0,
    non_finite: torch.Tensor | None = None,
) -> None:
    """codes[i] = encode((sum over ranks, in order, of decode(sources[i][rank]), xs[i] for `own`) / divisor);
    sources[i]: uint8 [ranks, bytes of a code or more]. Raises ValueError.
    """

def cuda_select(x: torch.Tensor, threshold: float, capacity: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Elements with |x| >= threshold (and NaNs), in order: index (int32 [capacity]) and value (float32
    [capacity]) of as many as fit; selected (int32 [1]): how many there are. Raises ValueError.
    """

def decode_rows(code: torch.Tensor, out: torch.Tensor, wire: str) -> None:
    """Put encoded rows into `out`, float32 or float64 [rows, dim]."""

def encode_rows(rows: torch.Tensor, wire: str) -> torch.Tensor:
    """All rows, encoded."""

def encoded_rows(table: torch.Tensor, count: int, wire: str) -> torch.Tensor:
    """Room for so many rows of a table as they travel: [count, dim], for int8 uint8 [count, dim + 4]."""

def enter_world(process_group: ProcessGroup, view: int, left: int) -> None:
    """On a newcomer: become a member of the view that go_on_in has made."""

def fail_future(future: torch.futures.Future[Any], exception: BaseException) -> None:
    """Complete the future with the exception, which is raised where the future is waited for, in C++ too."""

def fill_rows(table: torch.Tensor, which: torch.Tensor, ids: torch.Tensor, seed: int, size: float) -> None:
    """Nearly normal numbers times `size` for rows `which`, of their ids and the seed alone."""

def find_codec(sha256: str) -> CodecLibrary | None:
    """The one whose file had this digest; None where none is loaded."""

def first_non_finite(tensor: torch.Tensor) -> int:
    """The index of its first element with an infinity or a NaN; -1: there is none."""

def follow_view(process_group: ProcessGroup) -> None:
    """From now on the rank and size of a group of make_lasting_group are those of its backend's members."""

def forget_stack_source() -> None:
    """Before the interpreter ends."""

def gather_rows(table: torch.Tensor, which: torch.Tensor, wire: str) -> torch.Tensor:
    """Rows `which` (int32) of a table, float32 or float64 [rows, dim], encoded; a negative number is zeros."""

def go_on_in(process_group: ProcessGroup, world: str, view: int) -> bool:
    """All members of the view go on over the connections of this name (prepare_world), with its newcomers; they
    call it after the same
    unit. False: a member was lost meanwhile, and they go on without it where they were.
    """

def go_on_without(process_group: ProcessGroup, ranks: Sequence[int], view: int, cause: str) -> bool:
    """All members of the view but these go on without them; they call it after the same unit."""

def gradient_memory() -> tuple[bool, int, int]:
    """Whether the pool for gradients is installed, its bytes in use, and its idle bytes."""

def group_transports(process_group: ProcessGroup) -> dict[int, str]:
    """The same for a group whose CPU tensors ring moves, by rank in the group; {} for another backend's."""

def handshake_bytes() -> int:
    """Of each message of a handshake."""

def has_calls_in_flight(process_group: ProcessGroup) -> bool:
    """Whether operations that belong to no unit have not ended."""

def has_device_codec(device_type: str) -> bool:
    """Whether the core's codecs can be used on that kind of device."""

def in_gradient_pool(tensor: torch.Tensor) -> bool:
    """Whether the tensor's memory comes from the pool for gradients."""

def is_elastic(process_group: ProcessGroup) -> bool:
    """Whether the group continues after the loss of members."""

def isa() -> str:
    """The instruction set in use."""

def load_codec(path: str) -> CodecLibrary:
    """The codec of the shared library at `path`; every call of this module knows its name from now on.
    Raises ValueError for a file that is not one.
    """

def lose_member(process_group: ProcessGroup, place: int, cause: str) -> None:
    """The present member of this number (members_of) is lost from now on."""

def loss_scale_of_backward() -> float:
    """The loss scale of the backward under way; 1 where none was noted."""

def low_rank_expand(
    matrices: Sequence[torch.Tensor],
    kept: Sequence[torch.Tensor | None],
    factor: float,
    lefts: Sequence[torch.Tensor],
    rights: Sequence[torch.Tensor],
) -> None:
    """matrix = leftᵀ right of each; `kept`, v before, is (v - matrix) / factor then, where it is not None."""

def low_rank_orthonormalise(factors: Sequence[torch.Tensor]) -> None:
    """The vectors of each factor, in place, from the first to the last."""

def low_rank_project(
    lefts: Sequence[torch.Tensor],
    vs: Sequence[torch.Tensor],
    xs: Sequence[torch.Tensor],
    residuals: Sequence[torch.Tensor | None],
    factor: float,
    rights: Sequence[torch.Tensor],
) -> None:
    """v = x + factor * residual and left = (v rightᵀ)ᵀ of each matrix. Matrices: float32, [rows * columns];
    factors [rank, rows] and [rank, columns]; a residual may be None, and v may be x then.
    """

def low_rank_project_back(
    rights: Sequence[torch.Tensor], vs: Sequence[torch.Tensor], lefts: Sequence[torch.Tensor]
) -> None:
    """right = left v of each."""

def make_lasting_group(store: Store, rank: int, size: int) -> ProcessGroup:
    """torch's ProcessGroup, whose rank and size are those of an elastic group's present members."""

def members_of(process_group: ProcessGroup) -> list[int]:
    """The present members: their ranks at the start of the job, or the numbers that newcomers got."""

def most_steps() -> int:
    """Backwards that averaged gradients, of the wrapper of this process that had most."""

def network_interfaces(spec: str | None = None) -> list[dict[str, Any]]:
    """The addresses of this host, a dict each: name, ip, prefix_bits, loopback, running (has a carrier). `spec`:
    those
    that RINGDP_IFACE=spec chooses, in its order; None: all.
    """

def note_loss_scale(scale: float) -> None:
    """Inside a backward: its loss was multiplied by `scale`."""

def note_optimizer() -> None:
    """An optimizer has ended its step."""

def on_change(
    process_group: ProcessGroup, listener: Callable[[int, list[int], list[str], str, bool, bool], object]
) -> None:
    """Called after each change, by the thread that makes it, with (view, members, lost, cause, counted, replay)."""

def open_door_message(secret: bytes, transcript: bytes, message: bytes) -> tuple[int, int, int, int] | None:
    """Its type, protocol version, number and way of TLS (tls_mode); None: it is none, or of another secret."""

def openssl_version(library: str = "") -> str:
    """Of the OpenSSL that RINGDP_TLS would use. Raises SystemResourceError where there is none."""

def operations() -> list[OperationRecord]:
    """The last operations of the job's connections, as they were called; [] without a default group of ring."""

def operations_since(cursor: int) -> tuple[list[OperationRecord], int, int]:
    """(records, cursor, lost): the operations that ended since the cursor of the last call (0: all that are
    kept).
    """

def owned_elements(process_group: ProcessGroup, count: int, owner_offset: int) -> list[tuple[int, int]]:
    """[(begin, end), ...] of the elements of a parameter of `count` whose mean this rank computes when it is
    compressed.
    """

def owner_of_ids(ids: torch.Tensor, ranks: int) -> torch.Tensor:
    """Which rank owns each id of a growing table, int64."""

def owner_weights(rates: Sequence[int]) -> list[int]:
    """How much of a buffer each host owns, by the rates of the hosts' links; empty: all own alike."""

def owner_weights_of(process_group: ProcessGroup) -> list[int]:
    """How much each of its hosts owns of what is compressed, by the job's map of uplinks; empty: all own alike."""

def part_bounds(count: int, parts: int, owner_offset: int) -> list[int]:
    """[parts + 1]: where the parts of a parameter of `count` begin that each rank computes the mean of, when
    codes are exchanged and every rank is a host of its own.
    """

def prepare_world(
    *,
    process_group: ProcessGroup,
    name: str,
    pending: PendingMesh,
    store: Store,
    places: Sequence[int],
    config: dict[str, Any],
) -> None:
    """Connections with newcomers, over which an elastic group may go on from now on (go_on_in, enter_world).
    `places`:
    by rank in them, the numbers that members have for good.
    """

def protocol_version() -> int:
    """Of what ranks and launchers say to each other."""

def recorded_groups() -> list[RecordedGroup]:
    """The groups that those operations belong to."""

def registered_transports() -> list[dict[str, Any]]:
    """All transports, in the order in which RINGDP_TRANSPORT=auto prefers them: a dict for each."""

def rotate(x: torch.Tensor, signs: torch.Tensor, back: bool = False) -> torch.Tensor:
    """Blocks of 256 floats times a Hadamard matrix with random signs (uint8 [32], a bit for each element), or
    back.
    """

def run_unit(process_group: ProcessGroup, what: str, body: Callable[[], object]) -> None:
    """Calls `body()` as a unit on all members; again after the loss of one, unless it had returned on all.
    `what` is its name in the log.
    """

def seal_door_message(secret: bytes, transcript: bytes, type: int, number: int, tls: int) -> bytes:
    """A message of a handshake (docs/reference/wire_format.md) with a door."""

def set_farewell(reason: str) -> None:
    """The reason of this process's goodbyes, for the other ranks' errors."""

def set_log_sink(sink: Callable[[int, str], object]) -> None:
    """Where log lines go, called with (level, text) and levels 0 to 3 for debug to error."""

def set_stack_source(
    describe: Callable[[], str], helper_threads: Callable[[], int], signal: int, file: int, foreign: Sequence[str]
) -> None:
    """`describe()`: the stacks of all threads as text. `helper_threads()`: how many run nothing of the program.
    `signal`, `file`: where faulthandler writes them (0: nowhere). `foreign`: beginnings of paths that are not
    the user's.
    """

def shut_down_all() -> None:
    """Leave all jobs and end the threads; for the end of the process."""

def simulate(
    hosts: Sequence[tuple[int, int, float, float]],
    settings: dict[str, Any],
    bytes: int,
    *,
    dtype: str = "float32",
    algorithm: str = "ring",
    codec: str = "",
    barrier: bool = False,
    far: bool = False,
    weights: Sequence[int] = ...,
    most_messages: float = 10000000.0,
    fold_from_messages: float = 200000.0,
) -> dict[str, Any]:
    """An all-reduce by the core's own operations over links in numbers (csrc/simulation). `hosts`: of each its
    ranks, its site, and the bytes a second out of it and into it; `weights`: what each owns. Raises
    InvalidArgumentError for what cannot be simulated.
    """

def simulate_change(members: int, costs: dict[str, float]) -> dict[str, Any]:
    """How the members of an elastic job agree, after the loss of one of them, by the store."""

def simulate_loss(ranks_of_hosts: Sequence[int], full_mesh_ranks: int, costs: dict[str, float]) -> dict[str, Any]:
    """How the ranks of a job hear of the loss of one of them, over their connections of the start."""

def simulate_start(ranks_of_hosts: Sequence[int], full_mesh_ranks: int, costs: dict[str, float]) -> dict[str, Any]:
    """The start of a job by the core's own reads of the store (csrc/simulation/start.h). Raises
    InvalidArgumentError where too many ranks connect with all others.
    """

def sparse2_add(sum: torch.Tensor, code: torch.Tensor, kept: int, weight: float = 1.0) -> bool:
    """sum += weight * decode(code), in place, float32 [numel]. Returns whether the code's elements were finite.
    Raises ValueError for bytes that are not a code of so many elements.
    """

def sparse2_bytes(numel: int, kept: int) -> int:
    """Bytes of the sparse2 code of `numel` elements, `kept` of each 4,096."""

def sparse2_encode(
    code: torch.Tensor,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    new_residual: torch.Tensor | None,
    factor: float,
    decay: float,
    kept: int,
) -> bool:
    """Write the sparse2 code of v = x + factor * decay * residual, and v - decode(code) by factor. Returns
    whether what it has is finite. float32 [numel]; both residuals may be None, or the same.
    """

def sparse_cut(x: torch.Tensor, residual: torch.Tensor | None, factor: float, wanted: int) -> tuple[float, int]:
    """(threshold, equals): the `wanted` largest of x + factor * residual are those above the threshold and so
    many of those that equal it.
    """

def sparse_decode(code: torch.Tensor, numel: int, out: torch.Tensor | None = None) -> torch.Tensor:
    """float32 [numel], in `out` if that is given. Raises ValueError for bytes that are not a code of so many
    elements, an index out of range.
    """

def sparse_merge(
    codes: Sequence[torch.Tensor], numel: int, divisor: float, lost: torch.Tensor | None = None, back: float = 1.0
) -> torch.Tensor:
    """The code of the sum of what the codes hold, added in order, by `divisor`. What its rounding loses, times
    `back`, is added to `lost`, float32 [numel]. Raises ValueError as sparse_decode.
    """

def sparse_select(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    factor: float,
    threshold: float,
    most: int,
    left: torch.Tensor | None = None,
    equals: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, int]:
    """(code, new residual, found) of v = x + factor * residual: the code has the first `most` elements of
    magnitude `threshold` or more, of those that equal it the first `equals`; `found` is how many there are.
    float32 [numel]; the residuals may be None. `left`: where to put the new one; may be the old one.
    """

def sparse_threshold(x: torch.Tensor, residual: torch.Tensor | None, factor: float, wanted: int) -> float:
    """A magnitude that about `wanted` elements of x + factor * residual reach, by a sample; 0 where none is."""

def spread_bags(
    gradients: torch.Tensor, which: torch.Tensor, begins: torch.Tensor | None, mean: bool, count: int
) -> torch.Tensor:
    """The derivative of sum_bags: gradients [bags, dim] to gradients of rows [count, dim]."""

def stage_cpu_tensors(queues: Any) -> None:
    """For tests: treat CPU tensors as if they were on a device. `queues`: a capsule with a MakeCopyQueue that
    stays until the
    process ends, which carries out the copies; None: no longer.
    """

def sum_bags(rows: torch.Tensor, which: torch.Tensor, begins: torch.Tensor | None, mean: bool) -> torch.Tensor:
    """[bags, dim]: the sums, or means, of rows `which` (int32), from begins[b] (int64) on; None: bags of one."""

def sum_rows(
    table: torch.Tensor, codes: Sequence[torch.Tensor], which: Sequence[torch.Tensor], wire: str, divisor: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows, sums): of encoded gradients of rows of a table, list by list in order, the sum for each distinct
    row, by `divisor`; int32 [n] and [n, dim].
    """

def tls_mode(config: dict[str, Any]) -> int:
    """Of a RingConfig: 0 without TLS, 1 with the job's secret, 2 with certificates."""

def traffic() -> tuple[int, int]:
    """Bytes (sent, received) by this process over ring, all groups; (0, 0) without one."""

def transports() -> dict[int, str]:
    """The transport to each other rank of the default group, {rank: name}; {} without one."""

def units_left(process_group: ProcessGroup) -> int:
    """How many units this rank has left, over all views."""

def update_rows(
    rule: str,
    table: torch.Tensor,
    states: Sequence[torch.Tensor],
    which: torch.Tensor,
    sums: torch.Tensor,
    rate: float,
    eps: float,
    betas: tuple[float, float],
) -> None:
    """Update rows `which`, each given once, in place by "sgd", "adagrad", "rowwise_adagrad" or "adam"."""

def view_of(process_group: ProcessGroup) -> int:
    """The number of the present view, from 1."""

def watch_backend(ring: Backend, foreign: Backend) -> BackendWatchdog:
    """The watchdog of one backend, beside another that is ring."""

def watch_group(process_group: ProcessGroup) -> list[BackendWatchdog]:
    """Watchdogs of the backends that move the group's tensors beside ring, one each; none where ring is not in
    the group, or alone. They live as long as the group.
    """
