"""torch's elastic agent (LocalElasticAgent) with callbacks that report its actions. With ``--elastic`` a rank that dies
does not end the others."""

from __future__ import annotations

import dataclasses
import os
import socket
from collections.abc import Callable, Mapping
from typing import Any

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousStoreInfo
from torch.distributed.launcher import api

from ringdp.config import ELASTIC_MARK, MEMBER_MARK, joins
from ringdp.launcher import joining, other_nodes
from ringdp.launcher.logs import RankLogs
from ringdp.launcher.notice import Notice
from ringdp.launcher.other_nodes import End
from ringdp.launcher.replacements import Replacements, beside
from ringdp.launcher.stopped import StoppedRanks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Elsewhere:
    """The reports about other nodes to the user, and about this node to the others.

    Attributes:
        say: is given lines about the other nodes, and whether the launcher of another one shows the same.
        again: is given the reason for which another node, and this one with it, starts its ranks again, and whether
            those here had ended well.
        rank_failed: the message for the other nodes about failed ranks of this one, by rank.
        launcher_failed: the message about this launcher, which ends by an exception.
    """

    say: Callable[[list[str], bool], None]
    again: Callable[[str, bool], None]
    rank_failed: Callable[[Mapping[int, ProcessFailure]], str]
    launcher_failed: Callable[[BaseException], str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replacing:
    """Other processes in the place of lost ranks.

    Attributes:
        replacements: which are started, and when.
        started: is given the logs of one that was started.
        none: is given a rank and why none comes in its place.
    """

    replacements: Replacements
    started: Callable[[RankLogs], None]
    none: Callable[[int, str], None]


def report_to(
    *,
    meeting: Callable[[RendezvousHandler], None],
    restarting: Callable[[Mapping[int, ProcessFailure]], None],
    running: Callable[[Mapping[int, int]], None],
    elsewhere: Elsewhere,
    lost: Callable[[Mapping[int, ProcessFailure]], None] | None = None,
    stopped: StoppedRanks | None = None,
    replacing: Replacing | None = None,
    notice: Notice | None = None,
) -> Callable[[str], None]:
    """Have the agent of this process call these; torch.distributed.launcher makes it.

    Args:
        meeting: is given the rendezvous handler of the launchers, before they meet.
        restarting: is given the failures, by rank, after which all ranks are started again.
        running: is given the pids, by rank, of ranks that have been started.
        elsewhere: the reports about and to other nodes.
        lost: is given the lost ranks, without which the others go on; None: no rank goes on without another.
        stopped: ends ranks that are stopped for too long; None: nothing does.
        replacing: starts other processes in the place of lost ranks; None: nobody does.
        notice: lets this host's ranks leave; None: nothing does.

    Returns:
        A function to call when this process is about to end before the agent has: publishes the reason to the other
        nodes.
    """
    agents: list[ReportingAgent] = []

    class ReportingAgent(LocalElasticAgent):
        def __init__(self, spec: WorkerSpec, *args: Any, **named: Any) -> None:
            meeting(spec.rdzv_handler)
            super().__init__(spec, *args, **named)
            self._watched: SubprocessContext | None = None
            self._dead: set[int] = set()  # of its local ranks, those that were given to `lost`
            self._others: other_nodes.OtherNodes | None = None
            self._well: RunResult | None = None  # torch's result when all ranks of this node had ended well
            self._first_store: Any = None  # of the launchers, since torch's last rendezvous
            self._alone = False  # the launchers of all other nodes are gone
            self._together = False  # the launchers of an elastic job are about to agree on the next start
            self._guest: joining.Guest | None = None  # this launcher has joined a job that others have begun
            self._guests: joining.Guests | None = None  # may join the job whose store is here
            self._ranks_store: Any = None  # kept here for the ranks, since the launcher that kept the first one is gone
            agents.append(self)

        def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
            if self._others is not None:
                self._others.close()
            self._others, self._well = None, None
            started: dict[int, Any] = super()._start_workers(worker_group)
            running({worker_group.workers[local].global_rank: pid for local, pid in started.items()})
            if lost is not None and worker_group.group_rank == 0 and worker_group.master_port:
                address = f"[{worker_group.master_addr}]:{worker_group.master_port}"
                if "RINGDP_DOOR" not in os.environ:  # where all find the ranks' store by themselves
                    joining.publish(worker_group.store, worker_group.spec.rdzv_handler.get_run_id(), address)
                self._guests = joining.Guests(worker_group.master_addr, worker_group.master_port)
            if self._guest is None and (where := joins()) is not None:
                self._guest, self._guests = joining.Guest(*where), None
            if (worker_group.group_world_size or 1) > 1:
                self._others = other_nodes.of(self, elastic=lost is not None, say=elsewhere.say)
            return started

        def _invoke_run(self, *args: Any, **named: Any) -> RunResult:
            try:
                result: RunResult = super()._invoke_run(*args, **named)
            except other_nodes.OtherNodeFailed:
                raise
            except BaseException as error:
                if self._others is not None:
                    self._others.publish(End(other_nodes.FAILED, elsewhere.launcher_failed(error)))
                raise
            return result

        def run(self, *args: Any, **named: Any) -> RunResult:
            try:
                result: RunResult = super().run(*args, **named)
                return result
            finally:  # its own ranks are ended first
                if notice is not None:
                    notice.end()
                if self._others is not None:
                    self._others.flush()

        def gone(self, words: str) -> None:
            """Publish to the other nodes that this one ends before its ranks have."""
            if self._others is not None:
                self._others.publish(End(other_nodes.FAILED, words))
                self._others.flush()

        def _rendezvous(self, worker_group: WorkerGroup) -> None:
            if not self._together:
                super()._rendezvous(worker_group)
                self._first_store, self._alone = worker_group.store, False
                if lost is not None and (kept := self._kept(worker_group)) is not None:
                    given: Any = worker_group  # torch's annotations are those of its defaults
                    given.master_addr, given.master_port = kept
                if lost is not None and (worker_group.group_world_size or 1) > 1:
                    other_nodes.claim(self)
                return
            spec = worker_group.spec
            group: Any = worker_group  # torch's annotations are those of its defaults
            members, node = [0], 0
            restarts = spec.max_restarts - self._remaining_restarts
            if self._others is not None:
                node = group.group_rank
                members, restarts = self._others.agree(restarts)
            self._remaining_restarts = spec.max_restarts - restarts
            store: Any = PrefixStore(f"ringdp/restart/{restarts}", self._first_store)
            self._store = group.store = store
            group.group_rank, group.group_world_size = members.index(node), len(members)
            self._alone = len(members) == 1
            group.workers = self._assign_worker_ranks(group.store, group.group_rank, group.group_world_size, spec)
            if members[0] != 0 and self._kept(worker_group) is None:  # which kept the ranks' store
                if group.group_rank == 0:
                    host = spec.local_addr or socket.getfqdn()
                    self._ranks_store = TCPStore(host, 0, None, True, wait_for_workers=False)
                port = None if self._ranks_store is None else self._ranks_store.port
                info = RendezvousStoreInfo.build(group.group_rank, group.store, spec.local_addr, port)
                group.master_addr, group.master_port = info.master_addr, info.master_port

        def _kept(self, worker_group: WorkerGroup) -> tuple[str, int] | None:
            assert worker_group.store is not None
            return joining.kept(worker_group.store, worker_group.spec.rdzv_handler.get_run_id())

        def _restart_workers(self, worker_group: WorkerGroup) -> None:
            failed = worker_group.state is not WorkerState.HEALTHY
            self._together = lost is not None and failed and (self._others is not None or self._alone)
            if self._others is not None and worker_group.state is WorkerState.HEALTHY and self._remaining_restarts > 0:
                # torch has seen that another node waits for this one. If that is after a failure, it has counted it.
                self._others.flush()
                if any(end.how == other_nodes.AGAIN for end in self._others.ends.values()):
                    self._remaining_restarts -= 1
            super()._restart_workers(worker_group)

        def _exit_barrier(self) -> None:
            if self._others is None:
                super()._exit_barrier()
            else:
                self._others.leave()

        def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
            if lost is not None and self._others is not None:
                self._others.check_not_passed_over()
                if self._remaining_restarts > 0 and (again := self._others.again) is not None:
                    return self._start_again(self._others, again.words, ended_well=False)
            if self._guest is not None and isinstance(context := self._pcontext, SubprocessContext):
                self._guest.member = any(_is_member(context, local) for local in context.subprocess_handlers)
            if lost is not None and (going_on := self._without_the_dead(worker_group, lost)) is not None:
                return going_on
            result: RunResult = self._well or super()._monitor_workers(worker_group)
            if result.state is WorkerState.FAILED:
                if lost is not None and self._others is not None and self._others.store_is_gone():
                    self._remaining_restarts = 0  # whether the others start again cannot be known
                self._publish_failure(result)
            if result.state is WorkerState.FAILED and self._remaining_restarts > 0:
                restarting(result.failures)
            if result.state is WorkerState.SUCCEEDED and self._others is not None:
                if lost is not None:
                    return self._as_others_end(self._others, other_nodes.WELL, result) or result
                self._well = result
                return self._as_on_the_other_nodes(self._others, result)
            if result.state is WorkerState.SUCCEEDED and self._guests is not None and self._guests.go_on():
                self._well = result
                return RunResult(state=WorkerState.HEALTHY)
            return result

        def _publish_failure(self, result: RunResult) -> None:
            if self._others is None:
                return
            words = elsewhere.rank_failed(result.failures)
            if self._remaining_restarts > 0:
                self._others.publish(End(other_nodes.AGAIN, words))
                self._others.flush()
            else:
                self._others.publish(End(other_nodes.FAILED, words))
                self._others.leave(other_nodes.FAREWELL_S)

        def _as_on_the_other_nodes(self, others: other_nodes.OtherNodes, result: RunResult) -> RunResult:
            """The state of a job whose ranks here have ended well: as on one host, it is over when all have, and the
            failure of one starts all of them again.

            torch waits in its exit barrier for 300 s instead, silently, and then calls the job a good one.
            """
            others.publish(End(other_nodes.WELL))
            outcome = others.outcome
            if outcome is None:
                return RunResult(state=WorkerState.HEALTHY)
            if outcome.how == other_nodes.WELL:
                return result
            if outcome.how == other_nodes.AGAIN and self._remaining_restarts > 0:
                return self._start_again(others, outcome.words, ended_well=True)
            others.leave(other_nodes.FAREWELL_S)
            raise other_nodes.OtherNodeFailed(f"{outcome.words}; the ranks here had ended well")

        def _start_again(self, others: other_nodes.OtherNodes, words: str, *, ended_well: bool) -> RunResult:
            others.publish(End(other_nodes.AGAIN, words))
            elsewhere.again(words, ended_well)
            return RunResult(state=WorkerState.UNHEALTHY)

        def _as_others_end(self, others: other_nodes.OtherNodes, how: str, good: RunResult) -> RunResult | None:
            """The state of an elastic job whose ranks here are over: `good`, where it has ended well on some node."""
            outcome = others.end(how)
            if outcome.how == other_nodes.AGAIN and self._remaining_restarts > 0:
                return self._start_again(others, outcome.words, ended_well=how == other_nodes.WELL)
            return good if outcome.how == other_nodes.WELL else None

        def _without_the_dead(
            self, worker_group: WorkerGroup, lost: Callable[[Mapping[int, ProcessFailure]], None]
        ) -> RunResult | None:
            """The state of a job that can do without the ranks that have died; None: torch's own result counts."""
            context = self._pcontext
            if not isinstance(context, SubprocessContext):
                return None
            if context is not self._watched:
                self._watched, self._dead = context, set()
                if replacing is not None:
                    replacing.replacements.clear()
            codes = {local: handler.proc.poll() for local, handler in context.subprocess_handlers.items()}
            dead = {local: code for local, code in codes.items() if code not in (None, 0)}
            running = [local for local, code in codes.items() if code is None]
            if notice is not None:
                notice.look([context.subprocess_handlers[local].proc.pid for local in running])
            replaced = replacing.replacements.replaced if replacing is not None else lambda _: False
            if not all(replaced(one) or _goes_on(context, one) for one in running):
                return None  # as ever
            restarts = self._others is not None and self._remaining_restarts > 0
            if restarts and not any(_goes_on(context, one) for one in codes):
                return None  # none of them has met the others, which may wait for them
            if stopped is not None:
                pids = [context.subprocess_handlers[local].proc.pid for local in running]
                others = self._others is not None or self._guest is not None
                newcomers = [context.subprocess_handlers[one].proc.pid for one in running if _joins(context, one)]
                stopped.look(pids, others=others, newcomers=newcomers)
            if not dead:
                return None
            new = {local: code for local, code in dead.items() if local not in self._dead}
            self._dead.update(new)
            ranks = {worker.local_rank: worker.global_rank for worker in worker_group.workers}
            members = any(not replaced(one) or _is_member(context, one) for one in running)
            guests = not members and self._others is None and self._guests is not None and self._guests.go_on()
            if new and (running or len(dead) < len(codes) or self._others is not None or guests):
                lost({ranks[local]: _failure(context, local, code) for local, code in new.items()})
            let_in = members or guests or self._others is not None or self._guest is not None
            if replacing is not None and (running or guests or self._guest is not None):
                deaths = {local: int(code or 0) for local, code in new.items()}
                self._replace(context, worker_group, replacing, deaths, let_in=let_in)
                running = [one for one, handler in context.subprocess_handlers.items() if handler.proc.poll() is None]
            due = replacing is not None and self._guest is not None and replacing.replacements.due()
            if running or guests or due:
                return RunResult(state=WorkerState.HEALTHY)
            well = len(dead) < len(codes) or (self._guests is not None and self._guests.ended_well())
            good = RunResult(state=WorkerState.SUCCEEDED, return_values=dict.fromkeys(ranks.values()))
            if self._others is not None:
                return self._as_others_end(self._others, other_nodes.WELL if well else other_nodes.LOST, good)
            return good if well else None

        def _replace(
            self,
            context: SubprocessContext,
            worker_group: WorkerGroup,
            replacing: Replacing,
            dead: Mapping[int, int],
            *,
            let_in: bool,
        ) -> None:
            """`let_in`: some rank lives that could."""
            ranks = {worker.local_rank: worker.global_rank for worker in worker_group.workers}
            replacements = replacing.replacements
            for local, code in dead.items():
                if (why := replacements.note_death(context, local, code)) is not None:
                    replacing.none(ranks[local], why)
            running = [one for one, handler in context.subprocess_handlers.items() if handler.proc.poll() is None]
            if not let_in:
                for one in running:
                    context.subprocess_handlers[one].close()
                return
            started = replacements.start(context)
            for logs in started.values():
                self._dead.discard(logs.local_rank)
                for worker in worker_group.workers:
                    if worker.local_rank == logs.local_rank:
                        worker.id = context.subprocess_handlers[logs.local_rank].proc.pid  # torch compares them
                replacing.started(logs)
            if started:
                handlers = context.subprocess_handlers
                running_now = {one: it.proc.pid for one, it in handlers.items() if it.proc.poll() is None}
                report_running({ranks[local]: pid for local, pid in running_now.items()})

    report_running = running
    api.LocalElasticAgent = ReportingAgent  # type: ignore[attr-defined]

    def gone(words: str) -> None:
        for agent in agents:
            agent.gone(words)

    return gone


def _goes_on(context: SubprocessContext, local_rank: int) -> bool:
    """Whether the rank has joined an elastic job: from then on it does without others."""
    return beside(context, local_rank, ELASTIC_MARK).exists()


def _joins(context: SubprocessContext, local_rank: int) -> bool:
    """Whether its process is a newcomer to a running job, and no member yet."""
    newcomer = "RINGDP_JOIN" in context.envs[local_rank] or "RINGDP_JOIN" in os.environ
    return newcomer and not beside(context, local_rank, MEMBER_MARK).exists()


def _is_member(context: SubprocessContext, local_rank: int) -> bool:
    """Whether its process runs, and has become a member of a job that ran before."""
    process = context.subprocess_handlers[local_rank].proc
    return process.poll() is None and beside(context, local_rank, MEMBER_MARK).exists()


def _failure(context: SubprocessContext, local_rank: int, code: int) -> ProcessFailure:
    pid = context.subprocess_handlers[local_rank].proc.pid
    error_file = context.error_files.get(local_rank, "")
    return ProcessFailure(local_rank=local_rank, pid=pid, exitcode=code, error_file=error_file)
