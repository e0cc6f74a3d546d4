"""Lightning Fabric: ``Fabric(strategy=RingDPStrategy(), …)``, or by name, ``Fabric(strategy="ringdp", …)``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ringdp.ddp.wrapper import RingDP
from ringdp.integrations.libraries import imported, process_group_backend, register_strategy

if TYPE_CHECKING:
    from lightning.fabric import strategies
else:
    strategies = imported("lightning.fabric.strategies", "lightning_fabric.strategies", package="lightning-fabric>=2.6")


class RingDPStrategy(strategies.DDPStrategy):
    """Fabric's DDP strategy with RingDP as the wrapper and ``ring`` as the process group.

    Takes what `DDPStrategy` takes; arguments that it does not know go to `RingDP`. ``process_group_backend`` is
    ``ring`` on CPUs and ``cpu:ring,cuda:nccl`` on GPUs by default. Importing this module also
    registers the names ``ringdp``, ``ringdp_spawn``, ``ringdp_fork`` and ``ringdp_notebook``, after DDP's.
    """

    def setup_module(self, module: torch.nn.Module) -> RingDP:
        """``module`` in a RingDP, on this process's device."""
        device = self.root_device
        return RingDP(module, None if device.type == "cpu" else [device], **self._ddp_kwargs)

    _get_process_group_backend = process_group_backend


register_strategy(strategies.STRATEGY_REGISTRY, RingDPStrategy)
