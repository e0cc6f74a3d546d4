"""One rank of a job where GPU ranks and CPU ranks take turns: tests/gpu/mixed_job.py DEVICE, under a launcher.

Even ranks use the device, odd ones the CPU. Gradients are given, averaged as int8 codes and as they are; every rank
compares with the formula, and with what the others have.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import ringdp  # noqa: E402
from tests.train.given_gradients import Formula, Given, hash_of, noise  # noqa: E402

SHAPES = {"weight": (300, 70), "odd": (127, 41), "vector": (5_000,)}


def main(device: str) -> None:
    rank = int(os.environ["RANK"])
    ringdp.init(device=device if rank % 2 == 0 else "cpu")
    ranks, place = ringdp.world_size(), ringdp.device()
    model = ringdp.RingDP(Given(SHAPES).to(place), compression="int8")
    formula = Formula("int8", ranks, feedback=False)
    seen: dict[str, torch.Tensor] = {}
    for step in range(3):
        every = [noise(SHAPES, r, step) for r in range(ranks)]
        model.zero_grad()
        model({name: one.to(place) for name, one in every[rank].items()}).backward()
        for name, parameter in model.module.named_parameters():
            assert parameter.grad is not None
            seen[f"{step} {name}"] = parameter.grad.cpu()
            if len(SHAPES[name]) > 1 and device != "cpu":  # CPU ranks of one host add up before they encode
                wanted = formula.mean(name, [one[name] for one in every]).view(SHAPES[name])
                assert torch.equal(parameter.grad.cpu(), wanted), f"{name} in step {step}: not what the formula gives"
    hashes: list[str] = [""] * ranks
    dist.all_gather_object(hashes, hash_of(seen))
    assert len(set(hashes)) == 1, f"the ranks have different bits: {hashes}"
    print(f"rank {rank} on {place}: same bits on {ranks} ranks, {dist.get_backend()}")
    ringdp.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
