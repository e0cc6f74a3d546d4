"""What compression saves and costs: `RingDP.compression_stats`."""

from __future__ import annotations

import csv
import dataclasses
import os
from typing import Any

from ringdp.auto_compression import Decision
from ringdp.compression.exchange import Sparsity
from ringdp.compression_quality import Quality
from ringdp.model_compression import ModelCompression


@dataclasses.dataclass(frozen=True)
class CompressionStats:
    """Of this rank. Times and bytes are of the last synchronised step.

    Attributes:
        steps: synchronised backwards so far.
        parameters: how each parameter is compressed, ``"exact"`` where it is not.
        bytes_before: of the gradients, 4 per element of what is compressed.
        bytes_after: of their codes, once.
        wire_bytes: sent by this rank since the last forward, exact gradients and frame headers included; an exact
            ring would send ``2 * (ranks - 1) / ranks * bytes_before`` for the compressed ones alone.
        coding_s: spent on encoding and decoding.
        wire_s: from a bucket's launch until it was reduced, summed over the compressed buckets, which may overlap.
        exposed_s: how long the end of backward waited, for all buckets.
        buckets: a row for each bucket: index, name, method (-1: exact), numel, bytes_before, bytes_after, coding_s,
            seconds, exposed_s.
        sparsity: how many elements sparse codes sent in the last step, by parameter.
        decisions: what ``compression="auto"`` decided so far, and why.
        quality: what `RingDP.measure_compression` has measured, a row for each parameter and step.
    """

    steps: int
    parameters: dict[str, str]
    bytes_before: int
    bytes_after: int
    wire_bytes: int
    coding_s: float
    wire_s: float
    exposed_s: float
    buckets: list[dict[str, Any]]
    sparsity: dict[str, Sparsity]
    decisions: list[Decision]
    quality: list[Quality]

    def rows(self) -> list[dict[str, Any]]:
        """`quality` as dicts, for ``csv.DictWriter`` or a data frame."""
        return [dataclasses.asdict(row) for row in self.quality]

    def write_csv(self, path: str | os.PathLike[str]) -> None:
        """`rows` with a header line; replaces the file."""
        names = [field.name for field in dataclasses.fields(Quality)]
        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, names)
            writer.writeheader()
            writer.writerows(self.rows())


def collect(compression: ModelCompression) -> CompressionStats:
    """Of the last step, from the reducer and from the probe."""
    buckets = compression.reducer.bucket_rows()
    compressed = [row for row in buckets if row["method"] >= 0]
    return CompressionStats(
        steps=compression.steps,
        parameters={one.name: compression.describe_now(i) for i, one in enumerate(compression.parameters)},
        bytes_before=sum(row["bytes_before"] for row in compressed),
        bytes_after=sum(row["bytes_after"] for row in compressed),
        wire_bytes=compression.wire_bytes,
        coding_s=sum(row["coding_s"] for row in compressed),
        wire_s=sum(row["seconds"] for row in compressed),
        exposed_s=sum(row["exposed_s"] for row in buckets),
        buckets=buckets,
        sparsity=compression.sparsity(),
        decisions=compression.decisions,
        quality=[] if compression.probe is None else list(compression.probe.rows),
    )
