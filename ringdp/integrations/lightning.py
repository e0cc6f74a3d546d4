"""Lightning's Trainer: ``Trainer(strategy=RingDPTrainerStrategy(), …)``, or ``Trainer(strategy="ringdp", …)``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ringdp.ddp.wrapper import RingDP
from ringdp.integrations.libraries import imported, process_group_backend, register_strategy

if TYPE_CHECKING:
    from lightning.pytorch import strategies
else:
    strategies = imported("lightning.pytorch.strategies", "pytorch_lightning.strategies", package="lightning>=2.6")


class RingDPTrainerStrategy(strategies.DDPStrategy):
    """The Trainer's DDP strategy with RingDP as the wrapper and ``ring`` as the process group.

    Takes what `DDPStrategy` takes; arguments that it does not know go to `RingDP`. A ``ddp_comm_hook`` is registered on
    CPUs too, where Lightning leaves it out silently. Importing this module also registers the names ``ringdp``,
    ``ringdp_spawn``, ``ringdp_fork`` and ``ringdp_notebook``, after DDP's.
    """

    def _setup_model(self, model: torch.nn.Module) -> RingDP:
        device = self.root_device
        return RingDP(model, None if device.type == "cpu" else [device], **self._ddp_kwargs)

    def _register_ddp_hooks(self) -> None:
        hook = self._ddp_comm_hook
        if hook is not None and self._ddp_comm_wrapper is not None:
            hook = self._ddp_comm_wrapper(hook)
        if hook is not None:
            self.model.register_comm_hook(state=self._ddp_comm_state, hook=hook)

    _get_process_group_backend = process_group_backend


register_strategy(strategies.StrategyRegistry, RingDPTrainerStrategy)
