"""A script of MXNet as tests/train/test_async_store.py starts it: workers, servers and a scheduler run the same."""

import sys
from pathlib import Path

import torch

import ringdp

if __name__ == "__main__":
    kv = ringdp.kvstore.create("dist_async")
    kv.set_optimizer("sgd", learning_rate=1.0)
    weights = {"a": torch.zeros(5000), "b": torch.zeros(3)}
    for name, weight in weights.items():
        kv.init(name, weight)
    for name, weight in weights.items():
        kv.push(name, torch.full_like(weight, -1.0))
    kv.barrier()
    for name, weight in weights.items():
        kv.pull(name, out=weight)
    found = [kv.rank, kv.num_workers, *(sorted(set(it.tolist())) for it in weights.values())]
    kv.close()
    (Path(sys.argv[1]) / f"trained-{kv.rank}").write_text(repr(found))
