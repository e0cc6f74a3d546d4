"""Joining a job: `init`, this rank's number and its device.

Everything here sits on torch's own default process group, so after `init` all of torch.distributed works.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import json
import logging
import os
import sys
import warnings
import weakref
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from ringdp import config
from ringdp.config import environments, threads
from ringdp.errors import InvalidArgumentError, InvalidStateError, MismatchError
from ringdp.job import arguments, devices, elastic, job_store
from ringdp.job import backend as ring
from ringdp.job import threads as group_threads
from ringdp.job.backend_watchdog import leave_groups as _leave_groups
from ringdp.job.backend_watchdog import watch_backends as _watch_backends

DEFAULT_TIMEOUT = timedelta(minutes=30)
_log = logging.getLogger("ringdp.process_group")


@dataclasses.dataclass(frozen=True)
class _Hello:
    """One rank's record in the rendezvous. All ranks read all records and decide the same from them."""

    host_id: str
    host_name: str
    pid: int
    ringdp: str
    local_rank: int | None  # the launcher's
    backend: str | None  # what was passed to init
    device: str  # cuda or cpu
    gpus: list[str]  # the UUIDs of those it sees
    gpu: int | None  # the one that was passed to init
    nccl: bool
    cuda_choice: str  # RINGDP_CUDA
    elastic: bool  # RINGDP_ELASTIC

    def encode(self) -> str:
        """One line."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def decode(cls, text: str, *, rank: int) -> _Hello:
        try:
            return cls(**json.loads(text))
        except (ValueError, TypeError) as error:
            raise MismatchError(
                f"rank {rank} sent a record that this version cannot parse; is it running another ringdp version?",
                peer=rank,
            ) from error


@dataclasses.dataclass(frozen=True)
class _Membership:
    """The results of `init`, kept until `shutdown`."""

    group: weakref.ref[Any]  # torch's default group then; where it is another one now, the user replaced it
    local_rank: int
    device: torch.device
    pid: int


_membership: _Membership | None = None
_generation = 0  # how often init joined a job: keys in a store that outlives a group must differ


def init(
    backend: str | None = None,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    init_method: str | None = None,
    timeout: timedelta | float = DEFAULT_TIMEOUT,
    device: torch.device | str | None = None,
) -> torch.device:
    """Join the job: create torch.distributed's default process group and pick this rank's device.

    Without arguments it reads what ringrun, torchrun, mpirun, srun or MXNet's scripts put into the environment; without
    a launcher it makes a world of one, which opens no port. It ends at exit by itself, or with `shutdown`.

    Args:
        backend: anything ``torch.distributed.init_process_group`` takes. None is ``cpu:ring,cuda:nccl`` where
            each rank has a GPU of its own and NCCL is there, else ``ring``, which takes CUDA tensors through the
            host's memory; RINGDP_CUDA decides otherwise.
        rank: this rank, for ``mp.spawn`` and notebooks; together with ``world_size`` or not at all.
        world_size: the number of ranks.
        init_method: where the ranks meet, ``tcp://host:port`` or ``file:///path``; None takes the launcher's.
        timeout: how long the ranks wait for each other, here and in every operation; seconds or a timedelta.
        device: ``cpu`` or ``cuda`` overrides the choice; None is ``cuda:LOCAL_RANK`` where CUDA serves, else
            ``cpu``. Where there are fewer GPUs than ranks, several ranks use one.

    Returns:
        This rank's device, as `device` gives it afterwards.

    Raises:
        InvalidStateError: torch.distributed is initialised already; or a rank of a running job has started this
            process, which would take that rank's place.
        InvalidArgumentError: the arguments or the environment do not give this rank's number or the address of the
            store, a rank does not see the device it asks for, or NCCL was asked for and would refuse these ranks.
        RingTimeoutError: ranks did not come in time; the message names them.
        PeerLostError: a rank died while the ranks met.
        HandshakeError: the ranks could not meet or not reach each other; the message lists what was tried.
        MismatchError: the ranks chose differently (versions, backend, RINGDP_CUDA).
    """
    global _membership, _generation
    _refuse_second_call()
    config.apply_log_level()
    timeout = arguments.duration("timeout", timeout)
    arguments.text_or_none("backend", backend)
    arguments.text_or_none("init_method", init_method)
    launch = None if init_method is not None and rank is not None else config.launch_environment()
    if launch is None and rank is None and (advice := environments.forgotten()) is not None:
        warnings.warn(advice, stacklevel=2)
    joins = config.joins() if rank is None else None
    if joins is not None:  # alone at first
        rank, world_size, init_method = 0, 1, None
        backend = backend or ring.BACKEND  # the job's; its GPU alone would say NCCL
        elastic.find_job(*joins, timeout)
    rank, world_size, init_method = _place(launch, rank, world_size, init_method)
    config.refuse_inside_rank(init_method)
    kind = devices.kind_of(backend, device)
    agent_store = launch is not None and launch.agent_store and init_method == launch.init_method
    agent_store = agent_store and config.has_own_agent()
    settings = config.RingConfig.from_environment()
    if config.elastic():  # a rank must learn of every other's death by itself
        settings = dataclasses.replace(settings, full_mesh_ranks=max(settings.full_mesh_ranks, world_size))
    start = f"ringdp/{settings.epoch}/{_generation}"
    store = job_store.open_store(init_method, rank, world_size, timeout, agent_store=agent_store, start=f"{start}/kept")
    job, store = store, PrefixStore(start, store)
    _generation += 1
    given = launch.local_rank if launch is not None and (joins is not None or launch.rank == rank) else None
    hello = _hello(backend, kind, torch.device(device or kind).index, given, settings)
    with _met(store, hello, rank, world_size, timeout, settings) as hellos:
        _require_agreement(hellos)
        ranks = _devices_of(hellos)
        choice = devices.choose(ranks, backend)
        place = _device_of(ranks, rank)
        if place.type == "cuda":
            torch.cuda.set_device(place)
        lasting = joins is not None or elastic.check(
            world_size, choice.backend, agent_store=agent_store, init_method=init_method
        )
        with elastic.lasting_groups() if lasting else contextlib.nullcontext():
            _make_group(choice.backend, store, rank, world_size, timeout)
        if lasting:
            world = dist.group.WORLD
            assert world is not None  # it was made just now
            elastic.follow(world)
            if joins is None:
                elastic.begin(job, settings.epoch, world_size, rank)
    if choice.measure and devices.race(place):
        dist.destroy_process_group()
        _make_group(ring.BACKEND, PrefixStore("staged", store), rank, world_size, timeout)
    if launch is not None and launch.launcher in ("mpirun", "mpiexec", "srun"):
        threads.share_cores(sum(one.host_id == hello.host_id for one in hellos))
    local_rank = ranks[rank].local_rank
    _watch_backends()
    _membership = _Membership(weakref.ref(dist.group.WORLD), local_rank, place, os.getpid())
    config.mark_rank(rank, world_size, init_method)
    weakref.finalize(dist.group.WORLD, _unmark, _generation).atexit = False
    atexit.unregister(_shutdown_at_exit)
    atexit.register(_shutdown_at_exit)
    devices.log_choice(choice, rank)
    used = dist.get_backend_config()
    _log.info("rank %d of %d on %s: backend %s, device %s", rank, world_size, hellos[rank].host_name, used, place)
    return place


def join_behind(place: config.LaunchEnvironment) -> None:
    """`init` of one of the ranks that have no numbers of their own: `place` is that of the first of them.

    Raises:
        HandshakeError: the job's store cannot be reached.
    """
    epoch, size = config.RingConfig.from_environment().epoch, place.world_size
    start = f"ringdp/{epoch}/{_generation}/kept"
    store = job_store.open_store(place.init_method, size - 1, size, DEFAULT_TIMEOUT, agent_store=False, start=start)
    rank = place.rank + store.add(f"ringdp/{epoch}/{_generation}/numbered", 1) - 1
    init(rank=rank, world_size=size, init_method=place.init_method)


def shutdown() -> None:
    """Leave the job; `init` may be called again afterwards. Without a job it does nothing.

    An asynchronous store (``kvstore.create("dist_async")``) that is open serves the others first, until all workers
    have left it, unless this is called while an exception is on its way.
    """
    if not dist.is_initialized():
        return config.unmark_rank()
    try:
        group_threads.end_all()
    finally:
        if ring.BACKEND in str(dist.get_backend_config()):
            ring.say_farewell("it called ringdp.shutdown()")
        _leave_groups()
        config.unmark_rank()


def is_initialized() -> bool:
    """Whether this process has joined a job, by `init` or by ``torch.distributed.init_process_group``."""
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    """This rank's number in the job, from 0. Raises InvalidStateError before `init`."""
    ring.require_initialized("rank")
    return dist.get_rank()


