"""Compressors for gradients: what turns them into fewer bytes and back, and who gets which.

A compressor is an object with ``compress(x, info)`` and ``decompress(payload, info)``; docs/custom_compressors.md
builds one. Nothing here knows of a network: `ringdp.RingDP` and `ringdp.hooks.ddp_hook` move the payloads.
"""

from ringdp.compression.casts import Bfloat16, Float16
from ringdp.compression.feedback import EF21, ErrorFeedback, Feedback
from ringdp.compression.int4 import Int4
from ringdp.compression.int8 import Int8
from ringdp.compression.protocol import Compressor, Info, Payload
from ringdp.compression.registry import get, names, register
from ringdp.compression.rules import Rules, assign

__all__ = [
    "EF21",
    "Bfloat16",
    "Compressor",
    "ErrorFeedback",
    "Feedback",
    "Float16",
    "Info",
    "Int4",
    "Int8",
    "Payload",
    "Rules",
    "assign",
    "get",
    "names",
    "register",
]
