"""The arguments of a BalancedSampler, checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any

from torch.utils.data import IterableDataset

from ringdp import values
from ringdp.data.order import GlobalBatches
from ringdp.data.split import Pace, RankLimits
from ringdp.errors import InvalidArgumentError

_BY_SPEED = "speed"
_WHO = "BalancedSampler"


@dataclass(frozen=True)
class Limits:
    """How many samples of a batch a rank gets: ``BalancedSampler(…, limits=Limits(least=4, multiple=4))``.

    Args:
        least: samples that a rank gets at least, or a number for each rank. With 0 a rank may get an empty batch, which
            the DataLoader's ``collate_fn`` has to take.
        most: samples that a rank gets at most (its memory), or a number for each rank; None: the whole batch.
        multiple: each rank's number of samples is a multiple of this.

    Raises:
        InvalidArgumentError: another value.
    """

    least: int | Sequence[int] = 1
    most: int | Sequence[int] | None = None
    multiple: int = 1

    def __post_init__(self) -> None:
        _of_each("least", self.least, 0)
        if self.most is not None:
            _of_each("most", self.most, 1)
        values.whole("Limits", "multiple", self.multiple, 1)

    def of_ranks(self, ranks: int, size: int) -> RankLimits:
        """Of batches of `size` samples. Raises InvalidArgumentError where there is not a number for each rank."""
        most = size if self.most is None else self.most
        return RankLimits(_of_each("least", self.least, 0, ranks), _of_each("most", most, 1, ranks), self.multiple)


@dataclass(frozen=True)
class Settings:
    """The settings, which are equal on all ranks.

    Attributes:
        batches: which samples make each batch.
        limits: of a full batch.
        paces: by rank, those of the first batches.
        by_speed: whether measured times change them.
        has_cost: whether samples have a cost.
    """

    batches: GlobalBatches
    limits: RankLimits
    paces: tuple[Pace, ...]
    by_speed: bool
    has_cost: bool

    @property
    def ranks(self) -> int:
        return len(self.paces)

    @classmethod
    def checked(
        cls,
        dataset: Sized | int,
        global_batch: int,
        ranks: int,
        *,
        seed: int,
        shuffle: bool,
        drop_last: bool,
        balance: str | Sequence[float],
        limits: Limits,
        has_cost: bool,
    ) -> Settings:
        """Checks the arguments. Raises InvalidArgumentError, which names the argument and the values it takes."""
        length = _length(dataset)
        size = values.whole(_WHO, "global_batch", global_batch, 1)
        values.whole(_WHO, "seed", seed)
        batches = GlobalBatches(length, size, seed, bool(shuffle), bool(drop_last))
        if not isinstance(limits, Limits):
            values.refuse(_WHO, "limits", limits, "a ringdp.data.Limits")
        of_ranks = limits.of_ranks(ranks, size)
        _check_batch(size, of_ranks)
        if batches.count == 0:
            raise InvalidArgumentError(
                f"BalancedSampler: {length} samples do not fill one global batch of {size}, and drop_last=True leaves"
                " them out"
            )
        short = batches.last_size
        if short < sum(min(1, low) for low in of_ranks.least):
            raise InvalidArgumentError(
                f"BalancedSampler: the last batch of an epoch has {short} samples for {ranks} ranks: give"
                " drop_last=True, another global_batch, or Limits(least=0) with a collate_fn that takes an empty batch"
            )
        by_speed = isinstance(balance, str) and balance == _BY_SPEED
        return cls(batches, of_ranks, _paces(balance, ranks), by_speed, has_cost)

    def lines(self) -> list[str]:
        """The settings as text, a line each, to be compared between ranks."""
        named = dataclasses.asdict(self.batches) | dataclasses.asdict(self.limits)
        labels = {"length": "the dataset's length", "size": "global_batch"}
        lines = [f"{labels.get(name, name)}: {value}" for name, value in named.items()]
        shares = [1 / pace.seconds for pace in self.paces]
        return [*lines, f"balance: {_BY_SPEED if self.by_speed else shares}", f"cost given: {self.has_cost}"]

    def saved(self) -> dict[str, Any]:
        """The settings that decide which samples a batch has."""
        return {"global_batch" if name == "size" else name: value for name, value in vars(self.batches).items()}

    def position_in(self, state: Mapping[str, Any], version: int) -> tuple[int, int, list[int]]:
        """Where a state of `BalancedSampler.state_dict` is: the epoch, the batch in it, and what comes behind it."""
        try:
            if state["version"] != version:
                raise InvalidArgumentError(f"a sampler's state of version {state['version']}: {version} is known here")
            for name, value in self.saved().items():
                if state[name] != value:
                    raise InvalidArgumentError(
                        f"this sampler's state was saved with {name}={state[name]}, and here it is {value}: give the"
                        " sampler the same"
                    )
            epoch, position = int(state["epoch"]), int(state["position"])
            left_over = [int(sample) for sample in state["left_over"]]
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, InvalidArgumentError):
                raise
            raise InvalidArgumentError(f"this is not a BalancedSampler's state: {error!r}") from error
        most = self.batches.count_of(self.batches.length + len(left_over))
        if epoch < 0 or not 0 <= position <= most or not all(0 <= it < self.batches.length for it in left_over):
            raise InvalidArgumentError(
                f"this sampler's state is at batch {position} of epoch {epoch}, which does not exist"
            )
        return epoch, position, left_over


def _length(dataset: Sized | int) -> int:
    if isinstance(dataset, IterableDataset):
        raise InvalidArgumentError(
            "BalancedSampler needs indices, which an IterableDataset does not have: use a dataset with __len__ and"
            " __getitem__, or split the stream in the dataset itself"
        )
    try:
        length = dataset if isinstance(dataset, int) else len(dataset)
    except TypeError as error:
        raise InvalidArgumentError(
            f"{_WHO}: dataset must be a dataset with a length, or a length, not {type(dataset).__name__}"
        ) from error
    return values.whole(_WHO, "the dataset's length", length, 1)


def _of_each(name: str, value: int | Sequence[int], least: int, ranks: int | None = None) -> tuple[int, ...]:
    if isinstance(value, int):
        return (values.whole("Limits", name, value, least),) * (ranks or 1)
    if not isinstance(value, Sequence) or isinstance(value, str) or ranks not in (None, len(value)):
        each = "rank" if ranks is None else f"of the {ranks} ranks"
        values.refuse("Limits", name, value, f"a number, or one for each {each}")
    return tuple(values.whole("Limits", name, one, least) for one in value)


def _check_batch(size: int, limits: RankLimits) -> None:
    """A full batch can be split within the limits."""
    if size % limits.multiple:
        raise InvalidArgumentError(
            f"BalancedSampler: global_batch={size} is not a multiple of multiple={limits.multiple}"
        )
    if (problem := why_no_split(size, limits)) is not None:
        raise InvalidArgumentError(f"BalancedSampler: {problem}")


def why_no_split(size: int, limits: RankLimits) -> str | None:
    """Why a full batch of `size` samples cannot be split within the limits; None where it can."""
    for rank, (low, high) in enumerate(limits.units):
        if low > high:
            return (
                f"no multiple of {limits.multiple} lies between least={limits.least[rank]} and"
                f" most={limits.most[rank]} of rank {rank}"
            )
    low, high = (sum(it[i] for it in limits.units) * limits.multiple for i in (0, 1))
    ranks = len(limits.least)
    if low > size:
        return (
            f"{ranks} ranks with least={_short(limits.least)} (multiple={limits.multiple}) need {low} samples, and"
            f" global_batch={size}"
        )
    if high < size:
        return (
            f"{ranks} ranks with most={_short(limits.most)} (multiple={limits.multiple}) take {high} samples, and"
            f" global_batch={size}"
        )
    return None


def _paces(balance: str | Sequence[float], ranks: int) -> tuple[Pace, ...]:
    wanted = f"'speed', 'equal', or a number above 0 for each of the {ranks} ranks"
    if isinstance(balance, str):
        if balance not in (_BY_SPEED, "equal"):
            values.refuse(_WHO, "balance", balance, wanted)
        return (Pace(),) * ranks
    try:
        weights = [float(one) for one in balance]
    except (TypeError, ValueError):
        values.refuse(_WHO, "balance", balance, wanted)
    if len(weights) != ranks or not all(0 < one < float("inf") for one in weights):
        values.refuse(_WHO, "balance", balance, wanted)
    return tuple(Pace(1 / one) for one in weights)


def _short(values: Sequence[int]) -> object:
    return values[0] if len(set(values)) == 1 else list(values)
