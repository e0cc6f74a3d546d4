"""What RingDP refuses: an error of its constructor on one rank is raised on the others too, where they compare their
models; and where its forward cannot run."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ringdp.errors import InvalidArgumentError, InvalidStateError, RingError
from ringdp.job.agreement import report_refusal

COMPARING_MODELS = "comparing models"
Construct = TypeVar("Construct", bound=Callable[..., None])


def report_refusals(construct: Construct) -> Construct:
    """For a wrapper's ``__init__``: an error before the comparison of the models is raised there on all ranks.

    The wrapper's attribute ``_compare_models`` is gone, or False, when the comparison is over or will not happen.
    """
    signature = inspect.signature(construct)

    @functools.wraps(construct)
    def construct_or_report(self: Any, *positional: Any, **keywords: Any) -> None:
        self.__dict__["_compare_models"] = True
        try:
            construct(self, *positional, **keywords)
        except Exception as error:
            lost = isinstance(error, RingError) and not isinstance(error, InvalidArgumentError | InvalidStateError)
            if self.__dict__.get("_compare_models") and not lost:
                with contextlib.suppress(Exception):  # arguments of any kind: the error that is raised matters more
                    given = signature.bind(self, *positional, **keywords).arguments
                    _report_from_wrapper(error, given | given.pop("named", {}))
            raise

    return construct_or_report  # type: ignore[return-value]


def _report_from_wrapper(error: Exception, arguments: dict[str, Any]) -> None:
    """Report `error` in the wrapper's group and on its device, under the name of the comparison of models."""
    mesh, group = arguments.get("device_mesh"), arguments.get("process_group")
    if group is None:
        group = dist.group.WORLD if mesh is None else mesh.get_group(mesh_dim=0)
    module = arguments["module"]
    parameters = module.parameters() if isinstance(module, torch.nn.Module) else iter(())
    if isinstance(group, dist.ProcessGroup) and arguments.get("init_sync", True):
        device = next((parameter.device for parameter in parameters), torch.device("cpu"))
        report_refusal(error, group, device, COMPARING_MODELS)


def refuse_capture(device_type: str) -> None:
    """Raise InvalidStateError in a forward that a CUDA graph captures."""
    if device_type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise InvalidStateError(
            "RingDP's forward cannot be captured in a CUDA graph: its reducer decides on the host in every step."
            " Capture parts of the module (torch.cuda.make_graphed_callables) and leave RingDP outside."
        )


def refuse_distributed_autograd() -> None:
    """Raise InvalidStateError in a context of torch.distributed.rpc."""
    if not dist.rpc.is_available() or not dist.rpc._is_current_rpc_agent_set():  # type: ignore[attr-defined]
        return
    try:
        dist.autograd._current_context()  # type: ignore[attr-defined]
    except RuntimeError:  # there is none
        return
    raise InvalidStateError(
        "RingDP does not average the gradients that distributed autograd (torch.distributed.rpc) keeps in its "
        "context: use DistributedDataParallel for this module"
    )
