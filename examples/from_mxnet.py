"""A small Gluon program, ported line by line: docs/how-to/migrating_from_mxnet.md has it as it was.

    python launch.py --nproc-per-node 2 examples/from_mxnet.py
    python examples/from_mxnet.py                               # one rank, no launcher

It prints the accuracy on this rank's images, epoch by epoch.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

import ringdp


def main(epochs: int = 10) -> float:
    """Accuracy of the last epoch on this rank's images."""
    ringdp.init()
    store = ringdp.kvstore.create("dist_sync")
    digits = load_digits()
    images = torch.tensor(digits.data / 16, dtype=torch.float32)[store.rank :: store.num_workers]
    labels = torch.tensor(digits.target)[store.rank :: store.num_workers]
    torch.manual_seed(store.rank)
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))
    loss_of = nn.CrossEntropyLoss(reduction="sum")
    trainer = ringdp.kvstore.Trainer(net, "sgd", {"learning_rate": 0.1, "momentum": 0.9}, kvstore=store)
    steps = len(load_digits().data) // store.num_workers // 64
    for epoch in range(epochs):
        right = 0
        for rows in torch.randperm(steps * 64).split(64):
            net.zero_grad()
            output = net(images[rows])
            loss_of(output, labels[rows]).backward()
            trainer.step(len(rows) * store.num_workers)
            right += int((output.argmax(1) == labels[rows]).sum())
        if store.rank == 0:
            print(epoch, right / (steps * 64), flush=True)
    torch.save(net.state_dict(), "digits.pt")
    ringdp.shutdown()
    return right / (steps * 64)


if __name__ == "__main__":
    main()
