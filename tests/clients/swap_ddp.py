"""RingDP in the place of torch's DistributedDataParallel, for tests that were written for that one."""

from __future__ import annotations

import functools
import sys

# What stands in DDP's place: DDP itself, RingDP, or RingDP with DDP's default of find_unused_parameters. RingDP's own,
# None, ends a backward that DDP raises about.
CHOICES = ("torch", "ringdp", "ringdp-strict")


def put_in_ddps_place(choice: str) -> None:
    """Let every loaded module's name for DistributedDataParallel mean RingDP; those loaded later find it, too.

    torch's own modules are among them: what torch makes a DDP of (`torch.distributed._composable.replicate`) and what
    it asks ``isinstance`` about. ringdp's are not, they need the class that RingDP is a subclass of.
    """
    if choice == "torch":
        return
    from torch.nn.parallel import DistributedDataParallel

    from ringdp.ddp.wrapper import RingDP

    class Strict(RingDP):
        @functools.wraps(RingDP.__init__)  # type: ignore[misc]  # torch's tests look at the signature
        def __init__(self, *args: object, **kwargs: object) -> None:
            kwargs.setdefault("find_unused_parameters", False)
            super().__init__(*args, **kwargs)  # type: ignore[arg-type]

    chosen = Strict if choice == "ringdp-strict" else RingDP
    for module_name, module in list(sys.modules.items()):
        if module_name.split(".")[0] == "ringdp" or module is None:
            continue
        for name, value in list(vars(module).items()):
            if value is DistributedDataParallel:
                setattr(module, name, chosen)
