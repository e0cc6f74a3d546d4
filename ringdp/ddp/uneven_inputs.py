"""The part of RingDP for uneven inputs (torch's Join): a rank without input repeats the others' collectives."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import JoinHook, _JoinConfig

from ringdp import refusals
from ringdp.ddp.batch_weight import BatchWeight
from ringdp.ddp.dtensors import ShardedParameters
from ringdp.ddp.elastic import Elastic
from ringdp.ddp.features import FeaturedDDP
from ringdp.ddp.module_state import SentState, sends_buffers


class UnevenInputs(FeaturedDDP):
    """Called by torch's Join, on ranks with input and without. Owner, thread: the wrapper's."""

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """As DistributedDataParallel's; torch leaves the wrapper as if the join went on when it is over."""
        if self.ringdp_features[Elastic].repairs:
            refusals.refuse("elastic", "join")
        hook: JoinHook = super().join_hook(**kwargs)
        make_models_equal = hook.post_hook

        def post_hook(is_last_joiner: bool) -> None:
            make_models_equal(is_last_joiner)
            self._join_config = _JoinConfig.construct_disabled_join_config()
            for feature in self.ringdp_features:
                feature.join_is_over()

        hook.post_hook = post_hook  # type: ignore[method-assign]
        return hook

    def _check_global_requires_backward_grad_sync(self, is_joined_rank: bool) -> Any:
        """As torch's; a rank without input gets the number of ranks with input, which its part of a compressed bucket
        needs."""
        syncs = float(not is_joined_rank and self.require_backward_grad_sync)
        ranks = torch.full((1,), syncs, device=self.device, dtype=torch.float32)
        work = dist.all_reduce(ranks, group=self.process_group, async_op=True)
        if not is_joined_rank:
            return work
        assert work is not None
        work.wait()
        with_input = int(ranks.item())
        self.reducer.join.divide_by(self.process_group.size() if self._divide_by_initial_world_size else with_input)
        return with_input != 0

    def _match_all_reduce_for_bwd_pass(self) -> None:
        self.ringdp_features[BatchWeight].shadow(self)
        super()._match_all_reduce_for_bwd_pass()
        self.reducer.join.shadow_used_map()

    def _match_unused_params_allreduce(self) -> None:
        """Does nothing: _match_all_reduce_for_bwd_pass has done it, where it is an operation of its own."""

    def _sync_final_model(self, is_last_joiner: bool) -> None:
        torchs: Any = self
        source = torchs._authoritative_rank = torchs._find_common_rank(torchs._distributed_rank, is_last_joiner)
        with self.ringdp_features[ShardedParameters].as_leaves():
            self.ringdp_features[SentState].send(self, source, buffers=sends_buffers(self))
