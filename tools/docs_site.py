"""What `make docs` does beside mkdocs: a hook of mkdocs.yml.

The pages of docs/ are written for GitHub, where a link may leave docs/. On the site such a link leads to the repository
where mkdocs.yml has a `repo_url`, and is the file's path as plain text where it has none. Pages about the Python
modules are made from docstrings and exist on the site alone.
"""

from __future__ import annotations

import posixpath
import re
from typing import Any

# Modules with a page of their own, and mkdocstrings' options for it.
API: dict[str, str] = {
    # The exceptions are on the page of ringdp.errors; most methods of RingDP come from classes of the package.
    "ringdp": '{filters: ["!^_", "!Error$"], inherited_members: true}',
    "ringdp.compression": "",
    "ringdp.data": "",
    "ringdp.hooks": "",
    "ringdp.amp": "",
    "ringdp.checkpoint": "",
    "ringdp.metrics": "",
    "ringdp.testing": "",
    "ringdp.errors": "",
    "ringdp.integrations": "",
}
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((?!https?:)([^)#\s]+)(#[^)]*)?\)")
_FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


def on_files(files: Any, *, config: Any) -> Any:
    from mkdocs.structure.files import File

    for module, options in API.items():
        text = f"# {module}\n\n::: {module}\n" + (f"    options: {options}\n" if options else "")
        files.append(File.generated(config, f"api/{module.rpartition('.')[2]}.md", content=text))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    uri = page.file.src_uri
    if uri.startswith("api/"):
        return markdown
    parts = _FENCED.split(markdown)
    parts[::2] = [links_for_the_site(text, uri, config.docs_dir, config.repo_url) for text in parts[::2]]
    return "".join(parts)


def links_for_the_site(text: str, uri: str, docs: str, repository: str | None) -> str:
    """The page's text with what leads out of docs/ replaced; `uri` is the page's path in docs/."""
    folder = posixpath.basename(docs)

    def replaced(match: re.Match[str]) -> str:
        words, target, anchor = match[1], match[2], match[3] or ""
        path = posixpath.normpath(posixpath.join(folder, posixpath.dirname(uri), target))
        if path.startswith(f"{folder}/"):
            return match[0]
        if repository:
            return f"[{words}]({repository.rstrip('/')}/blob/main/{path}{anchor})"
        name = words.strip("`")
        return f"`{path}`" if path.endswith(name) else f"{words} (`{path}`)"

    return _LINK.sub(replaced, text)
