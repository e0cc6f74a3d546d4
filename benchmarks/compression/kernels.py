#!/usr/bin/env python3
"""The codecs' loops on one core, from memory, beside memcpy in the same rounds: GB of float32 gradient a second.

    python benchmarks/kernels.py                        all codecs, the best instruction set of this processor
    python benchmarks/kernels.py --isa avx2 --size 256m

Compiled from the codecs' sources with setup.py's flags (kernels.cpp), in build/benchmarks. Every round takes each pass
once over `--size` bytes of float32, in segments of 64 Ki elements as the engine does; codes lie in memory, too.
Medians; a ratio is the median of those to the same round's memcpy, which reads and writes what a pass only reads
(compress) or only writes (decode).
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.lib import command
from benchmarks.collectives.ceiling import compiler
from benchmarks.lib.measure import Quiet, codec_names, format_size, machine, parse_size, table

ROOT = Path(__file__).resolve().parents[1]
SOURCE = Path(__file__).with_name("kernels.cpp")
CSRC = ROOT / "ringdp" / "csrc"
FLAGS = ("-std=c++20", "-O3", "-ffp-contract=off", "-fvisibility=hidden")  # setup.py's
CODECS = codec_names()
PASSES = ("memcpy", "compress", "compress+feedback", "decode", "decode+add")
WANTED = {  # times memcpy
    ("int8", "compress"): 1.2,
    ("int8", "decode+add"): 1.2,
    ("int8", "compress+feedback"): 0.75,
    ("int4", "compress"): 1.1,
    ("int4", "decode+add"): 1.1,
}


class KernelsUnavailable(RuntimeError):
    """They cannot be measured here; the message says why."""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--codecs", default=",".join(CODECS), help=f"of {', '.join(CODECS)}")
    parser.add_argument("--size", default="128m", help="bytes of float32 (default 128m)")
    parser.add_argument("--rounds", type=int, default=11, help="times each pass is taken (default 11)")
    parser.add_argument("--isa", default="", help="scalar, avx2 or avx512; the best without it")
    parser.add_argument("--json", metavar="FILE", help="write everything measured there, too")
    args = parser.parse_args(argv)
    args.codec_names = args.codecs.split(",")
    if unknown := [name for name in args.codec_names if name not in CODECS]:
        parser.error(f"{unknown[0]!r} is not known: choose from {', '.join(CODECS)}")
    try:
        args.size_bytes = parse_size(args.size)
    except ValueError as error:
        parser.error(str(error))
    if args.rounds < 1 or args.size_bytes < 4:
        parser.error("at least one round and four bytes are needed")
    return args


def build() -> ctypes.CDLL:
    """Compile what is newer than the library. Raises KernelsUnavailable."""
    sources = [SOURCE, *(path for folder in ("base", "kernels", "codec") for path in sorted((CSRC / folder).iterdir()))]
    library = ROOT / "build" / "benchmarks" / "kernels.so"
    if not library.exists() or library.stat().st_mtime < max(path.stat().st_mtime for path in sources):
        found = compiler()
        if found is None:
            raise KernelsUnavailable("no C++ compiler: install g++, or name one in CXX")
        library.parent.mkdir(parents=True, exist_ok=True)
        words = [found, *FLAGS, "-shared", "-fPIC", "-pthread", f"-I{CSRC}", "-o", str(library)]
        files = [str(path) for path in sources if path.suffix == ".cpp"]
        done = subprocess.run([*words, *files], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise KernelsUnavailable(f"{found} cannot compile {SOURCE.name}: {done.stderr.strip()[-400:]}")
    loaded = ctypes.CDLL(str(library))
    loaded.kernels_select.argtypes, loaded.kernels_select.restype = [ctypes.c_char_p], ctypes.c_bool
    loaded.kernels_best.restype = ctypes.c_char_p
    loaded.kernels_time.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int, ctypes.POINTER(ctypes.c_double)]
    loaded.kernels_time.restype = None
    return loaded


def measure(args: argparse.Namespace) -> dict[str, Any]:
    loaded = build()
    isa = args.isa or loaded.kernels_best().decode()
    if not loaded.kernels_select(isa.encode()):
        raise KernelsUnavailable(f"this processor has no {isa}")
    quiet, rows = Quiet.start(), []
    count = args.size_bytes // 4
    for name in args.codec_names:
        seconds = (ctypes.c_double * (args.rounds * len(PASSES)))()
        loaded.kernels_time(name.encode(), count, args.rounds, seconds)
        rounds = [seconds[i : i + len(PASSES)] for i in range(0, len(seconds), len(PASSES))]
        for index, word in enumerate(PASSES):
            rows.append(
                {
                    "codec": name,
                    "pass": word,
                    "bytes_per_s": 4 * count / statistics.median(one[index] for one in rounds),
                    "over_memcpy": statistics.median(one[0] / one[index] for one in rounds),
                }
            )
    quiet.stop(ranks_s=0.0)
    return {
        "benchmark": "kernels",
        "machine": machine(),
        "isa": isa,
        "size_bytes": args.size_bytes,
        "quiet": quiet.as_dict() | {"words": str(quiet)},
        "rows": rows,
    }


def report(result: dict[str, Any]) -> str:
    rows = []
    for row in result["rows"]:
        wanted = WANTED.get((row["codec"], row["pass"]))
        cells = [row["codec"], row["pass"], f"{row['bytes_per_s'] / 1e9:.1f}", f"{row['over_memcpy']:.2f}"]
        verdict = "" if wanted is None else "reached" if row["over_memcpy"] >= wanted else "MISSED"
        rows.append([*cells, "" if wanted is None else f"{wanted:g}", verdict])
    about = result["machine"]
    lines = [
        f"codecs, {result['isa']}, one core, {format_size(result['size_bytes'])} of float32",
        f"{about['processor']}, {about['cores']} cores, Linux {about['kernel']}",
        "",
        table(["codec", "pass", "GB/s", "/ memcpy", "aim", ""], rows),
        "",
        result["quiet"]["words"],
    ]
    return "\n".join([*lines, *(f"WARNING: {it}" for it in result["quiet"]["warnings"])])


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    return command.run(lambda: measure(args), report, json_path=args.json, cannot=(KernelsUnavailable,), failed=())


if __name__ == "__main__":
    sys.exit(main())
