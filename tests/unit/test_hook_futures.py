"""Futures of hooks: values and errors come out as they went in, and an error keeps nothing alive."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from ringdp.hooks.futures import Promise, after

CPU = torch.device("cpu")


class Mine(KeyError):
    pass


def through(promises: list[Promise], *, late: bool) -> torch.futures.Future[Tensor]:
    """What follows what follows all of them, attached before they are settled or after; the first fails."""
    futures = [it.future for it in promises]
    thread = threading.Thread(target=settle, args=(promises,))
    if late:
        thread.start()
        thread.join()
    together: Any = futures[0] if len(futures) == 1 else torch.futures.collect_all(futures)
    following = after(after(together, lambda _: torch.ones(1), CPU), lambda it: it + 1, CPU)
    if not late:
        thread.start()
        thread.join()
    return following


def settle(promises: list[Promise]) -> None:
    def fail() -> Tensor:
        raise Mine("here")

    for promise in promises[1:]:
        promise.keep(lambda: torch.ones(1))
    promises[0].keep(fail)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("late", [False, True])
def test_an_error_comes_through_whole_and_is_gone_with_its_futures(count: int, late: bool) -> None:
    def fails() -> weakref.ref[Mine]:
        following = through([Promise(CPU) for _ in range(count)], late=late)
        for _ in range(2):  # a future may be asked again
            with pytest.raises(Mine, match="here") as caught:
                following.wait()
        assert [entry.name for entry in caught.traceback][-1] == "fail"
        caught.value.__traceback__ = None  # this frame has the future
        return weakref.ref(caught.value)

    gone = fails()
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("error", [SystemExit(7), KeyboardInterrupt(), GeneratorExit()])
def test_what_ends_a_program_comes_through_as_it_is(error: BaseException) -> None:
    def fail() -> Tensor:
        raise error

    promise, other = Promise(CPU), Promise(CPU)
    following = after(promise.future, lambda it: it, CPU)
    promise.keep(fail)
    by_callback = after(other.future, lambda _: fail(), CPU)
    other.keep(lambda: torch.ones(1))
    for future in (following, by_callback):
        assert future.done()
        with pytest.raises(type(error)) as caught:
            future.wait()
        assert caught.value is error


def test_a_value_comes_through() -> None:
    promise = Promise(CPU)
    following = after(promise.future, lambda it: it + 1, CPU)
    promise.keep(lambda: torch.ones(2))
    assert following.wait().tolist() == [2, 2]
