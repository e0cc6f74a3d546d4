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
        "backend/c10d_compressed_all_reduce.cpp",
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
        "reducer/exchange.cpp",
        "!bucket.buffer.is_cpu()",
        "false",
        f"{FAKE}::test_an_elastic_job_has_the_bits_of_the_cpu",
    ),
    on_device(
        "an overflow on the device does not hold back the residuals",
        "reducer/gradient_compression.cpp",
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
        "reducer/exchange.cpp",
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
    kernel("the last residual is not published", "encode.cu", "i < switches.count", "i + 1 < switches.count"),
]


def core(name: str, file: str, text: str, instead: str, *tests: str) -> Mutant:
    return Mutant(name, f"csrc/{file}", text, instead, tests)


def in_python(name: str, file: str, text: str, instead: str, *tests: str) -> Mutant:
    return Mutant(name, file, text, instead, tests)


COLLECTIVES = "tests/contract/test_collectives_core.py"
MESSAGES = "tests/contract/test_messages_core.py"
ELASTIC = "tests/fault/test_elastic.py"
DEATHS = "tests/train/test_weights_deaths.py"

CORE = [
    core(
        "the ring passes on what has not come yet",
        "collective/ring.cpp",
        "here = received > begin ? std::min(size, received - begin) : 0;",
        "here = size;",
        COLLECTIVES,
    ),
    core(
        "frames that are kept for a later connection read memory that has changed",
        "link/resend_queue.cpp",
        "if (it.lender != &flow || !concerned(it.payload)) continue;",
        "continue;",
        "tests/cpp/test_cpp.py::test_passes[asan-test_healing]",
    ),
    core(
        "frames are forgotten before they have arrived",
        "link/resend_queue.cpp",
        "while (!kept_.empty() && kept_.front().end <= delivered_bytes) drop_first();",
        "while (!kept_.empty()) drop_first();",
        "tests/cpp/test_cpp.py::test_passes[asan-test_healing]",
    ),
    core(
        "the number of elements is not part of an operation's fingerprint",
        "link/frame.cpp",
        "put(&raw[8], count);",
        ";",
        MESSAGES,
        "tests/fault/test_rank_disagreement.py",
    ),
    core(
        "the length of a frame is believed",
        "link/frame.cpp",
        "header.length > longest_payload(static_cast<FrameType>(type))",
        "false",
        "tests/cpp/test_cpp.py::test_passes[asan-test_damage]",
    ),
    core(
        "an early frame is taken without its fingerprint",
        "link/incoming_flows.cpp",
        "if (accept(flow, header)) deliver(flow, header, payload);",
        "deliver(flow, header, payload);",
        MESSAGES,
        "tests/fault/test_rank_disagreement.py",
        "tests/contract/test_late_connections_core.py",
    ),
    core(
        "a flow gets no grant beyond its first",
        "link/incoming_flows.cpp",
        "if (limit <= flow.granted) return;",
        "if (flow.granted != 0) return;",
        "tests/contract/test_staged_torch.py",
        COLLECTIVES,
    ),
]

REDUCER = [
    core(
        "a bucket goes before an earlier one is full",
        "torch/reducer/bucket_plan.cpp",
        "if (next_bucket_ >= sending_ || pending_[next_bucket_] > 0) return std::nullopt;",
        "if (next_bucket_ >= sending_) return std::nullopt;",
        "tests/train/test_parallel_training.py",
        "tests/train/test_parallel_gradients.py",
    ),
    core(
        "a gradient that arrives twice is taken",
        "torch/reducer/bucket_plan.cpp",
        "if (state.ready) return Arrival::kTwice;",
        ";",
        "tests/train/test_parallel_robustness.py",
        "tests/train/test_parallel_failures.py",
        "tests/train/test_ddp_methods.py",
    ),
    core(
        "the residual of a step is not the next one's",
        "torch/reducer/gradient_compression.cpp",
        "pair.index_ = 1 - *pair.index_;",
        ";",
        "tests/train/test_compression.py",
    ),
    core(
        "a residual that an exact bucket has sent stays",
        "torch/reducer/gradient_compression.cpp",
        "counts && in_step == Pair::InStep::kSent",
        "false",
        "tests/train/test_small_buckets.py",
        "tests/train/test_compression.py",
        "tests/train/test_auto_compression.py",
    ),
    core(
        "residuals of parameters that no rank used change",
        "torch/reducer/gradient_compression.cpp",
        "!unused.contains(name)",
        "true",
        "tests/train/test_compression.py",
        "tests/train/test_compression_state.py",
    ),
    core(
        "parameters that this rank did not use count as used",
        "torch/reducer/step_results.cpp",
        "marks.select(0, static_cast<int64_t>(i)).zero_();",
        ";",
        "tests/train/test_parallel_unused.py",
    ),
    core(
        "weights of two micro-batches differ unnoticed",
        "torch/reducer/gradient_weights.cpp",
        "if (!on_ || weight == current_) return;",
        "return;",
        "tests/train/test_weights.py",
    ),
    core(
        "gradients of a bucket are not aligned",
        "torch/reducer/bucket_plan.cpp",
        "memory.numel = (memory.numel + step - 1) / step * step;",
        ";",
        "tests/cpp/test_cpp.py::test_passes[asan-test_reducer]",
    ),
]

