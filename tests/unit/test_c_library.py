"""Compressors from shared libraries: as those in Python, refused in words, found out where they break promises."""

from __future__ import annotations

import copy
import functools
import pickle
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from ringdp import compression
from ringdp.compression import EF21, CCompressor, Info, Int8, include_dir, load, registry
from ringdp.errors import InvalidArgumentError
from ringdp.testing import check_compressor, simulate
from tests.c_libraries import build
from tests.helpers import need_command
from tests.train.harness import ring_is_built

pytestmark = pytest.mark.skipif(not ring_is_built(), reason="ringdp is not built")
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "c_compressor.c"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("c"), "unit_int8")


def gradients(ranks: int, steps: int) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [[torch.randn(70, 70, generator=generator) for _ in range(ranks)] for _ in range(steps)]


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


# As a compressor.


@pytest.mark.parametrize("error_feedback", [False, True, EF21()], ids=str)
def test_it_does_what_the_same_code_in_the_core_does(library: Path, error_feedback: Any) -> None:
    mine = load(library, error_feedback=error_feedback)
    theirs = Int8(error_feedback=error_feedback)
    for ranks in (2, 3):
        steps = gradients(ranks, 4)
        for one, other in zip(simulate(mine, steps).means, simulate(theirs, steps).means, strict=True):
            assert same(one, other)


def test_payloads_are_its_codes(library: Path) -> None:
    mine, info = load(str(library)), Info(name="w", shape=(300,), numel=300)
    x = torch.randn(300)
    (code,) = mine.compress(x, info)
    assert code.dtype == torch.uint8
    assert code.numel() == mine.code_bytes(300) == 308
    assert torch.equal(code, Int8().compress(x, info)[0])
    assert same(mine.decompress((code,), info), Int8().decompress((code,), info))
    with pytest.raises(InvalidArgumentError, match="unit_int8: a payload of 307 bytes for 300 elements of w"):
        mine.decompress((code[1:],), info)


def test_it_says_what_it_is_alike_wherever_its_file_lies(library: Path, tmp_path: Path) -> None:
    one = load(library, error_feedback=True)
    other = load(shutil.copy(library, tmp_path / "elsewhere.so"), error_feedback=True)
    assert one == other
    assert hash(one) == hash(other)
    assert repr(one) == repr(other)
    assert repr(one).startswith("CCompressor('unit_int8', 8.12 bits an element, block=256, abi=1, sha256=")
    assert one.sha256[:16] in repr(one)
    assert one.path == str(library)
    assert one != load(library)
    assert (one.aggregate, one.fixed_size, one.carries_nan) == ("owner", True, True)
    assert one.native == "unit_int8"
    assert load(library, error_feedback=EF21()).native is None


def test_copies_and_pickles_are_the_same_one(library: Path, tmp_path: Path) -> None:
    one = load(library, error_feedback=True)
    assert copy.deepcopy(one) == pickle.loads(pickle.dumps(one)) == one
    gone = build(tmp_path, "unit_gone")
    loaded = load(gone)
    text = pickle.dumps(loaded)
    gone.unlink()
    assert pickle.loads(text) == loaded, "what is loaded needs no file"
    _, codec, _, feedback = loaded.__reduce__()[1]
    rebuilt = build(tmp_path, "unit_gone_2")
    with pytest.raises(InvalidArgumentError, match=r"unit_gone_2\.so is not the library that was saved"):
        loaded.__reduce__()[0](str(rebuilt), codec, "0" * 64, feedback)


