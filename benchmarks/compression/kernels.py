"""The codecs' loops, top-k's choice and sparse2 on one core, from memory, beside memcpy: GB of float32 a second.

    python -m benchmarks kernels                        all codecs, the best instruction set of this processor
    python -m benchmarks kernels --isa avx2 --size 256m
    python -m benchmarks kernels --codecs int4 --size 43m       # a round's change of 10.7 M parameters

Compiled from the codecs' sources with setup.py's flags (kernels.cpp), in build/benchmarks. Every round takes each pass
once over `--size` bytes of float32, in segments of 64 Ki elements as the engine does; codes lie in memory, too.
Medians; a ratio is the median of those to the same round's memcpy, which reads and writes what a pass only reads
(compress) or only writes (decode). Top-k's choice is timed beside memcpy and torch.topk of the same elements, and
sparse2 with its milliseconds: as a round encodes (the residual decays and is written anew), and as it adds a code up.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from benchmarks.lib import session
from benchmarks.lib.measure import Quiet, codec_names, format_size, parse_size
from benchmarks.lib.ranks import ROOT, Failed, Unavailable, compile_program
from ringdp.compression import Info, Sparse2, TopK

SOURCE = Path(__file__).with_name("kernels.cpp")
CSRC = ROOT / "ringdp" / "csrc"
FLAGS = ("-O3", "-ffp-contract=off", "-fvisibility=hidden")  # setup.py's
CODECS = codec_names()
PASSES = ("memcpy", "compress", "compress+feedback", "decode", "decode+add")


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--codecs", default=",".join(CODECS), help=f"of {', '.join(CODECS)}")
    parser.add_argument("--size", default="128m", help="bytes of float32 (default 128m)")
    parser.add_argument("--rounds", type=int, default=11, help="times each pass is taken (default 11)")
    parser.add_argument("--isa", default="", help="scalar, avx2 or avx512; the best without it")
    parser.add_argument(
        "--fraction", type=float, default=0.01, help="of the elements that top-k chooses (default 0.01)"
    )


def check(args: argparse.Namespace) -> None:
    args.codecs = session.chosen(args.codecs, CODECS)
    args.size_bytes = parse_size(args.size)
    session.at_least(1, rounds=args.rounds)
    session.at_least(4, size=args.size_bytes)
    if not 0 < args.fraction <= 1:
        raise ValueError("--fraction must be above 0 and at most 1")


def build() -> ctypes.CDLL:
    """Compile what is newer than the library. Raises Unavailable."""
    sources = [SOURCE, *(path for folder in ("base", "kernels", "codec") for path in sorted((CSRC / folder).iterdir()))]
    library = ROOT / "build" / "benchmarks" / "kernels.so"
    if not library.exists() or library.stat().st_mtime < max(path.stat().st_mtime for path in sources):
        files = [path for path in sources if path.suffix == ".cpp"]
        compile_program(files, library, *FLAGS, "-shared", "-fPIC", "-pthread", f"-I{CSRC}")
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
        raise Unavailable(f"this processor has no {isa}")
    quiet, rows = Quiet.start(), []
    count = args.size_bytes // 4
    for name in args.codecs:
        seconds = (ctypes.c_double * (args.rounds * len(PASSES)))()
        loaded.kernels_time(name.encode(), count, args.rounds, seconds)
        rounds = [seconds[i : i + len(PASSES)] for i in range(0, len(seconds), len(PASSES))]
        for index, word in enumerate(PASSES):
            over = statistics.median(one[0] / one[index] for one in rounds)
            seconds_s = statistics.median(one[index] for one in rounds)
            rows.append({"codec": name, "pass": word, "bytes_per_s": 4 * count / seconds_s, "over_memcpy": over})
    rows += measure_selection(count, args.fraction, args.rounds)
    rows += measure_sparse2(count, args.rounds)
    quiet.stop(ranks_s=0.0)
    return session.result_of("kernels", quiet, isa=isa, size_bytes=args.size_bytes, rows=rows)


# The choice of top-k: residual added, threshold followed, code written, new residual written.


class Selection:
    """One parameter's, step by step, with two residuals that take turns."""

    def __init__(self, x: Tensor, fraction: float) -> None:
        self.x, self.compressor = x, TopK(fraction)
        self.residuals = [torch.zeros_like(x), torch.zeros_like(x)]
        self.info = Info(name="x", shape=tuple(x.shape), numel=x.numel(), state={})

    def step(self) -> Tensor:
        (code,), left = self.compressor.compress_with_residual(self.x, self.residuals[0], self.info, self.residuals[1])
        self.residuals = [left, self.residuals[0]]
        return code


