"""Runs a tier of the tests: `python tools/run_tests.py [--tier default|ci|slow|all]… [ARGUMENTS OF pytest]`.

A tier is one or two parts. Most tests run in two processes side by side (pytest-xdist), a file as a whole in one of
them. Those marked `alone` measure time or change the machine's state: they run afterwards in one process. Where
pytest-xdist is missing, everything runs in one process. The last line counts the tests of all parts, as pytest's own
last line does.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NO_TESTS = 5  # pytest's exit status where nothing was collected or all was deselected
WORKERS = 2


@dataclass(frozen=True)
class Tier:
    marks: str  # which tests, for pytest's -m
    usually: str = ""  # how long they take on two cores, where that was measured


TIERS = {
    "default": Tier("not slow and not integrations and not ci", "11 min or less"),
    "ci": Tier("ci and not slow"),
    "slow": Tier("slow and not integrations", "an hour or more"),
    "all": Tier("not integrations", "an hour or more"),
}
COUNT = re.compile(r"(\d+) (passed|failed|errors?|skipped|deselected|xfailed|xpassed|warnings?|rerun)")
CLOSING = re.compile(r"^=* ?(?:no tests ran|\d+ (?:passed|failed|error|skipped|deselected)).* in [0-9.]+s.*$")


def run_part(name: str, arguments: list[str]) -> tuple[int, Counter[str]]:
    """Run pytest, pass on what it prints, and return its exit status and what its closing line counts."""
    print(f"== {name}", flush=True)
    command = [sys.executable, "-m", "pytest", *arguments]
    closing = ""
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        assert process.stdout is not None
        line = b""
        while piece := process.stdout.read1():  # type: ignore[attr-defined]
            sys.stdout.buffer.write(piece)  # as it comes: the dots and percentages show how far it is
            sys.stdout.buffer.flush()
            *lines, line = (line + piece).split(b"\n")
            for complete in lines:
                text = re.sub(r"\x1b\[[0-9;]*m", "", complete.decode(errors="replace"))
                closing = text if CLOSING.match(text) else closing
    return process.returncode, Counter({word.rstrip("s"): int(count) for count, word in COUNT.findall(closing)})


def parts(tier: Tier, arguments: list[str]) -> list[tuple[str, list[str]]]:
    """(name, arguments of pytest) of each part."""
    if "-m" in arguments or "-n" in arguments:
        return [("one part, because -m or -n was given", arguments)]
    alone = ["-m", f"({tier.marks}) and alone", *arguments]
    if importlib.util.find_spec("xdist") is None:
        return [("one process, because pytest-xdist is not installed", ["-m", tier.marks, *arguments])]
    beside = ["-n", str(WORKERS), "--dist", "loadfile", "-m", f"({tier.marks}) and not alone", *arguments]
    return [(f"{WORKERS} processes", beside), ("the tests that run alone", alone)]


def closing_line(total: Counter[str], seconds: float) -> str:
    """As pytest's own, so that what reads the one can read the other."""
    words = ("failed", "passed", "skipped", "deselected", "xfailed", "xpassed", "error")
    counts = [f"{total[word]} {word}" for word in words if total[word] and word != "deselected"]
    text = f" {', '.join(counts) or 'no tests ran'} in {seconds:.2f}s ({int(seconds) // 60} min {int(seconds) % 60} s) "
    return text.center(80, "=")


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Runs a tier of the tests; what else is given goes to pytest.", allow_abbrev=False
    )
    parser.add_argument("--tier", choices=TIERS, action="append", help="one after the other where several are named")
    options, given = parser.parse_known_args()
    if importlib.util.find_spec("pytest") is None:
        sys.exit(f"ringdp: pytest is not installed for {sys.executable}: {sys.executable} -m pip install pytest")
    tiers = [TIERS[name] for name in options.tier or ["default"]]
    for tier in tiers:
        if tier.usually and not given:
            print(f"ringdp: the tests of {tier.marks!r} usually take {tier.usually} on two cores", flush=True)
    begin = time.monotonic()
    total: Counter[str] = Counter()
    statuses = []
    for name, arguments in [part for tier in tiers for part in parts(tier, given)]:
        status, counts = run_part(name, arguments)
        total += counts
        statuses.append(status)
        stop_early = any(word in ("-x", "--exitfirst") or word.startswith("--maxfail") for word in given)
        if status not in (0, NO_TESTS) and (stop_early or status < 0 or status == 2):
            break
    bad = [status for status in statuses if status not in (0, NO_TESTS)]
    print(closing_line(total, time.monotonic() - begin), flush=True)
    if bad:
        return bad[0] if bad[0] > 0 else 1
    return NO_TESTS if all(status == NO_TESTS for status in statuses) else 0


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    sys.exit(main())
