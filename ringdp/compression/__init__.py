"""Compressors, which encode gradients as fewer bytes, and the rules that assign them to parameters.

A compressor is an object with ``compress(x, info)`` and ``decompress(payload, info)``. Nothing here communicates:
`ringdp.RingDP` and `ringdp.hooks.ddp_hook` move the payloads.
"""

from ringdp.compression.auto import Auto
from ringdp.compression.codecs.c_library import CCompressor, include_dir, load
from ringdp.compression.codecs.casts import Bfloat16, Float16
from ringdp.compression.codecs.int8 import Int8
from ringdp.compression.codecs.low_bit import Int4, Int5, Int6, NormalFloat4
from ringdp.compression.feedback import EF21, ErrorFeedback, Feedback
from ringdp.compression.methods.majority import SignSGD
from ringdp.compression.methods.power_sgd import PowerSGD
from ringdp.compression.methods.random_k import RandomK
from ringdp.compression.methods.sign import Sign
from ringdp.compression.methods.sparse2 import Sparse2
from ringdp.compression.methods.stochastic import QSGD, TernGrad
from ringdp.compression.methods.top_k import DGC, TopK
from ringdp.compression.protocol import Compressor, CompressorLike, Info, MergeCompressor, Payload, RoundsCompressor
from ringdp.compression.registry import get, names, register
from ringdp.compression.rules import Compression, assign

__all__ = [
    "DGC",
    "EF21",
    "QSGD",
    "Auto",
    "Bfloat16",
    "CCompressor",
    "Compression",
    "Compressor",
    "CompressorLike",
    "ErrorFeedback",
    "Feedback",
    "Float16",
    "Info",
    "Int4",
    "Int5",
    "Int6",
    "Int8",
    "MergeCompressor",
    "NormalFloat4",
    "Payload",
    "PowerSGD",
    "RandomK",
    "RoundsCompressor",
    "Sign",
    "SignSGD",
    "Sparse2",
    "TernGrad",
    "TopK",
    "assign",
    "get",
    "include_dir",
    "load",
    "names",
    "register",
]
