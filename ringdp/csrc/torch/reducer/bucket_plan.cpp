#include "torch/reducer/bucket_plan.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <utility>

#include "base/error.h"

namespace ringdp {

namespace {

constexpr uint64_t kIdleGroup = uint64_t{1} << 63;

struct OpenBucket {
  BucketMembers members;
  std::size_t bytes = 0;
  std::size_t closed_before = 0;  // of this group
  std::size_t last_position = 0;  // in the order
};

struct ClosedBucket {
  BucketMembers members;
  std::size_t last_position = 0;
};

}  // namespace

std::vector<BucketMembers> assign_buckets(std::span<const PlannedGradient> gradients,
                                          std::span<const std::size_t> order, std::span<const std::size_t> caps_bytes) {
  std::map<uint64_t, OpenBucket> open;
  std::vector<ClosedBucket> closed;
  auto close = [&](OpenBucket& bucket) {
    closed.push_back({std::move(bucket.members), bucket.last_position});
    bucket.members.clear();
    bucket.bytes = 0;
    ++bucket.closed_before;
  };
  for (std::size_t position = 0; position < order.size(); ++position) {
    const PlannedGradient& gradient = gradients[order[position]];
    if (gradient.alone) {
      closed.push_back({{order[position]}, position});
      continue;
    }
    OpenBucket& bucket = open[gradient.group];
    bucket.members.push_back(order[position]);
    bucket.bytes += gradient.bytes();
    bucket.last_position = position;
    if (caps_bytes.empty()) continue;
    if (bucket.bytes >= caps_bytes[std::min(bucket.closed_before, caps_bytes.size() - 1)]) close(bucket);
  }
  for (auto& [group, bucket] : open) {
    if (!bucket.members.empty()) close(bucket);
  }
  std::sort(closed.begin(), closed.end(),
            [](const ClosedBucket& a, const ClosedBucket& b) { return a.last_position < b.last_position; });
  std::vector<BucketMembers> result;
  result.reserve(closed.size());
  for (ClosedBucket& bucket : closed) result.push_back(std::move(bucket.members));
  return result;
}

BucketMemory lay_out_bucket(std::span<const PlannedGradient> gradients, std::span<const std::size_t> members) {
  BucketMemory memory;
  for (std::size_t member : members) {
    const PlannedGradient& gradient = gradients[member];
    const std::size_t step = std::max<std::size_t>(1, kBucketAlignmentBytes / gradient.element_bytes);
    memory.numel = (memory.numel + step - 1) / step * step;
    memory.offsets.push_back(memory.numel);
    memory.lengths.push_back(gradient.numel);
    memory.numel += gradient.numel;
  }
  return memory;
}

void BucketPlan::start(std::vector<PlannedGradient> gradients) {
  gradients_ = std::move(gradients);
  idle_.clear();
  forget_learned();
  std::vector<std::size_t> order(gradients_.size());
  std::iota(order.rbegin(), order.rend(), 0);
  plan(std::move(order));
}

void BucketPlan::describe_again(std::vector<PlannedGradient> gradients) {
  gradients_ = std::move(gradients);
  plan(std::move(order_));
}

void BucketPlan::plan(std::vector<std::size_t> order) {
  order_ = std::move(order);
  std::vector<PlannedGradient> gradients = gradients_;
  for (std::size_t i = 0; i < idle_.size(); ++i) {
    if (idle_[i]) gradients[i].group |= kIdleGroup;  // they share no bucket with the others
  }
  buckets_ = assign_buckets(gradients, order_, caps_bytes_);
  const auto busy = [&](const auto& members) { return idle_.empty() || !idle_[members.front()]; };
  const auto end = std::stable_partition(buckets_.begin(), buckets_.end(), busy);
  kept_ = static_cast<std::size_t>(end - buckets_.begin());
  // The last kept one carries marks, if it is an exact one with memory of its own.
  const auto shared = [&](const auto& members) {
    return !gradients_[members.front()].alone && gradients_[members.front()].exact;
  };
  const auto last = std::find_if(std::make_reverse_iterator(end), buckets_.rend(), shared);
  if (last != buckets_.rend()) std::rotate(last.base() - 1, last.base(), end);
  bucket_of_.resize(gradients_.size());
  for (std::size_t index = 0; index < buckets_.size(); ++index) {
    for (std::size_t member : buckets_[index]) bucket_of_[member] = index;
  }
}

std::size_t BucketPlan::bytes(std::size_t bucket) const {
  std::size_t result = 0;
  for (std::size_t member : buckets_[bucket]) result += gradients_[member].bytes();
  return result;
}

std::size_t BucketPlan::dense_bytes(std::size_t bucket) const {
  return gradients_[buckets_[bucket].front()].sparse ? 0 : bytes(bucket);
}

std::vector<int32_t> BucketPlan::order_to_send(std::span<const std::size_t> arrivals,
                                               const std::vector<bool>& used_somewhere) const {
  std::vector<bool> seen(gradients_.size(), false);
  std::vector<int32_t> order;
  for (std::size_t i : arrivals) {
    if (!seen[i]) order.push_back(static_cast<int32_t>(i));
    seen[i] = true;
  }
  for (std::size_t i = gradients_.size(); i-- > 0;) {
    if (!seen[i]) order.push_back(static_cast<int32_t>(i));
  }
  if (used_somewhere.empty()) return order;
  for (int32_t& i : order) {
    if (!used_somewhere[static_cast<std::size_t>(i)]) i = ~i;
  }
  return order;
}

void BucketPlan::learn(std::span<const int32_t> sent) {
  order_known_ = true;
  std::vector<std::size_t> order;
  std::vector<bool> idle(gradients_.size(), false);
  for (const int32_t entry : sent) {
    order.push_back(static_cast<std::size_t>(entry < 0 ? ~entry : entry));
    if (entry < 0 && order.back() < idle.size()) idle[order.back()] = true;
  }
  std::vector<std::size_t> sorted = order;
  std::sort(sorted.begin(), sorted.end());
  for (std::size_t i = 0; i < sorted.size(); ++i) {
    if (sorted[i] != i)
      throw Error(ErrorKind::kMismatch,
                  "rank 0 sent an order of gradients that is not a permutation of the parameters");
  }
  const bool all_idle = std::find(idle.begin(), idle.end(), false) == idle.end();
  idle_ = all_idle ? std::vector<bool>() : std::move(idle);
  learned_ = std::move(order);
}

std::optional<bool> BucketPlan::follow_learned() {
  if (!learned_) return std::nullopt;
  const std::vector<BucketMembers> before = std::exchange(buckets_, {});
  plan(*std::exchange(learned_, std::nullopt));
  rebuilt_ = true;
  return buckets_ != before;
}

void BucketPlan::forget_learned() {
  learned_.reset();
  order_known_ = rebuilt_ = false;
}

std::vector<std::size_t> StaticGraph::unexpected() const {
  std::vector<std::size_t> result;
  for (std::size_t i = 0; i < arrivals.size(); ++i) {
    if (arrivals[i] == 0) result.push_back(i);
  }
  return result;
}

Arrivals::Arrivals(const BucketPlan& plan, StaticGraph& graph, std::size_t sending)
    : plan_(plan), graph_(graph), states_(plan.gradients().size()), sending_(sending) {
  for (const BucketMembers& members : plan_.buckets()) pending_.push_back(members.size());
  for (std::size_t i = 0; graph_.learned && i < states_.size(); ++i) states_[i].left = graph_.arrivals[i];
}

Arrivals::Arrival Arrivals::arrived(std::size_t parameter) {
  State& state = states_[parameter];
  if (graph_.learning()) {
    if (graph_.arrivals[parameter]++ == 0) order_.push_back(parameter);
    return Arrival::kOneOfSeveral;
  }
  if (graph_.learned) {
    if (state.left <= 0) return Arrival::kUnexpected;
    if (--state.left > 0) return Arrival::kOneOfSeveral;
  }
  if (state.ready) return Arrival::kTwice;
  order_.push_back(parameter);
  return Arrival::kComplete;
}

bool Arrivals::mark_ready(std::size_t parameter) {
  states_[parameter].ready = true;
  return --pending_[plan_.bucket_of(parameter)] == 0 && !graph_.learning();
}

std::optional<std::size_t> Arrivals::next_full() const {
  if (next_bucket_ >= sending_ || pending_[next_bucket_] > 0) return std::nullopt;
  return next_bucket_;
}

bool Arrivals::complete(bool all_required) const {
  return std::none_of(states_.begin(), states_.end(), [&](const State& state) {
    return (all_required && !graph_.on && !state.ready) || (graph_.learned && state.left > 0);
  });
}

std::vector<std::size_t> Arrivals::unfinished() const {
  std::vector<std::size_t> result;
  for (std::size_t i = 0; i < states_.size(); ++i) {
    if (!states_[i].ready || (graph_.learned && states_[i].left > 0)) result.push_back(i);
  }
  return result;
}

}  // namespace ringdp
