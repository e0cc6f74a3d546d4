"""The logging data of DistributedDataParallel, kept for `_get_ddp_logging_data` under torch's keys."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ringdp.config import ddp_environment
from ringdp.ddp.gradient_memory import gradient_memory
from ringdp.job.backend import backend_name

# As DDP: every one of the first steps, then one in so many.
_STEPS_ALWAYS_LOGGED = 10
_STEPS_BETWEEN_LOGS = 100
# DDP logs the names of types in C++.
_TYPE_NAMES = {
    "float32": "float",
    "float64": "double",
    "float16": "c10::Half",
    "bfloat16": "c10::BFloat16",
    "complex64": "c10::complex<float>",
    "complex128": "c10::complex<double>",
}
_TIMES = ("forward_compute_time", "backward_compute_time", "backward_comm_time", "backward_compute_comm_overlap_time")


@dataclass
class LoggingData:
    """Two maps, as torch's DDPLoggingData has them."""

    strs_map: dict[str, str] = field(default_factory=dict)
    ints_map: dict[str, int] = field(default_factory=dict)


class ReducerLog:
    """Takes the place of torch's C++ logger, which accepts torch's own reducer only.

    Times are in nanoseconds, those that end in ``_start`` and ``_end`` since 1970, those that begin with ``avg_`` the
    mean of the steps that were logged. A step is logged when the next forward begins.
    """

    def __init__(
        self,
        wrapper: DistributedDataParallel,
        parameters: Sequence[torch.Tensor],
        names: Sequence[str],
        *,
        bucket_cap_bytes: int,
    ) -> None:
        reducer: Any = wrapper.reducer
        self._reducer, self._plan, self._report = reducer, reducer.plan, reducer.report
        self._rate = _STEPS_BETWEEN_LOGS
        self._forwards = 0
        self._forward_began_ns = 0
        self._logged_steps = 0
        self._sums = dict.fromkeys(_TIMES, 0)
        backend = backend_name(wrapper.process_group)
        self._strings = {"backend_name": backend, **ddp_environment(backend)}
        self._integers = {
            "world_size": wrapper.process_group.size(),
            "rank": wrapper.process_group.rank(),
            "bucket_cap_bytes": bucket_cap_bytes,
            "find_unused_parameters": int(bool(wrapper.find_unused_parameters)),
            "gradient_as_bucket_view": int(bool(wrapper.gradient_as_bucket_view)),
            "is_multi_device_module": int(wrapper.is_multi_device_module),
        }
        if backend == "gloo":
            self._integers["gloo_num_threads"] = 2
        self.set_parameters(parameters, names)

    def set_parameters(self, parameters: Sequence[torch.Tensor], names: Sequence[str]) -> None:
        """Those that the reducer averages from now on."""
        self._strings |= {
            "dtypes": ", ".join(sorted({_type_name(parameter.dtype) for parameter in parameters})),
            "bucket_sizes": _listed(self._plan.bucket_bytes()),
            "parameter_names": ", ".join(names),
        }
        self._integers |= {
            "num_parameter_tensors": len(parameters),
            "total_parameter_size_bytes": sum(p.numel() * p.element_size() for p in parameters),
        }

    def set_construction_data_and_log(
        self,
        module_name: str,
        device_ids: list[int],
        output_device: int,
        broadcast_buffers: bool,
        has_sync_bn: bool,
        static_graph: bool,
    ) -> None:
        self._strings["module_name"] = module_name
        self._strings["device_ids"] = _listed(device_ids)
        self._integers.update(
            output_device=output_device,
            broadcast_buffers=int(broadcast_buffers),
            has_sync_bn=int(has_sync_bn),
            static_graph=int(static_graph),
            iteration=0,
        )

    def set_sample_rate(self, rate: int) -> None:
        self._rate = rate

    def set_runtime_stats_and_log(self) -> None:
        """Called at the beginning of every forward that synchronises."""
        step = self._forwards
        self._forwards += 1
        if step >= _STEPS_ALWAYS_LOGGED and step % self._rate:
            self._forward_began_ns = 0
            return
        self._log_times()
        self._forward_began_ns = time.monotonic_ns()
        self._integers["iteration"] = step

    def _log_times(self) -> None:
        """Record the step of the last logged forward, where its backward is over."""
        times: Mapping[str, int] = self._report.times()
        if not self._forward_began_ns or times["finished_ns"] < self._forward_began_ns:
            return
        to_epoch_ns = time.time_ns() - time.monotonic_ns()
        launched_ns = times["launched_ns"] or times["computed_ns"]
        integers = self._integers
        integers["forward_compute_time_start"] = self._forward_began_ns + to_epoch_ns
        integers["backward_compute_time_start"] = times["began_ns"] + to_epoch_ns
        integers["backward_compute_time_end"] = times["computed_ns"] + to_epoch_ns
        integers["backward_comm_time_start"] = launched_ns + to_epoch_ns
        integers["backward_comm_time_end"] = times["finished_ns"] + to_epoch_ns
        integers["forward_compute_time"] = times["began_ns"] - self._forward_began_ns
        integers["backward_compute_time"] = times["computed_ns"] - times["began_ns"]
        integers["backward_comm_time"] = times["finished_ns"] - launched_ns
        integers["backward_compute_comm_overlap_time"] = times["computed_ns"] - launched_ns
        integers["unused_parameter_size"] = times["unused_bytes"]
        self._forward_began_ns = 0
        self._logged_steps += 1
        for name in _TIMES:
            self._sums[name] += integers[name]
            integers[f"avg_{name}"] = self._sums[name] // self._logged_steps

    def set_error_and_log(self, error: str) -> None:
        self._integers["has_error"] = 1
        self._integers["iteration"] = max(0, self._forwards - 1)
        self._strings["error"] = error

    def _set_comm_hook_name(self, comm_hook: str) -> None:
        self._strings["comm_hook"] = comm_hook

    def _set_uneven_input_join(self) -> None:
        self._integers["join_uneven_inputs"] = 1

    def _set_static_graph(self) -> None:
        self._integers["static_graph"] = 1

    def _get_ddp_logging_data(self) -> LoggingData:
        if error := self._reducer.error():
            self.set_error_and_log(error)
        self._log_times()
        stats = self._report.stats()
        self._integers["has_rebuilt_buckets"] = int(self._plan.rebuilt())
        self._integers["num_buckets_reduced"] = stats["buckets"]
        memory = gradient_memory()
        self._integers["gradient_pool_bytes_in_use"] = memory.bytes_in_use
        self._integers["gradient_pool_bytes_idle"] = memory.bytes_idle
        self._strings["prev_iteration_grad_ready_order_indices"] = _listed(self._reducer.arrivals())
        if self._plan.rebuilt():
            self._strings["rebuilt_bucket_sizes"] = _listed(self._plan.bucket_bytes())
            layout = self._plan.layout()
            self._strings["rebuilt_per_bucket_param_indices"] = ", ".join(
                " ".join(str(index) for index in bucket) for bucket in layout
            )
        return LoggingData(dict(self._strings), dict(self._integers))


def _type_name(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    return _TYPE_NAMES.get(name, name)


def _listed(values: Sequence[object]) -> str:
    return ", ".join(str(value) for value in values)
