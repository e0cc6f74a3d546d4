"""The rules of a hook: the compressor of each parameter of its buckets, and the rules that fit none."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket

from ringdp.compression import Compressor
from ringdp.compression.parameters import other_parameters
from ringdp.compression.rule_use import RuleUse
from ringdp.compression.rules import Rules
from ringdp.errors import InvalidArgumentError
from ringdp.hooks.parameters import Parameters

_log = logging.getLogger("ringdp.hooks")


class HookRules:
    """Rules compared with the model, where that is given; else with the parameters in the first backward's buckets.

    Args:
        rules: checked.
        model: a module or the DDP around it.
        group: its first rank logs warnings; None is the default group.

    Raises:
        InvalidArgumentError: rules that need the model, where there is none; or that no parameter of the model fits.
    """

    def __init__(self, rules: Rules, model: nn.Module | None, group: dist.ProcessGroup | None) -> None:
        if rules.need_names and model is None:
            raise InvalidArgumentError("rules by name or type of module need to know the names: pass model=")
        self._rules, self._group = rules, group
        self.parameters: Parameters = Parameters(model)
        self._use: RuleUse | None = RuleUse(rules)  # until all that have gradients have come up
        if model is not None:
            known = self.parameters.of_model
            use = RuleUse(rules, known, other_parameters(model, known))
            use.refuse_unmatched()
            self._log_warnings(use.warnings)
            self._use = None

    def choose(self, name: str, parameter: Tensor) -> Compressor | None:
        """The compressor of a parameter; called by `CompressedHook`."""
        return self._rules.of(self.parameters.of(parameter))

    def see(self, bucket: GradBucket) -> None:
        """Without a model: warn after the first backward of rules that no parameter fits.

        That is not an error, whatever the rules say: some parameters may be frozen, and only one rank may have a rule.
        """
        if self._use is None:
            return
        for parameter in bucket.parameters():
            self._use.add(self.parameters.of(parameter))
        if bucket.is_last():
            unmatched = [f"of the parameters that have gradients, {sentence}" for sentence in self._use.unmatched]
            self._log_warnings([*unmatched, *self._use.without_effect])
            self._use = None

    def _log_warnings(self, warnings: Iterable[str]) -> None:
        if not dist.is_initialized() or dist.get_rank(self._group) == 0:
            for warning in warnings:
                _log.warning("%s", warning)
