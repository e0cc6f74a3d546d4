"""The costs of reducing gradients on a rank: `RingDP.stats`."""

from __future__ import annotations

from dataclasses import dataclass

from ringdp.text import count, format_size, format_time, table


@dataclass(frozen=True)
class Stats:
    """The costs of reducing gradients in the last backward that synchronised, and in all of them. Prints as a table.

    Attributes:
        steps: backwards of this rank that synchronised. Under torch's Join a rank that has run out of input makes none,
            so ranks differ from then on.
        buckets: operations per step.
        bytes: gradient bytes reduced per step.
        backward_s: from the first output or gradient to the last gradient, seconds.
        exposed_wait_s: how long the end of backward waited for communication, seconds.
        total_backward_s: backward_s summed over all steps.
        total_exposed_wait_s: exposed_wait_s summed over all steps.
    """

    steps: int
    buckets: int
    bytes: int
    backward_s: float
    exposed_wait_s: float
    total_backward_s: float
    total_exposed_wait_s: float

    def __str__(self) -> str:
        rows = [
            [name, format_time(last), format_time(total / max(self.steps, 1)), format_time(total)]
            for name, last, total in (
                ("backward", self.backward_s, self.total_backward_s),
                ("exposed wait", self.exposed_wait_s, self.total_exposed_wait_s),
            )
        ]
        head = f"{count(self.steps, 'step')}, {format_size(self.bytes)} of gradients in {count(self.buckets, 'bucket')}"
        return f"{head}\n{table(['', 'last step', 'mean', 'all steps'], rows)}"
