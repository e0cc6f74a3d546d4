// BucketPlan: the bucket of each gradient, its place there, and the order in which buckets are launched: first the
// reverse of registration, later the order in which rank 0's gradients arrived. Every rank computes it from the same
// input, so it is the same everywhere. No torch. Owned by the Reducer, used under its lock. A parameter is a number
// among those that require grad.
//
// Arrivals: which gradients have arrived in one backward, and which bucket to launch: buckets are launched in index
// order, each when all its gradients have arrived. With a static graph the first backward counts how often each
// parameter's gradient arrives (once for each use of the parameter), and later ones wait for the last arrival. No
// torch. Owned by the Step, used under the Reducer's lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace ringdp {

// The properties of one gradient on which the plan depends.
struct PlannedGradient {
  uint64_t group = 0;  // only gradients of one group (dtype, device and reduction) share a bucket; below 2^63
  std::size_t numel = 0;
  std::size_t element_bytes = 1;  // in the bucket
  bool alone = false;             // it gets a bucket of its own
  bool sparse = false;
  bool exact = true;  // it is not compressed

  std::size_t bytes() const { return numel * element_bytes; }
};

using BucketMembers = std::vector<std::size_t>;  // parameters, in the order of the buffer

// `order` is the order in which gradients are expected; buckets come out in the order in which they fill up. A bucket
// closes when its bytes reach the cap (so it may overshoot by one gradient): caps[0] for a group's first bucket,
// caps[1] for its second, and so on, the last cap for all that follow. An empty `caps` puts a group into one bucket.
std::vector<BucketMembers> assign_buckets(std::span<const PlannedGradient> gradients,
                                          std::span<const std::size_t> order, std::span<const std::size_t> caps_bytes);

// The places of the gradients in one bucket, in elements. Each begins at a multiple of kBucketAlignmentBytes.
struct BucketMemory {
  std::vector<std::size_t> offsets;
  std::vector<std::size_t> lengths;
  std::size_t numel = 0;
};

inline constexpr std::size_t kBucketAlignmentBytes = 64;

BucketMemory lay_out_bucket(std::span<const PlannedGradient> gradients, std::span<const std::size_t> members);

class BucketPlan {
 public:
  explicit BucketPlan(std::vector<std::size_t> caps_bytes) : caps_bytes_(std::move(caps_bytes)) {}

  // New parameters: plans in the reverse of registration, and drops the learned order.
  void start(std::vector<PlannedGradient> gradients);
  // The same parameters with changed reductions: plans anew in the same order.
  void describe_again(std::vector<PlannedGradient> gradients);

  const std::vector<PlannedGradient>& gradients() const { return gradients_; }
  const std::vector<BucketMembers>& buckets() const { return buckets_; }
  // Buckets behind these have idle parameters only.
  std::size_t kept() const { return kept_; }
  // Whether the marks of used parameters are sent behind the gradients of the last kept bucket; false if that is
  // compressed.
  bool may_carry_marks(std::size_t bucket) const { return bucket + 1 == kept_ && exact(bucket); }
  bool exact(std::size_t bucket) const { return gradients_[buckets_[bucket].front()].exact; }
  std::size_t bucket_of(std::size_t parameter) const { return bucket_of_[parameter]; }
  BucketMemory memory(std::size_t bucket) const { return lay_out_bucket(gradients_, buckets_[bucket]); }
  std::size_t bytes(std::size_t bucket) const;
  std::size_t dense_bytes(std::size_t bucket) const;  // without sparse gradients

  // The order of arrival, for rank 0 to send to all: parameters that did not arrive are last, in reverse. Idle ones,
  // which no rank used, are sent as their complement. `used_somewhere` is empty if that is unknown, or all are kept.
  std::vector<int32_t> order_to_send(std::span<const std::size_t> arrivals,
                                     const std::vector<bool>& used_somewhere) const;
  // The order that rank 0 sent; it takes effect with follow_learned(). Throws Error(kMismatch) if it is not a
  // permutation.
  void learn(std::span<const int32_t> sent);
  bool order_known() const { return order_known_; }
  // Plans with the newly learned order: whether the buckets have changed. nullopt: there is no new order.
  std::optional<bool> follow_learned();
  bool rebuilt() const { return rebuilt_; }  // the plan follows a learned order
  // Drops a learned order that is not followed yet; another one may be learned.
  void forget_learned();

 private:
  void plan(std::vector<std::size_t> order);

  std::vector<std::size_t> caps_bytes_;
  std::vector<PlannedGradient> gradients_;
  std::vector<bool> idle_;  // no rank had a gradient for it when the order was learned; empty: no parameter is idle
  std::vector<std::size_t> order_;
  std::vector<BucketMembers> buckets_;
  std::vector<std::size_t> bucket_of_;  // by parameter
  std::size_t kept_ = 0;
  std::optional<std::vector<std::size_t>> learned_;
  bool order_known_ = false;
  bool rebuilt_ = false;
};

// Of a static graph, which is the same in every backward. Owned by the Plan; a step counts into it.
struct StaticGraph {
  bool on = false;
  bool learned = false;            // `arrivals` are those of a whole backward
  std::vector<int> arrivals = {};  // by parameter

  bool learning() const { return on && !learned; }
  // The next backward counts again.
  void forget(std::size_t parameters) {
    learned = false;
    arrivals.assign(parameters, 0);
  }
  std::vector<std::size_t> unexpected() const;  // parameters without gradient
};

class Arrivals {
 public:
  enum class Arrival : uint8_t {
    kOneOfSeveral,  // more arrivals of the same parameter will come, or all are only counted
    kComplete,      // .grad has the result of this backward
    kTwice,         // the gradient was complete before
    kUnexpected     // more arrivals than in the static graph
  };

  // A backward begins, which sends the first `sending` buckets in any case.
  Arrivals(const BucketPlan& plan, StaticGraph& graph, std::size_t sending);

  Arrival arrived(std::size_t parameter);
  void note_used(std::size_t parameter, bool used) { states_[parameter].used = used; }
  // The parameter's part of its bucket is final. Returns whether the bucket has become full.
  bool mark_ready(std::size_t parameter);
  // The next bucket in order, if it is full; the same until note_sent.
  std::optional<std::size_t> next_full() const;
  void note_sent(std::size_t bucket) { next_bucket_ = bucket + 1; }
  // The backward has run to its end. False: required gradients are missing. `all_required`: every parameter's is
  // required.
  bool complete(bool all_required) const;
  void graph_learned() { graph_.learned = graph_.on; }

  bool ready(std::size_t parameter) const { return states_[parameter].ready; }
  // This rank has a gradient for it in this backward.
  bool used(std::size_t parameter) const { return states_[parameter].used; }
  std::size_t size() const { return states_.size(); }
  std::size_t sent() const { return next_bucket_; }
  std::size_t sending() const { return sending_; }
  std::vector<std::size_t> unfinished() const;  // parameters without gradient, or with too few
  const std::vector<std::size_t>& order() const { return order_; }

 private:
  struct State {
    bool used = false;
    bool ready = false;
    int left = 0;  // arrivals, of a static graph
  };

  const BucketPlan& plan_;
  StaticGraph& graph_;
  std::vector<State> states_;         // by parameter
  std::vector<std::size_t> pending_;  // by bucket: gradients still to come
  std::vector<std::size_t> order_;    // parameters as they arrived
  std::size_t next_bucket_ = 0;
  const std::size_t sending_;
};

}  // namespace ringdp