def world_size() -> int:
    """The number of ranks in the job. Raises InvalidStateError before `init`."""
    ring.require_initialized("world_size")
    return dist.get_world_size()


def local_rank() -> int:
    """This rank's number on its host, from 0: the launcher's, or counted when the ranks met.

    Raises:
        InvalidStateError: before `init`; or torch.distributed was initialised without `init` and no launcher
            said it.
    """
    ring.require_initialized("local_rank")
    if (membership := _current_membership()) is not None:
        return membership.local_rank
    launch = config.launch_environment()
    if launch is not None and launch.local_rank is not None:
        return launch.local_rank
    if dist.get_world_size() == 1:
        return 0
    raise InvalidStateError(
        "torch.distributed was initialised without ringdp.init() and LOCAL_RANK is not set, so this rank's"
        " number on its host is not known: call ringdp.init() instead, or set LOCAL_RANK"
    )


def device() -> torch.device:
    """The device `init` picked: ``cuda:<index>`` or ``cpu``. Raises InvalidStateError before `init`."""
    ring.require_initialized("device")
    if (membership := _current_membership()) is not None:
        return membership.device
    if torch.cuda.is_available() and "nccl" in str(dist.get_backend_config()):
        return torch.device("cuda", local_rank())
    return torch.device("cpu")


