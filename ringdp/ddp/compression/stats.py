"""The bytes that compression saves and the time it costs: `RingDP.compression_stats`."""

from __future__ import annotations

import csv
import dataclasses
import os
from typing import Any

from ringdp.compression.exchange import Sparsity
from ringdp.ddp.compression.auto import Decision
from ringdp.ddp.compression.plan import ModelCompression
from ringdp.ddp.compression.quality import Quality
from ringdp.text import count, cut, format_size, format_time, short_table, table

_NAMES = 3  # of parameters with one compressor, in a table
_CHOICES = 5  # the last decisions of "auto", in a table


@dataclasses.dataclass(frozen=True)
class CompressionStats:
    """Of this rank. Times and bytes are of the last synchronised step. Prints as tables, of the first rows of each.

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
        decisions: the decisions of ``compression="auto"`` so far, with reasons.
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

    def __str__(self) -> str:
        parts = [
            self._costs(),
            self._compressors(),
            self._buckets(),
            self._densities(),
            self._errors(),
            self._choices(),
        ]
        return "\n\n".join(part for part in parts if part)

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

    def _costs(self) -> str:
        smaller = f", {self.bytes_before / self.bytes_after:.1f} times smaller" if self.bytes_after else ""
        rows = [
            ["compressed gradients", format_size(self.bytes_before)],
            [f"their codes, once{smaller}", format_size(self.bytes_after)],
            ["sent by this rank, exact ones and headers too", format_size(self.wire_bytes)],
            ["encoding and decoding", format_time(self.coding_s)],
            ["compressed buckets on their way, summed", format_time(self.wire_s)],
            ["exposed wait at the end of backward", format_time(self.exposed_s)],
        ]
        return table([f"after {count(self.steps, 'step')}", "last step"], rows)

    def _compressors(self) -> str:
        """Most parameters share a compressor."""
        names: dict[str, list[str]] = {}
        for name, compressor in self.parameters.items():
            names.setdefault(compressor, []).append(name)
        rows = [[cut(compressor, 72), f"{len(its):,}", _some(its)] for compressor, its in names.items()]
        return short_table(["compressor", "parameters", "names"], rows)

    def _buckets(self) -> str:
        rows = [
            [
                cut(row["name"]),
                "compressed" if row["reduction"] >= 0 else "exact",
                format_size(row["bytes_before"]),
                format_size(row["bytes_after"]),
                format_time(row["coding_s"]),
                format_time(row["seconds"]),
                format_time(row["exposed_s"]),
            ]
            for row in self.buckets
        ]
        return short_table(["bucket", "", "gradients", "codes", "coding", "on its way", "exposed wait"], rows)

    def _densities(self) -> str:
        rows = [
            [name, _share(one.density), _share(one.union_density), _share(one.dropped_mass)]
            for name, one in self.sparsity.items()
        ]
        return short_table(["sparse codes", "sent", "sent by any rank", "dropped mass"], rows) if rows else ""

    def _errors(self) -> str:
        """Of the last step that was measured."""
        last = [row for row in self.quality if row.step == self.quality[-1].step]
        rows = [
            [
                row.name,
                f"{row.own_nmse:.2g}",
                f"{row.mean_nmse:.2g}",
                f"{row.cosine:.4f}",
                "" if row.residual_ratio is None else f"{row.residual_ratio:.2f}",
            ]
            for row in last
        ]
        if not rows:
            return ""
        columns = [f"measured in step {last[0].step}", "own NMSE", "mean NMSE", "cosine", "residual / gradient"]
        return f"{short_table(columns, rows)}\n{count(len(self.quality), 'row')} of all steps: rows(), write_csv()"

    def _choices(self) -> str:
        earlier = [f"… {count(len(self.decisions) - _CHOICES, 'decision')} before"] * (len(self.decisions) > _CHOICES)
        latest = [f"from step {one.step}: {one.reason}" for one in self.decisions[-_CHOICES:]]
        return "\n".join(["auto", *earlier, *latest]) if latest else ""


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _NAMES:,} more" if len(names) > _NAMES else ""
    return ", ".join(cut(name, 32) for name in names[:_NAMES]) + more


def _share(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.3g} %"


def collect(compression: ModelCompression) -> CompressionStats:
    """Of the last step, from the reducer and from the probe."""
    buckets = compression.reducer.report.bucket_rows()
    compressed = [row for row in buckets if row["reduction"] >= 0]
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
