"""``RingDP(bucket_cap_mb="auto")``: the first steps have buckets of several sizes, and what was fastest is kept.

What steps took all ranks hear from the exchange of `RingDP.report`: the same bytes on each of them, and no operation
more. So all of them decide the same, before the same step.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ringdp import config
from ringdp.compression import Auto, Rules
from ringdp.ddp import elastic as repair
from ringdp.ddp.layout_trial import Layout, Trial, layouts
from ringdp.ddp.reproducible import averages_elements
from ringdp.diagnosis.facts import FACTS_BYTES
from ringdp.diagnosis.monitor import StepMonitor
from ringdp.diagnosis.window import Window, step_of
from ringdp.errors import InvalidArgumentError
from ringdp.job.backend import BACKEND, backend_of

ASKED = 'bucket_cap_mb="auto"'
_WARM_UP = 3  # steps that are over before the first trial begins: connections, memory, the order of the gradients
_UNDER_JOIN = "steps under torch's Join are not compared"

_log = logging.getLogger("ringdp.bucket_layout")


class LayoutChoice:
    """Used by the thread that runs forward, between steps.

    Args:
        reducer: whose buckets these are.
        group: of its ranks.
        monitor: hears what the ranks tell each other.
        default_caps_bytes: the layout without ``"auto"``; the reducer has it.
    """

    def __init__(
        self, reducer: Any, group: dist.ProcessGroup, monitor: StepMonitor, default_caps_bytes: Sequence[int]
    ) -> None:
        self._reducer, self._group, self._monitor = reducer, group, monitor
        self._default = tuple(default_caps_bytes)
        self._tried: tuple[Layout, ...] = ()
        self._trial: Trial | None = None
        self._in_use = 0
        self._described: int = reducer.described()
        self._told: list[tuple[int, list[bytes]]] = []
        self._joined = False
        monitor.layout = self

    def before_forward(self) -> None:
        """In each forward that records gradients, but not under Join."""
        reducer = self._reducer
        if reducer.described() != self._described:
            self._begin_again()  # other parameters, or they are compressed in another way
        if self._trial is None:
            if self._joined or reducer.steps() < _WARM_UP or not reducer.rebuilt():
                return
            self._begin()
        self._follow()

    def hear(self, told: list[bytes]) -> None:
        """By rank, what all ranks told each other; between the backward that carried it and the next forward."""
        if self._trial is not None and self._trial.chosen is None:
            self._told.append((step_of(told[self._group.rank()]), told))

    def group_replaced(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._begin_again()

    def settle(self) -> None:
        """Ranks may run out of input from now on: nothing is tried any more. All call it between the same steps."""
        if self._joined:
            return
        self._joined = True
        self._monitor.take()
        self._judge()
        if self._trial is not None and self._trial.chosen is None:
            self._trial.give_up(_UNDER_JOIN)
            self._tell()
        if self._trial is not None:
            self._follow()

    @property
    def text(self) -> str:
        """Which layout there is, and why."""
        if self._trial is None:
            return f"{ASKED}: {_UNDER_JOIN}" if self._joined else f"{ASKED}: sizes are tried after the first steps"
        if self._trial.chosen is None:
            return f"{ASKED}: sizes are being tried, now {self._tried[self._in_use]}"
        return f"{ASKED}: {self._tried[self._trial.chosen]}; {self._trial.reason}"

    def _begin(self) -> None:
        found: dict[str, Layout] = {}
        for layout in layouts(self._default):
            self._reducer.set_caps(layout.caps_bytes)
            found.setdefault(str(self._reducer.layout()), layout)
        self._tried = tuple(found.values())
        self._use(0)
        self._trial = Trial(self._tried, self._reducer.steps())
        self._tell()

    def _begin_again(self) -> None:
        self._told, self._trial = [], None
        self._in_use = 0
        self._reducer.set_caps(self._default)
        self._described = self._reducer.described()

    def _follow(self) -> None:
        trial = self._trial
        assert trial is not None
        self._judge()
        wanted = trial.layout_after(self._reducer.steps())
        if wanted != self._in_use:
            self._use(wanted)

    def _use(self, layout: int) -> None:
        self._reducer.set_caps(self._tried[layout].caps_bytes)
        self._in_use = layout

    def _judge(self) -> None:
        told, self._told = self._told, []
        if self._trial is None or self._trial.chosen is not None:
            return
        for last, messages in told:
            self._trial.heard(costs_of(Window.unpacked(messages, FACTS_BYTES), last), self._reducer.steps())
        self._tell()

    def _tell(self) -> None:
        trial = self._trial
        if trial is not None and trial.chosen is not None and self._group.rank() == 0:
            _log.info("step %d: %s", self._reducer.steps(), self.text)


def costs_of(window: Window, last: int) -> Mapping[int, float]:
    """By the number of each step, of which `last` is this rank's number of the last: what it took, in seconds.

    That is the computing of the rank that computes longest and the waiting for buckets of the rank that waits least;
    the others wait for that one, too. Data loading and what else lies between two steps is left out. Floats are added
    one by one: the same bits on all processors.
    """
    forward, backward, after, exposed = (
        window.field(name).tolist() for name in ("forward", "backward", "after", "exposed")
    )
    first = last - window.rows.shape[1] + 1
    ranks = range(window.ranks)
    return {
        first + step: max(forward[rank][step] + backward[rank][step] + after[rank][step] for rank in ranks)
        + min(exposed[rank][step] for rank in ranks)
        for step in range(window.rows.shape[1])
    }


class LayoutChoosingModule(DistributedDataParallel):
    """A part of RingDP.

    Attributes:
        _asks_for_layout: the user gave ``bucket_cap_mb="auto"``.
        _layout_choice: what came of it, made with the reducer; None: sizes are fixed.
    """

    reducer: Any
    _asks_for_layout: bool
    _caps_bytes: list[int]
    _monitor: StepMonitor
    _before_forward: list[Any]
    _layout_choice: LayoutChoice | None = None

    def _choose_layout_if_asked(self) -> None:
        """When the reducer is made.

        Raises:
            InvalidArgumentError: the ranks of this wrapper do not tell each other about their steps, or its steps are
                made again without lost ranks.
        """
        self._layout_choice = None
        if not self._asks_for_layout:
            return
        group, device = self.process_group, self.device_type
        if repair.steps_are_repaired(self):
            repair.refuse(ASKED)
        if group.size() == 1:
            return
        needs = f"{ASKED} compares steps by what the ranks tell each other about them for model.report(), which needs"
        if device != "cpu" or backend_of(group, device) != BACKEND:
            raise InvalidArgumentError(
                f"{needs} the backend ring and parameters on the CPU; this module's are on {device}, averaged by"
                f" {backend_of(group, device)}: name a size in MiB"
            )
        if not config.report_every():
            raise InvalidArgumentError(f"{needs} another RINGDP_REPORT_EVERY than 0: unset it, or name a size in MiB")
        self._layout_choice = LayoutChoice(self.reducer, group, self._monitor, self._caps_bytes)
        self._before_forward.append(self._layout_choice.before_forward)

    def _refuse_beside_layout(self, rules: Rules) -> None:
        if self._asks_for_layout and any(
            isinstance(one, Auto) for one in (rules.compression, *(compressor for _, compressor in rules.pairs))
        ):
            raise InvalidArgumentError(
                f'{ASKED} and compression="auto" do not go together: each would measure what the other one changes;'
                " name a size in MiB, or a compressor"
            )

    def _check_hook_beside_layout(self, hook: Any) -> None:
        """Raise InvalidArgumentError where the hook may remember something by a bucket's number."""
        if not self._asks_for_layout or averages_elements(hook):
            return
        name = getattr(hook, "__qualname__", repr(hook))
        raise InvalidArgumentError(
            f"{ASKED}: the communication hook {name} may keep state by the number or the size of a bucket, which change"
            " while sizes are tried. Name a size in MiB; or, where the mean of each parameter depends on that parameter"
            f" alone and nothing is kept by bucket, say so by {name}.per_parameter = True"
        )
