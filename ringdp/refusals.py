"""What cannot be used together: the one table. docs/reference/refusals.md is printed from it by `markdown`.

`RingDP` gives `check` the features that are in use; a part that finds an elastic group calls `refuse`. To let two go
together, delete the row, and the call of `refuse` where there is one.
"""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Mapping
from typing import NamedTuple, NoReturn

from ringdp.errors import InvalidArgumentError


class Row(NamedTuple):
    """One pair; `{name}` in a text is the object that the user gave.

    Attributes:
        feature: key in `FEATURES`.
        other: key in `FEATURES`.
        why: the reason in a few words.
        instead: what to do.
    """

    feature: str
    other: str
    why: str
    instead: str


FEATURES = {
    "elastic": "--elastic (RINGDP_ELASTIC=1)",
    "reproducible": "reproducible=True",
    "compression": "compression",
    "mixed_precision": "mixed_precision",
    "low precision": "mixed_precision with a reduce_dtype or a param_dtype",
    "weight": "weight",
    "dtensor": "DTensor parameters",
    "optimizer in backward": "an optimizer that steps during backward (_apply_optimizer_in_backward)",
    "delayed all-reduce": "delay_all_reduce_named_params",
    "compiled backward": "a backward that is compiled as one graph",
    "other parameters": "parameters that are replaced, added or removed after wrapping",
    "any hook": "the communication hook {name}",
    "mixing hook": "the communication hook {name}",
    "unrepeatable": "a hook or compressor that may keep a state elsewhere ({name})",
    "rounds compressor": "compression by {name}, whose `average` gets whole buckets,",
    "auto": 'compression="auto"',
    "rules": "rules of a Compression",
    "join": "torch's Join",
    "async kvstore": "an asynchronous store or table (dist_async, asynchronous=True)",
    "waiting kvstore": "dist_async with staleness=0",
    "async table": "ShardedEmbedding(asynchronous=True)",
    "growing": "a table that grows",
    "compressed kvstore": "the compression of a key-value store",
    "rounds": "averaging in rounds ({name})",
    "group": "a RingDP or a hook over another kind of group ({name})",
    "backend": "the backend {name}",
    "ddp_hook": "ddp_hook or simulate",
    "warmup_steps": "warmup_steps of a Compression",
    "job": "ringdp.elastic.Job",
    "job batches": "epochs() and loader() of ringdp.elastic.Job",
    "sites": "a DiLoCo whose model is in a RingDP over several ranks",
    "unequal rounds": "rounds by time (unequal=True)",
    "quorum": "rounds that end without late ranks (quorum=…)",
    "delay": "fragments on their way (Fragments(…, delay=…))",
    "average_momenta": "average_momenta of LocalSGD",
    "redirects": "--redirects, --tee or --local-ranks-filter",
    "console": "--console",
}
"""What users call each feature."""