def test_it_may_have_a_name(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_factories", dict(registry._factories))
    compression.register("mine in C")(functools.partial(load, library))
    got = compression.get("mine in C", error_feedback=True)
    assert got == load(library, error_feedback=True)


@pytest.mark.parametrize("macros", [(), ("NO_FEEDBACK",), ("NO_ADD",), ("HEADER=7", "NO_ADD", "NO_FEEDBACK")], ids=str)
def test_good_ones_keep_their_promises(tmp_path: Path, macros: tuple[str, ...]) -> None:
    name = "unit_good_" + str(abs(hash(macros)))
    report = check_compressor(load(build(tmp_path, name, *macros), error_feedback=True))
    assert len(report.passed) == 10
    assert "its functions do what ringdp/compressor.h says, and write nowhere else" in str(report)


def test_the_example_keeps_them(tmp_path: Path) -> None:
    renamed = tmp_path / "renamed.c"  # the tests of the example load it with other options
    renamed.write_text(EXAMPLE.read_text().replace('"shift8"', "NAME"))
    report = check_compressor(load(build(tmp_path, "unit_shift8", source=renamed)))
    assert report.bits == 8.125
    assert report.nmse < 1e-4


# Found out.


@pytest.mark.parametrize(
    ("macros", "words"),
    [
        (["OVERRUN=1"], ["compress writes outside the code of 1 element"]),
        (["OVERRUN=9000"], ["compress writes outside the code of 1 element"]),
        (["DECODE_OVERRUN=1"], ["decode_set writes outside the output of 1 element"]),
        (["LAZY"], ["two calls of compress gave different codes", "must write every byte"]),
        (["SWALLOW"], ["RINGDP_FINITE where a NaN is among the elements", "a NaN decodes to finite elements"]),
        (["SWALLOW"], ["compress_with_feedback returns RINGDP_FINITE where an infinity is among the elements"]),
        (["GREEDY"], ["pieces of 256 elements decode to other elements than the whole"]),
        (["BLOCK=64"], ["outside its block of 64"]),
        (["FAILS=7", "FAILS_FROM=300"], ["'unit_bad", "failed: compress returned 7 for 511 elements"]),
        (["WRONG_RESIDUAL"], ["does not leave (v - decode(code)) / factor"]),
        (["WRONG_SUM"], ["decode_add does not give sum + decode_set"]),
    ],
    ids=lambda it: str(it[0]),
)
def test_a_broken_promise_is_told(tmp_path: Path, macros: list[str], words: list[str]) -> None:
    made = load(build(tmp_path, f"unit_bad_{'_'.join(macros).replace('=', '')}_{len(words[0])}", *macros))
    with pytest.raises(AssertionError) as told:
        check_compressor(made)
    assert "of its header:" in str(told.value)
    for word in words:
        assert word in str(told.value)


# Refused.


@pytest.mark.parametrize(
    ("macros", "words"),
    [
        (
            ["VERSION=2"],
            "it has version 2 of the interface, this ringdp has version 1: build it with the header of this",
        ),
        (["STRUCT_SIZE=72"], "its struct ringdp_compressor has 72 bytes, that of this ringdp 64"),
        (
            ["NO_ENTRY"],
            r"it has no function ringdp_compressor_v1 \(in C\+\+ it must be extern \"C\"\): .*undefined symbol",
        ),
        (["NO_STRUCT"], "ringdp_compressor_v1 returned NULL"),
        (["NO_COMPRESS"], "compress is NULL"),
        (["BLOCK=0"], "its block is 0; it must divide 256"),
        (["BLOCK=96"], "its block is 96; it must divide 256"),
        (["RESERVED=1"], "`reserved` must be 0"),
        (["BOUND=0"], r"size_bound\(1\) is 0 bytes; it must be from 1 to 1032"),
        (["BOUND=count*9+100"], r"size_bound\(925\) is 8425 bytes; it must be from 1 to 8424"),
        (["BOUND=300-count"], r"size_bound\(2\) is 298 bytes, less than size_bound\(1\) is 299"),
        (["BOUND=(size_t)rand()%100+count"], "once and another number the next time"),
    ],
    ids=lambda it: str(it[0]),
)
def test_what_keeps_to_nothing_is_refused(tmp_path: Path, macros: list[str], words: str) -> None:
    path = build(tmp_path, "unit_refused", *macros)
    with pytest.raises(InvalidArgumentError, match=words) as told:
        load(path)
    assert str(told.value).startswith(f"the compressor library {path} cannot be used: ")


@pytest.mark.parametrize("name", ["", "with space", "x" * 65, "ä"])
def test_names_are_plain(tmp_path: Path, name: str) -> None:
    path = build(tmp_path, "unit_names", f'NAMED="{name}"')
    with pytest.raises(InvalidArgumentError, match="its name must have 1 to 64 of the characters"):
        load(path)


def test_names_belong_to_one_library(tmp_path: Path) -> None:
    build(tmp_path, "unit_clash")
    first = load(build(tmp_path, "unit_clash"))
    with pytest.raises(
        InvalidArgumentError, match=r"another library with a codec 'unit_clash' is loaded already, from /"
    ):
        load(build(tmp_path, "unit_clash_2", 'NAMED="unit_clash"', "HEADER=1"))
    with pytest.raises(InvalidArgumentError, match="the codec 'int8' is built in; call it something else"):
        load(build(tmp_path, "unit_clash_3", 'NAMED="int8"'))
    assert load(first.path) == first


def test_what_is_no_library_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"nowhere\.so cannot be used: No such file or directory"):
        load(tmp_path / "nowhere.so")
    with pytest.raises(InvalidArgumentError, match="cannot be used: it is not a file"):
        load(tmp_path)
    text = tmp_path / "text.so"
    text.write_text("int main;")
    with pytest.raises(InvalidArgumentError, match=r"cannot be used: .*(too short|invalid ELF header)"):
        load(text)
    wrong: Any = 3
    with pytest.raises(InvalidArgumentError, match="load needs the path of a shared library, not 3"):
        load(wrong)
    with pytest.raises(InvalidArgumentError):
        load(text, error_feedback=wrong)


def test_one_that_was_refused_may_come_back_better(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="version 3"):
        load(build(tmp_path, "unit_better", "VERSION=3"))
    (tmp_path / "libunit_better.so").unlink()
    assert isinstance(load(build(tmp_path, "unit_better")), CCompressor)


# The header.


@pytest.mark.parametrize("language", ["c99", "c11", "c++11"])
def test_the_header_is_plain(tmp_path: Path, language: str) -> None:
    compiler = need_command("g++" if "+" in language else "gcc", "g++")
    source = tmp_path / ("x.cpp" if "+" in language else "x.c")
    source.write_text("#include <ringdp/compressor.h>\nint size = sizeof(struct ringdp_compressor);\n")
    command = [compiler, f"-std={language}", "-pedantic-errors", "-Wall", "-Wextra", "-Werror", "-fsyntax-only"]
    done = subprocess.run([*command, f"-I{include_dir()}", str(source)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
