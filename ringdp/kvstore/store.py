"""KVStore."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ringdp.compression import Compression, CompressorLike
from ringdp.errors import InvalidArgumentError, InvalidStateError, RingError
from ringdp.kvstore import saved
from ringdp.kvstore.attached import Attached, trained_parameters
from ringdp.kvstore.compressed import compressor_of
from ringdp.kvstore.keys import KeyName, Values, by_key, check_number, check_priority, check_rows, summed
from ringdp.kvstore.table import Table
from ringdp.kvstore.updates import Callback, Optimizer, Updater, resolve

_OF_ARGUMENTS = (InvalidStateError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError)
Method = TypeVar("Method", bound=Callable[..., Any])


def _report_refusals(method: Method) -> Method:
    """Errors of this rank's arguments are raised as MismatchError on the ranks that wait for it."""

    @functools.wraps(method)
    def call(self: KVStore, *positional: Any, **named: Any) -> Any:
        try:
            return method(self, *positional, **named)
        except _OF_ARGUMENTS as error:
            if not isinstance(error, RingError) or isinstance(error, InvalidArgumentError | InvalidStateError):
                self._refuse(error)
            raise

    return call  # type: ignore[return-value]


def _together(method: Method) -> Method:
    """A call of all ranks, about all keys: inside `_as_one`."""

    @functools.wraps(method)
    def call(self: KVStore, *positional: Any, **named: Any) -> Any:
        with self._as_one(method.__name__):
            return method(self, *positional, **named)

    return call  # type: ignore[return-value]


