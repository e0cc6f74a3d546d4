"""The table of what does not go together, the page that it prints, and the calls that name its rows."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook, powerSGD_hook

from ringdp import hooks, refusals
from ringdp.compression.rules import Compression, Rules
from ringdp.ddp import in_use
from ringdp.errors import InvalidArgumentError

ROOT = Path(__file__).resolve().parents[2]


class OfABucket:
    aggregate = "rounds"

    def average(self, xs: Any, infos: Any) -> Any:
        yield list(xs)


def calls() -> set[tuple[str, str]]:
    """The rows that the product names by literals."""
    found = set()
    for path in (ROOT / "ringdp").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            function = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if function not in ("refusals.refuse", "refusals.explain", "refuse_where_elastic"):
                continue
            assert isinstance(node, ast.Call)
            words = [word.value for word in node.args if isinstance(word, ast.Constant) and isinstance(word.value, str)]
            words = ["elastic", *words] if function == "refuse_where_elastic" else words
            if len(words) >= 2:
                found.add((words[0], words[1]))
    return found


def test_the_page_is_the_table() -> None:
    page = (ROOT / "docs" / "reference" / "refusals.md").read_text()
    assert page.endswith(refusals.markdown()), "write the end of the page anew: ringdp.refusals.markdown()"


def test_each_row_has_names_and_stands_once() -> None:
    pairs = [(row.feature, row.other) for row in refusals.TABLE]
    assert len(set(pairs)) == len(pairs)
    assert {key for pair in pairs for key in pair} == set(refusals.FEATURES)


def test_each_call_has_a_row_and_each_feature_is_found_somewhere() -> None:
    """A row nobody asks for would be a promise; a call without one a KeyError in a user's job."""
    rows = {(row.feature, row.other) for row in refusals.TABLE}
    assert calls() - rows == set()
    source = "".join(path.read_text() for path in (ROOT / "ringdp").rglob("*.py") if path.name != "refusals.py")
    assert [key for key in refusals.FEATURES if f'"{key}"' not in source] == []


def test_check_refuses_the_pair_that_is_in_use_and_no_other() -> None:
    for row in refusals.TABLE:
        refusals.check({row.feature: ""})
        refusals.check({row.other: ""})
        with pytest.raises(InvalidArgumentError) as caught:
            refusals.check({row.feature: "", row.other: "its_name"})
        assert str(caught.value) == refusals.explain(row.feature, row.other, "its_name")
        assert row.why in str(caught.value)


def test_a_text() -> None:
    assert refusals.explain("reproducible", "mixing hook", "power") == (
        "reproducible=True and the communication hook power cannot be combined: it may mix the parameters of a bucket."
        " Set power.per_parameter = True if it does not"
    )
    assert refusals.explain("elastic", "join") == (
        "--elastic (RINGDP_ELASTIC=1) and torch's Join cannot be combined: ranks without input do not repeat steps."
        " Give all ranks as many batches, or start without --elastic"
    )


def test_what_hooks_rules_and_modules_bring_along() -> None:
    group: Any = object()
    assert in_use.of_hook(hooks.fp16_hook, group, group) == {"any hook": "fp16_hook"}
    other = mock.Mock(process_group=object())
    assert in_use.of_hook(hooks.fp16_hook, other, group).keys() == {"any hook", "group"}
    assert in_use.of_hook(hooks.fp16_hook, mock.Mock(process_group=group), group).keys() == {"any hook"}
    assert in_use.of_hook(powerSGD_hook.powerSGD_hook, None, group).keys() == {"any hook", "mixing hook"}
    assert in_use.of_hook(post_localSGD_hook.post_localSGD_hook, None, group)["unrepeatable"] == ("post_localSGD_hook")
    assert in_use.of_rules(Rules(None)) == {}
    assert in_use.of_rules(Rules("int8")) == {"compression": ""}
    assert in_use.of_rules(Rules("auto")) == {"compression": "", "auto": ""}
    assert in_use.of_rules(Rules("topk")).keys() == {"compression"}
    of_a_bucket = Rules(Compression(rules=[("*", OfABucket())]))
    assert "rounds compressor" in in_use.of_rules(of_a_bucket)
    assert "unrepeatable" not in in_use.of_rules(of_a_bucket)
    with mock.patch.object(OfABucket, "repeatable", False, create=True):
        assert "unrepeatable" in in_use.of_rules(of_a_bucket)
