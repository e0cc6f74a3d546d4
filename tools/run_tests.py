"""Runs a tier of the tests: `python tools/run_tests.py [--tier default|ci|nightly|slow|all]… [ARGUMENTS OF pytest]`.

There are two parts, for all tiers that are named. Most tests run in three processes side by side (pytest-xdist), a file
as a whole in one of them; tests/tiers.py says which files begin. Those marked `alone` measure time or memory: they run
afterwards in one process. Where pytest-xdist is missing, everything runs in one process.

At the end, tests that failed run once more, in one process with nothing beside them, unless more than MOST_AGAIN
failed or -x or --maxfail was given. One that passes then counts as passed, and a paragraph names it: there is a time
bound that a loaded machine does not keep, or a race. The last line counts the tests of all parts, as pytest's own last
line does.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import runpy
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

ROOT = Path(__file__).resolve().parent.parent
NO_TESTS = 5  # pytest's exit status where nothing was collected or all was deselected
WORKERS = 3  # keep two cores busy: many tests wait for a rank that is late or dead
MOST_AGAIN = 20  # where more tests fail, the change is the reason
# What pytest, with this file as its plugin, reads: where to write what came of each test, and the only tests to run.
REPORTS, ONLY = "RUN_TESTS_REPORTS", "RUN_TESTS_ONLY"


@dataclass(frozen=True)
class Tier:
    marks: str  # which tests, for pytest's -m
    usually: str = ""  # how long they take on two cores, where that was measured


TIERS = {
    "default": Tier("not slow and not integrations and not ci and not nightly", "11 min"),
    "ci": Tier("ci and not slow and not nightly"),
    "nightly": Tier("nightly and not slow"),
    "slow": Tier("slow and not integrations", "an hour or more"),
    "all": Tier("not integrations", "an hour or more"),
}
COUNT = re.compile(r"(\d+) (passed|failed|errors?|skipped|deselected|xfailed|xpassed|warnings?|rerun)")
CLOSING = re.compile(r"^=* ?(?:no tests ran|\d+ (?:passed|failed|error|skipped|deselected)).* in [0-9.]+s.*$")


@dataclass(frozen=True)
class Ran:
    """The result of one run of pytest."""

    status: int
    counts: Counter[str]  # of its closing line; empty where there was none
    outcomes: Mapping[str, Mapping[str, str]]  # of each test (node id): setup, call and teardown, as far as they ran

    @property
    def failed(self) -> list[str]:
        return [test for test, phases in self.outcomes.items() if "failed" in phases.values()]

    @property
    def only_tests_failed(self) -> bool:
        """Not a file that cannot be collected, nor pytest itself: each failure is one that is known here."""
        failures = sum(list(phases.values()).count("failed") for phases in self.outcomes.values())
        return self.status == 1 and failures == self.counts["failed"] + self.counts["error"] > 0


def run_part(name: str, arguments: Sequence[str], only: Sequence[str] = ()) -> Ran:
    """Run pytest and pass on what it prints; with `only`, these tests instead of the files among the arguments."""
    print(f"== {name}", flush=True)
    closing = ""
    with tempfile.TemporaryDirectory(prefix="ringdp-tests-") as folder:
        reports = Path(folder, "reports")
        environ = {**os.environ, REPORTS: str(reports), ONLY: json.dumps(list(only))}
        command = [sys.executable, "-m", "pytest", "-p", "tools.run_tests", *arguments]
        with subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environ
        ) as process:
            assert process.stdout is not None
            line = b""
            while piece := process.stdout.read1():  # type: ignore[attr-defined]
                sys.stdout.buffer.write(piece)  # as it comes: the dots and percentages show how far it is
                sys.stdout.buffer.flush()
                *lines, line = (line + piece).split(b"\n")
                for complete in lines:
                    text = re.sub(r"\x1b\[[0-9;]*m", "", complete.decode(errors="replace"))
                    closing = text if CLOSING.match(text) else closing
        outcomes: dict[str, dict[str, str]] = {}
        for report in reports.read_text().splitlines() if reports.exists() else []:
            test, phase, outcome = json.loads(report)
            outcomes.setdefault(test, {})[phase] = outcome
    counts = Counter({word.rstrip("s"): int(count) for count, word in COUNT.findall(closing)})
    return Ran(process.returncode, counts, outcomes)


def pytest_configure(config: pytest.Config) -> None:
    """pytest's hook, for the processes that run_part starts: report to it, and run only what it names."""
    if hasattr(config, "workerinput"):  # the leading process of pytest-xdist gets the reports of every test
        return
    config.pluginmanager.register(Reporter(Path(os.environ.pop(REPORTS))))  # tests and their processes see neither
    if only := json.loads(os.environ.pop(ONLY)):
        config.args[:] = only


