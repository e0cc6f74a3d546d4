"""A DataLoader whose batches follow the ranks that come and go."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from torch.utils.data import DataLoader, Sampler

from ringdp.data.sampler import BalancedSampler


class Steps(Protocol):
    """What a loader knows of its Job.

    Attributes:
        training: its RingDP or DiLoCo.
    """

    training: Any

    @property
    def changes(self) -> int:
        """Of the members that loaders follow, so far."""
        ...

    def enter(self) -> None: ...
    def before_step(self, loader: Loader) -> None: ...
    def note_batch(self, epoch: int, batch: int, samples: Sequence[int]) -> None: ...


class _Noted(Sampler[list[int]]):
    """A sampler whose batches are kept until the loader gives them."""

    def __init__(self, sampler: BalancedSampler) -> None:
        self._sampler = sampler
        self.samples: deque[list[int]] = deque()

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self._sampler:
            self.samples.append(batch)
            # Collate functions do not know empty batches. The sampler gives this one no weight.
            yield batch or [0]

    def __len__(self) -> int:
        return len(self._sampler)


class Loader:
    """What `Job.loader` returns: each pass is an epoch, or the rest of one. Ranks come and go before a batch.

    Attributes:
        sampler: of the present members.
    """

    def __init__(
        self, job: Steps, dataset: Any, sampler: Callable[[], BalancedSampler], split: str, arguments: Mapping[str, Any]
    ) -> None:
        """`sampler`: makes one for the present members; `split`: how batches are split, for comparisons; `arguments`:
        of torch's DataLoader."""
        self._job, self._dataset, self._make, self._arguments = job, dataset, sampler, dict(arguments)
        self._split = split
        self._make_sampler(None)

    def _make_sampler(self, state: Mapping[str, Any] | None) -> None:
        self.sampler = self._make()
        self.sampler.watch(self._job.training.part)
        if state is not None:
            self.sampler.load_state_dict(state)

    def members_changed(self, state: Mapping[str, Any]) -> None:
        """All ranks go on with the samples from here."""
        self.sampler.unwatch()
        self._make_sampler(state)

    def described(self) -> list[str]:
        """What newcomers have to have alike."""
        return [*self.sampler.described(), self._split]

    def __len__(self) -> int:
        """Batches of a whole epoch."""
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        self._job.enter()
        epoch = self.sampler.state_dict()["epoch"]
        try:
            while True:
                views, start = self._job.changes, self.sampler.state_dict()["position"]
                drawn = _Noted(self.sampler)
                batches = iter(DataLoader(self._dataset, batch_sampler=drawn, **self._arguments))
                # Nobody comes behind the last batch: a newcomer would not run what follows the epoch.
                for batch in batches:
                    self._job.before_step(self)
                    if self._job.changes != views:
                        break  # this batch is drawn again, by the present members
                    self._job.note_batch(epoch, start, drawn.samples.popleft())
                    start += 1
                    yield batch
                else:
                    return
        finally:
            self.sampler.end_pass()