def measure_selection(count: int, fraction: float, rounds: int) -> list[dict[str, Any]]:
    """Rows of ringdp's choice, torch.topk and memcpy. Raises Failed."""
    torch.set_num_threads(1)
    x = torch.randn(count, generator=torch.Generator().manual_seed(0))
    wanted = max(1, round(fraction * count))
    check_selection(x, fraction, wanted)
    selection, copy = Selection(x, fraction), torch.empty_like(x)
    calls: dict[str, Callable[[], object]] = {
        "memcpy": lambda: copy.copy_(x), "select": selection.step, "torch.topk": lambda: x.abs().topk(wanted)
    }  # fmt: skip
    return timed(f"topk {fraction:.2%}", calls, count, rounds)


def measure_sparse2(count: int, rounds: int) -> list[dict[str, Any]]:
    """Raises Failed."""
    sparse, x = Sparse2(), torch.randn(count, generator=torch.Generator().manual_seed(0))
    residuals, total, code = [torch.zeros_like(x), torch.zeros_like(x)], torch.zeros_like(x), sparse.room(count)

    def encode() -> None:
        sparse.encode(code, x, *residuals, decay=0.95)
        residuals.reverse()

    for _ in range(3):
        wanted = x + residuals[0] * 0.95
        encode()
        total.zero_()
        sparse.add(total, code)
        if not torch.equal(wanted - total, residuals[0]):
            raise Failed("sparse2: what was sent and what was kept do not add up")
    calls: dict[str, Callable[[], object]] = {
        "memcpy": lambda: total.copy_(x),
        "compress+feedback": encode,
        "decode+add": lambda: sparse.add(total, code, 0.5),
    }
    return timed("sparse2", calls, count, rounds)


def timed(codec: str, calls: dict[str, Callable[[], object]], count: int, rounds: int) -> list[dict[str, Any]]:
    """In turns; one of them is memcpy."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 1):
        for name, call in calls.items():
            began = perf_counter()
            call()
            if turn:
                times[name].append(perf_counter() - began)
    rows = []
    for name, seconds in times.items():
        over = statistics.median(copied / mine for copied, mine in zip(times["memcpy"], seconds, strict=True))
        row: dict[str, Any] = {"codec": codec, "pass": name, "over_memcpy": over}
        rows.append(row | {"bytes_per_s": 4 * count / statistics.median(seconds)})
    return rows


def check_selection(x: Tensor, fraction: float, wanted: int) -> None:
    """What is sent and what is kept add up to the input, and what is sent is as large as what torch.topk finds."""
    selection = Selection(x, fraction)
    for _ in range(3):
        before = selection.residuals[0].clone()
        decoded = selection.compressor.decompress((selection.step(),), selection.info)
        if not torch.allclose(decoded + selection.residuals[0], x + before, rtol=0, atol=1e-6):
            raise Failed("top-k: what was sent and what was kept do not add up")
    found = int(decoded.count_nonzero())
    if not wanted / 2 <= found <= 2 * wanted:
        raise Failed(f"top-k: {found} elements were chosen, not about {wanted}")
    if float(decoded[decoded != 0].abs().min()) < 0.99 * float((x + before).abs().topk(found).values.min()):
        raise Failed("top-k: smaller elements were chosen than there are")


def report(result: dict[str, Any]) -> str:
    rows = [
        [
            row["codec"],
            row["pass"],
            f"{row['bytes_per_s'] / 1e9:.1f}",
            f"{row['over_memcpy']:.2f}",
            f"{result['size_bytes'] / row['bytes_per_s'] * 1e3:.1f}",
        ]
        for row in result["rows"]
    ]
    title = f"codecs, {result['isa']}, one core, {format_size(result['size_bytes'])} of float32"
    return session.report_table(result, title, ["codec", "pass", "GB/s", "/ memcpy", "ms"], rows)
