"""Checks of payloads for the compressors of this package."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ringdp.compression.feedback import ErrorFeedback, feedback_of
from ringdp.compression.protocol import Info, Payload
from ringdp.errors import InvalidArgumentError


def check_code(what: str, payload: Payload, size: int, info: Info) -> Tensor:
    """The one tensor of `payload`, uint8 ``[size]``. Raises InvalidArgumentError where it is anything else."""
    code = check_payload(what, payload)
    if code.numel() != size:
        raise InvalidArgumentError(
            f"{what}: a payload of {code.numel()} bytes for {info.numel} elements of {info.name}, which take {size}",
            name=info.name,
        )
    return code


def check_payload(what: str, payload: Payload) -> Tensor:
    """The one tensor of `payload`, flat uint8. Raises InvalidArgumentError where it is anything else."""
    if len(payload) != 1 or payload[0].dtype != torch.uint8 or payload[0].dim() != 1:
        raise InvalidArgumentError(f"{what}: a payload is one flat tensor of uint8")
    return payload[0]


def native_name(codec: str, error_feedback: Any) -> str | None:
    """`codec` where the core serves: no error feedback, or the standard one."""
    feedback = feedback_of(error_feedback)
    return codec if feedback is None or feedback == ErrorFeedback() else None
