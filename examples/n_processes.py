"""one_process.py on several ranks: six lines are changed.

    python launch.py --nproc-per-node 2 examples/n_processes.py
    python examples/n_processes.py                                   # one rank, no launcher

The last line of each epoch has the accuracy on 360 other images.
"""

from __future__ import annotations

import argparse

import torch
from resnet import ResNet18, load_digits, prepared
from torch.nn import functional
from torch.utils.data import DataLoader

import ringdp


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="ResNet-18 on scikit-learn's digits")
    add = parser.add_argument
    add("--epochs", type=int, default=3, help="passes over the 1,437 training images (default %(default)s)")
    add("--batch-size", type=int, default=32, help="images of a step, on each rank (default %(default)s)")
    add("--lr", type=float, default=0.05, help="learning rate of SGD, momentum 0.9 (default %(default)s)")
    add("--warm-up", type=int, default=1, help="steps until the learning rate is reached (default %(default)s)")
    add("--width", type=int, default=8, help="channels of the first stage; ResNet-18 has 64 (default %(default)s)")
    add("--seed", type=int, default=0, help="of the weights and of the order (default %(default)s)")
    add("--save", default="resnet", help="for the weights: a file without its .pt, or a folder (default %(default)s)")
    return parser.parse_args()


def main() -> None:
    options = parse()
    device = ringdp.init()
    torch.manual_seed(options.seed)
    training, test = load_digits(seed=0)
    loader = DataLoader(training, batch_size=options.batch_size, shuffle=True, drop_last=True)
    test_loader = DataLoader(test, batch_size=60)
    model = ResNet18(options.width).to(device)
    model, loader, test_loader = ringdp.prepare(model, loader, test_loader)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / options.warm_up, total_iters=options.warm_up)
    for epoch in range(options.epochs):
        model.train()
        for images, labels in loader:
            loss = functional.cross_entropy(model(prepared(images).to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        model.eval()
        right = 0
        with torch.no_grad():
            for images, labels in test_loader:
                found = model(prepared(images).to(device)).argmax(dim=1) == labels.to(device)
                right += int(ringdp.gather(found, test_loader).sum())
        ringdp.print(f"epoch {epoch}: loss {loss.item():.4f}, accuracy {right / len(test):.4f}", flush=True)
    ringdp.checkpoint.save(options.save, options.epochs, model.module.state_dict())


if __name__ == "__main__":
    main()
