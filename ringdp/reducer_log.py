"""What torch's DistributedDataParallel tells its logger, kept for `_get_ddp_logging_data`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class LoggingData:
    """Two maps, as torch's DDPLoggingData has them."""

    strs_map: dict[str, str] = field(default_factory=dict)
    ints_map: dict[str, int] = field(default_factory=dict)


class ReducerLog:
    """Takes the place of torch's C++ logger, which accepts torch's own reducer only."""

    def __init__(self, reducer: Any, *, strings: dict[str, str], integers: dict[str, int]) -> None:
        self._reducer = reducer
        self._strings = dict(strings)
        self._integers = dict(integers)

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
        self._strings["device_ids"] = ", ".join(str(device) for device in device_ids)
        self._integers.update(
            output_device=output_device,
            broadcast_buffers=int(broadcast_buffers),
            has_sync_bn=int(has_sync_bn),
            static_graph=int(static_graph),
            is_multi_device_module=self._integers.get("is_multi_device_module", 0),
        )

    def set_runtime_stats_and_log(self) -> None:
        """Called at every forward; the numbers are read when somebody asks."""

    def set_error_and_log(self, error: str) -> None:
        self._integers["has_error"] = 1
        self._integers["iteration"] = self._reducer.stats()["steps"]
        self._strings["error"] = error

    def _set_comm_hook_name(self, comm_hook: str) -> None:
        self._strings["comm_hook"] = comm_hook

    def _set_uneven_input_join(self) -> None:
        self._integers["join_uneven_inputs"] = 1

    def _set_static_graph(self) -> None:
        self._integers["static_graph"] = 1

    def _get_ddp_logging_data(self) -> LoggingData:
        stats = self._reducer.stats()
        sizes = ", ".join(str(size) for size in self._reducer.bucket_bytes())
        strings = dict(self._strings)
        rebuilt = self._reducer.rebuilt()
        strings.setdefault("initial_bucket_sizes", sizes)
        strings["bucket_sizes"] = strings["initial_bucket_sizes"]
        strings["rebuilt_bucket_sizes"] = sizes if rebuilt else ""
        integers = dict(self._integers)
        integers.setdefault("iteration", stats["steps"])
        integers["has_rebuilt_buckets"] = int(rebuilt)
        integers["num_buckets_reduced"] = stats["buckets"]
        integers["backward_compute_time"] = int(stats["backward_s"] * 1e9)
        integers["backward_comm_exposed_time"] = int(stats["exposed_wait_s"] * 1e9)
        return LoggingData(strings, integers)
