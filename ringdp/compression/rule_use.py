"""The rules and the parameters that they fit, and the messages about rules that fit none."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Sequence

from ringdp.compression.parameters import ModelParameter
from ringdp.compression.rules import Rules, why_always_exact
from ringdp.errors import InvalidArgumentError

_MOST_NAMES = 3
_MOST_TYPES = 8


class RuleUse:
    """The rules of one model compared with its parameters.

    Args:
        rules: checked.
        parameters: all that may be compressed, frozen ones too: they may be unfrozen.
        left_out: the model's other parameters, whose gradients are not averaged.

    Raises:
        InvalidArgumentError: a rule's function raises.
    """

    def __init__(
        self, rules: Rules, parameters: Iterable[ModelParameter] = (), left_out: Iterable[ModelParameter] = ()
    ) -> None:
        self._rules = rules
        self._parameters: list[ModelParameter] = []
        self._fit: list[list[ModelParameter]] = [[] for _ in rules.pairs]
        self._first: list[list[ModelParameter]] = [[] for _ in rules.pairs]  # for which the rule counts
        self._earlier: list[set[int]] = [set() for _ in rules.pairs]  # the rules that count in its place
        self._exact: dict[str, str] = {}  # reasons, by name
        for one in parameters:
            self.add(one)
        for one in left_out:
            self.add(one, why_always_exact(one) or "is left out of data parallelism")

    def add(self, one: ModelParameter, exact: str | None = None) -> None:
        """Add a parameter of the model. `exact`: the reason for which it is never compressed, as text."""
        exact = exact or why_always_exact(one)
        self._parameters.append(one)
        if exact is not None:
            self._exact[one.name] = exact
        fitting = list(self._rules.fitting(one))
        for number in fitting:
            self._fit[number].append(one)
            if number == fitting[0]:
                self._first[number].append(one)
            else:
                self._earlier[number].add(fitting[0])

    @property
    def unmatched(self) -> list[str]:
        """A sentence for each rule that no parameter fits, with the closest names."""
        return [
            f"no parameter fits {self._rules.describe(number)}: {self._instead(number)}"
            for number, fit in enumerate(self._fit)
            if not fit
        ]

    @property
    def without_effect(self) -> list[str]:
        """A sentence for each rule that parameters fit, and that changes nothing for any of them."""
        sentences = []
        for number, (fit, first) in enumerate(zip(self._fit, self._first, strict=True)):
            words, compressor = self._rules.describe(number), self._rules.pairs[number][1]
            if fit and not first:
                earlier = [self._rules.describe(one) for one in sorted(self._earlier[number])]
                come = "comes" if len(earlier) == 1 else "come"
                sentences.append(f"{words}, never counts: {' and '.join(earlier)}, {come} first for {_listed(fit)}")
            elif first and compressor is not None and all(one.name in self._exact for one in first):
                sentences.append(f"{words}, has no effect: {self._why_exact(first)}")
        return sentences

    def refuse_unmatched(self) -> None:
        """Raise for rules that fit no parameter, where the rules say that this is an error.

        Raises:
            InvalidArgumentError: no parameter fits some rule; says which, and the closest names.
        """
        unmatched = self.unmatched
        if unmatched and self._rules.asked.unmatched_rules == "error":
            raise InvalidArgumentError(
                "; ".join(unmatched)
                + ". Mend the rule, or pass Compression(…, unmatched_rules='warn') where rules are for several models."
            )

    @property
    def warnings(self) -> list[str]:
        """The warnings for the user, where `refuse_unmatched` has raised no error."""
        return [*self.unmatched, *self.without_effect]

    def _why_exact(self, ones: Sequence[ModelParameter]) -> str:
        reasons = [f"{one.name!r} {self._exact[one.name]}" for one in ones]
        return f"{_cut(reasons)}, so it is never compressed"

    def _instead(self, number: int) -> str:
        condition = self._rules.pairs[number][0]
        if not self._parameters:
            return "the model has no parameters"
        if isinstance(condition, str):
            names = [name for one in self._parameters for name in (*one.names, *one.aliases)]
            near = closest(condition, names)
            if near:
                return f"the closest names are {', '.join(map(repr, near))}"
            return f"the names are {_cut([repr(name) for name in names])}"
        if isinstance(condition, type):
            modules = {id(owner): owner for one in self._parameters for owner in one.owners}
            kinds = Counter(type(owner).__name__ for owner in modules.values())
            counted = [f"{kind} ({count})" for kind, count in kinds.most_common()]
            return f"the modules that have parameters themselves are of the types {_cut(counted, _MOST_TYPES)}"
        sizes = sorted(one.parameter.numel() for one in self._parameters)
        return f"they have {sizes[0]:,} to {sizes[-1]:,} elements"


def closest(pattern: str, names: Sequence[str]) -> list[str]:
    """Suggestions for a pattern: names, or where it has wildcards patterns of that form that some name fits."""
    parts = [name.split(".") for name in names]
    if pattern.startswith("*") and pattern.endswith("*"):
        candidates = [f"*{part}*" for words in parts for part in words]
    elif pattern.startswith("*"):
        candidates = [f"*.{'.'.join(words[at:])}" for words in parts for at in range(1, len(words))]
    else:
        candidates = [f"{'.'.join(words[:at])}.*" for words in parts for at in range(1, len(words))]
        candidates = candidates if pattern.endswith("*") else [*names, *candidates]
    near = difflib.get_close_matches(pattern, list(dict.fromkeys(candidates)), n=_MOST_NAMES)
    return near or difflib.get_close_matches(pattern.replace("*", ""), list(dict.fromkeys(names)), n=_MOST_NAMES)


def _listed(ones: Sequence[ModelParameter]) -> str:
    return _cut([repr(one.name) for one in ones])


def _cut(texts: Sequence[str], most: int = _MOST_NAMES) -> str:
    """With commas, and how many are not named."""
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return ", ".join(texts[:most]) + more
