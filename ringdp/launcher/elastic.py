"""torch's elastic agent, which tells what it does: as LocalElasticAgent, which a user of torchrun knows. With
``--elastic`` a rank that dies does not end the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousHandler
from torch.distributed.launcher import api

from ringdp.config import ELASTIC_MARK
from ringdp.launcher import other_nodes
from ringdp.launcher.stopped import StoppedRanks


def tell(
    *,
    meeting: Callable[[RendezvousHandler], None],
    restarting: Callable[[Mapping[int, ProcessFailure]], None],
    lost: Callable[[Mapping[int, ProcessFailure]], None] | None = None,
    stopped: StoppedRanks | None = None,
) -> None:
    """Have the agent of this process call these; torch.distributed.launcher makes it.

    Args:
        meeting: is given what the launchers of the nodes meet through, before they do.
        restarting: is given the failures, by rank, after which all ranks are started again.
        lost: is given those without which the other ranks go on; None: no rank goes on without another.
        stopped: ends ranks that are stopped for too long; None: they are waited for.
    """

    class TellingAgent(LocalElasticAgent):
        def __init__(self, spec: WorkerSpec, *args: Any, **named: Any) -> None:
            meeting(spec.rdzv_handler)
            super().__init__(spec, *args, **named)
            self._watched: SubprocessContext | None = None
            self._dead: set[int] = set()  # of its local ranks, those that `lost` has heard of
            self._others: other_nodes.OtherNodes | None = None

        def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
            started: dict[int, Any] = super()._start_workers(worker_group)
            if lost is not None and (worker_group.group_world_size or 1) > 1:
                self._others = other_nodes.of(self)
            return started

        def _exit_barrier(self) -> None:
            if self._others is None:
                super()._exit_barrier()
            else:
                self._others.end(other_nodes.WELL)

        def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
            if lost is not None and (going_on := self._without_the_dead(worker_group, lost)) is not None:
                return going_on
            result: RunResult = super()._monitor_workers(worker_group)
            if result.state is WorkerState.FAILED and self._remaining_restarts > 0:
                restarting(result.failures)
            return result

        def _without_the_dead(
            self, worker_group: WorkerGroup, lost: Callable[[Mapping[int, ProcessFailure]], None]
        ) -> RunResult | None:
            """The state of a job that can do without the ranks that have died; None: torch is to judge it."""
            context = self._pcontext
            if not isinstance(context, SubprocessContext):
                return None
            if context is not self._watched:
                self._watched, self._dead = context, set()
            codes = {local: handler.proc.poll() for local, handler in context.subprocess_handlers.items()}
            dead = {local: code for local, code in codes.items() if code not in (None, 0)}
            running = [local for local, code in codes.items() if code is None]
            if (not dead and stopped is None) or not all(_goes_on(context, local) for local in running):
                return None  # as ever
            if stopped is not None:
                pids = [context.subprocess_handlers[local].proc.pid for local in running]
                stopped.look(pids, others=self._others is not None)
            if not dead:
                return None
            new = {local: code for local, code in dead.items() if local not in self._dead}
            self._dead.update(new)
            ranks = {worker.local_rank: worker.global_rank for worker in worker_group.workers}
            if new and (running or len(dead) < len(codes) or self._others is not None):
                lost({ranks[local]: _failure(context, local, code) for local, code in new.items()})
            if running:
                return RunResult(state=WorkerState.HEALTHY)
            if len(dead) < len(codes) or (self._others is not None and self._others.end(other_nodes.LOST)):
                return RunResult(state=WorkerState.SUCCEEDED, return_values=dict.fromkeys(ranks.values()))
            return None

    api.LocalElasticAgent = TellingAgent  # type: ignore[attr-defined]


def _goes_on(context: SubprocessContext, local_rank: int) -> bool:
    """Whether the rank has joined an elastic job: from then on it does without others."""
    return Path(context.error_files[local_rank]).with_name(ELASTIC_MARK).exists()


def _failure(context: SubprocessContext, local_rank: int, code: int) -> ProcessFailure:
    pid = context.subprocess_handlers[local_rank].proc.pid
    return ProcessFailure(local_rank=local_rank, pid=pid, exitcode=code, error_file=context.error_files[local_rank])
