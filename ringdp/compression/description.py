"""The description of a compressor, the same on all ranks and in the next run: compared, saved, and shown in
messages."""

from __future__ import annotations

import re
from typing import Any

from ringdp.compression.feedback import Feedback
from ringdp.compression.protocol import Compressor, RoundsCompressor

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_SETTINGS = (bool, int, float, str, type(None), Feedback, Compressor, RoundsCompressor)


def describe(compressor: Any) -> str:
    """Its ``__repr__``; without one its class and its settings.

    Settings are attributes that are numbers, text, None, error feedback or compressors. A part of it whose ``repr`` is
    only a class and an address is described in the same way.
    """
    return " ".join(_describe(compressor, ()).split())  # one line


def _describe(thing: Any, around: tuple[Any, ...]) -> str:
    kind: Any = type(thing)
    settings: dict[str, Any] = getattr(thing, "__dict__", {})
    if any(thing is one for one in around):
        return str(kind.__qualname__)
    around = (*around, thing)
    if kind.__repr__ is object.__repr__:
        said = [f"{name}={_describe(it, around)}" for name, it in sorted(settings.items()) if isinstance(it, _SETTINGS)]
        return f"{kind.__qualname__}({', '.join(said)})"
    text = repr(thing)
    for part in settings.values():
        if _ADDRESS.search(repr(part)):
            text = text.replace(repr(part), _describe(part, around))
    return _ADDRESS.sub("", text)
