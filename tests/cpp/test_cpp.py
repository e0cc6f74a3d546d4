"""Builds the C++ tests beside this file and runs them, file by file: plain, under ASan and ASan + UBSan. TSan:
test_threads.py."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from tests.cpp.building import BUILD, COMPILER, HERE, make, run
from tests.helpers import need_command

TESTS = sorted(path.stem for path in HERE.glob("test_*.cpp"))
FUZZERS = sorted(path.stem for path in HERE.glob("fuzz_*.cpp"))
# A length from outside that is believed shows as an allocation above this.
FUZZ_OPTIONS = {
    "ASAN_OPTIONS": "detect_stack_use_after_return=1:strict_string_checks=1:max_allocation_size_mb=16"
    ":hard_rss_limit_mb=2048"
}
SEEN = {
    "fuzz_handshake": ["let in", "took an answer", "messages believed", "messages not believed", "addresses read"],
    "fuzz_link": [
        "operations received",
        "mismatches",
        "aborts",
        "goodbyes",
        "questions",
        "answers",
        "read to the end",
        "ended in an error",
    ],
}
FUZZ_S = 6  # for all of them; `make -C tests/cpp fuzz SECONDS=3600` takes its time
LOOPS = re.findall(
    r"test_\w+", re.findall(r"^WITHOUT_THE_CORE := (?:.*\\\n)*.*", (HERE / "Makefile").read_text(), re.M)[0]
)
EXPLORERS = ("test_agreement", "test_resume_protocol")  # models, which see more states without a sanitizer
PLAIN = ("test_kernels", "test_sha256", *EXPLORERS)  # CI runs kernels as they are shipped
FIBERS = ("test_cuda_kernels",)  # which ThreadSanitizer does not follow
SANITIZERS = {"plain": "", "asan": "address", "ubsan": "address,undefined", "tsan": "thread"}
# A thread, because that is where a sanitizer's run time fails to start if it does.
PROBE = "#include <thread>\nint main() { std::thread([] {}).join(); }\n"

pytestmark = [pytest.mark.ci, pytest.mark.timeout(1300)]  # the first test of each build waits for the compiler


@cache
def launch_prefix(build: str) -> list[str]:
    """What to start the binaries of a build with; skips where the compiler or the kernel cannot do the sanitizer.

    ThreadSanitizer before GCC 14 and Clang 18 dies where the kernel randomises addresses by more than 28 bits
    (vm.mmap_rnd_bits): setarch -R switches that off for one process.
    """
    folder = BUILD / build
    folder.mkdir(parents=True, exist_ok=True)
    source, binary = folder / "probe.cpp", folder / f"probe-{os.getpid()}"
    source.write_text(PROBE)
    flags = [f"-fsanitize={SANITIZERS[build]}"] if SANITIZERS[build] else []
    compiled = run([*COMPILER, "-pthread", *flags, "-o", str(binary), str(source)])
    if compiled.returncode != 0:
        pytest.skip(f"{COMPILER[0]} cannot build with {' '.join(flags) or 'threads'}: {compiled.stderr.strip()[-300:]}")
    try:
        if all(run([str(binary)]).returncode == 0 for _ in range(4)):
            return []
        setarch = shutil.which("setarch")
        if setarch and run([setarch, "-R", str(binary)]).returncode == 0:
            return [setarch, "-R"]
        pytest.skip(f"programs built with {' '.join(flags)} do not start here (see vm.mmap_rnd_bits)")
    finally:
        binary.unlink(missing_ok=True)


@cache
def made(build: str, *goals: str) -> str:
    """What make says that went wrong, if anything did."""
    done = make(*(f"../../build/cpp/{build}/{goal}" for goal in goals))
    errors = [line for line in done.stderr.splitlines() if line.strip()]
    return "" if done.returncode == 0 else "\n".join(["does not build:", *errors[:40]])


def built(build: str, test: str) -> list[str]:
    """The command that runs the cases of a file, or a fuzzer. Under a sanitizer all are built at once: CI runs all."""
    device = [] if build == "tsan" else ["device"]
    runner = test if test in FUZZERS else "loops" if test in LOOPS else "device" if test in FIBERS else "tests"
    if build != "plain":
        made(build, "tests", "loops", *device)
    error = made(build, runner)
    assert not error, error
    return [str(BUILD / build / runner), *(["--file", test] if runner != test else [])]


def has_threads(test: str) -> bool:
    """Of its own or of an engine (job.h)."""
    return bool(re.search(r'^#include (<thread>|"job\.h")', (HERE / f"{test}.cpp").read_text(), re.MULTILINE))


def of_build(build: str) -> list[str]:
    return [test for test in TESTS if build != "tsan" or (has_threads(test) and test not in FIBERS)]


def passing() -> Iterator[Any]:
    """CI runs kernels as they are shipped, and all under ASan; all else is slow. TSan's are in test_threads.py."""
    for build in ("plain", "asan", "ubsan"):
        for test in of_build(build):
            fast = test in PLAIN if build == "plain" else build == "asan" and test not in EXPLORERS
            yield pytest.param(build, test, marks=[] if fast else [pytest.mark.slow])


