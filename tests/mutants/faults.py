"""Faults of one place each that the tests have to find: a wait less, memory given back early, a result read too soon …

In a file of C++ the text and what replaces it are compiled both, and RINGDP_MUTANT chooses; so all share one build.
"""

from __future__ import annotations

from dataclasses import dataclass

FAKE = "tests/fake_cuda/test_fake_cuda.py"
RING = "tests/gpu/test_ring_gpu.py"
CODES = "tests/gpu/test_codes_gpu.py"
PAIR = "tests/gpu/test_nccl_pair.py"
TRAINING = f"{FAKE}::test_training_has_the_bits_of_the_cpu"


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


def kernel(name: str, file: str, text: str, instead: str) -> Mutant:
    return Mutant(
        name, f"csrc/cuda/{file}", text, instead, (TRAINING, CODES, "tests/gpu/test_training_gpu.py"), device=True
    )


DEVICE = [
    on_device(
        "a bucket goes before the gradients of another stream are written",
        "reducer/bucket.cpp",
        "current.wait(written);",
        ";",
        TRAINING,
    ),
    on_device(
        "a bucket does not remember which streams write it",
        "reducer/bucket.cpp",
        "bucket.streams.push_back(current);",
        ";",
        TRAINING,
    ),
    on_device(
        "codes are made before the stream of the caller is there",
        "reducer/c10d_compressed_all_reduce.cpp",
        "stream.wait(reached);",
        ";",
        TRAINING,
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
        TRAINING,
    ),
    Mutant(
        "copies count as landed at once",
        "csrc/device/staging.cpp",
        "if (!queue_->done(results_[i])) return false;",
        ";",
        (RING, CODES, FAKE),
        device=True,
    ),
    on_device(
        "a bucket's operation on a device is not waited for",
        "reducer/reduction_strategy.cpp",
        "work->wait();",
        ";",
        TRAINING,
    ),
    on_device(
        "NCCL is not aborted when a rank is lost",
        "backend/watchdog.cpp",
        "foreign->abort();",
        ";",
        f"{PAIR}::test_an_abort_frees_the_device_that_waits_for_a_dead_rank",
    ),
    on_device(
        "a failure that the watchdog knows is not raised",
        "backend/watchdog.cpp",
        "if (const auto failure = failure_within(std::chrono::milliseconds(0))) std::rethrow_exception(failure);",
        ";",
        f"{PAIR}::test_an_abort_frees_the_device_that_waits_for_a_dead_rank",
    ),
    on_device(
        "buckets that NCCL reduces are not announced",
        "reducer/bucket_announcer.cpp",
        "if (watchdog == nullptr) return;",
        "return;",
        f"{PAIR}::test_other_buckets_are_an_error_on_both",
    ),
    kernel(
        "the last element is not read",
        "shares.cuh",
        "at + i < count ? x[at + i] : 0.0f",
        "at + i + 1 < count ? x[at + i] : 0.0f",
    ),
    kernel("codes are not scaled", "block_codes.cuh", "values[i] * code.scale", "values[i]"),
    kernel("the last residual is not published", "commit.cu", "i < switches.count", "i + 1 < switches.count"),
]

ALL = DEVICE
