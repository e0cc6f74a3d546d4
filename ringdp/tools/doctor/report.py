"""The findings as text for people and as JSON for programs."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Sequence
from typing import Any

from ringdp.text import count
from ringdp.tools.doctor.finding import Finding, Verdict

WIDTH = 118
_INDENT = " " * 11
FORMAT = 1
"""Of the JSON: another number where a field changes its meaning or goes."""


def exit_code(findings: Sequence[Finding]) -> int:
    """0, or 1 where there is a problem."""
    return int(any(finding.verdict is Verdict.PROBLEM for finding in findings))


def text(title: str, findings: Sequence[Finding], *, tables: Sequence[str] = (), hosts: Sequence[str] = ()) -> str:
    """A paragraph for each check; a sentence that holds for some of several hosts has their names before it.

    Args:
        hosts: all hosts that were looked at; with fewer than two no names are shown.
    """
    lines = [title]
    last = ""
    for finding in findings:
        if finding.check != last:
            lines += ["", finding.check]
            last = finding.check
        lines += _lines(finding, hosts)
    for table in tables:
        lines += ["", table]
    return "\n".join([*lines, "", conclusion(findings)])


def conclusion(findings: Sequence[Finding]) -> str:
    """The numbers of problems and notes, in one line."""
    counts = Counter(finding.verdict for finding in findings)
    words = [count(counts[verdict], name) for verdict, name in ((Verdict.PROBLEM, "problem"), (Verdict.NOTE, "note"))]
    return f"{words[0]}, {words[1]}"


def as_json(content: dict[str, Any], findings: Sequence[Finding]) -> str:
    """One object: ``ringdp_doctor`` (the format's number), ``ok``, ``findings``, and the items of `content`."""
    ok = exit_code(findings) == 0
    report = {"ringdp_doctor": FORMAT, "ok": ok, **content, "findings": [one.as_dict() for one in findings]}
    return json.dumps(report, indent=2)


def _lines(finding: Finding, hosts: Sequence[str]) -> list[str]:
    some = finding.hosts and len(hosts) > 1 and set(finding.hosts) != set(hosts)
    where = f"{', '.join(finding.hosts)}: " if some else ""
    head = f"  {finding.verdict.value.ljust(7)}  "
    found = _wrapped(head, where + finding.sentence)
    return found + (_wrapped(f"{_INDENT}→ ", finding.remedy) if finding.remedy else [])


def _wrapped(head: str, words: str) -> list[str]:
    return textwrap.wrap(
        words,
        WIDTH,
        initial_indent=head,
        subsequent_indent=_INDENT + ("  " if "→" in head else ""),
        break_long_words=False,
        break_on_hyphens=False,
    )
