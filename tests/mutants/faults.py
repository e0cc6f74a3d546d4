"""Faults of one place each that the tests have to find: a wait less, memory given back early, a result read too soon …

In a file of C++ the text and what replaces it are compiled both, and RINGDP_MUTANT chooses; so all share one build.
"""

from __future__ import annotations

from dataclasses import dataclass

FAKE = "tests/fake_cuda/test_fake_cuda.py"
RING = "tests/gpu/test_ring_gpu.py"
CODES = "tests/gpu/test_codes_gpu.py"


@dataclass(frozen=True)
class Mutant:
    """`text` stands once in `file`, a path below ringdp/. A statement ends with ; or }; the rest are expressions."""

    name: str
    file: str
    text: str
    instead: str
    tests: tuple[str, ...]  # arguments of pytest: at least one of these has to fail
    device: bool = False  # on the device of tests/fake_cuda, lazily


def on_device(name: str, file: str, text: str, instead: str, *tests: str) -> Mutant:
    return Mutant(name, f"csrc/torch/{file}", text, instead, tests, device=True)


DEVICE = [
    on_device(
        "a bucket goes before the gradients of another stream are written",
        "reducer/bucket.cpp",
        "current.wait(written);",
        ";",
        f"{FAKE}::test_training_has_the_bits_of_the_cpu",
    ),
    on_device(
        "a bucket does not remember which streams write it",
        "reducer/bucket.cpp",
        "bucket.streams.push_back(current);",
        ";",
        f"{FAKE}::test_training_has_the_bits_of_the_cpu",
    ),
    on_device(
        "codes are made before the stream of the caller is there",
        "reducer/c10d_compressed_all_reduce.cpp",
        "stream.wait(reached);",
        ";",
        f"{FAKE}::test_training_has_the_bits_of_the_cpu",
    ),
    on_device(
        "input is copied before the caller has written it",
        "device/device_copies.cpp",
        "called_->block(streams_.in);",
        ";",
        RING,
    ),
    on_device(
        "results are copied over what the caller still reads",
        "device/device_copies.cpp",
        "if (!results_ordered_) called_->block(streams_.out);",
        ";",
        RING,
        FAKE,
    ),
    on_device(
        "a copy counts as done once it is queued",
        "device/device_copies.cpp",
        "events_[ticket].query()",
        "true",
        RING,
    ),
    on_device(
        "the caller is not ordered after the results",
        "device/device_copies.cpp",
        "events_.back().block(device.getStream(streams_.out.device()));",
        ";",
        RING,
    ),
    on_device(
        "the caller is ordered after all results but the last",
        "device/device_copies.cpp",
        "events_.back().block(device.getStream(streams_.out.device()));",
        "events_.front().block(device.getStream(streams_.out.device()));",
        RING,
    ),
    on_device(
        "the event of a copy is recorded on the other stream",
        "device/device_copies.cpp",
        "return record(streams_.in);",
        "return record(streams_.out);",
        RING,
    ),
    on_device(
        "nobody waits for an earlier call on the same memory",
        "device/device_side.cpp",
        "for (const auto& work : earlier) work->wait(kNoTimeout);",
        ";",
        RING,
    ),
    on_device(
        "an elastic step leaves its input on the device to the core",
        "reducer/bucket_reducer.cpp",
        "!bucket.buffer.is_cpu()",
        "false",
        f"{FAKE}::test_an_elastic_job_has_the_bits_of_the_cpu",
    ),
    on_device(
        "an overflow on the device does not hold back the residuals",
        "reducer/residuals.cpp",
        "flag.defined() ? flag.const_data_ptr<int32_t>() : nullptr",
        "nullptr",
        f"{FAKE}::test_training_has_the_bits_of_the_cpu",
    ),
    on_device(
        "the memory of a flat copy is given back while it is still on its way",
        "backend/buffers.cpp",
        "kept_.insert(kept_.end(), {flat, host});",
        "kept_.insert(kept_.end(), {host});",
        RING,
    ),
    Mutant(
        "copies count as landed at once",
        "csrc/device/staging.cpp",
        "if (!queue_->done(results_[i])) return false;",
        ";",
        (RING, CODES, FAKE),
        device=True,
    ),
]

ALL = DEVICE
