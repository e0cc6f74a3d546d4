"""A key-value store in MXNet's shape over collectives: push gradients, pull values, 1/n of the optimizer on each rank.

    kv = ringdp.kvstore.create("dist_sync")
    kv.set_optimizer(torch.optim.AdamW, lr=1e-3)
    kv.init("w", weight)                       # rank 0's value counts
    kv.pushpull("w", gradient, out=weight)

There is no server: a key's values are cut into a slice for each rank. A push is a reduce-scatter to the owners of the
slices, an update runs on the owner, and a pull is an all-gather.
"""

from ringdp.kvstore.async_stats import AsyncStats
from ringdp.kvstore.async_store import AsyncStore
from ringdp.kvstore.attached import Attached
from ringdp.kvstore.create import create
from ringdp.kvstore.store import KVStore
from ringdp.kvstore.trainer import Trainer

__all__ = ["AsyncStats", "AsyncStore", "Attached", "KVStore", "Trainer", "create"]
