"""What happens to a full bucket: communication hooks, one file each.

torch's own hooks (`torch.distributed.algorithms.ddp_comm_hooks`) work with `RingDP.register_comm_hook` unchanged.
"""

from ringdp.hooks.compressed import CompressedHook, ddp_hook
from ringdp.hooks.names import parameter_names

__all__ = ["CompressedHook", "ddp_hook", "parameter_names"]