TABLE = (
    Row("elastic", "dtensor", "a lost rank's part of them is lost", "use plain parameters"),
    Row(
        "elastic",
        "compiled backward",
        "its all-reduces are in the graph, which is not run again",
        "compile without optimize_ddp='python_reducer'",
    ),
    Row(
        "elastic",
        "unrepeatable",
        "a repeated step would change it twice",
        "keep all in a hook's first argument, or in a compressor's info.state, and set repeatable = True",
    ),
    Row("elastic", "join", "ranks without input do not repeat steps", "give all ranks as many batches"),
    Row(
        "elastic",
        "group",
        "in a step only the model's group goes on without a lost rank, on ring and the CPU",
        "make the model's group on ring, and give the hook none",
    ),
    Row("elastic", "waiting kvstore", "pushes of a clock are lost with an owner", "take dist_sync, which keeps all"),
    Row("elastic", "async table", "rows would be lost with a rank", "take a table that is not asynchronous"),
    Row("job", "sites", "a newcomer is a site of its own", "give DiLoCo a plain module, with one rank a site"),
    Row(
        "job",
        "async kvstore",
        "newcomers come where all ranks are at one step, and workers of this store are each at their own",
        "leave out the Job: then ranks may die, and nobody comes",
    ),
    Row("job", "unequal rounds", "there is no step before which all ranks could let others in", "use rounds by steps"),
    Row(
        "quorum",
        "job batches",
        "ranks are at batches of their own",
        "iterate over job.rounds(n), with a loader of yours",
    ),
    Row("quorum", "unequal rounds", "each says in its own way when a round is over", "give one of the two"),
    Row("quorum", "delay", "nobody goes on before a mean is there that some may not be in", "leave out the delay"),
    Row("quorum", "average_momenta", "a late rank's momenta are of other steps", "leave out one of the two"),
    Row("quorum", "sites", "a site's ranks would be late one by one", "give DiLoCo a plain module, one rank a site"),
    Row("console", "redirects", "both say where output goes", "leave out one of them"),
    Row("reproducible", "backend", "only the backend ring adds in rank order", "make a group on ring"),
    Row("reproducible", "auto", "it chooses by measured speeds", "name a compressor"),
    Row(
        "reproducible",
        "rounds compressor",
        "it may mix the parameters of a bucket",
        "set per_parameter = True in its class if it does not",
    ),
    Row(
        "reproducible",
        "mixing hook",
        "it may mix the parameters of a bucket",
        "set {name}.per_parameter = True if it does not",
    ),
    Row(
        "compression",
        "any hook",
        "both say how buckets are reduced",
        "use one of them: ddp_hook makes a hook of a compressor",
    ),
    Row("compression", "low precision", "it sends gradients in its own dtype", "call forward under torch.autocast"),
    Row("compression", "optimizer in backward", "it averages buckets in a hook of its own", "leave out one of them"),
    Row("any hook", "optimizer in backward", "it averages buckets in a hook of its own", "leave out one of them"),
    Row("any hook", "low precision", "it reduces buckets in a hook of its own", "call forward under torch.autocast"),
    Row("low precision", "optimizer in backward", "each needs a hook of its own", "call forward under torch.autocast"),
    Row(
        "optimizer in backward",
        "delayed all-reduce",
        "it would step before the mean is there",
        "call the optimizer after backward",
    ),
    Row("dtensor", "mixed_precision", "its copies are plain tensors", "call forward under torch.autocast"),
    Row("dtensor", "optimizer in backward", "it would step before the mean is there", "use a plain optimizer"),
    Row("other parameters", "dtensor", "its parts are those of the start", "wrap the module anew"),
    Row("other parameters", "mixed_precision", "its copies are those of the start", "wrap the module anew"),
    Row("other parameters", "delayed all-reduce", "its list is that of the start", "wrap the module anew"),
    Row("other parameters", "optimizer in backward", "its hooks are those of the start", "wrap the module anew"),
    Row("other parameters", "compiled backward", "its graph is that of the start", "wrap the module anew"),
    Row("weight", "delayed all-reduce", "that all-reduce counts all ranks the same", "leave out one of them"),
    Row("weight", "compiled backward", "its means are in the graph", "leave out one of them"),
    Row("async kvstore", "compressed kvstore", "an owner has no common residual of all workers", "push less often"),
    Row("async kvstore", "growing", "ids get rows by what all ranks look up in a step", "give the number of rows"),
    Row("auto", "compressed kvstore", "only RingDP measures while it trains", "name a compressor"),
    Row("auto", "ddp_hook", "only RingDP measures while it trains", "name a compressor"),
    Row("auto", "rounds", "only RingDP measures while it trains", "name a compressor"),
    Row("rules", "compressed kvstore", "all keys have one compressor", "give that"),
    Row("rules", "rounds", "all changes have one codec, those of biases and norms too", "give that"),
    Row("warmup_steps", "compressed kvstore", "a store does not count steps", "call set_gradient_compression later"),
    Row("warmup_steps", "ddp_hook", "a hook does not count steps", "use RingDP, or register it later"),
)

_ROWS = {(row.feature, row.other): row for row in TABLE}


def explain(feature: str, other: str, name: str = "") -> str:
    """The message of a row; `name` is the object that the user gave, where the row has a place for it."""
    row = _ROWS[feature, other]
    pair = f"{FEATURES[feature]} and {FEATURES[other]}".replace("{name}", name)
    return f"{pair.removesuffix(',')} cannot be combined: {row.why}. {_advice(row).replace('{name}', name)}"


def refuse(feature: str, other: str, name: str = "") -> NoReturn:
    """Raise InvalidArgumentError with the message of that row."""
    raise InvalidArgumentError(explain(feature, other, name))


def check(in_use: Mapping[str, str]) -> None:
    """Raise InvalidArgumentError for the first row of the table whose features are both in use.

    Args:
        in_use: the keys of features; to each the name of the user's object, or "".
    """
    if text := found(in_use):
        raise InvalidArgumentError(text)


def found(in_use: Mapping[str, str]) -> str:
    """As `check`, but returns the message; "" where all go together."""
    for row in TABLE:
        if row.feature in in_use and row.other in in_use:
            return explain(row.feature, row.other, in_use[row.other] or in_use[row.feature])
    return ""


def markdown() -> str:
    """The page's part that lists the table: a heading for each feature, and a point for each it does not go with."""
    parts: list[str] = []
    for feature, rows in itertools.groupby(TABLE, lambda row: row.feature):
        parts.append(f"## {FEATURES[feature]}\n\n")
        for row in rows:
            point = f"- {FEATURES[row.other].removesuffix(',')}: {row.why}. {_advice(row)}".replace("{name}", "…")
            parts.append(textwrap.fill(point, 128, subsequent_indent="  ", break_on_hyphens=False) + "\n")
        parts.append("\n")
    return "".join(parts).rstrip("\n") + "\n"


def _advice(row: Row) -> str:
    otherwise = ", or start without --elastic" if row.feature == "elastic" else ""
    return f"{row.instead[:1].upper()}{row.instead[1:]}{otherwise}"
