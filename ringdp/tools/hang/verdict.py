"""The verdict from all dumps of a job: the first operation on which the ranks differ, and the cause."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from ringdp import stories
from ringdp.tools.hang.dump_files import Dump, Failure, Group, Job, Operation

# Code that is not the user's, wherever it was installed.
_FOREIGN = re.compile(
    r"/lib/python3|/site-packages/|/ringdp/(compression|data|ddp|hooks|integrations|job|launcher|testing|tools)/|^<"
)
_LEFT_JOB = ": it left the job"  # in the errors of the others, where a rank has said goodbye
_VIEW = "/view "  # in the names of an elastic group after a loss
# Ranks write their dumps at different moments: what one has called shortly before is on its way to the others.
_SHORT_NS = 1_000_000_000
FIRST_FRAMES = 6  # of a stack that a verdict shows


@dataclasses.dataclass(frozen=True)
class Wait:
    """A rank has called an operation that another member of its group has not."""

    rank: int
    operation: Operation
    group: Group
    for_rank: int


@dataclasses.dataclass(frozen=True)
class Verdict:
    """``paragraph`` is the explanation; ``stacks`` has the stacks of the ranks that it names, by rank."""

    paragraph: str
    guilty: tuple[int, ...]
    stacks: dict[int, str]


def judge(job: Job) -> Verdict:
    """The verdict; of several faults, the one that explains the others."""
    waits = find_waits(job)
    for found in (
        _disagreement(job),
        _death(job),
        _deadlock(job, waits),
        _stuck(job, waits),
        _unsent(job),
        _failure(job),
    ):
        if found is not None:
            return _with_batches(job, found)
    return Verdict(_nothing(job), (), {})


def _with_batches(job: Job, verdict: Verdict) -> Verdict:
    """With the sentence about different numbers of batches, where these are the cause and no launcher has said so."""
    if any(stories.ADVICE in one.words for one in job.said):
        return verdict
    messages = {rank: it.text for rank, dump in job.dumps.items() for it in dump.failures}
    unequal = stories.unequal_of_all(messages, without_step=True)
    if unequal is None:
        return verdict
    return dataclasses.replace(verdict, paragraph=f"{_capital(unequal.sentence())}. {verdict.paragraph}")


def _capital(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]


def find_waits(job: Job) -> list[Wait]:
    """The ranks that wait, and for which rank: by operations that the one has called and the other has not."""
    waits: list[Wait] = []
    for dump in job.dumps.values():
        for it in dump.operations:
            group = dump.groups.get(it.group)
            if it.ended_well or it.order != "collective" or group is None:
                continue
            for member in group.members:
                other = job.dumps.get(member)
                if member == dump.rank or other is None or _has_called(other, it):
                    continue
                if it.state == "failed" or min(dump.at_ns, other.at_ns) - it.queued_ns >= _SHORT_NS:
                    waits.append(Wait(dump.rank, it, group, member))
    return waits


def _has_called(dump: Dump, it: Operation) -> bool:
    called = dump.of_group(it.group)
    # Operations older than all recorded ones were called.
    return it.sequence in called or (bool(called) and it.sequence < min(called))


def group_name(group: Group, job: Job) -> str:
    everybody = " of all ranks" if len(group.members) == job.world else f" of ranks {_list(group.members)}"
    return f"group '{group.name}'{everybody}"


def _disagreement(job: Job) -> Verdict | None:
    """Members that call different things at the same place of their group's order."""
    found: list[tuple[int, Group, dict[int, Operation]]] = []
    for group in _groups(job):
        by_rank = {rank: dump.of_group(group.id) for rank, dump in job.dumps.items() if rank in group.members}
        sequences = sorted({it for called in by_rank.values() for it in called})
        for sequence in sequences:
            here = {rank: called[sequence] for rank, called in by_rank.items() if sequence in called}
            if len({_agreed(it) for it in here.values()}) > 1:
                found.append((min(it.queued_ns for it in here.values()), group, here))
                break
    if not found:
        return None
    _, group, here = min(found, key=lambda it: it[0])
    kinds: dict[str, list[int]] = {}
    for rank, it in here.items():
        kinds.setdefault(it.title, []).append(rank)
    parts = sorted(kinds.items(), key=lambda it: len(it[1]))
    words = "; ".join(f"{_ranks(ranks)} called {title}{_at(here[ranks[0]])}" for title, ranks in parts)
    what = _difference([here[ranks[0]] for _, ranks in parts])
    sequence = next(iter(here.values())).sequence
    paragraph = (
        f"The ranks disagree about operation #{sequence} of {group_name(group, job)}: {words}. {what} "
        "All members of a group must call the same operations in the same order."
    )
    # The fewest; of two equally large groups it is not known which is right.
    guilty = sorted(rank for _, ranks in parts if len(ranks) == len(parts[0][1]) for rank in ranks)
    stacks = {ranks[0]: _called_at(here[ranks[0]]) for _, ranks in parts}
    return Verdict(paragraph, tuple(guilty), stacks)


