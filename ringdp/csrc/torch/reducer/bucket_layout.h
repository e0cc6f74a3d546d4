// Which gradient goes into which bucket, and where it lies there. No torch; owns nothing; any thread.
// Every rank computes this from the same input, so the layout is the same everywhere.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace ringdp {

struct LayoutItem {
  uint64_t group = 0;  // only items of one group (dtype and device) share a bucket
  std::size_t numel = 0;
  std::size_t element_bytes = 1;
  bool alone = false;  // a bucket of its own (sparse gradients)
};

// `order` is the order in which gradients are expected; buckets come out in the order in which they fill up.
// A bucket closes when its bytes reach the cap (so it may overshoot by one item): caps[0] for a group's first bucket,
// caps[1] for its second, and so on, the last cap for all that follow. An empty `caps` puts a group into one bucket.
std::vector<std::vector<std::size_t>> assign_buckets(std::span<const LayoutItem> items,
                                                     std::span<const std::size_t> order,
                                                     std::span<const std::size_t> caps_bytes);

// Where the items of one bucket lie, in elements. Each begins at a multiple of kBucketAlignmentBytes.
struct BucketPlan {
  std::vector<std::size_t> offsets;
  std::vector<std::size_t> lengths;
  std::size_t numel = 0;
};

inline constexpr std::size_t kBucketAlignmentBytes = 64;

BucketPlan plan_bucket(std::span<const LayoutItem> items, std::span<const std::size_t> members);

}  // namespace ringdp
