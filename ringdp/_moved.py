"""Modules under their names from before they moved, by which pickled objects name their classes."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

# Where classes live that saved objects hold (torch.save of a model in a RingDP, of its statistics, of a compressor).
NOW = {
    "ringdp.compression.c_library": "ringdp.compression.codecs.c_library",
    "ringdp.compression.casts": "ringdp.compression.codecs.casts",
    "ringdp.compression.int8": "ringdp.compression.codecs.int8",
    "ringdp.compression.majority": "ringdp.compression.methods.majority",
    "ringdp.compression.planes": "ringdp.compression.codecs.low_bit",
    "ringdp.compression.power_sgd": "ringdp.compression.methods.power_sgd",
    "ringdp.compression.random_k": "ringdp.compression.methods.random_k",
    "ringdp.compression.sign": "ringdp.compression.methods.sign",
    "ringdp.compression.stochastic": "ringdp.compression.methods.stochastic",
    "ringdp.compression.top_k": "ringdp.compression.methods.top_k",
    "ringdp.compression_stats": "ringdp.ddp.compression.stats",
    "ringdp.mixed_precision": "ringdp.ddp.mixed_precision",
    "ringdp.parallel": "ringdp.ddp.wrapper",
    "ringdp.reduction_stats": "ringdp.ddp.reduction_stats",
    "ringdp.sync_batch_norm": "ringdp.ddp.sync_batch_norm",
}


class _Same(Loader):
    """Loads the module of another name, which stays as it is."""

    def __init__(self, now: str) -> None:
        self._now = now
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._now)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # the import system has put the old name's there


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, _Same(NOW[fullname])) if fullname in NOW else None


def keep_old_names() -> None:
    """Asked last, after every finder of modules that are there."""
    sys.meta_path.append(_Finder())
