"""The communication hooks of a RingDP: a user's, and the one that steps optimizers during backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._C._distributed_c10d import BuiltinCommHookType

from ringdp import refusals
from ringdp.ddp import in_use
from ringdp.ddp.divergence.options import ReplicaGuard
from ringdp.ddp.elastic import Elastic
from ringdp.ddp.features import FeaturedDDP
from ringdp.ddp.optimizer_in_backward import has_optimizers, stepping_at_end, stepping_hook, take_over
from ringdp.hooks.signature import what_is_wrong_with


class CommHooks(FeaturedDDP):
    """A part of RingDP without a state of its own: the reducer has the hook."""

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Let ``hook(state, bucket) -> Future[Tensor]`` reduce each bucket; torch's hooks work unchanged.

        The bucket holds this rank's gradients, not divided. `ringdp.hooks.parameter_names` names them. May be called
        once, before the first backward. In an elastic job ``hook.repeatable = True`` says that all that it keeps
        between calls is in `state`.

        Raises:
            TypeError, ValueError: not a hook, as by DistributedDataParallel.
            RuntimeError: there is one already.
        """
        self._check_comm_hook(hook)
        refusals.check(self.ringdp_features.in_use(self) | in_use.of_hook(hook, state, self.process_group))
        self._take_hook(state, hook)
        self.ringdp_features[in_use.OfTorch].hook = hook.__qualname__

    def _take_hook(self, state: object, hook: Callable[..., Any]) -> None:
        elastic = self.ringdp_features[Elastic]
        self.reducer.register_comm_hook(state, elastic.repeatable(self, state, hook) if elastic.repairs else hook)
        self.logger._set_comm_hook_name(hook.__qualname__)
        self._comm_hooks.append((hook, state))
        self.ringdp_features[ReplicaGuard].rest_beside(self, hook)

    def _check_comm_hook(self, hook: Callable[..., Any]) -> None:
        """torch's check, which would refuse annotations that are text (``from __future__ import annotations``)."""
        wrong = what_is_wrong_with(hook)
        if wrong is not None:
            self._log_and_throw(*wrong)

    def _register_builtin_comm_hook(self, comm_hook_type: BuiltinCommHookType) -> None:
        self.reducer.register_builtin_comm_hook(comm_hook_type)
        self.logger._set_comm_hook_name(str(comm_hook_type))

    def register_builtin_comm_hook(self, comm_hook_type: BuiltinCommHookType) -> None:
        """Reduce by torch's ``ALLREDUCE`` or ``FP16_COMPRESS`` hook, without Python in backward."""
        self._register_builtin_comm_hook(comm_hook_type)

    def _setup_in_backward_optimizers(self) -> None:
        if has_optimizers(self._module_parameters):
            refusals.check(self.ringdp_features.in_use(self))  # optimizers may be given after wrapping
            take_over(self._module_parameters)
            elastic = self.ringdp_features[Elastic]
            if elastic.repairs:
                elastic.when_counted(self, stepping_at_end(self))
                return
            self._take_hook(None, stepping_hook(self))
            self.reducer._set_optimizer_in_backward()
