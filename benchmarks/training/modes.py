"""How a training step is done: bare, in torch's DDP, or in RingDP with one of its options."""

from __future__ import annotations

import atexit
import math
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

DGC, RAMP_STEPS = "topk-dgc", 15  # top-k with momentum on the ranks, and over how many steps it falls to 1 %
_FOLDER = "RINGDP_METRICS_DIR"


@dataclass(frozen=True)
class Mode:
    """How gradients are averaged: by which wrapper, over which backend. Without a wrapper they are not."""

    wrapper: str = ""  # DDP or RingDP
    backend: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)  # the wrapper's own
    environment: Mapping[str, str] = field(default_factory=dict)  # while it is made
    compression: str = ""  # RingDP's: a compressor's name, or `DGC`
    samples: str = ""  # RingDP's weights: equal or unequal ones
    hook: str = ""  # DDP's: fp16 and powersgd, torch's hooks; int8 and int4, ringdp.hooks.ddp_hook
    scaler: str = ""  # the loss is scaled, by the GradScaler of torch or ringdp
    barrier: bool = False  # without a wrapper: the ranks wait for each other at the end of backward
    largest_error: float = 1e-2  # of a parameter's change in three steps, relative

    @property
    def compressor(self) -> Any:
        """What RingDP is given."""
        if self.compression != DGC:
            return self.compression or None
        from ringdp import compression

        return compression.TopK(0.01, ramp_steps=RAMP_STEPS, error_feedback=compression.DGC(0.9))

    @property
    def momentum_on_ranks(self) -> bool:
        """The optimizer has none then."""
        return self.compression == DGC


# The largest error of a parameter's change, by what compresses.
_LOSSY = {
    "int8": 0.05, "int6": 0.1, "int5": 0.3, "int4": 0.5, "nf4": 0.5, "fp16": 1e-2, "bf16": 0.02, "topk": 1.0, DGC: 3.0,
    "powersgd": 1.0, "randomk": 1.0, "sign": 1.0, "signsgd": math.inf, "qsgd": 3.0, "terngrad": 3.0, "auto": 0.05,
}  # fmt: skip
_VIEW = {"gradient_as_bucket_view": True}
# No reports, and reports and metrics of each step.
_SILENT, _TOLD = {"RINGDP_REPORT_EVERY": "0"}, {"RINGDP_REPORT_EVERY": "20", _FOLDER: "made anew"}
MODES = {
    "bare": Mode(),
    "bare-barrier": Mode(backend="ring", barrier=True),
    **{f"ddp-{name}": Mode("DDP", name) for name in ("gloo", "ring")},
    **{f"ddp-{name}-view": Mode("DDP", name, _VIEW) for name in ("gloo", "ring")},
    "ringdp": Mode("RingDP", "ring"),
    "ringdp-gloo": Mode("RingDP", "gloo"),
    "ringdp-nopool": Mode("RingDP", "ring", {"gradient_pool": False}),
    "ringdp-reproducible": Mode("RingDP", "ring", {"reproducible": True}),
    **{f"ringdp-guard-{every}": Mode("RingDP", "ring", {"guard": every}) for every in (100, 500)},
    "ringdp-silent": Mode("RingDP", "ring", environment=_SILENT),
    "ringdp-metrics": Mode("RingDP", "ring", environment=_TOLD),
    **{f"ringdp-buckets-{mb:g}": Mode("RingDP", "ring", {"bucket_cap_mb": mb}) for mb in (0.5, 1.0, 4.0, 25.0, 100.0)},
    "ringdp-weights": Mode("RingDP", "ring", {"weight": "call"}, samples="equal"),
    "ringdp-unequal": Mode("RingDP", "ring", {"weight": "call"}, samples="unequal"),
    "ringdp-scaled": Mode("RingDP", "ring", scaler="ringdp"),
    "ringdp-torch-scaled": Mode("RingDP", "ring", scaler="torch"),
    "ddp-ring-scaled": Mode("DDP", "ring", scaler="torch"),
    **{f"ringdp-{name}": Mode("RingDP", "ring", compression=name, largest_error=it) for name, it in _LOSSY.items()},
    **{f"ddp-{name}-fp16": Mode("DDP", name, hook="fp16") for name in ("gloo", "ring")},
    **{f"ddp-ring-{name}": Mode("DDP", "ring", hook=name, largest_error=_LOSSY[name]) for name in ("int8", "int4")},
    "ddp-ring-powersgd": Mode("DDP", "ring", hook="powersgd", largest_error=1.0),
}
DEFAULT_MODES = ("bare", "ddp-gloo", "ringdp", "ddp-ring")