def _current_membership() -> _Membership | None:
    """The results of `init`; None where the user has replaced the process group since."""
    if _membership is not None and dist.is_initialized() and _membership.group() is dist.group.WORLD:
        return _membership
    return None


def _refuse_second_call() -> None:
    if not dist.is_available():
        raise InvalidStateError("this torch was built without torch.distributed, which ringdp needs")
    if not dist.is_initialized():
        return
    if _membership is not None and _membership.pid != os.getpid():
        raise InvalidStateError(
            f"this process (pid {os.getpid()}) was forked by rank {dist.get_rank()} (pid {_membership.pid}) of a job of"
            f" {dist.get_world_size()}, so it cannot join that job, nor another: start a fresh process (subprocess, or"
            " multiprocessing's start method spawn), without the launcher's variables (RANK, WORLD_SIZE, MASTER_ADDR,"
            " MASTER_PORT)"
        )
    if _current_membership() is not None:
        raise InvalidStateError(
            f"ringdp.init() was called before in this process (rank {dist.get_rank()} of"
            f" {dist.get_world_size()}): call it once, or ringdp.shutdown() in between"
        )
    raise InvalidStateError(
        f"torch.distributed is initialised already (backend {dist.get_backend()}) and RingDP uses it as it"
        " is: leave out ringdp.init(), or call torch.distributed.destroy_process_group() before it"
    )


def _place(
    launch: config.LaunchEnvironment | None, rank: int | None, world_size: int | None, init_method: str | None
) -> tuple[int, int, str | None]:
    """This rank's number, the world size and the address of the store; arguments go before the launcher. None: a world
    of one."""
    if (rank is None) != (world_size is None):
        missing = "world_size" if world_size is None else "rank"
        raise InvalidArgumentError(f"rank and world_size belong together, {missing} is missing")
    if rank is None or world_size is None:
        if launch is not None:
            return launch.rank, launch.world_size, init_method or launch.init_method
        if init_method is not None:
            raise InvalidArgumentError(f"init_method={init_method} needs rank and world_size: no launcher gives them")
        return 0, 1, None
    rank, world_size = arguments.whole_number("rank", rank), arguments.whole_number("world_size", world_size)
    if world_size < 1 or not 0 <= rank < world_size:
        raise InvalidArgumentError(f"rank {rank} of {world_size}: a rank lies between 0 and world_size - 1")
    if world_size == 1:
        return 0, 1, None
    if init_method is None and launch is not None:
        init_method = launch.init_method
    if init_method is None:
        raise InvalidArgumentError(
            f"rank {rank} of {world_size} has no address of the job's store: pass"
            " init_method='tcp://<host of rank 0>:<free port>' or 'file:///<path on a shared disk>'"
        )
    return rank, world_size, init_method


