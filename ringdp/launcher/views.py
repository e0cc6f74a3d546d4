"""How the console shows each rank's two streams."""

from __future__ import annotations

import dataclasses
import enum
from string import Template
from typing import Literal

from torch.distributed.elastic.multiprocessing import Std, to_map

Stream = Literal["stdout", "stderr"]
STREAMS: tuple[Stream, Stream] = ("stdout", "stderr")


class Mode(enum.Enum):
    """How one stream of one rank is shown."""

    RAW = "as it comes, byte by byte, so that progress bars work"
    LINES = "line by line, prefixed"
    ERRORS = "only tracebacks and lines that are errors, prefixed"
    HIDDEN = "not at all; the log has it"


@dataclasses.dataclass(frozen=True, kw_only=True)
class View:
    """How one stream is shown, and what stands before each line."""

    mode: Mode
    prefix: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Views:
    """The rules, from the command line.

    With any of --redirects, --tee and --local-ranks-filter torchrun's rules hold: a redirected stream is not shown,
    a teed one is shown with torchrun's prefix, any other is shown as it is. Where that would mix the streams of
    several ranks byte by byte, lines with the rank in front are shown instead.

    Attributes:
        console: "errors", "rank0", "all", or "none", where a user's class shows the streams (--logs-specs); None for
            torchrun's rules.
        redirects: streams that go to the log alone, for all ranks or by local rank.
        tee: streams that are also shown.
        local_ranks: the only local ranks that are shown; empty for all.
        role: name of the role, for torchrun's prefix.
        template: TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE.
    """

    console: str | None
    redirects: Std | dict[int, Std] = Std.NONE
    tee: Std | dict[int, Std] = Std.NONE
    local_ranks: frozenset[int] = frozenset()
    role: str = "default"
    template: str | None = None

    def of(self, *, rank: int, local_rank: int, local_world_size: int, stream: Stream) -> View:
        """How one stream is shown."""
        if self.console is None:
            return self._as_torchrun(rank, local_rank, local_world_size, stream)
        if self.console == "none":
            return View(mode=Mode.HIDDEN)
        if self.console == "all":
            return View(mode=Mode.LINES, prefix=rank_prefix(rank))
        if rank == 0:
            return View(mode=Mode.RAW)
        if self.console == "errors" and stream == "stderr":
            return View(mode=Mode.ERRORS, prefix=rank_prefix(rank))
        return View(mode=Mode.HIDDEN)

    @property
    def follow_rank_0(self) -> bool:
        """Whether a process that becomes rank 0 of an elastic job is shown as rank 0 is."""
        return self.console in ("errors", "rank0")

    def teed(self, *, local_rank: int, local_world_size: int, stream: Stream) -> bool:
        """Whether --tee names this stream."""
        return bool(to_map(self.tee, local_world_size)[local_rank] & (Std.OUT if stream == "stdout" else Std.ERR))

    def _as_torchrun(self, rank: int, local_rank: int, local_world_size: int, stream: Stream) -> View:
        bit = Std.OUT if stream == "stdout" else Std.ERR
        tee, redirects = to_map(self.tee, local_world_size), to_map(self.redirects, local_world_size)
        if self.local_ranks and local_rank not in self.local_ranks:
            return View(mode=Mode.HIDDEN)
        if tee[local_rank] & bit:
            return View(mode=Mode.LINES, prefix=self._torchrun_prefix(rank, local_rank))
        if redirects[local_rank] & bit:
            return View(mode=Mode.HIDDEN)
        shown = [r for r in range(local_world_size) if not self.local_ranks or r in self.local_ranks]
        plain = [r for r in shown if not (tee[r] | redirects[r]) & bit]
        return View(mode=Mode.RAW) if len(plain) == 1 else View(mode=Mode.LINES, prefix=rank_prefix(rank))

    def _torchrun_prefix(self, rank: int, local_rank: int) -> str:
        if self.template is None:
            return f"[{self.role}{local_rank}]:"
        return Template(self.template).safe_substitute(role_name=self.role, rank=rank, local_rank=local_rank)


def rank_prefix(rank: int) -> str:
    """What stands before a line of this rank."""
    return f"[rank {rank}] "
