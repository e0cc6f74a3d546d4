"""RingDP in the place of torch's DistributedDataParallel, for tests that were written for that one."""

from __future__ import annotations

import sys


def put_ringdp_in_ddps_place() -> None:
    """Let every loaded module's name for DistributedDataParallel mean RingDP; those loaded later find it, too.

    torch's own modules are among them: what torch makes a DDP of (`torch.distributed._composable.replicate`) and what
    it asks ``isinstance`` about. ringdp's are not, they need the class that RingDP is a subclass of.
    """
    from torch.nn.parallel import DistributedDataParallel

    from ringdp.parallel import RingDP

    for module_name, module in list(sys.modules.items()):
        if module_name.split(".")[0] == "ringdp" or module is None:
            continue
        for name, value in list(vars(module).items()):
            if value is DistributedDataParallel:
                setattr(module, name, RingDP)
