"""What `make docs` does beside mkdocs: a hook of mkdocs.yml.

The pages of docs/ are written for GitHub, where a link may leave docs/. On the site such a link leads to the page that
is made of the file (an example, the changes), else to the repository where one is known, else it is the file's path
as plain text. Pages about the Python modules are made from docstrings and exist on the site alone.

The repository is that of `toolchain.repository`.
"""

from __future__ import annotations

import ast
import html
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))

import toolchain  # noqa: E402

# Of the page of `ringdp`: its parts, in the order in which users need them. A member of RingDP that is not named here
# is one that libraries call.
RINGDP: dict[str, list[str]] = {
    "The model": ["RingDP"],
    "A script on several ranks": ["init", "prepare", "gather", "print", "main_first", "shutdown"],
    "Who am I": ["rank", "world_size", "local_rank", "device", "is_initialized"],
    "Without a launcher": ["launch"],
    "Slow networks": ["Compression", "DiLoCo", "LocalSGD", "Fragments", "levels"],
    "Finding out": ["timeline", "Guard", "named", "monitored_barrier", "traffic", "transports", "gradient_memory"],
}
RINGDP_MEMBERS = [
    "report", "stats", "set_weight", "check_replicas", "guard_optimizer", "compression_stats", "measure_compression",
    "set_compression", "compression_state_dict", "load_compression_state_dict", "register_comm_hook",
    "register_builtin_comm_hook", "zero_grad", "load_state_dict",
]  # fmt: skip
# Methods of torch's DistributedDataParallel, whose text is not here.
OF_TORCH = """
#### no_sync()

`with model.no_sync():` around the forward **and** the backward of a micro-batch: gradients add up on this rank and
are not sent. The first backward outside sends their sum. [Accumulate gradients](../how-to/gradient_accumulation.md).

#### join()

`with model.join():` around the loop over batches: ranks may have different numbers of batches. One that has none left
takes part in the others' collectives with zeros (`divide_by_initial_world_size=False` divides by the ranks that have
batches).
`throw_on_early_termination=True` raises on all ranks when the first one is done.
"""
# In another place than their name says: a module of the same name, or one that needs its library.
PLACES = {"launch": "ringdp.job.local_ranks.launch"}
# Modules with a page of their own, and what is shown of them in place of the module's own members.
API: dict[str, list[str]] = {
    "ringdp": [],
    "ringdp.data": [],
    "ringdp.elastic": [],
    "ringdp.metrics": [],
    "ringdp.checkpoint": [],
    "ringdp.compression": [],
    "ringdp.amp": [],
    "ringdp.hooks": [],
    "ringdp.kvstore": [],
    "ringdp.nn": [],
    "ringdp.integrations": [
        "accelerate.RingAccelerator", "accelerate.use_ringdp", "transformers.RingTrainer",
        "lightning.RingDPTrainerStrategy", "fabric.RingDPStrategy", "ray.RingConfig", "torchft.ProcessGroupRing",
    ],
    "ringdp.errors": [],
    "ringdp.testing": [],
}  # fmt: skip
# Files outside docs/ that are pages of the site.
OTHERS = {"CHANGELOG.md": "changes.md", "examples/README.md": "examples/README.md"}
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((?!https?:)([^)#\s]+)(#[^)]*)?\)")
_FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
_ROW = re.compile(r"<tr>(.*?)</tr>", re.DOTALL)


def examples() -> dict[str, str]:
    """The file of each example and its page."""
    return {f"examples/{path.name}": f"examples/{path.stem}.md" for path in sorted(ROOT.glob("examples/*.py"))}


def on_config(config: Any) -> Any:
    config.repo_url = config.repo_url or toolchain.repository()
    if config.repo_url:
        config.edit_uri = "edit/main/docs/"
        config.repo_name = "/".join(config.repo_url.rstrip("/").split("/")[-2:])
    found = re.search(r'^__version__ = "(.+?)"', (ROOT / "ringdp/__init__.py").read_text(), re.MULTILINE)
    assert found
    config.site_name = f"ringdp {found[1]}"
    return config


def on_files(files: Any, *, config: Any) -> Any:
    from mkdocs.structure.files import File

    pages = {f"api/{module.rpartition('.')[2]}.md": api_page(module) for module in API}
    pages |= {page: example_page(file) for file, page in examples().items()}
    pages |= {page: (ROOT / file).read_text() for file, page in OTHERS.items()}
    for page, text in pages.items():
        files.append(File.generated(config, page, content=text))
    return files


def api_page(module: str) -> str:
    if module == "ringdp":
        parts = [f"\n## {title}\n\n" + "".join(map(_member, names)) for title, names in RINGDP.items()]
        return "# ringdp\n\nThe exceptions are on the page of [ringdp.errors](errors.md).\n" + "".join(parts)
    members = "".join(_entry(f"{module}.{name}", "heading_level: 2") for name in API[module])
    return f"# {module}\n\n" + (members or f"::: {module}\n")


def _member(name: str) -> str:
    place = PLACES.get(name, f"ringdp.{name}")
    if name != "RingDP":
        return _entry(place, "heading_level: 3")
    members = [_entry(f"{place}.{member}", "heading_level: 4") for member in RINGDP_MEMBERS]
    return _entry(place, "heading_level: 3, members: false") + OF_TORCH + "\n" + "".join(members)


def _entry(place: str, options: str) -> str:
    return f"::: {place}\n    options: {{show_root_heading: true, show_root_toc_entry: true, {options}}}\n\n"


def example_page(file: str) -> str:
    """The script, below what it says of itself; commands in there are those that it has."""
    source = (ROOT / file).read_text()
    text = ast.get_docstring(ast.parse(source)) or ""
    summary, _, rest = text.partition("\n\n")
    commands = f"```text\n{rest}\n```\n\n" if rest else ""
    code = source.split('"""\n', 2)[-1].lstrip("\n") if source.startswith('"""') else source
    return f"# {posixpath.basename(file)}\n\n{summary}\n\n{commands}```python\n{code}```\n"


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    uri = page.file.src_uri
    if uri.startswith("api/") or uri in examples().values():
        return markdown
    parts = _FENCED.split(markdown)
    written = next((file for file, made in OTHERS.items() if made == uri), posixpath.join("docs", uri))
    parts[::2] = [links_for_the_site(text, uri, written, config.repo_url) for text in parts[::2]]
    return "".join(parts)


def links_for_the_site(text: str, uri: str, written: str, repository: str | None) -> str:
    """The page's text with what leads out of docs/ replaced.

    Args:
        uri: the page's path on the site.
        written: the path of its file from the repository's root, from which its links lead.
    """
    made = examples() | OTHERS

    def replaced(match: re.Match[str]) -> str:
        words, target, anchor = match[1], match[2], match[3] or ""
        path = posixpath.normpath(posixpath.join(posixpath.dirname(written), target))
        if path in made or path.startswith("docs/"):
            there = made.get(path, path.removeprefix("docs/"))
            return f"[{words}]({posixpath.relpath(there, posixpath.dirname(uri) or '.')}{anchor})"
        if repository:
            return f"[{words}]({repository.rstrip('/')}/blob/main/{path}{anchor})"
        name = words.strip("`")
        return f"`{path}`" if path.endswith(name) else f"{words} (`{path}`)"

    return _LINK.sub(replaced, text)


def on_page_content(content: str, **_: Any) -> str:
    """Tables that a phone can read: site.css shows each cell below its column's name, which is written into it here."""
    return re.sub(r"<table>.*?</table>", lambda table: labelled(table[0]), content, flags=re.DOTALL)


def labelled(table: str) -> str:
    """The table, with the attribute data-label in its cells."""
    heads = [re.sub(r"<[^>]+>", "", name) for name in re.findall(r"<th[^>]*>(.*?)</th>", table, re.DOTALL)]
    names = [html.escape(html.unescape(name).strip()) for name in heads]

    def row(match: re.Match[str]) -> str:
        column = iter(names)
        return re.sub(r"<td", lambda _: f'<td data-label="{next(column, "")}"', match[0])

    return _ROW.sub(row, table)
