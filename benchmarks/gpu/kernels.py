"""The CUDA kernels on one GPU, beside a device-to-device copy in the same rounds: GB moved a second.

    python -m benchmarks gpu_kernels                       all kernels on 25 M and 124 M elements
    python -m benchmarks gpu_kernels --elements 25m --codecs int8 --rounds 51

Bytes moved are those a kernel has to read and write: float32 elements, residuals, codes. Results are compared with the
CPU's codecs and with torch before anything is timed. Every round runs each kernel once between two CUDA events, first
the copy (4 bytes read and 4 written an element); medians. A ratio is the median of those to the same round's copy; that
of select is torch.topk's time for as many elements over ours.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.lib import session
from benchmarks.lib.measure import codec_names
from benchmarks.lib.ranks import Failed, Unavailable

RANKS = 4  # of a fold
AIM = 0.8  # of a copy, every pass of a codec
SELECT_AIM = 5.0  # times faster than torch.topk
SELECTED = 0.01

CODECS = codec_names()


@dataclass(frozen=True)
class Case:
    """One kernel on its arguments."""

    codec: str
    name: str
    bytes_moved: int
    run: Callable[[], object]
    aim: float | None = None


def parse_elements(text: str) -> int:
    """`25m`, `124M`, `4096`: how many; m stands for a million. Raises ValueError."""
    word = text.strip().lower()
    digits = word.removesuffix("m")
    if not digits.isdigit() or int(digits) == 0:
        raise ValueError(f"{text!r} is not a number of elements: write it like 25m or 4096")
    return int(digits) * (10**6 if word.endswith("m") else 1)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--codecs", default=",".join(CODECS), help=f"of {', '.join(CODECS)}")
    parser.add_argument("--elements", default="25m,124m", help="sizes, m for a million (default 25m,124m)")
    parser.add_argument("--rounds", type=int, default=31, help="times each kernel is timed (default 31)")


def check(args: argparse.Namespace) -> None:
    args.codecs = session.chosen(args.codecs, CODECS)
    args.counts = [parse_elements(word) for word in args.elements.split(",")]
    session.at_least(1, rounds=args.rounds)


def need_kernels() -> Any:
    """ringdp._C. Raises Unavailable in words."""
    import torch

    if not torch.cuda.is_available():
        raise Unavailable(f"torch {torch.__version__} sees no CUDA device: the kernels run on a GPU only")
    from ringdp import _C

    if not _C.cuda_kernels():
        raise Unavailable("this build of ringdp has no CUDA kernels: build it where torch has CUDA and nvcc fits it")
    return _C


def expect(right: bool, what: str) -> None:
    if not right:
        raise Failed(f"{what}: the GPU's result is not the CPU's, so nothing is timed")


def codec_cases(kernels: Any, codec: str, x: Any) -> Iterator[Case]:
    """Every pass of a codec over x, float32 [n] on the device, its results compared first."""
    import torch

    n, size = x.numel(), kernels.codec_bytes(codec, x.numel())
    stride = (size + 15) // 16 * 16
    code, out = torch.empty(size, dtype=torch.uint8, device=x.device), torch.zeros_like(x)
    feedback = [(torch.zeros_like(x), torch.empty_like(x), torch.zeros(1, dtype=torch.int32, device=x.device))]
    folded = torch.empty_like(code)

    kernels.cuda_encode(codec, [x], [code])
    wanted = kernels.codec_compress(codec, x.cpu())
    expect(torch.equal(code.cpu(), wanted), f"{codec}, encode")
    kernels.cuda_encode(codec, [x], [folded], feedback)
    expect(torch.equal(folded, code), f"{codec}, encode with feedback of nothing")
    kernels.cuda_decode_set(codec, [out], [code])
    decoded = kernels.codec_decompress(codec, wanted, n)
    expect(torch.equal(out.cpu(), decoded), f"{codec}, decode")
    expect(torch.equal(feedback[0][1].cpu(), x.cpu() - decoded), f"{codec}, residual")
    sources = torch.zeros(RANKS, stride, dtype=torch.uint8, device=x.device)
    sources[:, :size] = code
    kernels.cuda_reduce_codes(codec, [x], [sources], [folded], 0, float(RANKS))
    mean = (x.cpu() + decoded + decoded + decoded) / RANKS
    expect(torch.equal(folded.cpu(), kernels.codec_compress(codec, mean)), f"{codec}, fold")

    codes, floats = [code], 4 * n
    fold = partial(kernels.cuda_reduce_codes, codec, [x], [sources], [folded], 0, float(RANKS))
    encode = partial(kernels.cuda_encode, codec, [x], codes)
    yield Case(codec, "encode", floats + size, encode, AIM)
    yield Case(codec, "encode+feedback", 3 * floats + size, partial(encode, feedback), AIM)
    yield Case(codec, "decode", floats + size, lambda: kernels.cuda_decode_set(codec, [out], codes), AIM)
    yield Case(codec, f"fold of {RANKS}", floats + RANKS * size, fold, AIM)
    yield Case(codec, f"fold of {RANKS}+feedback", 3 * floats + RANKS * size, partial(fold, feedback), AIM)


def other_cases(kernels: Any, x: Any) -> Iterator[Case]:
    """Looking for infinities."""
    import torch

    n = x.numel()
    found = torch.zeros(1, dtype=torch.int32, device=x.device)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        values, size, name = x.to(dtype), dtype.itemsize, str(dtype).removeprefix("torch.")
        yield Case(name, "find", size * n, partial(kernels.cuda_find_non_finite, values, found))


def select_cases(kernels: Any, x: Any) -> Iterator[Case]:
    """Select of 1 %, with its threshold given, and torch.topk of as many."""
    import torch

    n = x.numel()
    k = max(1, int(n * SELECTED))
    magnitude = x.abs()
    threshold = float(magnitude.topk(k).values[-1])
    wanted = (magnitude >= threshold).nonzero().flatten()

    def select() -> tuple[Any, Any, Any]:
        return kernels.cuda_select(x, threshold, wanted.numel())

    index, value, selected = select()
    right = int(selected) == wanted.numel() and torch.equal(index.long(), wanted) and torch.equal(value, x[wanted])
    expect(right, "select")
    moved = 4 * n + 2 * (n // 8) + 12 * wanted.numel()
    yield Case("float32", "select 1 %", moved, select, SELECT_AIM)
    yield Case("float32", "torch.topk 1 %", 4 * n, lambda: torch.topk(magnitude, k))


def time_rounds(cases: Sequence[Case], rounds: int) -> list[list[float]]:
    """Seconds of each case in each round, in turn on one stream."""
    import torch

    for case in cases:
        case.run()
    torch.cuda.synchronize()
    seconds = []
    for _ in range(rounds):
        events = []
        for case in cases:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            case.run()
            end.record()
            events.append((begin, end))
        torch.cuda.synchronize()
        seconds.append([begin.elapsed_time(end) / 1e3 for begin, end in events])
    return seconds


def rows_of(count: int, cases: Sequence[Case], seconds: Sequence[Sequence[float]]) -> Iterator[dict[str, Any]]:
    """The figures of each case; the first is the copy, the last torch.topk."""
    names = [case.name for case in cases]
    topk = names.index("torch.topk 1 %") if "torch.topk 1 %" in names else -1
    for i, case in enumerate(cases):
        copy = [case.bytes_moved / one[i] / (cases[0].bytes_moved / one[0]) for one in seconds]
        selects = topk >= 0 and "select" in case.name
        yield {
            "elements": count,
            "type": case.codec,
            "kernel": case.name,
            "seconds": statistics.median(one[i] for one in seconds),
            "bytes_moved": case.bytes_moved,
            "over_copy": statistics.median(copy),
            "over_topk": statistics.median(one[topk] / one[i] for one in seconds) if selects else None,
            "aim": case.aim,
        }


def measure(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """What was measured so far, after each type. Raises Unavailable, Failed."""
    kernels = need_kernels()
    import torch

    rows: list[dict[str, Any]] = []
    result = session.result_of("gpu_kernels", None, gpu=torch.cuda.get_device_name(), rounds=args.rounds, rows=rows)
    for count in args.counts:
        x = torch.randn(count, device="cuda", generator=torch.Generator("cuda").manual_seed(1)) * 1e-3
        copied = torch.empty_like(x)
        copy = Case("float32", "copy", 8 * count, partial(copied.copy_, x))
        for codec in args.codecs:  # one at a time, for the memory's sake
            cases = [copy, *codec_cases(kernels, codec, x)]
            rows += list(rows_of(count, cases, time_rounds(cases, args.rounds)))[1:]
            yield result
        cases = [copy, *other_cases(kernels, x), *select_cases(kernels, x)]
        rows += rows_of(count, cases, time_rounds(cases, args.rounds))
        yield result


def report(result: dict[str, Any]) -> str:
    cells = []
    for row in result["rows"]:
        aimed = row["over_topk"] if row["over_topk"] is not None else row["over_copy"]
        cell = [f"{row['elements'] / 1e6:g} M", row["type"], row["kernel"], f"{row['seconds'] * 1e6:.0f}"]
        cell += [f"{row['bytes_moved'] / row['seconds'] / 1e9:.0f}", f"{row['over_copy']:.2f}"]
        cell += ["" if row["over_topk"] is None else f"{row['over_topk']:.1f}"]
        aim = row["aim"]
        cell += ["", ""] if aim is None else [f"{aim:g}", "reached" if aimed >= aim else "MISSED"]
        cells.append(cell)
    columns = ["elements", "type", "kernel", "µs", "GB/s", "/ copy", "topk /", "aim", ""]
    title = f"CUDA kernels on {result['gpu']}, medians of {result['rounds']} rounds; GB moved a second"
    return session.report_table(result, title, columns, cells)
