"""What there is of each kind, asked from ringdp itself, so that tests meet a newcomer without being told of it."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from ringdp import compression
from ringdp.compression.codecs.core_codec import CoreCodec

# None where it is not built: the tests that need it are skipped.
_core: Any = importlib.import_module("tests.core._core") if importlib.util.find_spec("tests.core._core") else None

# By name, in the order of their numbers on the wire: {"name", "number", "block", "bits", "scale_bytes", …}.
CODEC_SPECS: dict[str, dict[str, Any]] = {} if _core is None else {row["name"]: row for row in _core.codec_specs()}
CODECS = tuple(CODEC_SPECS)
BLOCK_CODECS = tuple(name for name, row in CODEC_SPECS.items() if row["scale_bytes"] > 0)

ALGORITHMS: list[dict[str, Any]] = [] if _core is None else _core.algorithms()
ALL_REDUCES = tuple(row["name"] for row in ALGORITHMS if row["all_reduce"])


def _compressors() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in compression.names():
        one = compression.get(name)
        if type(one).__module__.startswith("ringdp.") and not isinstance(one, compression.Auto):
            found.setdefault(type(one).__qualname__, (name, one))
    return dict(found.values())


# By one of its names: every compressor of ringdp's own with default arguments, but for "auto", which chooses others.
COMPRESSORS = _compressors()
# By the codec's name: the compressors that have the codecs' bits.
CODEC_COMPRESSORS: dict[str, Any] = {one.codec: one for one in COMPRESSORS.values() if isinstance(one, CoreCodec)}
