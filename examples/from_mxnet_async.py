"""MXNet's factorisation of ratings with dist_async, ported line by line: each rank trains at its own pace.

    python launch.py --nproc-per-node 2 examples/from_mxnet_async.py
    python examples/from_mxnet_async.py                         # one rank, no launcher

It prints the mean square error of this rank's batches, epoch by epoch.
"""

import torch
from torch import nn

import ringdp


def main(epochs: int = 10) -> float:
    """The error of the last epoch."""
    ringdp.init()
    store = ringdp.kvstore.create("dist_async")
    truth = torch.Generator().manual_seed(0)
    tastes, traits = torch.randn(200, 4, generator=truth), torch.randn(100, 4, generator=truth) / 2
    torch.manual_seed(store.rank)
    net = nn.ModuleList([nn.Embedding(200, 8), nn.Embedding(100, 8)])
    trainer = ringdp.kvstore.Trainer(net, "adam", {"learning_rate": 0.02}, kvstore=store)
    for epoch in range(epochs):
        total = 0.0
        for _ in range(50):
            users, films = torch.randint(200, (256,)), torch.randint(100, (256,))
            error = (net[0](users) * net[1](films)).sum(1) - (tastes[users] * traits[films]).sum(1)
            net.zero_grad()
            error.square().mean().backward()
            trainer.step(1)  # each push counts in full, as it comes
            total += float(error.detach().square().mean()) / 50
        if store.rank == 0:
            print(epoch, total, flush=True)
    store.close()  # leaves when all have ended
    ringdp.shutdown()
    return total


if __name__ == "__main__":
    main()
