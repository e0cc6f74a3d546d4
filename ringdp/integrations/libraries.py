"""Shared functions of this folder's modules: the import of their library, and Lightning's registries."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any


def imported(*names: str, package: str) -> ModuleType:
    """One of the modules ``names``: one that the program has imported already, else the first that is installed.

    Args:
        names: what to import. Lightning is published under two names each with classes of its own.
        package: the name for pip where none of them is installed.

    Raises:
        ImportError: none is installed; the message names the package. An ImportError from inside an installed
            module is passed on as it is.
    """
    for name in sorted(names, key=lambda name: name not in sys.modules):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or name.split(".")[0] != error.name.split(".")[0]:
                raise
    raise ImportError(
        f"this part of ringdp.integrations needs {package}, which is not installed: pip install '{package}'"
    )


def process_group_backend(strategy: Any) -> str:
    """Lightning's ``_get_process_group_backend``: the user's choice, else ring, and NCCL beside it on GPUs. It is asked
    before Lightning makes the process group, which it leaves as it is where there is one: that of an elastic job."""
    import torch.distributed as dist

    import ringdp
    from ringdp import config
    from ringdp.job.devices import default_backend

    if config.elastic() and not dist.is_initialized():
        ringdp.init(device=strategy.root_device.type)
    return str(strategy._process_group_backend or default_backend(strategy.root_device.type))


def register_strategy(registry: Any, strategy: type) -> None:
    """Enter ``strategy`` into a Lightning strategy registry, once for each way of starting processes."""
    starts = {"ringdp": "popen", "ringdp_spawn": "spawn", "ringdp_fork": "fork", "ringdp_notebook": "fork"}
    for name, start_method in starts.items():
        registry.register(
            name, strategy, description=f"RingDP with start_method={start_method!r}", start_method=start_method
        )
