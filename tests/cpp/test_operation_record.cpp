// The recorder of operations: what it remembers, what it forgets, and that it can be read while it is written.
#include <atomic>
#include <thread>

#include "engine/operation_record.h"
#include "job.h"

namespace ringdp::testing {
namespace {

FlowIdentity identity(uint64_t sequence, const std::string& name = "") {
  FlowIdentity it;
  it.sequence = sequence;
  it.shape.what = Collective::kAllReduce;
  it.shape.dtype = DType::kFloat32;
  it.shape.count = sequence;
  it.name = name;
  return it;
}

OperationRecorder::Entry* begin(OperationRecorder& recorder, uint64_t sequence, const std::string& name = "") {
  return recorder.begin(7, identity(sequence, name), Clock::now(), -1);
}

}  // namespace

CASE("the last operations are remembered, older ones are not, and those in flight keep their place") {
  OperationRecorder recorder(1, 8);
  OperationRecorder::Entry* stuck = begin(recorder, 1, "stuck");
  for (uint64_t sequence = 2; sequence <= 100; ++sequence) recorder.end(begin(recorder, sequence), false);
  const std::vector<OperationRecord> all = recorder.all();
  REQUIRE(all.size() == 8);
  CHECK_EQ(all[0].sequence, 1U);
  CHECK_EQ(all[0].name, "stuck");
  CHECK(all[0].state == OperationState::kQueued);
  for (std::size_t i = 1; i < all.size(); ++i) CHECK_EQ(all[i].sequence, 93 + i);
  for (std::size_t i = 1; i < all.size(); ++i) CHECK(all[i].state == OperationState::kDone);
  recorder.end(stuck, true);
  CHECK(recorder.all()[0].state == OperationState::kFailed);
  CHECK_EQ(recorder.called(), 100U);
}

CASE("with more in flight than there are places the later ones are counted, and nothing else happens") {
  OperationRecorder recorder(1, 2);
  OperationRecorder::Entry* first = begin(recorder, 1);
  begin(recorder, 2);
  CHECK(begin(recorder, 3) == nullptr);
  recorder.end(nullptr, false);
  recorder.end(first, false);
  CHECK(begin(recorder, 4) != nullptr);
  const auto all = recorder.all();
  REQUIRE(all.size() == 2);
  CHECK_EQ(all[0].number, 2U);
  CHECK_EQ(all[1].number, 4U);
}

CASE("a cursor gives each ended operation once, in the order of the ends, and counts what it has missed") {
  OperationRecorder recorder(1, 4);
  uint64_t cursor = 0, lost = 99;
  CHECK(recorder.ended_since(cursor, lost).empty());
  CHECK_EQ(lost, 0U);
  OperationRecorder::Entry* a = begin(recorder, 1);
  OperationRecorder::Entry* b = begin(recorder, 2);
  recorder.end(b, false);
  auto ended = recorder.ended_since(cursor, lost);
  REQUIRE(ended.size() == 1);
  CHECK_EQ(ended[0].sequence, 2U);
  recorder.end(a, false);
  ended = recorder.ended_since(cursor, lost);
  REQUIRE(ended.size() == 1);
  CHECK_EQ(ended[0].sequence, 1U);
  CHECK(recorder.ended_since(cursor, lost).empty());
  for (uint64_t sequence = 3; sequence <= 12; ++sequence) recorder.end(begin(recorder, sequence), false);
  ended = recorder.ended_since(cursor, lost);
  CHECK_EQ(ended.size(), 4U);
  CHECK_EQ(lost, 6U);
  CHECK_EQ(cursor, 12U);
}

CASE("a name that is too long is cut, and a short one leaves nothing of the one before it") {
  OperationRecorder recorder(1, 1);
  recorder.end(begin(recorder, 1, std::string(500, 'x')), false);
  CHECK_EQ(recorder.all()[0].name, std::string(kRecordedNameBytes, 'x'));
  recorder.end(begin(recorder, 2, "layer.0"), false);
  CHECK_EQ(recorder.all()[0].name, "layer.0");
}

// Each operation's fields are made from its sequence, so a record that mixes two operations shows.
CASE("readers see whole operations while others are written") {
  OperationRecorder recorder(1, 16);
  std::atomic<bool> over{false};
  std::atomic<uint64_t> looked{0};
  std::vector<std::thread> readers;
  for (int i = 0; i < 2; ++i)
    readers.emplace_back([&] {
      uint64_t cursor = 0, lost = 0, before = 0;
      auto check = [&](const OperationRecord& it) {
        CHECK_EQ(it.shape.count, it.sequence);
        CHECK_EQ(it.number, it.sequence);
        CHECK_EQ(it.name, "operation " + std::to_string(it.sequence));
      };
      do {
        for (const OperationRecord& it : recorder.all()) check(it);
        for (const OperationRecord& it : recorder.ended_since(cursor, lost)) {
          check(it);
          CHECK(it.ended_number > before);
          before = it.ended_number;
        }
        ++looked;
      } while (!over);
    });
  for (uint64_t sequence = 1; sequence <= 20'000 || looked < 20; ++sequence)
    recorder.end(begin(recorder, sequence, "operation " + std::to_string(sequence)), false);
  over = true;
  for (std::thread& reader : readers) reader.join();
}

CASE("a job's operations: times in order, bytes by peer, the same sequences on all ranks") {
  auto body = [](Rank& self) {
    std::vector<float> data(100'000, 1.0F);
    const OperationRecorder& recorder = self.runtime->engine().recorder();
    std::atomic<bool> over{false};
    std::thread reader([&] {
      do
        for (const OperationRecord& it : recorder.all()) CHECK(it.queued_ns > 0);
      while (!over);
    });
    for (int i = 0; i < 30; ++i) self.wait(self.group->all_reduce(bytes_of(data), DType::kFloat32, ReduceOp::kMax, {}));
    over = true;
    reader.join();
    const auto all = recorder.all();
    CHECK_EQ(all.size(), 30U);
    for (std::size_t i = 0; i < all.size(); ++i) {
      const OperationRecord& it = all[i];
      CHECK_EQ(it.sequence, i + 1);
      CHECK_EQ(it.bytes(), 400'000U);
      CHECK(it.state == OperationState::kDone);
      CHECK(it.queued_ns <= it.started_ns && it.started_ns <= it.ended_ns);
      CHECK_EQ(it.flows.size(), 2U);  // a ring: to the next rank, from the one before
      for (const FlowTimes& flow : it.flows) {
        CHECK_EQ(flow.peer, (self.rank + (flow.sends ? 1 : 2)) % 3);
        CHECK_EQ(flow.moved, flow.total);
        CHECK(flow.total > 0);
        CHECK(it.started_ns <= flow.first_ns && flow.first_ns <= flow.last_ns && flow.last_ns <= it.ended_ns);
      }
    }
    const auto groups = recorder.groups();
    REQUIRE(groups.size() == 1);
    CHECK_EQ(groups[0].name, "everybody");
    CHECK_EQ(groups[0].id, all[0].group);
    CHECK(groups[0].members == everybody(3));
    self.wait(self.group->barrier({}));
  };
  run_job(3, kNeverSmall, body);
}

CASE("what does not come is seen while it is in flight: the bytes so far, and who is missing") {
  std::atomic<bool> seen{false};
  auto body = [&](Rank& self) {
    std::vector<float> data(10, 1.0F);
    self.wait(self.group->barrier({}));
    if (self.rank == 1) {
      const auto end = Clock::now() + std::chrono::seconds(20);
      while (!seen && Clock::now() < end) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    auto work = self.group->all_reduce(bytes_of(data), DType::kFloat32, ReduceOp::kSum, {});
    if (self.rank == 0) {
      const auto end = Clock::now() + std::chrono::seconds(20);
      while (!seen && Clock::now() < end) {
        const OperationRecord last = self.runtime->engine().recorder().all().back();
        for (const FlowTimes& flow : last.flows)
          seen = seen || (last.state == OperationState::kStarted && !flow.sends && flow.peer == 1 && flow.moved == 0 &&
                          flow.first_ns == 0 && flow.total > 0);
      }
      CHECK(seen);
    }
    self.wait(work);
  };
  run_job(2, {}, body);
}

}  // namespace ringdp::testing
