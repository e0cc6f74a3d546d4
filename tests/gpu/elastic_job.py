"""One rank of a job that loses a rank and gets another in its place: tests/gpu/elastic_job.py DEVICE WAY FOLDER

Rank 1 kills itself once. WAY: `steps` or `rounds`, a colon, a compressor or `none`. At its end a rank writes the hash
of its parameters, the number of ranks and its device into FOLDER; a line for each of its batches is in FOLDER as well.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import nn  # noqa: E402

import ringdp  # noqa: E402
from tests.train.given_gradients import hash_of  # noqa: E402

SAMPLES, BATCH, EPOCHS, KILLED_IN_STEP = 480, 48, 40, 12
STEP_S = 0.05  # so that a newcomer finds its way to the device before the end


def main(device: str, way: str, folder: Path) -> None:
    ringdp.init(device=device)
    at_start, rank = "RINGDP_JOIN" not in os.environ, ringdp.rank()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(ringdp.device())
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
    kind, _, name = way.partition(":")
    compression = None if name == "none" else name
    if kind == "steps":
        model: nn.Module = ringdp.RingDP(net, weight="samples", compression=compression)
        job = ringdp.elastic.Job(model, optimizer)
    else:
        model, rounds = net, ringdp.DiLoCo(net, optimizer, every=4, compression=compression)
        job = ringdp.elastic.Job(rounds, optimizer)
    job.audit(folder / f"audit-{os.getpid()}")
    draw = torch.Generator().manual_seed(1)
    data = torch.randn(SAMPLES, 64, generator=draw), torch.randint(10, (SAMPLES,), generator=draw)
    loader = job.loader(torch.utils.data.TensorDataset(*data), global_batch=BATCH)
    for _ in job.epochs(EPOCHS):
        for x, y in loader:
            if at_start and rank == 1 and job.step + 1 == KILLED_IN_STEP:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x.to(ringdp.device())), y.to(ringdp.device())).backward()
            optimizer.step()
            time.sleep(STEP_S)
    if kind == "rounds":
        rounds.finish()
    story = {
        "hash": hash_of(dict(net.named_parameters())),
        "ranks": ringdp.world_size(),
        "device": str(ringdp.device()),
    }
    (folder / f"end-{os.getpid()}").write_text(json.dumps(story))
    ringdp.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
