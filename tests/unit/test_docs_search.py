"""The words that users type lead to the page for them: what the site's search finds, in its order.

The site's search is lunr over the sections of the pages, with the boosts of mkdocs-material's search worker: a title
counts a thousand times, a page of all words more than a section, and pages are in the order of their best section.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest

from tests.helpers import need
from tests.unit import doc_pages as pages

need("lunr")
import lunr  # noqa: E402

# What is typed, and a page that has to be among the first three.
WORDS = {
    "resume": "how-to/checkpoints.md",
    "checkpoint": "how-to/checkpoints.md",
    "learning rate": "how-to/from_one_process.md",
    "warm-up": "how-to/from_one_process.md",
    "batch size": "how-to/from_one_process.md",
    "dropout": "how-to/from_one_process.md",
    "BatchNorm": "how-to/from_one_process.md",
    "evaluation": "how-to/from_one_process.md",
    "gradient accumulation": "how-to/gradient_accumulation.md",
    "no_sync": "how-to/gradient_accumulation.md",
    "mixed precision": "how-to/amp.md",
    "firewall": "how-to/launching.md",
    "ssh": "how-to/launching.md",
    "Slurm": "how-to/launching.md",
    "Kubernetes": "how-to/kubernetes.md",
    "notebook": "faq.md",
    "Windows": "faq.md",
    "out of memory": "how-to/diagnosis.md",
    "NaN": "how-to/amp.md",
    "hang": "how-to/diagnosis.md",
    "Bus error": "how-to/troubleshooting.md",
    "ModuleNotFoundError": "how-to/troubleshooting.md",
    "install": "start/first_job.md",
    "wandb": "how-to/integrations.md",
    "transformers": "how-to/integrations.md",
    "Prometheus": "reference/metrics.md",
    "environment variables": "reference/settings.md",
    "PeerLostError": "how-to/failures.md",
    "DataLoader": "how-to/from_one_process.md",
    "Horovod": "how-to/migrating_from_horovod.md",
}
FIRST = 3


def sections() -> list[dict[str, str]]:
    """As the site has them: a page's text up to its first heading of the second level, then each of these."""
    found = []
    for page in pages.all_pages():
        if page.startswith("docs/"):
            parts = re.split(r"^##+ (.*)$", pages.read(page), flags=re.MULTILINE)
            title, _, text = parts[0].lstrip("# ").partition("\n")
            titles, texts = [title, *parts[1::2]], [text, *parts[2::2]]
            for number, (title, text) in enumerate(zip(titles, texts, strict=True)):
                location = page.removeprefix("docs/") + (f"#{number}" if number else "")
                found.append({"location": location, "title": title, "text": text})
    return found


@functools.cache
def index() -> Any:
    fields = [{"field_name": "title", "boost": 1000}, "text"]
    return lunr.lunr(ref="location", fields=fields, documents=sections())


def found(words: str) -> list[str]:
    """The pages in the order of the site's search."""
    typed = re.findall(r"[\w-]+", words.lower())
    best: dict[str, float] = {}
    for one in index().search(" ".join([*typed, *(f"{word}*" for word in typed)])):
        page, _, section = one["ref"].partition("#")
        terms = one["match_data"].metadata
        every = all(any(term.startswith(word[:5]) for term in terms) for word in typed)
        best[page] = max(best.get(page, 0.0), one["score"] * (1 + ((not section) + every) ** 2))
    return sorted(best, key=lambda page: -best[page])


@pytest.mark.parametrize("words", WORDS)
def test_the_page_for_these_words_is_among_the_first(words: str) -> None:
    assert WORDS[words] in found(words)[:FIRST]


def test_as_many_words_as_users_have() -> None:
    assert len(WORDS) >= 25
