"""The result of a check: a sentence with a verdict and, where there is one, a remedy."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Mapping
from typing import Any


class Verdict(enum.Enum):
    """How much a finding matters."""

    OK = "ok"
    NOTE = "note"  # works, and could work better; or a fact that explains a later one
    PROBLEM = "problem"  # training will fail here, or a threshold that the user gave is missed


@dataclasses.dataclass(frozen=True)
class Finding:
    """One sentence of a check.

    Attributes:
        check: the name of the check, one of `registry.CHECKS` or of the checks between ranks.
        verdict: how much it matters.
        sentence: the result.
        remedy: empty where there is nothing to do.
        facts: the same as numbers and words, for ``--json``.
        hosts: the hosts that it holds for; empty for the host that checks, and for the job.
    """

    check: str
    verdict: Verdict
    sentence: str
    remedy: str = ""
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    hosts: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**dataclasses.asdict(self), "verdict": self.verdict.value, "hosts": list(self.hosts)}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Finding:
        """The finding of an `as_dict`."""
        return cls(**{**content, "verdict": Verdict(content["verdict"]), "hosts": tuple(content["hosts"])})


def ok(sentence: str, **facts: Any) -> Finding:
    """A finding without a remedy; `run_checks` adds the check's name."""
    return Finding("", Verdict.OK, sentence, facts=facts)


def note(sentence: str, remedy: str = "", **facts: Any) -> Finding:
    """A finding that could be better."""
    return Finding("", Verdict.NOTE, sentence, remedy, facts)


def problem(sentence: str, remedy: str, **facts: Any) -> Finding:
    """A finding that stops training or misses a threshold."""
    return Finding("", Verdict.PROBLEM, sentence, remedy, facts)


def merged(findings_by_host: Mapping[str, Iterable[Finding]]) -> list[Finding]:
    """The findings of several hosts, by check; equal ones stand there once, with the names of their hosts."""
    hosts_of: dict[tuple[str, Verdict, str, str], list[str]] = {}
    first: dict[tuple[str, Verdict, str, str], Finding] = {}
    order: dict[str, int] = {}
    for host, findings in findings_by_host.items():
        for finding in findings:
            key = (finding.check, finding.verdict, finding.sentence, finding.remedy)
            order.setdefault(finding.check, len(order))
            first.setdefault(key, finding)
            hosts_of.setdefault(key, []).append(host)
    found = [dataclasses.replace(one, hosts=tuple(hosts_of[key])) for key, one in first.items()]
    return sorted(found, key=lambda one: order[one.check])
