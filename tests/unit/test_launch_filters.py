"""What the console shows of the other ranks' streams."""

from __future__ import annotations

from ringdp.launcher.filters import MAX_BLOCK_LINES, MAX_IDLE, AllLines, Errors, Shown

TRACEBACK = 'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n    step()\nValueError: bad\n'


def test_every_line_with_its_rank_and_of_a_bar_the_last_state() -> None:
    lines = AllLines("[rank 1] ")
    assert lines.feed(b"one\ntw") == ["[rank 1] one"]
    assert lines.feed(b"o\n") == ["[rank 1] two"]
    assert lines.feed(b"\r 10%\r 20%\r100%\n") == ["[rank 1] 100%"]
    assert lines.feed(b"end\xff") == []
    assert lines.finish() == ["[rank 1] end\N{REPLACEMENT CHARACTER}"]


def test_a_traceback_is_shown_and_the_rest_is_not() -> None:
    errors = Errors("[rank 1] ", Shown(), "log")
    assert errors.feed(b"UserWarning: slow\nloading\n 10%\r 20%") == []
    assert errors.feed(b"\n" + TRACEBACK.encode()) == []
    assert errors.idle() == [f"[rank 1] {line}" for line in TRACEBACK.splitlines()]
    assert errors.feed(b"going on\n") == []
    assert errors.finish() == []


def test_the_prefix_that_torch_adds_is_not_there_twice() -> None:
    errors = Errors("[rank 1] ", Shown(), "log")
    errors.feed("".join(f"[rank1]: {line}\n" for line in TRACEBACK.splitlines()).encode())
    assert errors.idle() == [f"[rank 1] {line}" for line in TRACEBACK.splitlines()]


def test_a_traceback_that_comes_slowly_stays_whole() -> None:
    errors = Errors("", Shown(), "log")
    shown: list[str] = []
    for line in TRACEBACK.splitlines(keepends=True):
        shown += errors.feed(line.encode())
        if not line.startswith("ValueError"):
            shown += errors.idle()
            assert shown == []
    shown += errors.idle()
    assert shown == TRACEBACK.splitlines()


def test_a_traceback_without_an_end_is_shown_in_the_end() -> None:
    errors = Errors("", Shown(), "log")
    errors.feed(b"Traceback (most recent call last):\n")
    assert [line for _ in range(MAX_IDLE + 1) for line in errors.idle()] == ["Traceback (most recent call last):"]


def test_lines_of_a_logger_and_of_native_code() -> None:
    errors = Errors("> ", Shown(), "log")
    assert errors.feed(b"12:00 ERROR no disk\n12:01 INFO fine\nRuntimeError: x\n") == [
        "> 12:00 ERROR no disk",
        "> RuntimeError: x",
    ]


def test_the_same_traceback_of_another_rank_is_one_line() -> None:
    shown = Shown()
    first, second, third = (Errors(f"[rank {n}] ", shown, "log") for n in (1, 2, 3))
    for number, errors in enumerate((first, second), 1):
        errors.feed(TRACEBACK.replace("bad", f"rank {number} at 0x7f{number}").encode())
    assert len(first.idle()) == 4
    assert second.idle() == ["[rank 2] the same as [rank 1]: ValueError: rank 2 at 0x7f2"]
    third.feed(TRACEBACK.replace("step()", "other()").encode())
    assert len(third.idle()) == 4
    third.feed(TRACEBACK.replace("bad", "a message of its own").encode())
    assert third.idle() == ["[rank 3] the same as [rank 1]: ValueError: a message of its own"]


def test_a_very_long_traceback_is_cut_in_the_middle() -> None:
    errors = Errors("", Shown(), "the.log")
    lines = ["Traceback (most recent call last):", *(f"  frame {n}" for n in range(500)), "RecursionError: deep"]
    errors.feed("\n".join(lines).encode() + b"\n")
    shown = errors.idle()
    assert len(shown) == MAX_BLOCK_LINES + 1
    assert shown[0] == lines[0]
    assert shown[-1] == lines[-1]
    assert "442 lines more in the.log" in shown[MAX_BLOCK_LINES // 2]
