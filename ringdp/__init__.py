"""Data-parallel training for PyTorch on whatever connects your ranks: `init`, then wrap in `RingDP`."""

from __future__ import annotations

import contextlib
import importlib
import sys
from typing import TYPE_CHECKING, Any

from ringdp import _early

if _early.is_launcher(sys.orig_argv):
    _early.hold()

__version__ = "0.1.0"  # of the sources; that of a build names its torch, as pip does
with contextlib.suppress(ImportError, AttributeError):
    __version__ = importlib.import_module("ringdp._build_info").VERSION

if TYPE_CHECKING:
    from ringdp import amp, checkpoint, compression, data, elastic, hooks, kvstore, metrics, nn, testing
    from ringdp.compression.rules import Compression
    from ringdp.ddp.divergence.options import Guard
    from ringdp.ddp.gradient_memory import gradient_memory
    from ringdp.ddp.wrapper import RingDP
    from ringdp.diagnosis.timeline_session import timeline
    from ringdp.errors import (
        DamagedDataError,
        ExpelledError,
        GradientOverflowError,
        HandshakeError,
        InvalidArgumentError,
        InvalidStateError,
        MembershipChanged,
        MismatchError,
        PeerLostError,
        RankError,
        RingError,
        RingTimeoutError,
        SystemResourceError,
    )
    from ringdp.job.backend import named, traffic, transports
    from ringdp.job.barrier import monitored_barrier
    from ringdp.job.local_ranks import launch
    from ringdp.job.process_group import (
        device,
        init,
        is_initialized,
        local_rank,
        rank,
        shutdown,
        world_size,
    )
    from ringdp.rounds import DiLoCo, Fragments, LocalSGD, levels
    from ringdp.script import gather, main_first, prepare, print

__all__ = [
    "Compression",
    "DamagedDataError",
    "DiLoCo",
    "ExpelledError",
    "Fragments",
    "GradientOverflowError",
    "Guard",
    "HandshakeError",
    "InvalidArgumentError",
    "InvalidStateError",
    "LocalSGD",
    "MembershipChanged",
    "MismatchError",
    "PeerLostError",
    "RankError",
    "RingDP",
    "RingError",
    "RingTimeoutError",
    "SystemResourceError",
    "amp",
    "checkpoint",
    "compression",
    "data",
    "device",
    "elastic",
    "gather",
    "gradient_memory",
    "hooks",
    "init",
    "is_initialized",
    "kvstore",
    "launch",
    "levels",
    "local_rank",
    "main_first",
    "metrics",
    "monitored_barrier",
    "named",
    "nn",
    "prepare",
    "print",
    "rank",
    "shutdown",
    "testing",
    "timeline",
    "traffic",
    "transports",
    "world_size",
]

_ERRORS = [name for name in __all__ if name.endswith("Error") or name == "MembershipChanged"]
_HOME = dict.fromkeys(__all__, "job.process_group") | dict.fromkeys(_ERRORS, "errors")
_HOME |= {
    "RingDP": "ddp.wrapper",
    "Compression": "compression.rules",
    "Guard": "ddp.divergence.options",
    "gradient_memory": "ddp.gradient_memory",
    "monitored_barrier": "job.barrier",
    "launch": "job.local_ranks",
    "timeline": "diagnosis.timeline_session",
}
_HOME |= dict.fromkeys(("named", "traffic", "transports"), "job.backend")
_MODULES = frozenset(
    {"amp", "checkpoint", "compression", "data", "elastic", "hooks", "kvstore", "metrics", "nn", "testing"}
)
_HOME |= dict.fromkeys(("gather", "main_first", "prepare", "print"), "script")
_HOME |= dict.fromkeys(("DiLoCo", "Fragments", "LocalSGD", "levels"), "rounds")


def _load(name: str) -> Any:
    """Load a public name when it is first used: `import torch` alone comes through here and must stay cheap."""
    if name not in _HOME:
        raise AttributeError(f"module 'ringdp' has no attribute {name!r}")
    _check()
    if name in _MODULES:
        return importlib.import_module(f"ringdp.{name}")
    value = getattr(importlib.import_module(f"ringdp.{_HOME[name]}"), name)
    globals()[name] = value
    return value


if not TYPE_CHECKING:  # for type checkers every name would exist
    __getattr__ = _load


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


def _check() -> None:
    """Raise ImportError with the reason where ringdp cannot work: not Linux, not built, built for another torch."""
    if sys.platform != "linux":
        raise ImportError(f"ringdp runs on Linux only, and this is {sys.platform}")
    from ringdp import _build

    _build.check()


def _called_by_import_torch() -> bool:
    """Whether torch's own import loads this module, through the entry point in ringdp/_autoload.py.

    An error would then break torch for all programs in the environment, so it waits until a name is used.
    """
    spec = getattr(sys.modules.get("torch"), "__spec__", None)
    return bool(getattr(spec, "_initializing", False))


if not _called_by_import_torch():
    try:
        _check()
    except ImportError as error:
        if not _early.is_command(sys.orig_argv):
            raise
        sys.stderr.write(f"ringdp: {error}\n")
        sys.exit(1)
    importlib.import_module("ringdp._autoload").register()
