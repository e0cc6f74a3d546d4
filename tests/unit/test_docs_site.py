"""tools/docs_site.py: links that leave docs/ on the site, and its pages in mkdocs.yml."""

from __future__ import annotations

import re
import sys

import pytest

from tests.unit.doc_pages import ROOT

sys.path.insert(0, str(ROOT / "tools"))

import docs_site


@pytest.mark.parametrize(
    ("text", "without", "with_one"),
    [
        ("[amp](amp.md#x)", "[amp](amp.md#x)", "[amp](amp.md#x)"),
        ("[here](#x)", "[here](#x)", "[here](#x)"),
        ("![plot](../../benchmarks/a.svg)", "![plot](../../benchmarks/a.svg)", "![plot](../../benchmarks/a.svg)"),
        ("[elsewhere](https://x.org/a)", "[elsewhere](https://x.org/a)", "[elsewhere](https://x.org/a)"),
        ("[a.py](../../examples/a.py)", "`examples/a.py`", "[a.py](https://h/r/blob/main/examples/a.py)"),
        ("[README](../../README.md#x)", "README (`README.md`)", "[README](https://h/r/blob/main/README.md#x)"),
    ],
)
def test_a_link_that_leaves_docs_is_replaced(text: str, without: str, with_one: str) -> None:
    for repository, expected in ((None, without), ("https://h/r/", with_one)):
        assert docs_site.links_for_the_site(text, "how-to/gpu.md", str(ROOT / "docs"), repository) == expected


def test_code_is_left_as_it_is() -> None:
    class Page:
        class file:
            src_uri = "how-to/gpu.md"

    class Config:
        docs_dir, repo_url = "docs", None

    text = "```text\n[a.py](../../examples/a.py)\n```\n[a.py](../../examples/a.py)\n"
    shown = docs_site.on_page_markdown(text, page=Page, config=Config)
    assert shown == "```text\n[a.py](../../examples/a.py)\n```\n`examples/a.py`\n"


def test_the_navigation_has_every_page() -> None:
    listed = re.findall(r"^ +- (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    written = [str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")]
    made = [f"api/{module.rpartition('.')[2]}.md" for module in docs_site.API]
    assert sorted(listed) == sorted(written + made)


def test_lists_of_pinned_packages_agree() -> None:
    """`make lint` and `make docs` may run side by side in one .venv: neither replaces what the other is using."""
    lint, docs = (
        dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "requirements" / name).read_text(), re.MULTILINE))
        for name in ("lint.txt", "docs.txt")
    )
    assert docs["ruff"] == lint["ruff"]
    assert {name: docs[name] for name in docs.keys() & lint} == {name: lint[name] for name in docs.keys() & lint}
