"""One rank of `python -m benchmarks joins`: trains a model until the file `finish` is there, and writes down when."""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from pathlib import Path

BEGAN = time.time()

import torch  # noqa: E402

import ringdp  # noqa: E402
from ringdp.job.byte_collectives import all_gather_bytes  # noqa: E402
from ringdp.job.elastic import as_unit  # noqa: E402

MODELS = {"small": [64] * 30, "mlp": [1024, 4096, 4096, 512]}
"""By name, the widths of linear layers: 0.1 and 23.1 million parameters."""


def main(folder: Path, model_name: str, step_s: float) -> None:
    out = open(folder / f"{os.getpid()}.jsonl", "a", buffering=1)  # noqa: SIM115

    def tell(what: str, **fields: object) -> None:
        out.write(json.dumps({"what": what, "at": time.time(), **fields}) + "\n")

    tell("began", joins="RINGDP_JOIN" in os.environ, process_at=BEGAN)
    ringdp.init(device="cpu")
    torch.manual_seed(0)
    widths = MODELS[model_name]
    layers = [layer for pair in itertools.pairwise(widths) for layer in (torch.nn.Linear(*pair), torch.nn.ReLU())]
    model = ringdp.RingDP(torch.nn.Sequential(*layers), weight="samples")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    job = ringdp.elastic.Job(model, optimizer)
    job.on_change(lambda it: tell("change", now=it.now, joined=it.joined, seconds=it.seconds))
    group = torch.distributed.group.WORLD
    assert group is not None
    loader = job.loader(torch.utils.data.TensorDataset(torch.randn(160, widths[0])), global_batch=8)
    tell("ready")

    def finished() -> bool:
        seen = bytes([(folder / "finish").exists()])
        return b"\1" in as_unit(group, "the question for the end", lambda: all_gather_bytes(seen, group, room=1))

    for _ in job.epochs(1_000_000):
        for (x,) in loader:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(step_s)
            tell("step", rank=ringdp.rank(), number=job.step, ranks=ringdp.world_size())
        if finished():
            break
    job.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]))
