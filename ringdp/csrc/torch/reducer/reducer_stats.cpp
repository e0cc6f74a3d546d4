#include "torch/reducer/reducer_stats.h"

#include <atomic>

#include "codec/codec.h"
#include "torch/reducer/messages.h"

namespace ringdp {
namespace {

std::atomic<int64_t> most = 0;

int64_t nanoseconds(StepTimes::Clock::time_point time) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count();
}

}  // namespace

void StepTimes::begin() {
  began_ = Clock::now();
  stats_.began_ns = nanoseconds(began_);
  stats_.launched_ns = 0;
}

void StepTimes::note_first_launch() { stats_.launched_ns = nanoseconds(Clock::now()); }

void StepTimes::end(Clock::time_point gradients_done, int64_t unused_bytes, bool local) {
  const auto now = Clock::now();
  ++stats_.steps;
  if (stats_.steps > most.load(std::memory_order_relaxed)) most.store(stats_.steps, std::memory_order_relaxed);
  stats_.computed_ns = nanoseconds(gradients_done);
  stats_.finished_ns = nanoseconds(now);
  stats_.unused_bytes = unused_bytes;
  stats_.backward_s = seconds(gradients_done - began_);
  stats_.exposed_wait_s = local ? 0 : seconds(now - gradients_done);
  stats_.total_backward_s += stats_.backward_s;
  stats_.total_exposed_wait_s += stats_.exposed_wait_s;
}

int64_t most_steps() { return most.load(std::memory_order_relaxed); }

void StepTimes::count_kept(const BucketPlan& plan) {
  stats_.buckets = stats_.bytes = 0;
  for (std::size_t index = 0; index < plan.kept(); ++index) count_bucket(plan, index);
}

void StepTimes::count_bucket(const BucketPlan& plan, std::size_t bucket) {
  ++stats_.buckets;
  stats_.bytes += static_cast<int64_t>(plan.dense_bytes(bucket));
}

std::vector<BucketRow> bucket_rows(const GradientLayout& layout, const ReducerStats& stats) {
  std::vector<BucketRow> rows;
  for (std::size_t index = 0; index < layout.plan.buckets().size(); ++index) {
    const BucketMembers& members = layout.plan.buckets()[index];
    BucketRow& row = rows.emplace_back();
    row.index = index;
    row.name = describe_bucket(index, members, layout.parameters.names());
    row.reduction = layout.reductions.number_of_bucket(index);
    row.free = layout.reductions.free(index);
    const auto* native = dynamic_cast<const CodecReduction*>(layout.reductions.of_bucket(index));
    const bool coded = native != nullptr && native->enabled() && !layout.reductions.too_small(index);
    for (std::size_t member : members) {
      const PlannedGradient& gradient = layout.plan.gradients()[member];
      row.parameters.push_back(layout.parameters.param_index(member));
      row.numel += gradient.numel;
      row.bytes_before += gradient.bytes();
      row.bytes_after += coded ? codec(native->codec()).encoded_bytes(gradient.numel) : gradient.bytes();
    }
    if (index >= layout.store.size()) continue;
    const Bucket& bucket = layout.store[index];
    if (bucket.report) row.coding_s = static_cast<double>(bucket.report->coding_ns) * 1e-9;
    row.launched_s = static_cast<double>(nanoseconds(bucket.times.launched) - stats.launched_ns) * 1e-9;
    row.seconds = bucket.times.seconds;
    row.exposed_s = bucket.times.exposed_s;
  }
  return rows;
}

}  // namespace ringdp