class KVStore:
    """Keys with values that all ranks share: `push` gradients, `pull` values; made by `create`.

    Values are tensors, or lists of tensors of one key on several devices, which are added up. A list of keys goes with
    a list of values. All ranks call alike: pushes may come in any order, but between two pulls all ranks push the same
    keys, and they pull the same keys. Where they do not, all ranks raise a MismatchError with both sides' keys.

    A key of 4 KiB and more is cut into equal slices, one for each rank, which alone updates its slice and keeps the
    optimizer's state of it; smaller keys are dealt to the ranks whole. In an elastic job each rank has all of it, and
    nothing is lost with a rank. Used by one thread at a time.

    Attributes:
        type: the name given to `create`.
    """

    def __init__(self, name: str, group: dist.ProcessGroup | None, reduce: str) -> None:
        self.type = name
        self._table = Table(group, average=reduce == "mean", description=f"{name}, reduce={reduce!r}")
        self._pushed: list[dict[str, tuple[int, Tensor]]] = []  # rounds: of each key one push
        self._values: dict[str, Tensor] = {}  # whole, of keys that were pushed and pulled since

    @property
    def rank(self) -> int:
        """This rank's number among those of the store, from 0."""
        group = self._table.group
        return 0 if group is None else group.rank()

    @property
    def num_workers(self) -> int:
        """How many ranks the store has."""
        group = self._table.group
        return 1 if group is None else group.size()

    def keys(self) -> list[str]:
        """The keys that all ranks have, as text."""
        return list(self._table.keys)

    # Keys and values.

    @_report_refusals
    def init(self, key: KeyName | Sequence[KeyName], value: Values) -> None:
        """Make a key, or several, with a value each: rank 0's counts. The ranks compare keys at the next operation.

        Raises:
            InvalidArgumentError: the key is there already, or its value cannot be used.
        """
        for name, tensors in by_key("init", key, value).items():
            self._table.add(name, tensors[0])

    @_report_refusals
    def push(self, key: KeyName | Sequence[KeyName], value: Values, priority: int = 0) -> None:
        """Give this rank's gradients, which are copied. They are exchanged at the next pull, barrier or `flush`.

        Args:
            priority: keys of higher priority go first; the same on all ranks.

        Raises:
            InvalidArgumentError: a key that was never initialised, or a value of another shape or type.
        """
        priority = check_priority("push", priority)
        for name, tensors in by_key("push", key, value).items():
            self._table.check("push", name, tensors)
            mine = summed(tensors, tensors[0].device)
            copied = mine.clone() if len(tensors) == 1 else mine
            free = next((one for one in self._pushed if name not in one), None)
            if free is None:
                self._pushed.append(free := {})
            free[name] = (priority, copied)

    @_report_refusals
    def pull(self, key: KeyName | Sequence[KeyName], out: Values, priority: int = 0) -> None:
        """Put the values into the tensors `out`, after all pushes so far.

        Raises:
            InvalidArgumentError: a key that was never initialised, or a tensor of another shape or type.
            MismatchError: the ranks did not push the same keys, pull other ones, or have other optimizers.
        """
        check_priority("pull", priority)  # of no effect: a pull waits
        wanted = by_key("pull", key, out)
        for name, tensors in wanted.items():
            self._table.check("pull", name, tensors)
        pushed = self._flush()
        gathered = {name: wanted.get(name) for name in pushed | {it for it in wanted if it not in self._values}}
        self._gather(gathered)
        for name, tensors in wanted.items():
            if (value := self._values.get(name)) is not None:
                for tensor in tensors:
                    tensor.copy_(value.view(tensor.shape))

    def pushpull(
        self,
        key: KeyName | Sequence[KeyName],
        value: Values,
        out: Values = None,
        priority: int = 0,
        *,
        scale: float = 1.0,
    ) -> None:
        """`push` and `pull` in one: the gradients are not copied, and nothing is kept. The fastest way.

        Args:
            out: tensors for the values; None: into `value`.
            scale: the sum of the gradients is multiplied by it before the update.

        Raises:
            InvalidArgumentError, MismatchError: as `push` and `pull`.
        """
        if not self._pushed and scale == 1.0 and self._sum_small(key, value, out):
            return
        self._pushpull(key, value, out, scale)

    @_report_refusals
    def _pushpull(self, key: KeyName | Sequence[KeyName], value: Values, out: Values, scale: float) -> None:
        scale = check_number("pushpull: scale", scale)
        inputs = by_key("pushpull", key, value)
        outputs = inputs if out is None else by_key("pushpull", key, out)
        self._table.check_all("pushpull", inputs)
        if out is not None:
            self._table.check_all("pushpull", outputs)
        self._flush()
        if len(inputs) > 1:
            order = sorted(inputs)
            inputs, outputs = {name: inputs[name] for name in order}, {name: outputs[name] for name in order}
        for name in inputs:
            self._values.pop(name, None)
        self._table.pushpull(inputs, outputs, scale)

    def broadcast(self, key: KeyName | Sequence[KeyName], value: Values, out: Values, priority: int = 0) -> None:
        """`init`, then `pull`: rank 0's values for all ranks."""
        self.init(key, value)
        self.pull(key, out, priority)

    @_report_refusals
    def row_sparse_pull(
        self, key: KeyName | Sequence[KeyName], out: Values, priority: int = 0, row_ids: Values = None
    ) -> None:
        """Put the rows `row_ids` of the value into `out`, ``[rows, ...]``; each rank may ask for other rows.

        The whole value crosses the network: for a table of which a batch needs few rows take
        `ringdp.nn.ShardedEmbedding`, which moves these rows only.

        Args:
            row_ids: integers, one tensor for each key.

        Raises:
            InvalidArgumentError: also where an id is not a row.
        """
        wanted = by_key("row_sparse_pull", key, out)
        if row_ids is None:
            raise InvalidArgumentError("row_sparse_pull needs row_ids: the numbers of the rows, a tensor for each out")
        ids = by_key("row_sparse_pull", key, row_ids)
        for name, tensors in wanted.items():
            check_rows(name, self._table.shape("row_sparse_pull", name), ids[name], tensors)
        whole = {name: self._table.empty(name) for name in wanted}
        self.pull(list(wanted), list(whole.values()), priority)
        for name, tensors in wanted.items():
            for rows, tensor in zip(ids[name], tensors, strict=True):
                tensor.copy_(whole[name].index_select(0, rows.reshape(-1).to(whole[name].device)))

    def flush(self) -> None:
        """Exchange the pushes and update the values, without a pull."""
        self._flush()

    def barrier(self) -> None:
        """Exchange the pushes, then wait until all ranks have come here."""
        self._flush()
        table = self._table
        if table.group is not None:
            table.operations.run("barrier of a key-value store", functools.partial(dist.barrier, group=table.group))

    # The treatment of pushes.

    @_report_refusals
    def set_optimizer(self, optimizer: str | Callable[..., torch.optim.Optimizer], **numbers: Any) -> None:
        """Let the owners update values by an optimizer: a class of torch.optim, or MXNet's name of one ("sgd").

        Args:
            numbers: its arguments, under torch's names or MXNet's (``learning_rate``, ``wd``); what is not given is
                torch's default. All ranks give the same.

        Raises:
            InvalidArgumentError: it cannot be made with these, or does not treat each element by itself.
        """
        kind, given = resolve(optimizer, numbers)
        self._flush_if_pushed()
        self._table.set_update(Optimizer(kind, given))

    @_report_refusals
    def set_updater(self, updater: Updater) -> None:
        """Let the owners call ``updater(key, sum, value)``, which changes `value` in place, for each push.

        `sum` and `value` are flat: this rank's slice of the key. So it has to treat each element by itself, and be
        the same on all ranks.
        """
        self._flush_if_pushed()
        self._table.set_update(Callback(updater))

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """This rank's torch optimizer, for schedulers of torch; its parameters are slices.

        Raises:
            InvalidStateError: no optimizer was set.
        """
        return self._optimizer("optimizer").torch_optimizer

    @property
    def learning_rate(self) -> float:
        """Raises InvalidStateError where no optimizer was set."""
        return float(self.optimizer.param_groups[0]["lr"])

    @_report_refusals
    def set_learning_rate(self, learning_rate: float) -> None:
        """Set it for the updates that follow; the same on all ranks. Raises InvalidArgumentError where it is not a
        finite number from 0 on."""
        rate = check_number("set_learning_rate: a learning rate", learning_rate, at_least=0.0)
        self._flush_if_pushed()
        self.optimizer.param_groups[0]["lr"] = rate

    @_report_refusals
    def set_gradient_compression(
        self, compression: CompressorLike | Compression | Mapping[str, Any], **options: Any
    ) -> None:
        """Send pushes as codes: a name or an object of `ringdp.compression`, or MXNet's ``{"type": "2bit"}``.

        Weights of two and more dimensions with at least 1,024 elements are compressed, all else stays exact. Values
        that are pulled are exact.

        Raises:
            InvalidArgumentError: a compressor that is not known.
        """
        chosen = compressor_of(compression, options)
        self._flush_if_pushed()
        self._table.compress(chosen)

    # Overlap, and saved states.

    @_report_refusals
    def attach(self, model: nn.Module) -> Attached:
        """Push the model's gradients while backward runs; see `Attached`.

        Raises:
            InvalidArgumentError: the model has no parameters to train, or a key of that name is there.
        """
        named = trained_parameters(model)
        parameters = list(named.values())
        self.broadcast(list(named), parameters, parameters)
        return Attached(self._table, named)

    @_together
    def state_dict(self) -> dict[str, Any]:
        """Values, the optimizer's state and compression's residuals: whole tensors, the same on all ranks, which all
        must call. It loads at any number of ranks."""
        self._flush()
        return saved.state_dict(self._table)

    @_report_refusals
    @_together
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state of `state_dict`, on all ranks. Keys that the store does not have are made.

        Raises:
            InvalidArgumentError: it is not such a state, or does not fit the keys or the optimizer.
            MismatchError: the ranks load different states.
        """
        self._flush_if_pushed()
        self._values.clear()
        saved.load_state_dict(self._table, state)

    @_report_refusals
    @_together
    def save_optimizer_states(self, path: str | os.PathLike[str]) -> None:
        """Write the optimizer's state to a file on rank 0's host, which is complete or absent; on all ranks.

        Raises:
            InvalidStateError: no optimizer was set.
            SystemResourceError: it cannot be written; on all ranks.
        """
        self._optimizer("save_optimizer_states")
        self._flush()
        saved.save_optimizer(self._table, path)

    @_report_refusals
    @_together
    def load_optimizer_states(self, path: str | os.PathLike[str]) -> None:
        """Read a file of `save_optimizer_states`, at any number of ranks: rank 0 reads it and sends it to the others.

        Raises:
            InvalidStateError: no optimizer was set.
            InvalidArgumentError: it does not fit the keys or the optimizer.
            SystemResourceError: it cannot be read; on all ranks.
        """
        self._optimizer("load_optimizer_states")
        self._flush()
        saved.load_optimizer(self._table, path)

    # Private methods.

    def _exchange(self, names: list[str], grads: list[Tensor], values: list[Tensor], scale: float) -> None:
        """A step of a Trainer."""
        self.pushpull(names, grads, values, scale=scale)

    @contextlib.contextmanager
    def _as_one(self, what: str) -> Iterator[None]:
        """All ranks are in this call."""
        del what
        yield

    def _refuse(self, error: Exception) -> None:
        """Give this rank's error to the others, which are, or will be, in another call."""
        self._table.operations.refuse(error)

    def _sum_small(self, key: Any, value: Values, out: Values) -> bool:
        """A pushpull of one small key without an optimizer by its short way, if that is known; whether it was done."""
        if type(key) is list and type(value) is list and len(key) == len(value) == 1:
            key, value = key[0], value[0]
            if type(out) is list and len(out) == 1:
                out = out[0]
        if type(key) is int:
            key = str(key)
        small = self._table.small_sum(key) if type(key) is str else None
        if small is None or not small(value, out):
            return False
        self._values.pop(key, None)
        return True

    def _flush(self) -> set[str]:
        """Exchange the pushes, and return their keys."""
        self._table.settle()
        if not self._pushed:
            return set()
        names: set[str] = set()
        rounds, self._pushed = self._pushed, []
        for pushed in rounds:
            order = sorted(pushed, key=lambda name: (-pushed[name][0], name))
            self._table.push({name: [pushed[name][1]] for name in order})
            names |= pushed.keys()
        for name in names:
            self._values.pop(name, None)
        return names

    def _flush_if_pushed(self) -> None:
        if self._pushed:
            self._flush()

    def _gather(self, wanted: Mapping[str, list[Tensor] | None]) -> None:
        """All-gather these keys, in one order on all ranks: into the tensors, or to be kept where there are none."""
        outputs: dict[str, Sequence[Tensor]] = {}
        for name in sorted(wanted):
            tensors = wanted[name]
            if tensors is None:
                tensors = [self._table.empty(name)]
                self._values[name] = tensors[0]
            outputs[name] = tensors
        self._table.pull(outputs)

    def _optimizer(self, what: str) -> Optimizer:
        update = self._table.update
        if not isinstance(update, Optimizer):
            raise InvalidStateError(f"{what}: the store has no optimizer; call set_optimizer first")
        return update
