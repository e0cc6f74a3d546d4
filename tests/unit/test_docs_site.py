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
        ("[d](../../examples/digits.py)", "[d](../examples/digits.md)", "[d](../examples/digits.md)"),
        ("[all](../../examples/README.md#x)", "[all](../examples/README.md#x)", "[all](../examples/README.md#x)"),
        ("[changes](../../CHANGELOG.md)", "[changes](../changes.md)", "[changes](../changes.md)"),
        ("[a.c](../../examples/a.c)", "`examples/a.c`", "[a.c](https://h/r/blob/main/examples/a.c)"),
        ("[README](../../README.md#x)", "README (`README.md`)", "[README](https://h/r/blob/main/README.md#x)"),
    ],
)
def test_a_link_that_leaves_docs_is_replaced(text: str, without: str, with_one: str) -> None:
    for repository, expected in ((None, without), ("https://h/r/", with_one)):
        assert docs_site.links_for_the_site(text, "how-to/gpu.md", "docs/how-to/gpu.md", repository) == expected


def test_links_of_files_beside_docs_lead_to_pages() -> None:
    text = "[first](docs/start/first_job.md), [d](examples/digits.py)"
    shown = docs_site.links_for_the_site(text, "changes.md", "CHANGELOG.md", None)
    assert shown == "[first](start/first_job.md), [d](examples/digits.md)"
    shown = docs_site.links_for_the_site(
        "[k](../docs/a.md), [d](digits.py)", "examples/README.md", "examples/README.md", None
    )
    assert shown == "[k](../a.md), [d](digits.md)"


def test_code_is_left_as_it_is() -> None:
    class Page:
        class file:
            src_uri = "how-to/gpu.md"

    class Config:
        docs_dir, repo_url = "docs", None

    text = "```text\n[a.c](../../examples/a.c)\n```\n[a.c](../../examples/a.c)\n"
    shown = docs_site.on_page_markdown(text, page=Page, config=Config)
    assert shown == "```text\n[a.c](../../examples/a.c)\n```\n`examples/a.c`\n"


def test_the_navigation_has_every_page() -> None:
    listed = re.findall(r"^ +- (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    written = [str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")]
    made = [f"api/{module.rpartition('.')[2]}.md" for module in docs_site.API]
    made += [*docs_site.examples().values(), *docs_site.OTHERS.values()]
    assert sorted(listed) == sorted(written + made)


def test_the_how_to_pages_are_in_five_groups() -> None:
    how_to = (ROOT / "mkdocs.yml").read_text().split("  - How to:\n")[1].split("  - Examples:\n")[0]
    groups = [len(group.split(".md")) - 1 for group in re.split(r"^ {6}- .*:$", how_to, flags=re.MULTILINE)[1:]]
    assert len(groups) == 5
    assert max(groups) <= 8


def test_the_reference_has_every_public_name() -> None:
    import ringdp
    import ringdp.integrations

    shown = [name for names in docs_site.RINGDP.values() for name in names]
    assert len(shown) == len(set(shown))
    modules = {module.removeprefix("ringdp.") for module in docs_site.API}
    others = {name for name in ringdp.__all__ if name.endswith("Error") or name == "MembershipChanged"}
    assert {*shown, *others} == set(ringdp.__all__) - modules
    assert shown[0] == "RingDP"
    page = docs_site.api_page("ringdp")
    first = [
        page.index(text) for text in ("ringdp.RingDP\n", "no_sync()", "join()", "ringdp.RingDP.report", "ringdp.init")
    ]
    assert first == sorted(first)
    for member in docs_site.RINGDP_MEMBERS:
        assert callable(getattr(ringdp.RingDP, member))
    integrations = {name.rpartition(".")[2] for name in docs_site.API["ringdp.integrations"]}
    assert integrations == set(ringdp.integrations.__all__)


def test_a_table_has_its_columns_names_in_the_cells() -> None:
    table = "<table><tr><th>a &amp; b</th><th></th></tr><tr><td>1</td><td style='x'>2</td></tr></table>"
    shown = docs_site.on_page_content(f"<p>{table}")
    assert '<td data-label="a &amp; b">1</td>' in shown
    assert "<td data-label=\"\" style='x'>2</td>" in shown


def test_an_example_is_a_page() -> None:
    page = docs_site.example_page("examples/n_processes.py")
    assert page.startswith("# n_processes.py\n\none_process.py on several ranks")
    assert "```python\nfrom __future__" in page


def test_lists_of_pinned_packages_agree() -> None:
    """`make lint` and `make docs` may run side by side in one .venv: neither replaces what the other is using."""
    lint, docs = (
        dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "requirements" / name).read_text(), re.MULTILINE))
        for name in ("lint.txt", "docs.txt")
    )
    assert docs["ruff"] == lint["ruff"]
    assert {name: docs[name] for name in docs.keys() & lint} == {name: lint[name] for name in docs.keys() & lint}
