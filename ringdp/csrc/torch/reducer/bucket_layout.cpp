#include "torch/reducer/bucket_layout.h"

#include <algorithm>
#include <map>

namespace ringdp {
namespace {

struct OpenBucket {
  std::vector<std::size_t> members;
  std::size_t bytes = 0;
  std::size_t closed_before = 0;  // of this group
  std::size_t last_position = 0;  // in the order
};

struct ClosedBucket {
  std::vector<std::size_t> members;
  std::size_t last_position = 0;
};

}  // namespace

std::vector<std::vector<std::size_t>> assign_buckets(std::span<const LayoutItem> items,
                                                     std::span<const std::size_t> order,
                                                     std::span<const std::size_t> caps_bytes) {
  std::map<uint64_t, OpenBucket> open;
  std::vector<ClosedBucket> closed;
  auto close = [&](OpenBucket& bucket) {
    closed.push_back({std::move(bucket.members), bucket.last_position});
    bucket.members.clear();
    bucket.bytes = 0;
    ++bucket.closed_before;
  };
  for (std::size_t position = 0; position < order.size(); ++position) {
    const LayoutItem& item = items[order[position]];
    if (item.alone) {
      closed.push_back({{order[position]}, position});
      continue;
    }
    OpenBucket& bucket = open[item.group];
    bucket.members.push_back(order[position]);
    bucket.bytes += item.numel * item.element_bytes;
    bucket.last_position = position;
    if (caps_bytes.empty()) continue;
    if (bucket.bytes >= caps_bytes[std::min(bucket.closed_before, caps_bytes.size() - 1)]) close(bucket);
  }
  for (auto& [group, bucket] : open) {
    if (!bucket.members.empty()) close(bucket);
  }
  std::sort(closed.begin(), closed.end(),
            [](const ClosedBucket& a, const ClosedBucket& b) { return a.last_position < b.last_position; });
  std::vector<std::vector<std::size_t>> result;
  result.reserve(closed.size());
  for (ClosedBucket& bucket : closed) result.push_back(std::move(bucket.members));
  return result;
}

BucketPlan plan_bucket(std::span<const LayoutItem> items, std::span<const std::size_t> members) {
  BucketPlan plan;
  for (std::size_t member : members) {
    const LayoutItem& item = items[member];
    const std::size_t step = std::max<std::size_t>(1, kBucketAlignmentBytes / item.element_bytes);
    plan.numel = (plan.numel + step - 1) / step * step;
    plan.offsets.push_back(plan.numel);
    plan.lengths.push_back(item.numel);
    plan.numel += item.numel;
  }
  return plan;
}

}  // namespace ringdp