def _agreed(it: Operation) -> tuple[str, str]:
    return it.text, it.name


def _difference(operations: Sequence[Operation]) -> str:
    for label, values in (
        ("kinds", [it.kind for it in operations]),
        ("types", [it.dtype for it in operations]),
        ("sizes", [str(it.count) for it in operations]),
        ("names", [it.name or "none" for it in operations]),
    ):
        if len(set(values)) > 1:
            return f"The {label} differ ({', '.join(dict.fromkeys(values))})."
    return "Their arguments differ."


def _death(job: Job) -> Verdict | None:
    """A rank that the others lost."""
    lost = sorted(
        (it for dump in job.dumps.values() for it in dump.failures if it.kind == "PeerLostError" and it.guilty >= 0),
        key=lambda it: it.at_ns,
    )
    first_of_others = min(
        (it.at_ns for dump in job.dumps.values() for it in dump.failures if it.kind != "PeerLostError"),
        default=None,
    )
    if not lost or (first_of_others is not None and first_of_others < lost[0].at_ns):
        return None
    first = lost[0]
    dump = job.dumps.get(first.guilty)
    others = sorted({it.guilty for it in lost[1:]} - {first.guilty})
    paragraph = f"Rank {first.guilty} was lost first: {_first_sentence(first.text)}."
    left = _LEFT_JOB in first.text
    if dump is None and not left and not job.said:
        paragraph += (
            " It left no dump, so its process was ended (SIGKILL, out of memory, os._exit) or its host was lost;"
            " the end of its own log, and the host's kernel log, say more."
        )
    if any(_VIEW in group.name for group in _groups(job)):
        paragraph += " The job is elastic: the others went on without it"
        paragraph += f", and lost {_ranks(others)} later." if others else "."
        return Verdict(paragraph, (first.guilty,), {first.guilty: _main_stack(dump)} if dump else {})
    if others:
        paragraph += f" {_ranks(others).capitalize()} went after it, because of it."
    waiting = [it for dump in job.dumps.values() for it in dump.operations if not it.ended_well]
    if waiting:
        last = min(waiting, key=lambda it: it.queued_ns)
        paragraph += f" The others were in {last.title}{_at(last)}."
    return Verdict(paragraph, (first.guilty,), {first.guilty: _main_stack(dump)} if dump else {})


def _deadlock(job: Job, waits: Sequence[Wait]) -> Verdict | None:
    """Ranks that wait for one another in different groups."""
    by_rank: dict[int, list[Wait]] = {}
    for wait in waits:
        by_rank.setdefault(wait.rank, []).append(wait)
    cycle = _cycle(by_rank)
    if not cycle or len({wait.group.id for wait in cycle}) < 2:
        return None
    steps = "; ".join(
        f"rank {wait.rank} waits in {wait.operation.title} of {group_name(wait.group, job)}{_at(wait.operation)} "
        f"for rank {wait.for_rank}, which has not called it"
        for wait in cycle
    )
    paragraph = (
        f"Deadlock of {len({wait.group.id for wait in cycle})} groups that are taken in other orders: {steps}. "
        "Call the operations of both groups in the same order on all ranks, or give each a thread of its own."
    )
    ranks = tuple(sorted({wait.rank for wait in cycle}))
    return Verdict(paragraph, ranks, {wait.rank: _called_at(wait.operation) for wait in cycle})


def _cycle(by_rank: dict[int, list[Wait]]) -> list[Wait]:
    """A circle of waits, each for the rank of the next; empty where there is none."""
    done: set[int] = set()

    def follow(rank: int, path: list[Wait]) -> list[Wait]:
        if rank in done:
            return []
        for at, wait in enumerate(path):
            if wait.rank == rank:
                return path[at:]
        for wait in by_rank.get(rank, []):
            if found := follow(wait.for_rank, [*path, wait]):
                return found
        done.add(rank)
        return []

    for rank in sorted(by_rank):
        if found := follow(rank, []):
            return found
    return []


def _stuck(job: Job, waits: Sequence[Wait]) -> Verdict | None:
    """A rank that has not called the operation in which the others wait, and waits in none itself."""
    if not waits:
        return None
    waiting = {wait.rank for wait in waits}
    roots = [wait for wait in waits if wait.for_rank not in waiting] or list(waits)
    first = min(roots, key=lambda wait: (wait.operation.queued_ns, wait.for_rank))
    same = [wait for wait in waits if wait.operation.sequence == first.operation.sequence and wait.group == first.group]
    guilty = sorted({wait.for_rank for wait in same if wait.for_rank not in waiting} or {first.for_rank})
    held_up = sorted({wait.rank for wait in same} - set(guilty))
    paragraph = (
        f"{_ranks(guilty).capitalize()} never called {first.operation.title} of {group_name(first.group, job)}, "
        f"in which {_ranks(held_up)} wait{'s' if len(held_up) == 1 else ''}{_at(first.operation)}. "
    )
    paragraph += " ".join(_instead(job, job.dumps[rank], first) for rank in guilty)
    return Verdict(paragraph, tuple(guilty), {rank: _main_stack(job.dumps[rank]) for rank in guilty})


