// A watched all-reduce: all ranks report an infinity or a NaN, and its source its place. The cases cover each
// algorithm's paths for bytes on their way; tests/contract/test_finite_core.py has the types and places.
#include <cmath>
#include <limits>

#include "job.h"

using namespace ringdp;
using namespace ringdp::testing;

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Rank `culprit` has an infinity at `place`; no rank has one if that is beyond the end. Several in flight.
void check_watched(const AlgorithmTable& table, int world, DType dtype, std::size_t count, int culprit,
                   std::size_t place) {
  run_job(world, table, [&](Rank& self) {
    std::vector<std::byte> memory(3 * count * dtype_size(dtype));
    const std::span<std::byte> all(memory);
    std::vector<std::shared_ptr<FiniteReport>> reports;
    std::vector<std::shared_ptr<Work>> works;
    for (std::size_t turn = 0; turn < 3; ++turn) {
      auto part = all.subspan(turn * count * dtype_size(dtype), count * dtype_size(dtype));
      if (turn == 1 && self.rank == culprit && place < count) {
        const uint16_t half = 0x7c00;
        std::byte* at = part.data() + place * dtype_size(dtype);
        if (dtype == DType::kFloat32)
          std::memcpy(at, &kInfinity, sizeof kInfinity);
        else
          std::memcpy(at, &half, sizeof half);
      }
      CallOptions options;
      options.finite = reports.emplace_back(std::make_shared<FiniteReport>());
      works.push_back(self.group->all_reduce(part, dtype, ReduceOp::kAvg, std::move(options)));
    }
    for (const auto& work : works) self.wait(work);
    for (std::size_t turn = 0; turn < 3; ++turn) {
      const bool wrong = turn == 1 && place < count;
      CHECK_EQ(reports[turn]->finite, !wrong);
      const std::byte* wanted = nullptr;
      if (wrong && self.rank == culprit) wanted = memory.data() + (count + place) * dtype_size(dtype);
      CHECK(reports[turn]->own == wanted);
    }
  });
}

}  // namespace

CASE("an infinity is heard of on all ranks and found on its own") {
  for (const AlgorithmTable& table : {kFoldAlways, kNeverSmall})
    for (const DType dtype : {DType::kFloat32, DType::kFloat16})
      for (const int world : {2, 3}) {
        const std::size_t count = 140'003;
        for (const std::size_t place : {std::size_t{0}, count - 1, count})
          check_watched(table, world, dtype, count, static_cast<int>(place) % world, place);
      }
}

CASE("along a tree: its root, a rank inside, one at its end") {
  for (const DType dtype : {DType::kFloat32, DType::kFloat16})
    for (const int culprit : {0, 1, 2, 4}) check_watched(kTreeAlways, 6, dtype, 40'003, culprit, 33'333);
}

CASE("by halving: what a rank gives away first and last, and keeps") {
  for (const DType dtype : {DType::kFloat32, DType::kFloat16})
    for (std::size_t place = 0; place < 40'003; place += 5'003)
      check_watched(kHalvingAlways, 6, dtype, 40'003, 2, place);
}

CASE("one element, and none") {
  for (const AlgorithmTable& table : {kFoldAlways, kNeverSmall, kTreeAlways, kHalvingAlways})
    for (const std::size_t count : {std::size_t{0}, std::size_t{1}})
      check_watched(table, 3, DType::kFloat32, count, 2, 0);
}
