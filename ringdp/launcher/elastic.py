"""torch's elastic agent, which tells what it does: as LocalElasticAgent, which a user of torchrun knows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousHandler
from torch.distributed.launcher import api


def tell(
    *,
    meeting: Callable[[RendezvousHandler], None],
    restarting: Callable[[Mapping[int, ProcessFailure]], None],
) -> None:
    """Have the agent of this process call these; torch.distributed.launcher makes it.

    Args:
        meeting: is given what the launchers of the nodes meet through, before they do.
        restarting: is given the failures, by rank, after which all ranks are started again.
    """

    class TellingAgent(LocalElasticAgent):
        def __init__(self, spec: WorkerSpec, *args: Any, **named: Any) -> None:
            meeting(spec.rdzv_handler)
            super().__init__(spec, *args, **named)

        def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
            result: RunResult = super()._monitor_workers(worker_group)
            if result.state is WorkerState.FAILED and self._remaining_restarts > 0:
                restarting(result.failures)
            return result

    api.LocalElasticAgent = TellingAgent  # type: ignore[attr-defined]