def _unsent(job: Job) -> Verdict | None:
    """A message that a rank waits for and another one has not sent."""
    for dump in job.dumps.values():
        for it in dump.operations:
            senders = [flow["peer"] for flow in it.flows if not flow.get("sends") and not flow.get("first_ns")]
            if it.order != "message" or it.ended_well or not senders or dump.at_ns - it.queued_ns < _SHORT_NS:
                continue
            sender = senders[0]
            paragraph = f"Rank {dump.rank} waits in {it.title}{_at(it)} for rank {sender}, which has not sent it."
            other = job.dumps.get(sender)
            if other is not None and (state := state_of_main_thread(other.stacks)):
                paragraph += f" Rank {sender} {state}."
            return Verdict(paragraph, (sender,), {sender: _main_stack(other)} if other else {})
    return None


def _instead(job: Job, dump: Dump, wait: Wait) -> str:
    """The last operation of a rank in place of the one that the others wait in."""
    here = dump.of_group(wait.group.id)
    words = [f"Rank {dump.rank}"]
    if wait.group.id not in dump.groups:
        words.append("has not created that group")
    elif here:
        last = here[max(here)]
        words.append(f"called {last.title} last there{_at(last)}")
    else:
        words.append("has called nothing there")
    elsewhere = [it for it in dump.operations if not it.ended_well and it.group != wait.group.id]
    if elsewhere:
        other = elsewhere[0]
        group = dump.groups.get(other.group)
        words.append(f"is in {other.title}" + (f" of {group_name(group, job)}" if group else ""))
    if state := state_of_main_thread(dump.stacks):
        words.append(state)
    return ", ".join(words[:1]) + " " + ", and ".join(words[1:]) + "."


def _failure(job: Job) -> Verdict | None:
    failures: list[Failure] = sorted((it for d in job.dumps.values() for it in d.failures), key=lambda it: it.at_ns)
    if not failures:
        return None
    first = failures[0]
    return Verdict(f"{first.kind}: {_first_sentence(first.text)}.", (first.guilty,) if first.guilty >= 0 else (), {})


def _nothing(job: Job) -> str:
    open_ones = [it for dump in job.dumps.values() for it in dump.operations if not it.ended_well]
    if open_ones:
        return (
            f"All ranks with a dump have called the same operations; {len(open_ones)} of them were under way when the "
            "dumps were written."
        )
    return (
        "All ranks with a dump have called the same operations, and all of these have ended: nothing waits in ringdp."
    )


def state_of_main_thread(stacks: str) -> str:
    """The position of its main thread, as text; empty without stacks."""
    if not stacks:
        return ""
    frame = frame_of_script(stacks)
    where = f" at {frame}" if frame else ""
    native = stacks.partition("C++ stack of the main thread")[2]
    if "(C code holds Python's lock)" in stacks:
        return f"is in C code that holds Python's lock{where}"
    if re.search(r"nanosleep|time_sleep|pysleep", native):
        return f"sleeps{where}"
    if "PyThread_acquire_lock" in native or re.search(r"in threading$|\block_acquire|acquire_timed", native, re.M):
        return f"waits for a lock{where}"
    return f"is{where}" if frame else ""


def frame_of_script(stacks: str) -> str:
    """``train.py:88 in load_batch``: the innermost frame of the main thread that is not Python's own or a package's."""
    main = re.split(r"\n\s*\n|C\+\+ stack of the main thread", stacks, maxsplit=1)[0]
    frames = re.findall(r'File "([^"]+)", line (\d+) in (.+)', main)
    own = [it for it in frames if not _FOREIGN.search(it[0])]
    path, line, function = (own or frames or [("", "", "")])[0]
    return f"{path.rpartition('/')[2]}:{line} in {function.strip()}" if path else ""


def _main_stack(dump: Dump | None) -> str:
    return dump.stacks.rstrip() if dump else ""


def _called_at(it: Operation) -> str:
    lines = it.call_site.rstrip().splitlines()[: FIRST_FRAMES * 2]
    return "\n".join(f"  {line}" for line in lines)


def _at(it: Operation) -> str:
    """`` (called at train.py:88 in step)``; empty where it is not known."""
    lines = [line for line in it.call_site.splitlines() if line]
    own = [line for line in lines if not _FOREIGN.search(line)]
    line = (own or lines or [""])[0]
    return f" (called at {line.rpartition('/')[2]})" if line else ""


def _groups(job: Job) -> list[Group]:
    found: dict[str, Group] = {}
    for dump in job.dumps.values():
        found |= dump.groups
    return list(found.values())


def _first_sentence(text: str) -> str:
    return text.partition("; look at")[0].rstrip(".")


def _list(ranks: Sequence[int]) -> str:
    words = [str(rank) for rank in ranks]
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'' if len(ranks) == 1 else 's'} {_list(sorted(ranks))}"
