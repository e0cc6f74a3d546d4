"""Classes of the core are whole: each says at its head what it is, and none is made of more than four others.

That no member of a member is called from outside its file, CONTRIBUTING's third rule, needs a compiler to see: no test
checks it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

CSRC = Path(__file__).resolve().parents[2] / "ringdp" / "csrc"
MOST_COLLABORATORS = 4
# What does not keep to the rules yet. Names are taken out, and none is put in.
MADE_OF_MORE = {"Progress": 8, "StallMonitor": 5}

CLASS = re.compile(
    r"^[ \t]*(?:template\s*<[^\n]*>\s*)?(class|struct)\s+(?:\[\[\w+\]\]\s*)?(\w+)\s*(?:final\s*)?(?::[^:{;][^{;]*)?\{",
    re.MULTILINE,
)
NOISE = re.compile(
    r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|(?<![0-9A-Fa-f])\'(?:\\.|[^\'\\\n])+\'|^[ \t]*#(?:[^\n]*\\\n)*[^\n]*',
    re.DOTALL | re.MULTILINE,
)
HELD = re.compile(r"[&*]|\b(?:shared|unique|weak|intrusive)_ptr\b")
# What calls back, and what holds several of a kind.
NO_COLLABORATOR = re.compile(r"\b(?:function|vector|map|span|optional)\s*<|&&")


def headers() -> list[Path]:
    return sorted(CSRC.rglob("*.h"))


def without_noise(source: str) -> str:
    """Comments, strings and directives as blanks: places stay where they are."""
    return NOISE.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), source)


def closed_by(source: str, at: int, pair: str) -> int:
    """Where the bracket at `at` is closed."""
    depth = 0
    for end in range(at, len(source)):
        depth += {pair[0]: 1, pair[1]: -1}.get(source[end], 0)
        if depth == 0:
            return end
    raise ValueError("a bracket is not closed: " + source[at : at + 60])


def arguments_of(text: str) -> list[str]:
    """The arguments between two parentheses."""
    arguments, depth = [""], 0
    for sign in text:
        depth += {**dict.fromkeys("(<{[", 1), **dict.fromkeys(")>}]", -1)}.get(sign, 0)
        if sign == "," and depth == 0:
            arguments.append("")
        else:
            arguments[-1] += sign
    return [" ".join(one.split()) for one in arguments if one.strip()]


def classes_in(source: str) -> Iterator[tuple[str, str, int, str]]:
    """Of each class: class or struct, its name, where it begins, what stands between its braces."""
    plain = without_noise(source)
    for found in CLASS.finditer(plain):
        brace = found.end() - 1
        yield found[1], found[2], found.start(), plain[brace + 1 : closed_by(plain, brace, "{}")]


def collaborators(name: str, body: str, classes: set[str]) -> list[str]:
    """The arguments that refer to other classes, of the constructor that has most of them."""
    most: list[str] = []
    for found in re.finditer(rf"(?<![\w~:.>]){name}\s*\(", body):
        end = closed_by(body, found.end() - 1, "()")
        told = [
            one
            for one in arguments_of(body[found.end() : end])
            if HELD.search(one)
            and not NO_COLLABORATOR.search(one)
            and set(re.findall(r"\w+", one)) & (classes - {name})
        ]
        most = max(most, told, key=len)
    return most


def made_of_more(sources: list[str]) -> dict[str, int]:
    """The classes that more than four others are given to, and how many."""
    found = [one for source in sources for one in classes_in(source)]
    classes = {name for kind, name, _, _ in found if kind == "class"}
    counts = {name: len(collaborators(name, body, classes)) for _, name, _, body in found}
    return {name: count for name, count in counts.items() if count > MOST_COLLABORATORS}


def without_a_head(source: str) -> set[str]:
    """The classes above which no comment stands, and of which the first one of the file does not speak."""
    first = re.match(r"(?://[^\n]*\n)*", source)
    assert first is not None
    return {
        name
        for kind, name, begin, _ in classes_in(source)
        if kind == "class"
        and not source[:begin].rstrip().rpartition("\n")[2].lstrip().startswith("//")
        and not re.search(rf"\b{name}\b", first[0])
    }


def test_a_class_is_made_of_four_others_at_most() -> None:
    found = made_of_more([path.read_text() for path in headers()])
    assert found == MADE_OF_MORE, (
        "a class that needs more is cut in the wrong place; one that needs fewer leaves the list"
    )


def test_a_class_says_what_it_is() -> None:
    found = set().union(*(without_a_head(path.read_text()) for path in headers()))
    assert not found, "say in a comment above it what is always true of it"


@pytest.mark.parametrize(
    ("arguments", "count"),
    [
        ("", 0),
        ("int a, std::string b, Options options", 0),
        ("Other& a, const Other* b, std::shared_ptr<Other> c, std::weak_ptr<const Other> d = {}", 4),
        ("const Options& a, Big& b, std::function<void(Other&)> c, std::vector<Other*> d, Other&& e", 0),
        ("Other& a,  // Other& b,\n Other& c", 2),
        ('std::map<int, Other*> a, const char* b = "Other& ,", Other& c', 1),
    ],
)
def test_what_a_class_is_made_of_is_counted(arguments: str, count: int) -> None:
    big = f"class Big final : public Base {{\n public:\n  Big({arguments});\n}};"
    source = "class Other {\n};\nstruct Options {};\n" + big
    found = {name: body for _, name, _, body in classes_in(source)}
    assert list(found) == ["Other", "Options", "Big"]
    assert len(collaborators("Big", found["Big"], {"Other", "Big"})) == count


def test_a_class_that_is_made_of_too_much_is_named() -> None:
    parts = "".join(f"class P{i} {{\n}};\n" for i in range(5))
    arguments = "P0& a, P1& b, P2& c, P3& d, const P4& e"
    big = f"struct Big {{\n  explicit Big(int x) : x(x) {{}}\n  Big({arguments}) : x(f({{1}})) {{}}\n}};"
    assert made_of_more([parts, big]) == {"Big": 5}
    assert made_of_more([parts, big.replace(", const P4& e", "")]) == {}


def test_a_class_without_a_head_is_named() -> None:
    assert without_a_head("// About Told.\nclass Told {\n};\n\n// This.\nclass Said {\n};\n\nclass Bare {\n};\n") == {
        "Bare"
    }
    assert without_a_head("#pragma once\nclass Bare {\n  struct Row {\n  };\n};\nclass Later;\n") == {"Bare"}
