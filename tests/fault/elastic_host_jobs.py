"""What the ranks of test_elastic_hosts.py do: train on hosts of their own until they are told to end.

They write down each step that counts for them. The launcher's store is kept by a process that is no rank.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from tests.fault.hosts import Lab, Outcome, RankSpec

NETWORK = "10.87.0.{}/24"
ADDRESS, PORT = "10.87.0.1", 29731
KEEPER = 99
HEAL_S = 1.0


def specs(lab: Lab, folder: Path, per_host: int) -> list[RankSpec]:
    """So many ranks on each host, and on the first one the store."""
    world = per_host * len(lab.spaces)
    found = [RankSpec(KEEPER, world, space=lab.spaces[0], method=str(folder), body=f"{__name__}:keep_store")]
    for rank in range(world):
        host = rank // per_host
        variables = {
            "RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_RANK": str(rank % per_host),
            "LOCAL_WORLD_SIZE": str(per_host),
            "MASTER_ADDR": ADDRESS,
            "MASTER_PORT": str(PORT),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "RINGDP_ELASTIC": "1",
            "RINGDP_HEAL": str(HEAL_S),
        }
        found.append(
            RankSpec(
                rank,
                world,
                space=lab.spaces[host],
                host_name=f"h{host}",
                variables=variables,
                method=str(folder),
                body=f"{__name__}:train",
            )
        )
    return found


def keep_store(spec: RankSpec, outcome: Outcome) -> None:
    """A file for each key of a change: `1-state-2` is there when rank 2 has said where it stands in view 1."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore("0.0.0.0", PORT, is_master=True, wait_for_workers=False)
    Path(spec.method, "store-pid").write_text(str(outcome.pid))
    end = time.monotonic() + 60
    while not Path(spec.method, "over").exists() and time.monotonic() < end:
        for key in store.list_keys():
            if "/elastic/" in key:
                Path(spec.method, key.rpartition("/elastic/")[2].replace("/", "-")).touch()
        time.sleep(0.01)
    del store


def train(spec: RankSpec, outcome: Outcome) -> None:
    import torch

    import ringdp

    folder = Path(spec.method)
    while not (folder / "store-pid").exists():
        time.sleep(0.01)
    ringdp.init(device="cpu", timeout=30)
    torch.manual_seed(1)
    model = ringdp.RingDP(torch.nn.Linear(10, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.001)
    (folder / f"pid-{spec.rank}").write_text(str(os.getpid()))
    with open(folder / f"steps-{spec.rank}", "w") as log:
        for step in range(100_000):
            x = torch.randn(4, 10, generator=torch.Generator().manual_seed(1000 * spec.rank + step))
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            text = " ".join(float(p.detach().sum()).hex() for p in model.parameters())
            log.write(f"{step} {ringdp.world_size()} {text}\n")
            log.flush()
            wanted = float((folder / "stop").exists())
            if ringdp.metrics.mean(wanted) > 0:
                return
            time.sleep(0.02)


def steps(folder: Path, rank: int) -> dict[int, tuple[int, str]]:
    """What counts for the rank: the group's size and its parameters, by step."""
    path = folder / f"steps-{rank}"
    if not path.exists():
        return {}
    found = {}
    for line in path.read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            number, size, text = line.strip().split(" ", 2)
            found[int(number)] = (int(size), text)
    return found
