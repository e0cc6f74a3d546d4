"""Futures of communication hooks that fail with the error itself: the caller of backward gets its type and fields."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Future = torch.futures.Future
_HAVE_FUTURES = (__file__, torch.futures.__file__)  # frames there hold futures, and do not explain an error


class Promise:
    """Holds a future until it is completed with a value or an error. Then it drops the future: the frames of an error
    refer to the promise, so that a future with the error would never be freed.

    Args:
        device: the device of its value.
    """

    def __init__(self, device: torch.device) -> None:
        devices: Any = None if device.type == "cpu" else [device]
        self.future: Future[Tensor] = Future(devices=devices)

    def keep(self, make: Callable[[], Tensor]) -> Future[Tensor]:
        """Complete with the result of `make`, or fail with its exception; returns the future."""
        try:
            self.future.set_result(make())
        except BaseException as error:  # also sys.exit() and Ctrl-C: the thread that waits for the future ends by it
            _fail(self.future, error)
        return self._let_go()

    def fail(self, error: BaseException) -> None:
        """Fail with the error of another future, in the frame that asked that one."""
        _fail(self.future, error)
        self._let_go()

    def _let_go(self) -> Future[Tensor]:
        future = self.future
        del self.future
        return future


def failed(error: Exception, device: torch.device) -> Future[Tensor]:
    """One that has failed with this error."""
    promise = Promise(device)
    future = promise.future
    promise.fail(error)
    return future


def after(future: Future[Any], make: Callable[[Any], Tensor], device: torch.device) -> Future[Tensor]:
    """As ``future.then``, but `make` gets the value, and errors keep their type, of which torch's `then` passes on the
    text alone."""
    promise = Promise(device)
    following = promise.future

    def follow(done: Future[Any]) -> None:
        try:
            value = done.value()
        except BaseException as error:
            promise.fail(error)
        else:
            promise.keep(lambda: make(value))

    future.add_done_callback(follow)
    return following


def _fail(future: Future[Tensor], error: BaseException) -> None:
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_frame.f_code.co_filename in _HAVE_FUTURES:
        traceback = traceback.tb_next
    error.__traceback__ = traceback
    from ringdp import _C

    _C.fail_future(future, error)
