"""The guard that is on by default: its hash travels in the message that the ranks exchange about their steps.

Every RINGDP_REPORT_EVERY steps `diagnosis.monitor.StepMonitor` asks for a message and receives those of all ranks. That
adds no operation: the hash of a part is the only cost.
"""

from __future__ import annotations

import struct
import weakref
from typing import Any

from ringdp.ddp.divergence.comparison import Comparison
from ringdp.diagnosis.rank_facts import ATTACHED_BYTES

EVERY = 500  # steps within which a difference is found
_PACKED = struct.Struct("<qQ")  # the window's number from 1 on, and the part's hash
NOTHING = bytes(_PACKED.size)
assert _PACKED.size == ATTACHED_BYTES


class AttachedGuard:
    """Used by the thread that runs forward, between steps.

    Args:
        wrapper: the RingDP, which owns this.
        comparison: what is compared.
        window: steps between two messages.
    """

    def __init__(self, wrapper: Any, comparison: Comparison, window: int) -> None:
        self._wrapper = weakref.ref(wrapper)
        self.comparison = comparison
        self._parts = parts_of(window)
        self._number = 0  # of the window whose message is sent
        self._steps = -1  # the reducer's, when it was made
        self._message = NOTHING
        self._received: tuple[int, list[bytes]] | None = None

    def message(self) -> bytes:
        """This rank's message, in a forward before the backward that carries it. Micro-batches of one step have the
        same."""
        wrapper = self._wrapper()
        assert wrapper is not None
        steps = wrapper.reducer.steps()
        if steps != self._steps:
            self._steps = steps
            self._number += 1
            self._message = _PACKED.pack(
                self._number, self.comparison.hash(wrapper, self._number % self._parts, self._parts)
            )
        return self._message

    def receive(self, step: int, gathered: list[bytes]) -> None:
        """Take all ranks' messages, by rank, in the backward after step `step`. `look` compares them in the next
        forward."""
        self._received = step, gathered

    def look(self) -> None:
        """Called in a forward. Raises MismatchError where replicas differ and the action is "raise"."""
        if self._received is None:
            return
        (step, messages), self._received = self._received, None
        gathered = [_PACKED.unpack(one) for one in messages]
        numbers = [number for number, _ in gathered]
        if len(set(numbers)) > 1:  # a rank is new, or had no forward in time: they hashed different parts
            self._number = max(numbers)
            self.comparison.forget_differences()
        elif numbers[0] and any(one != gathered[0] for one in gathered):
            wrapper = self._wrapper()
            assert wrapper is not None
            part = numbers[0] % self._parts
            self.comparison.act(wrapper, wrapper.process_group, step, part=part, parts=self._parts)

    def start_again(self) -> None:
        """Called when the wrapper has another group, or a join is over."""
        self._received = None
        self.comparison.forget_differences()


def parts_of(window: int) -> int:
    """In how many parts the replica is hashed, one in each window, so that a difference is found within `EVERY`."""
    return max(1, (EVERY - 1) // window - 1)
