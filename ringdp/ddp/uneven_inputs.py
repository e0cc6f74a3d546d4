"""The part of RingDP for uneven inputs (torch's Join): a rank without input repeats the others' collectives."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ringdp.ddp.batch_weight import WeightedModule


class UnevenInputs(WeightedModule, DistributedDataParallel):
    """Called by torch's Join, on ranks with input and without. Owner, thread: the wrapper's."""

    reducer: Any

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
        self.reducer.shadow_with(self.process_group.size() if self._divide_by_initial_world_size else with_input)
        return with_input != 0

    def _match_all_reduce_for_bwd_pass(self) -> None:
        self._shadow_weight()
        super()._match_all_reduce_for_bwd_pass()
        self.reducer.shadow_used_map()

    def _match_unused_params_allreduce(self) -> None:
        """Does nothing: _match_all_reduce_for_bwd_pass has done it, where it is an operation of its own."""
