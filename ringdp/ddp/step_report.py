"""The report about the steps of a RingDP: `RingDP.report`."""

from __future__ import annotations

import torch.distributed as dist

from ringdp.config import report_every
from ringdp.ddp.exit_report import report_at_exit
from ringdp.ddp.features import Feature, FeaturedDDP
from ringdp.diagnosis.monitor import StepMonitor
from ringdp.diagnosis.window import REPORT_FORM


class StepReport(Feature):
    """Attributes:
    monitor: of the reducer's steps.
    """

    made_with_reducer = ("monitor",)
    monitor: StepMonitor

    def settings(self) -> dict[str, str]:
        if not report_every():  # without it, builds of other releases can train together
            return {}
        about = f"every {report_every()} steps, form {REPORT_FORM}"
        return {"step report": f"{about} (RINGDP_REPORT_EVERY=0 on all ranks turns it off)"}

    def reducer_made(self, ddp: FeaturedDDP) -> None:
        self.monitor = StepMonitor(ddp.reducer, ddp.process_group)
        report_at_exit()

    def between_steps(self, ddp: FeaturedDDP) -> None:
        self.monitor.before_forward()

    def group_replaced(self, ddp: FeaturedDDP, group: dist.ProcessGroup) -> None:
        self.monitor.group_replaced(group)