@pytest.mark.parametrize(("build", "test"), list(passing()))
def test_passes(build: str, test: str) -> None:
    check_passes(build, test)


def check_passes(build: str, test: str) -> None:
    need_command(COMPILER[0], "g++")
    prefix = launch_prefix(build)
    done = run([*prefix, *built(build, test), "--limit-s", "60"])
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"


@pytest.mark.slow
@pytest.mark.parametrize("build", ["plain", "ubsan"])
def test_connections_heal_wherever_they_are_cut(build: str) -> None:
    """At every byte that a rank sends in a short operation, in both directions; some thousand places of long ones."""
    need_command(COMPILER[0], "g++")
    prefix = launch_prefix(build)
    done = run(
        [*prefix, *built(build, "test_healing"), "--limit-s", "1000", "cut anywhere"],
        variables={"RINGDP_CUTS": "0"},
    )
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"


@pytest.mark.slow
def test_more_of_what_can_happen_when_a_connection_is_made_again() -> None:
    need_command(COMPILER[0], "g++")
    done = run([*built("plain", "test_resume_protocol"), "--limit-s", "1000"], variables={"RINGDP_EXPLORE": "1"})
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-3000:]}"


@pytest.mark.slow
def test_a_rank_of_an_elastic_job_dies_at_any_byte() -> None:
    """At every byte that it sends in a step, under each algorithm."""
    need_command(COMPILER[0], "g++")
    done = run([*built("plain", "test_elastic_cuts"), "--limit-s", "900"], variables={"RINGDP_CUTS": "0"})
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"


@pytest.mark.parametrize("fuzzer", FUZZERS)
@pytest.mark.parametrize("build", ["asan", pytest.param("ubsan", marks=pytest.mark.slow)])
def test_nothing_from_the_network_does_harm(build: str, fuzzer: str) -> None:
    need_command(COMPILER[0], "g++")
    prefix = launch_prefix(build)
    seconds = FUZZ_S / len(FUZZERS)
    done = run([*prefix, *built(build, fuzzer), "--seconds", str(seconds)], variables=FUZZ_OPTIONS)
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    # It must have got somewhere: past the door, into the flows.
    seen = {what: int(times) for times, what in re.findall(r"^ *(\d+) (.+)$", done.stdout, re.MULTILINE)}
    assert all(seen.get(what, 0) > 10 for what in SEEN[fuzzer]), done.stdout


@pytest.mark.slow
def test_more_of_what_can_happen_to_a_view() -> None:
    """Twelve times as many states as by default."""
    need_command(COMPILER[0], "g++")
    done = run([*built("plain", "test_agreement"), "--limit-s", "600"], variables={"RINGDP_EXPLORE": "12"})
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-3000:]}"


def test_no_member_is_used_without_its_lock() -> None:
    """clang reads in the annotations of base/thread_safety.h which lock, or the driver's role, guards a member."""
    clang = need_command("clang++", "clang")
    root = HERE.parents[1]
    files = [
        str(root / path) for path in run([sys.executable, str(root / "tools" / "unity.py"), "engine"]).stdout.split()
    ]
    assert len(files) > 1
    flags = ["-std=c++20", "-fsyntax-only", "-Wthread-safety", "-Werror", f"-I{root / 'ringdp' / 'csrc'}"]
    done = run([clang, *flags, *files])
    assert done.returncode == 0, done.stderr[-6000:]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the wide kernels are for x86-64")
@pytest.mark.parametrize(("isa", "register"), [("avx2", "ymm"), ("avx512", "zmm")])
def test_kernels_are_vectorised_and_not_fused(isa: str, register: str) -> None:
    """What the compiler made of the loops: wide registers, and no fused multiply-add, which would change the bits."""
    need_command(COMPILER[0], "g++")
    objdump = need_command("objdump", "binutils")
    built("plain", "test_kernels")
    listing = run([objdump, "-d", "-C", "--no-show-raw-insn", str(BUILD / "plain" / "kernels" / f"{isa}.o")]).stdout
    functions = dict(re.findall(r"^[0-9a-f]+ <(.*)>:\n((?:.+\n)*)", listing, re.MULTILINE))
    loops = {name: body for name, body in functions.items() if "Loops::" in name}
    assert len(loops) > 60
    fused = {name for name, body in functions.items() if re.search(r"\bvfn?m(add|sub)", body)}
    assert not fused
    # Integer division has no vector instruction; everything else must be wide.
    narrow = {
        name
        for name, body in loops.items()
        if register not in body and not re.search(r"::divide<(?!float|double)", name)
    }
    assert not narrow


def test_inline_code_of_wide_kernels_does_not_leak() -> None:
    """No weak symbol in the objects of an instruction set: the linker might take its copy for the whole program."""
    need_command(COMPILER[0], "g++")
    nm = need_command("nm", "binutils")
    built("plain", "test_kernels")
    for isa in ("scalar", "avx2", "avx512"):
        symbols = run([nm, "-C", "--defined-only", str(BUILD / "plain" / "kernels" / f"{isa}.o")]).stdout.splitlines()
        shared = [line.split(maxsplit=2)[2] for line in symbols if line.split(maxsplit=2)[1] not in "tdrb"]
        assert shared == [f"ringdp::kernels::{isa}_table()"]
