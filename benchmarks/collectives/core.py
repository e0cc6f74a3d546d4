"""The core without torch on a benchmark's ranks: what C++ itself takes."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]


def make_runtime(rank: int, ranks: int, name: str, **given: Any) -> tuple[Any, Any]:
    """A Runtime of tests.core._core that meets the other ranks' in torch's store under that name, and the module.

    Its options are `given`, and else what the environment says.
    """
    from ringdp import config
    from tests.core import _core

    store = PrefixStore(name, dist.distributed_c10d._get_default_store())

    def find(key: str) -> str | None:
        return store.get(key).decode() if store.check([key]) else None

    settings = config.RingConfig.from_environment()
    options: dict[str, Any] = {"host_id": settings.host_id, "spin_us": settings.spin_us}
    options["table"] = dict(settings.tuning.limits)
    options |= {"checksums": settings.checksum, "heal_ms": settings.heal_ms, **given}
    return _core.Runtime(_core.CallbackStore(store.set, find), rank, ranks, **options), _core
