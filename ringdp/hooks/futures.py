"""Futures of communication hooks that fail with the error itself: whoever calls backward gets its type and fields."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ringdp.compression import native

Future = torch.futures.Future
_HAVE_FUTURES = (__file__, torch.futures.__file__)  # frames there hold some, and have nothing to tell of an error


class Promise:
    """A future, until somebody keeps it or fails to.

    Then it is the promise's no more: the frames that an error has come through lead to the promise, and a future that
    has the error would never go.

    Args:
        device: where what it is kept with is.
    """

    def __init__(self, device: torch.device) -> None:
        devices: Any = None if device.type == "cpu" else [device]
        self.future: Future[Tensor] = Future(devices=devices)

    def keep(self, make: Callable[[], Tensor]) -> Future[Tensor]:
        """Complete with what `make` returns, or fail with what it raises; returns the future."""
        try:
            result = make()
        except Exception as error:
            _fail(self.future, error)
        else:
            self.future.set_result(result)
        return self._let_go()

    def fail(self, error: Exception) -> None:
        """With the error of another future, in the frame that asked that one."""
        _fail(self.future, error)
        self._let_go()

    def _let_go(self) -> Future[Tensor]:
        future = self.future
        del self.future
        return future


def after(future: Future[Any], make: Callable[[Any], Tensor], device: torch.device) -> Future[Tensor]:
    """As ``future.then``, but `make` gets the value, and errors stay what they are: `then` hands on their text."""
    promise = Promise(device)
    following = promise.future

    def follow(done: Future[Any]) -> None:
        try:
            value = done.value()
        except Exception as error:
            promise.fail(error)
        else:
            promise.keep(lambda: make(value))

    future.add_done_callback(follow)
    return following


def _fail(future: Future[Tensor], error: Exception) -> None:
    story = error.__traceback__
    while story is not None and story.tb_frame.f_code.co_filename in _HAVE_FUTURES:
        story = story.tb_next
    error.__traceback__ = story
    extension = native.extension()
    if extension is None:  # C++ does not raise it then, but takes it for a result that is no tensor
        future.set_exception(error)  # type: ignore[arg-type]
    else:
        extension.fail_future(future, error)
