"""Sentences about ranks that failed, in the same words wherever they are said: how a process ended, and which ranks
made different numbers of steps."""

from __future__ import annotations

import dataclasses
import re
import signal
from collections.abc import Mapping

RETURNED = "the function has returned"
"""The name of the barrier that `ringdp.launch` issues behind the function."""

ADVICE = "Use DistributedSampler, drop_last=True, or `with model.join():`"
_CAUSE = "the ranks have different numbers of batches"
_LEFT_EARLY = "left its loop early"

_STEP = re.compile(r"\(step (\d+), ")
_HOW = {  # of goodbyes: what follows the rank's name
    "its program ended": "'s program ended",
    "it called ringdp.shutdown()": " called ringdp.shutdown()",
    "its process group was destroyed": " left its process group",
}
_LEFT = re.compile(rf"lost rank (\d+)\b.*?it left the job: ({'|'.join(map(re.escape, _HOW))}) after (\d+) steps?\b")
_MISMATCH = re.compile(
    r"ranks disagree about operation #\d+: rank (\d+) \([^)]*\) does (.*?), rank (\d+) \([^)]*\) does (.*?); "
)
_TOLD = re.compile(r"\brank \d+(?:'s)? [^:]*? after (\d+) steps? while rank \d+ makes ")  # by `Unequal.sentence`
_IN_A_STEP = " 'bucket "


@dataclasses.dataclass(frozen=True)
class Unequal:
    """A rank that has made its last step while another one makes a further one.

    Attributes:
        done: the rank without batches.
        how: what it does instead, to follow its name: "'s program ended".
        steps: those it has made; None where that is not known.
        rank: the other rank.
        step: the step that this one makes; None where that is not known.
        otherwise: the other explanation, to follow the first one's name: "left its loop early".
    """

    done: int
    how: str
    steps: int | None
    rank: int
    step: int | None
    otherwise: str = _LEFT_EARLY

    def sentence(self, how: str = "", *, sure: bool = False) -> str:
        """The sentence for the user.

        Args:
            how: in place of the attribute, what is known better by now: " finished its script".
            sure: the rank is known to have ended well.
        """
        after = "" if self.steps is None else f" after {self.steps} step{'' if self.steps == 1 else 's'}"
        other = "a further step" if self.step is None else f"step {self.step}"
        early = "" if sure else f", or rank {self.done} {self.otherwise}"
        return (
            f"rank {self.done}{how or self.how}{after}{' (exit code 0)' if sure else ''} while rank {self.rank} makes"
            f" {other}: {_CAUSE}{early}. {ADVICE}"
        )


def unequal(message: str, rank: int | None, made: int | None = None, *, without_step: bool = False) -> Unequal | None:
    """What the message of an error of `rank` says about different numbers of steps; None where it says nothing.

    Args:
        message: as the core and the reducer have composed it.
        rank: the one that raised it.
        made: the steps of this rank.
        without_step: the message is the core's alone, which knows the bucket and not the step.
    """
    found = _STEP.search(message)
    step = int(found[1]) if found else None
    in_bucket = step is not None or (without_step and _IN_A_STEP in message)
    if rank is not None and in_bucket and (left := _LEFT.search(message)):
        done, how, steps = int(left[1]), left[2], int(left[3])
        if done != rank and (step is None or steps < step):
            return Unequal(done, _HOW[how], steps, rank, step)
    if (both := _MISMATCH.search(message)) is None:
        return None
    calls = {int(both[1]): both[2], int(both[3]): both[4]}
    in_step = [it for it, call in calls.items() if _IN_A_STEP in call]
    if len(calls) != 2 or len(in_step) != 1:
        return None
    (other,) = in_step
    (done,) = set(calls) - {other}
    returned = RETURNED in calls[done]
    how = "'s function returned" if returned else f" calls {calls[done]}"
    if made is None and (told := _TOLD.search(message)):
        made = int(told[1])
    return Unequal(
        done,
        how,
        made if rank == done else None,
        other,
        step if rank == other else None,
        _LEFT_EARLY if returned else "alone makes that call",
    )


def unequal_of_all(messages: Mapping[int, str], *, without_step: bool = False) -> Unequal | None:
    """What the ranks' errors say together about different numbers of steps; see `unequal`.

    Args:
        messages: by the rank that raised it.
        without_step: as there.
    """
    each = [unequal(message, rank, without_step=without_step) for rank, message in messages.items()]
    found = [one for one in each if one is not None]
    if not found:
        return None
    first = found[0]
    steps = [it.steps for it in found if it.done == first.done and it.steps is not None]
    step = [it.step for it in found if it.rank == first.rank and it.step is not None]
    return dataclasses.replace(first, steps=steps[0] if steps else None, step=step[0] if step else None)


_SIGNALS = {
    signal.SIGKILL: "often: out of memory",
    signal.SIGSEGV: "invalid memory access",
    signal.SIGABRT: "a check in native code failed",
    signal.SIGBUS: "often: the shared-memory file system /dev/shm is full",
    signal.SIGILL: "an instruction this processor does not have",
    signal.SIGFPE: "integer division by zero",
    signal.SIGTERM: "another process asked it to end",
    signal.SIGINT: "Ctrl-C, or sent by another process",
    signal.SIGXCPU: "its limit of CPU time",
}


def ended(exit_code: int, why: str = "") -> str:
    """How a process ended, to follow its name: "was killed by SIGKILL (out of memory: the kernel ended it)".

    Args:
        exit_code: minus the number of the signal that killed it.
        why: the explanation of the signal, if it is known better than from its number.
    """
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    try:
        number = signal.Signals(-exit_code)
    except ValueError:
        return f"was killed by signal {-exit_code}"
    words = why or _SIGNALS.get(number)
    return f"was killed by {number.name}{f' ({words})' if words else ''}"


WITHOUT_LEAVING = "ended with exit code 0 without leaving the job (os._exit?)"


def out_of_memory(before: int | None, after: int | None) -> str:
    """The explanation of a SIGKILL; empty where the kernel does not count.

    Args:
        before: `oom_kills` when the ranks were started.
        after: `oom_kills` now.
    """
    if before is None or after is None:
        return ""
    if after > before:
        return "out of memory: the kernel ended it"
    return "often: out of memory; here the kernel's own killer did not act"


def oom_kills() -> int | None:
    """The number of processes that this kernel's out-of-memory killer has ended, in containers too; None where it does
    not count them."""
    try:
        with open("/proc/vmstat") as file:
            return next((int(line.split()[1]) for line in file if line.startswith("oom_kill ")), None)
    except OSError:
        return None
