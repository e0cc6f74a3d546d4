"""RingDP inside other libraries. Each module is imported when its name is first used; none is needed otherwise.

A new one is a module here, its line in `_HOME` and beside it for type checkers, and its library's line in
requirements/integrations.txt.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ringdp.integrations.accelerate import RingAccelerator as RingAccelerator
    from ringdp.integrations.accelerate import use_ringdp as use_ringdp
    from ringdp.integrations.fabric import RingDPStrategy as RingDPStrategy
    from ringdp.integrations.lightning import RingDPTrainerStrategy as RingDPTrainerStrategy
    from ringdp.integrations.ray import RingConfig as RingConfig
    from ringdp.integrations.torchft import ProcessGroupRing as ProcessGroupRing
    from ringdp.integrations.transformers import RingTrainer as RingTrainer

_HOME = {
    "ProcessGroupRing": "torchft",
    "RingAccelerator": "accelerate",
    "RingConfig": "ray",
    "RingDPStrategy": "fabric",
    "RingDPTrainerStrategy": "lightning",
    "RingTrainer": "transformers",
    "use_ringdp": "accelerate",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'ringdp.integrations' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"ringdp.integrations.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
