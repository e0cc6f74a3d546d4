"""Ranks die, are replaced, come and leave, and the digits are learned all the same.

    python examples/come_and_go.py                                          one process
    ringrun --elastic -n 4 examples/come_and_go.py --kill 20                rank 1 kills itself, and is replaced
    ringrun --elastic -n 2 --rdzv-backend c10d --rdzv-endpoint node1:29400 --secret-file secret examples/come_and_go.py
    ringrun --join node1:29400 --secret-file secret -n 2 examples/come_and_go.py      and two more ranks come

Three lines of the script are about it: those with `job`. Each sample of an epoch is in one step, whoever has it.
"""

from __future__ import annotations

import argparse
import os
import signal
import time

import torch
from sklearn.datasets import load_digits

import ringdp


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--kill", type=int, default=0, metavar="STEP", help="rank 1 kills itself in this step")
    parser.add_argument("--step-seconds", type=float, default=0.02, help="sleep so long in each step")
    options = parser.parse_args()

    ringdp.init(device="cpu")
    torch.manual_seed(0)
    digits = load_digits()
    x = torch.from_numpy(digits.data).float() / 16
    y = torch.from_numpy(digits.target)
    train = torch.utils.data.TensorDataset(x[:1440], y[:1440])

    net = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.ReLU(), torch.nn.Linear(96, 10))
    model = ringdp.RingDP(net, weight="samples")
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    job = ringdp.elastic.Job(model, optimizer)  # 1: what a newcomer needs
    loader = job.loader(train, global_batch=48)  # 2: in place of a sampler and a DataLoader
    at_start = "RINGDP_JOIN" not in os.environ

    @job.on_change
    def changed(it: ringdp.elastic.Change) -> None:
        if ringdp.rank() == 0:
            print(f"after step {it.step}: {it.before} ranks, now {it.now}", flush=True)

    for epoch in job.epochs(options.epochs):  # 3: begins where the job is
        total = torch.zeros(())
        for images, labels in loader:
            if at_start and ringdp.rank() == 1 and job.step + 1 == options.kill:
                os.kill(os.getpid(), signal.SIGKILL)
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total += loss.detach()
            time.sleep(options.step_seconds)
        ringdp.print(f"epoch {epoch}: loss {total / len(loader):.3f} on {ringdp.world_size()} ranks", flush=True)

    with torch.no_grad():
        right = (model.module(x[1440:]).argmax(1) == y[1440:]).float().mean()
    ringdp.print(f"accuracy {right:.3f} after {job.step} steps")
    if right < 0.85:
        raise SystemExit(f"accuracy {right:.3f} is too low")


if __name__ == "__main__":
    main()