CODECS = [
    core(
        "a sparse code's values lack their scale",
        "codec/sparse.cpp",
        "use(std::to_integer<std::size_t>(*places_++), half_to_float(half_at(values_)) * header_.scale);",
        "use(std::to_integer<std::size_t>(*places_++), half_to_float(half_at(values_)));",
        "tests/unit/test_compression_sparse.py",
        "tests/contract/test_compressed_core.py",
    ),
    core(
        "a block with more entries than a byte counts stays sparse",
        "codec/sparse.cpp",
        "dense_ = ++counts_.back() > kMostInBlock || dense_;",
        "++counts_.back();",
        "tests/unit/test_compression_sparse.py",
        "tests/contract/test_compressed_core.py",
    ),
    core(
        "of equal magnitudes sparse2 keeps the last",
        "codec/sparse2.cpp",
        "if (equal) --equals;",
        "",
        "tests/cpp/test_cpp.py::test_passes[asan-test_sparse2]",
    ),
    core(
        "a sparse2 code's places are not checked",
        "codec/sparse2.cpp",
        "if (place < next || place >= shape.n)",
        "if (place < next)",
        "tests/cpp/test_cpp.py::test_passes[asan-test_sparse2]",
    ),
    in_python(
        "a zero is sent as negative",
        "compression/methods/sign.py",
        "pack((part >= 0).view(torch.uint8), 1)",
        "pack((part > 0).view(torch.uint8), 1)",
        "tests/unit/test_compression_methods.py",
    ),
]

COMPRESSORS = [
    in_python(
        "the last rule that fits counts",
        "compression/rules.py",
        "            return self.pairs[number][1]\n",
        "            last = number\n        if list(self.fitting(one)):\n            return self.pairs[last][1]\n",
        "tests/unit/test_compression_rules.py",
    ),
    in_python(
        "error feedback forgets the error",
        "compression/feedback.py",
        'state["residual"] = x - decoded',
        'state["residual"] = x - x',
        "tests/unit/test_compression_feedback.py",
        "tests/train/test_examples.py::test_two_ranks[custom_compressor]",
        "tests/train/test_exchanged_codes.py",
    ),
    in_python(
        "EF21's estimate does not move",
        "compression/feedback.py",
        'state["estimate"] = decoded + state.get("estimate", 0.0)',
        'state["estimate"] = decoded',
        "tests/unit/test_compression_feedback.py",
        "tests/train/test_exchanged_codes.py",
    ),
    in_python(
        "PowerSGD starts anew in each step",
        "compression/methods/power_sgd.py",
        "        if self.warm_start:\n",
        "        if not self.warm_start:\n",
        "tests/unit/test_compression_methods.py",
    ),
]

COMPRESSORS += [
    in_python(
        "what compressors left in a step that is made again counts",
        "hooks/compressed.py",
        "            self.memory.states.commit(False)  #",
        "            self.memory.states.commit(True)  #",
        "tests/fault/test_elastic_features.py",
    ),
    in_python(
        "a step that is made again counts twice for compressors",
        "hooks/compressed.py",
        "if is_elastic(self.group) and self._counts_later:",
        "if False:",
        "tests/fault/test_elastic_features.py",
    ),
    in_python(
        "residuals stay those of the owners before a loss",
        "compression/saved.py",
        """_times(carried["residual"], _owned_mask(following, now[0]), 1.0 / now[1])""",
        """carried["residual"]""",
        "tests/fault/test_elastic_features.py",
    ),
    in_python(
        "parts of parameters stay those of the ranks before a loss",
        "hooks/compressed.py",
        "            self._contents.clear()\n",
        "            pass\n",
        "tests/fault/test_elastic_features.py",
    ),
]

COMPRESSORS += [
    in_python(
        "a lost rank's share of a step that is made again is forgotten",
        "data/sampler.py",
        "                self._untrained[index] = self._samples_of(gone, index)\n"
        "        for index in range(self._committed, end):\n            drawn",
        "                pass\n        for index in range(self._committed, end):\n            drawn",
        "tests/fault/test_elastic_data.py",
    ),
    in_python(
        "a lost rank's share is dealt twice",
        "data/sampler.py",
        "            self._epochs.leave_over(epoch, samples)\n",
        "            self._epochs.leave_over(epoch, samples + samples[:1])\n",
        "tests/fault/test_elastic_data.py",
    ),
    in_python(
        "an optimizer in backward steps before its step counts",
        "ddp/comm_hooks.py",
        "            if elastic.repairs:\n",
        "            if False:\n",
        "tests/fault/test_elastic_features.py",
    ),
    in_python(
        "a hook that is called again finds the state that it has left",
        "ddp/elastic.py",
        "            before.put_back()\n",
        "            pass\n",
        "tests/fault/test_elastic_features.py",
    ),
    in_python(
        "codes that a push has left behind when it is made again count",
        "kvstore/compressed.py",
        "        self.memory.states.commit(False)\n",
        "        self.memory.states.commit(True)\n",
        "tests/fault/test_elastic_kept.py",
    ),
    core(
        "a sparse gradient of an elastic job is averaged without its batch's weight",
        "torch/reducer/exchange.cpp",
        "gradient_times(bucket.buffer, own)",
        "bucket.buffer",
        "tests/fault/test_elastic_features.py",
    ),
]

