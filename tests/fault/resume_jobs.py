"""What the ranks of test_resume.py do: examples/checkpoint_resume.py, with a tongue, and with further ways to die."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import signal
from typing import Any

# Slow to import: before the ranks are forked, see RankServer.
import sklearn.datasets  # noqa: F401
import torch._dynamo
import torch.distributed.nn  # noqa: F401
import tqdm  # noqa: F401

from examples import checkpoint_resume
from ringdp import RingDP, checkpoint  # noqa: F401
from tests.fault.hosts import Outcome, RankSpec


def train(spec: RankSpec, outcome: Outcome) -> None:
    """Outcome's text is JSON: the exit code, what was printed and logged, all losses as hexadecimal floats.

    Variables: TEST_ARGUMENTS, the example's; TEST_DIE_IN_WRITE, at which write() of rank 0 into a file to die.
    """
    losses: list[str] = []
    report = checkpoint_resume.report

    def telling_report(training: Any, again: Any, begun_at: int) -> bool:
        losses.extend(loss.hex() for loss in training.losses)
        return report(training, again, begun_at)

    checkpoint_resume.report = telling_report
    if "TEST_DIE_IN_WRITE" in os.environ and spec.rank == 0:
        _die_in_write(int(os.environ["TEST_DIE_IN_WRITE"]))
    printed = io.StringIO()
    logging.basicConfig(stream=printed, level=logging.WARNING, format="%(message)s")
    with contextlib.redirect_stdout(printed):
        code = checkpoint_resume.main(os.environ["TEST_ARGUMENTS"].split())
    outcome.text = json.dumps({"code": code, "printed": printed.getvalue(), "losses": losses})


def _die_in_write(countdown: int) -> None:
    write = checkpoint._Writer.write

    def dying_write(self: Any, data: Any) -> int:
        nonlocal countdown
        countdown -= 1
        if countdown == 0:
            write(self, bytes(data)[: len(data) // 2])
            self.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        return write(self, data)

    checkpoint._Writer.write = dying_write  # type: ignore[method-assign]
