"""A training loop for pods, which may be asked to leave at any time: SIGTERM saves all ranks' state at the same step.

ringrun -n 2 train.py --folder checkpoints --steps 500
"""

from __future__ import annotations

import argparse
import signal
import sys
import time

import torch
import torch.distributed as dist

import ringdp

STOPPED = 128 + signal.SIGTERM  # not 0: a pod that ends with 0 has done its work and is not started again


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", default="checkpoints")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seconds-per-step", type=float, default=0.0, help="to slow it down")
    options = parser.parse_args()
    stop = torch.zeros(1)
    signal.signal(signal.SIGTERM, lambda number, frame: stop.fill_(1.0))

    ringdp.init()
    torch.manual_seed(0)
    model = ringdp.RingDP(torch.nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    first = 0
    if (found := ringdp.checkpoint.load(options.folder)) is not None:
        model.load_state_dict(found.shared["model"])
        optimizer.load_state_dict(found.shared["optimizer"])
        first = found.step
    if ringdp.rank() == 0:
        print(f"{ringdp.world_size()} ranks, from step {first}", flush=True)
    for step in range(first, options.steps):
        torch.manual_seed(step * ringdp.world_size() + ringdp.rank())
        model(torch.randn(32, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(options.seconds_per_step)
        anywhere = stop.clone()
        dist.all_reduce(anywhere)  # one pod may be asked alone: all ranks learn of it in the same step
        if anywhere.item():
            shared = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            ringdp.checkpoint.save(options.folder, step + 1, shared)
            if ringdp.rank() == 0:
                print(f"stopped, saved step {step + 1}", flush=True)
            ringdp.shutdown()
            return STOPPED
    if ringdp.rank() == 0:
        print(f"done after step {options.steps}", flush=True)
    ringdp.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
