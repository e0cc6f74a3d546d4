"""What compression="auto" does on a link whose speed changes: one training, the links change under it.

    sudo python -m benchmarks auto_compression --hosts 2 --rates 100mbit,1gbit,10gbit,1gbit,100mbit

Prints each decision, and what steps took at each speed, by rank 0's clock; steps wait for each other anyway. How auto
compares with exact gradients where nothing changes: `python -m benchmarks step --modes ringdp,ringdp-auto`.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.lib import models, session
from benchmarks.lib.hosts import Hosts
from benchmarks.lib.measure import format_time, table


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="mlp", choices=models.NAMES)
    parser.add_argument("--allow", default="4bit", help="what auto may choose among (default 4bit)")
    parser.add_argument("--rates", default="100mbit,1gbit,10gbit,1gbit,100mbit", help="speeds, one by one")
    parser.add_argument("--seconds", type=float, default=45.0, help="how long each lasts (default 45)")
    parser.add_argument("--idle", type=float, default=0.0, help="seconds that each forward takes longer")


def check(args: argparse.Namespace) -> None:
    args.rates = args.rates.split(",")
    hosts = args.hosts or 2
    args.place = session.Place(args.ranks or hosts * (args.ranks_per_host or 1), hosts, args.rates[0])


def run_rank(joined: session.Joined) -> None:
    import ringdp

    given, group = joined.settings, session.ring_group()
    task = models.make(given["model"], rank=joined.rank)
    module = ringdp.RingDP(task.module, process_group=group, compression="auto", allow=given["allow"])
    optimizer = torch.optim.SGD(task.module.parameters(), lr=task.learning_rate)
    decisions: list[tuple[float, int, str]] = []
    begin, steps, go_on = time.time(), list[tuple[float, float]](), torch.ones(1)
    while bool(go_on):
        began = time.perf_counter()
        optimizer.zero_grad()
        loss = task.loss(module, task.batch)
        if given["idle_s"]:
            loss.register_hook(lambda gradient: time.sleep(given["idle_s"]))
        loss.backward()
        optimizer.step()
        steps.append((time.time(), time.perf_counter() - began))
        for one in module.compression_stats().decisions[len(decisions) :]:
            decisions.append((time.time(), one.step, one.reason))
            joined.say(f"step {one.step}: {one.reason}")
        go_on.fill_(float(time.time() - begin < given["seconds"]))
        dist.broadcast(go_on, 0)
    joined.deliver({"steps": steps, "decisions": decisions})


@contextmanager
def changing(hosts: Hosts, rates: Sequence[str], seconds: float) -> Iterator[list[tuple[float, str]]]:
    """Within the block the links get one speed after the other; the list has when, by time.time()."""
    log: list[tuple[float, str]] = []
    stop = threading.Event()

    def change() -> None:
        for rate in rates:
            hosts.set_rate(rate)
            log.append((time.time(), rate))
            if stop.wait(seconds):
                return

    thread = threading.Thread(target=change, daemon=True)
    thread.start()
    try:
        yield log
    finally:
        stop.set()
        thread.join()


def measure(args: argparse.Namespace) -> dict[str, Any]:
    session.need_ringdp()
    settings = {"model": args.model, "allow": args.allow, "seconds": args.seconds * len(args.rates) + 5}
    settings["idle_s"] = args.idle
    with session.make_hosts(args.place) as hosts:
        assert hosts is not None
        with changing(hosts, args.rates, args.seconds) as changes:
            rows, quiet = session.run("auto_compression", settings, args.place, hosts=hosts, timeout_s=args.timeout)
    return session.result_of("auto_compression", quiet, args.place, settings=settings, changes=changes, rows=rows)


def report(result: dict[str, Any]) -> str:
    found, changes = result["rows"], result["changes"]
    ends = [when for when, _ in changes[1:]] + [float("inf")]
    rows = []
    for (when, rate), end in zip(changes, ends, strict=True):
        here = [seconds for at, seconds in found["steps"] if when <= at < end]
        last = here[len(here) * 2 // 3 :]
        rows.append([rate, str(len(here)), format_time(statistics.median(last)) if last else ""])
    events = [(at, f"step {step}: {reason}") for at, step, reason in found["decisions"]]
    events += [(when, f"links of {rate}") for when, rate in changes]
    lines = [f"{at - changes[0][0]:6.1f} s  {words}" for at, words in sorted(events)]
    title = f"compression=auto, allow={result['settings']['allow']}, {result['settings']['model']}"
    return session.text(result, title, table(["links", "steps", "step, in the last third"], rows), "\n".join(lines))