def make_groups(modes: Sequence[str]) -> dict[str, dist.ProcessGroup]:
    """A group of all ranks for each backend that the modes use."""
    groups: dict[str, dist.ProcessGroup] = {}
    for backend in dict.fromkeys(MODES[mode].backend for mode in modes):
        if backend == "ring":
            import ringdp  # noqa: F401  # registers the backend
        if backend:
            groups[backend] = dist.new_group(backend=backend)
    return groups


def wrap(mode: Mode, module: nn.Module, group: dist.ProcessGroup | None) -> nn.Module:
    """The module as that mode trains it: bare, in DDP or in RingDP."""
    if mode.wrapper == "RingDP":
        return _in_ringdp(mode, module, group)
    if not mode.wrapper:
        return module
    wrapped = DistributedDataParallel(module, process_group=group, **mode.arguments)
    if mode.hook == "fp16":
        wrapped.register_comm_hook(group, fp16_compress_hook)
    elif mode.hook == "powersgd":
        state = PowerSGDState(group, matrix_approximation_rank=4, start_powerSGD_iter=2)  # 2 is the least it takes
        wrapped.register_comm_hook(state, powerSGD_hook)
    elif mode.hook:
        from ringdp.hooks import ddp_hook

        wrapped.register_comm_hook(*ddp_hook(mode.hook, model=module, process_group=group))
    return wrapped


def _in_ringdp(mode: Mode, module: nn.Module, group: dist.ProcessGroup | None) -> nn.Module:
    import ringdp
    from ringdp.diagnosis.records import step_records

    before = dict(os.environ)
    os.environ.update(mode.environment)
    if _FOLDER in mode.environment:
        os.environ[_FOLDER] = tempfile.mkdtemp(prefix="ringdp-metrics-")
        atexit.register(shutil.rmtree, os.environ[_FOLDER], ignore_errors=True)
    if mode.environment:
        step_records.cache_clear()
    try:
        model = ringdp.RingDP(module, process_group=group, compression=mode.compressor, **mode.arguments)
    finally:
        os.environ.clear()
        os.environ.update(before)
    if mode.samples:
        samples = 1000 + (dist.get_rank(group) if mode.samples == "unequal" else 0)
        model.register_forward_pre_hook(lambda wrapper, _: wrapper.set_weight(samples))
    return model


def wire_bytes(mode: Mode, module: nn.Module) -> int | None:
    """What the gradients of `module` take on the wire; None where no codec of the core says so."""
    parameters = dict(module.named_parameters())
    if mode.hook == "fp16":
        return 2 * sum(it.numel() for it in parameters.values())
    if not (mode.compression or mode.hook):
        return 4 * sum(it.numel() for it in parameters.values())
    if mode.hook == "powersgd":
        return None
    from ringdp import _C, compression

    chosen = compression.assign(mode.compressor or mode.hook, parameters, dict(module.named_modules()))
    codecs = {name: getattr(it, "native", None) for name, it in chosen.items()}
    if any(it is not None and not codecs[name] for name, it in chosen.items()):
        return None
    sizes = ((codecs[name], it.numel()) for name, it in parameters.items())
    return sum(_C.codec_bytes(codec, numel) if codec else 4 * numel for codec, numel in sizes)