class Reporter:
    """Writes down what came of each phase of each test, as it happens."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        with open(self.path, "a") as file:
            file.write(json.dumps([report.nodeid, report.when, report.outcome]) + "\n")


def again(ran: Sequence[Ran], given: list[str]) -> tuple[int, Counter[str], list[str]]:
    """Run what failed once more, alone. Returns the exit status, what to add to the counts, and which tests passed."""
    first = {test: phases for part in ran for test, phases in part.outcomes.items() if "failed" in phases.values()}
    marks = [] if "-m" in given else ["-m", ""]  # the node ids say which
    one_process = ["-n", "0"] if importlib.util.find_spec("xdist") else []
    second = run_part(f"once more, alone: what failed ({len(first)})", [*marks, *given, *one_process], only=list(first))
    passed = [
        test
        for test in first
        if {"call": "passed", "teardown": "passed"}.items() <= second.outcomes.get(test, {}).items()
    ]
    change: Counter[str] = Counter()
    for test in passed:
        phases = first[test]
        change["passed"] += phases.get("call") != "passed"  # else it counted as passed, and its teardown as an error
        for phase, outcome in phases.items():
            if outcome == "failed":
                change["error" if phase in ("setup", "teardown") else "failed"] -= 1
    return 0 if len(passed) == len(first) else 1, change, passed


def alone_files(arguments: Sequence[str]) -> list[str]:
    """The files of the tests that run alone, where the arguments name no file: pytest then collects no others."""
    if any(Path(ROOT, word.partition("::")[0]).exists() for word in arguments):
        return []
    tiers = ROOT / "tests" / "tiers.py"
    return [f"tests/{name}" for name in runpy.run_path(str(tiers))["ALONE"]] if tiers.exists() else []


def parts(tiers: Sequence[Tier], arguments: list[str]) -> list[tuple[str, list[str]]]:
    """(name, arguments of pytest) of each part."""
    marks = " or ".join(f"({tier.marks})" for tier in tiers)
    if "-m" in arguments or "-n" in arguments:
        return [("one part, because -m or -n was given", arguments)]
    alone = ["-m", f"({marks}) and alone", *arguments, *alone_files(arguments)]
    if importlib.util.find_spec("xdist") is None:
        return [("one process, because pytest-xdist is not installed", ["-m", marks, *arguments])]
    beside = ["-n", str(WORKERS), "--dist", "loadfile", "-m", f"({marks}) and not alone", *arguments]
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
    parser.add_argument("--tier", choices=TIERS, action="append", help="may be named several times")
    options, given = parser.parse_known_args()
    if importlib.util.find_spec("pytest") is None:
        sys.exit(f"ringdp: pytest is not installed for {sys.executable}: {sys.executable} -m pip install pytest")
    tiers = [TIERS[name] for name in options.tier or ["default"]]
    for tier in tiers:
        if tier.usually and not given:
            print(f"ringdp: the tests of {tier.marks!r} usually take {tier.usually} on two cores", flush=True)
    begin = time.monotonic()
    ran: list[Ran] = []
    stop_early = any(word in ("-x", "--exitfirst") or word.startswith("--maxfail") for word in given)
    for name, arguments in parts(tiers, given):
        ran.append(run_part(name, arguments))
        status = ran[-1].status
        if status not in (0, NO_TESTS) and (stop_early or status < 0 or status == 2):
            break
    total = sum((part.counts for part in ran), Counter[str]())
    bad = [part for part in ran if part.status not in (0, NO_TESTS)]
    status = (bad[0].status if bad[0].status > 0 else 1) if bad else 0
    failed = sum(len(part.failed) for part in bad)
    if bad and not stop_early and failed <= MOST_AGAIN and all(part.only_tests_failed for part in bad):
        status, change, passed = again(bad, given)
        total.update(change)
        if passed:
            print(
                f"ringdp: failed once and passed when run again, alone: {', '.join(passed)}; such a test needs a quiet "
                "machine, or there is a race: the first failure is above",
                flush=True,
            )
    print(closing_line(total, time.monotonic() - begin), flush=True)
    return NO_TESTS if all(part.status == NO_TESTS for part in ran) else status


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    sys.exit(main())