ROUNDS_AGAIN = "tests/fault/test_elastic_rounds.py"

ROUNDS = [
    in_python(
        "what a code left out counts before its round does",
        "rounds/exchange.py",
        "        return Arrival(usable, flight.of_parameters, usual, records, flight.rank)\n",
        "        self.codes.commit(usable=usable, counts=True)\n"
        "        return Arrival(usable, flight.of_parameters, usual, records, flight.rank)\n",
        ROUNDS_AGAIN,
    ),
    in_python(
        "a round that is made again begins with what it left",
        "rounds/exchange.py",
        "            torch.sub(fragment.total, kept, out=fragment.buffer)\n",
        "            pass\n",
        ROUNDS_AGAIN,
    ),
    in_python(
        "momenta are averaged again where a round is",
        "rounds/exchange.py",
        "lambda: self._arrive(flight, beside), writes=writes)",
        "lambda: self._arrive(flight, beside), writes=())",
        ROUNDS_AGAIN,
    ),
    in_python(
        "the outer step is made for each try of a round",
        "rounds/diloco.py",
        "self._exchanges[number].wait(flight, self._beside(number))\n",
        "self._exchanges[number].wait(\n"
        "            flight, Beside((), lambda: self._outer[number].step(self._fragments[number].buffer.clone()))\n"
        "        )\n"
        "        self._fragments[number].buffer.zero_()\n",
        ROUNDS_AGAIN,
    ),
    in_python(
        "residuals of rounds stay those of the owners before a loss",
        "rounds/codes.py",
        "own[begin:end] *= 1.0 / ranks",
        "own[begin:end] *= 1.0",
        ROUNDS_AGAIN,
    ),
    in_python(
        "a rank that does not count has sent what it owed",
        "rounds/codes.py",
        "self.residuals.commit(usable and counts)",
        "self.residuals.commit(usable)",
        "tests/train/test_rounds.py",
    ),
    in_python(
        "a fragment is not sent again where another unit has told of the loss",
        "rounds/exchange.py",
        "if self._elastic and flight.view != _C.view_of(group):",
        "if self._elastic and (flight.view == 0 or not all(it.is_completed() for it in flight.works)):",
        ROUNDS_AGAIN,
    ),
]

LAUNCHER = [
    in_python(
        "a rank that lost another one is blamed for it",
        "launcher/failure.py",
        "if exception and _CONSEQUENCES.search(exception):",
        "if exception and not exception:",
        "tests/unit/test_launch_failure.py",
        "tests/fault/test_launch_failure.py",
    ),
    in_python(
        "a stopped rank is never ended",
        "launcher/stopped.py",
        "if seconds >= limit_s and pid not in self._ended:",
        "if seconds >= 2 * limit_s + 60 and pid not in self._ended:",
        "tests/unit/test_stopped_ranks.py",
        "tests/fault/test_elastic_launch.py",
    ),
    in_python(
        "the last ranks that run are ended, too",
        "launcher/stopped.py",
        "if not others and len(self._stopped_s) == len(pids):",
        "if False:",
        "tests/unit/test_stopped_ranks.py",
        "tests/fault/test_elastic_launch.py",
    ),
    in_python(
        "the error file of torch is read as a text",
        "launcher/failure.py",
        'message["message"] if isinstance(message, dict) else message',
        "message",
        "tests/unit/test_launch_failure.py",
        "tests/fault/test_launch_failure.py",
    ),
]

MEMBERS = [
    core(
        "a step that all have finished does not count",
        "membership/agreement.cpp",
        "if (all_done) ++decision.committed;",
        ";",
        "tests/cpp/test_cpp.py::test_passes[asan-test_elastic]",
    ),
    core(
        "free calls are not made again",
        "membership/agreement.cpp",
        "state.unfinished || state.called != states.front().called",
        "false",
        "tests/cpp/test_cpp.py::test_passes[asan-test_elastic]",
    ),
    core(
        "the bucket's input is not kept for the step that is made again",
        "torch/reducer/buckets.cpp",
        "kept.spare.copy_(buffer);",
        ";",
        ELASTIC,
        DEATHS,
        "tests/fault/test_elastic_features.py",
    ),
    core(
        "a step is made again from what is left of its sums",
        "torch/reducer/buckets.cpp",
        "index < kept_.size() && kept_[index].filled && kept_[index].copied",
        "false",
        ELASTIC,
        DEATHS,
        "tests/fault/test_elastic_features.py",
    ),
    core(
        "the view of the group is not followed before a step is made again",
        "torch/reducer/buckets.cpp",
        "exchange_.group.follow_view();",
        ";",
        ELASTIC,
    ),
]

ALL = [*CORE, *REDUCER, *CODECS, *COMPRESSORS, *ROUNDS, *LAUNCHER, *MEMBERS, *DEVICE]
