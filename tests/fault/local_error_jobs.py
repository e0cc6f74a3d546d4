"""What the ranks of test_local_error.py do: one rank's own program closes the descriptor by which its core waits."""

from __future__ import annotations

import os
import time
from typing import Any

import torch

import ringdp
from ringdp.errors import RingError
from tests.fault.elastic_jobs import Net, Told, batch, hexadecimal, joined

OUTLIVES_S = 4.0


def close_pollers() -> None:
    for name in os.listdir("/proc/self/fd"):
        try:
            if "eventpoll" in os.readlink(f"/proc/self/fd/{name}"):
                os.close(int(name))
        except OSError:
            continue


def train(
    folder: str,
    steps: range,
    deaths: tuple[Any, ...] = (),
    *,
    elastic: bool = True,
    places: tuple[int, ...] | None = None,
    state: dict[str, Any] | None = None,
    victim: int = -1,
    transport: str = "auto",
) -> Told:
    """In the second step `victim` closes them. It catches what it gets, and its process lives on for a while."""
    os.environ["RINGDP_TRANSPORT"] = transport
    told = Told()
    with joined(folder, elastic=elastic) as rank:
        place = rank if places is None else places[rank]
        net = Net(60)
        model = ringdp.RingDP(net, bucket_cap_mb=0.01, reproducible=True)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.5)
        if state is not None:
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
        for step in steps:
            x, y = batch(place, step)
            loss = (model(x) - y).square().mean()
            if step == 1 and victim == place:
                close_pollers()
            elif step == 1 and victim >= 0:
                time.sleep(0.6)  # so that the other one has to wait
            began = time.monotonic()
            try:
                loss.backward()
            except RingError as error:
                told.seconds.append(time.monotonic() - began)
                told.extra |= {"error": type(error).__name__, "text": str(error)}
                told.extra |= {"rank": error.rank, "peer": getattr(error, "peer", None)}
                if place == victim:
                    time.sleep(OUTLIVES_S)
                break
            told.seconds.append(time.monotonic() - began)
            told.gradients.append(hexadecimal([one.grad for one in net.parameters() if one.grad is not None]))
            optimizer.step()
            optimizer.zero_grad()
            told.parameters.append(hexadecimal(list(net.parameters())))
            told.sizes.append(ringdp.world_size())
        told.state = {"model": {name: one.clone() for name, one in model.state_dict().items()}}
        told.state |= {"optimizer": optimizer.state_dict(), "residuals": None}
    return told
