"""Types of the tools' options: sizes, rates and times, for argparse."""

from __future__ import annotations

import argparse
import re

from ringdp.config import parse_rate
from ringdp.text import parse_size

_TIME = re.compile(r"(\d+(?:\.\d+)?) ?(us|µs|ms|s)")


def size(text: str) -> int:
    """Bytes of ``4096``, ``4k`` or ``25m``."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def rate(text: str) -> float:
    """Bytes a second, above 0."""
    try:
        if found := parse_rate(text):
            return found
        raise ValueError("is not a rate: it is 0")
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} {error}") from None


def duration(text: str) -> float:
    """Seconds of ``500us``, ``2ms`` or ``1s``."""
    found = _TIME.fullmatch(text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time: write 500us, 2ms or 1s")
    return float(found[1]) * {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}[found[2]]