def _hello(
    backend: str | None, kind: str, gpu: int | None, local_rank: int | None, settings: config.RingConfig
) -> _Hello:
    from ringdp import __version__

    return _Hello(
        host_id=config.host_identity(settings.host_id),
        host_name=settings.host_name,
        pid=os.getpid(),
        ringdp=__version__,
        local_rank=local_rank,
        backend=backend,
        device=kind,
        gpus=devices.visible() if kind == "cuda" else [],
        gpu=gpu if kind == "cuda" else None,
        nccl=dist.is_nccl_available(),
        cuda_choice=config.cuda_choice(),
        elastic=config.elastic(),
    )


@contextlib.contextmanager
def _met(
    store: Store, mine: _Hello, rank: int, world_size: int, timeout: timedelta, settings: config.RingConfig
) -> Iterator[list[_Hello]]:
    """All ranks' hellos, once all are there and connected to each other; the first process group of ``ring`` made
    inside the block takes the connections over, without one they are closed at its end."""
    if world_size == 1:
        yield [mine]
        return
    ring.check_extension()
    from ringdp import _C

    _C.set_log_sink(ring.log_line)
    pending = _C.PendingMesh(
        store=store,
        rank=rank,
        size=world_size,
        hello=mine.encode(),
        timeout=timeout,
        first_notice_s=job_store.FIRST_NOTICE_S,
        config=settings.as_dict(),
    )
    with ring.handing_over(pending):
        yield [_Hello.decode(text, rank=r) for r, text in enumerate(pending.hellos())]


def _require_agreement(hellos: Sequence[_Hello]) -> None:
    advice = {
        "ringdp": "install the same version everywhere",
        "backend": "pass the same backend to ringdp.init() everywhere",
        "cuda_choice": "set RINGDP_CUDA alike everywhere",
        "elastic": "set RINGDP_ELASTIC alike everywhere, or start with ringrun --elastic",
    }
    if hellos[0].backend not in (None, ring.BACKEND):  # ring is in one group with ranks on CPUs and on GPUs
        advice["device"] = "pass device='cpu' to ringdp.init() everywhere, or give every rank a GPU"
    for field, what_to_do in advice.items():
        expected = getattr(hellos[0], field)
        for number, hello in enumerate(hellos):
            if getattr(hello, field) != expected:
                raise MismatchError(
                    f"rank 0 on {hellos[0].host_name} has {field} {expected}, rank {number} on"
                    f" {hello.host_name} has {getattr(hello, field)}: {what_to_do}",
                    peer=number,
                    peer_host=hello.host_name,
                    peer_pid=hello.pid,
                )


def _devices_of(hellos: Sequence[_Hello]) -> list[devices.VisibleDevices]:
    """Input of `devices`. Without a launcher the local rank is the number of lower ranks on the same host."""
    return [
        devices.VisibleDevices(
            host=hello.host_name,
            local_rank=sum(other.host_id == hello.host_id for other in hellos[:rank])
            if hello.local_rank is None
            else hello.local_rank,
            kind=hello.device,
            gpus=hello.gpus,
            asked=hello.gpu,
            nccl=hello.nccl,
            choice=hello.cuda_choice,
        )
        for rank, hello in enumerate(hellos)
    ]


def _device_of(ranks: Sequence[devices.VisibleDevices], rank: int) -> torch.device:
    number = devices.gpu_of(ranks, rank)
    return torch.device("cpu") if number is None else torch.device("cuda", number)


def _make_group(backend: str, store: Store, rank: int, world_size: int, timeout: timedelta) -> None:
    if backend == ring.BACKEND:
        ring.register_backend()
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def _unmark(generation: int) -> None:
    """Called when the group of that call of `init` is destroyed, by torch's own destroy_process_group too."""
    if generation == _generation:
        config.unmark_rank()


def _shutdown_at_exit() -> None:
    """Leave the job at exit if the script has not; never raises, and does nothing in a forked child."""
    if _membership is None or os.getpid() != _membership.pid or _current_membership() is None:
        return
    if getattr(sys, "last_value", None) is not None and "nccl" in str(dist.get_backend_config()):
        return  # after an unhandled exception NCCL would wait for ranks that never come
    try:
        if ring.BACKEND in str(dist.get_backend_config()):
            ring.say_farewell()
        _leave_groups()
        config.unmark_rank()
    except Exception as error:
        _log.warning("leaving the job at exit failed: %s", error)
