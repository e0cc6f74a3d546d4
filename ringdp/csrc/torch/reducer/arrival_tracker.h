// ArrivalTracker: which gradients have arrived in this backward, and which bucket to launch: buckets are launched in
// index order, each when all its gradients have arrived. With a static graph it counts in the first backward how often
// each parameter's gradient arrives (once for each use of the parameter), and in later ones waits for the last
// arrival. No torch. Owned by the Reducer, used under its lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "torch/reducer/bucket_plan.h"

namespace ringdp {

class ArrivalTracker {
 public:
  enum class Arrival : uint8_t {
    kOneOfSeveral,  // more arrivals of the same parameter will come, or all are only counted
    kComplete,      // .grad has the result of this backward
    kTwice,         // the gradient was complete before
    kUnexpected     // more arrivals than in the static graph
  };

  explicit ArrivalTracker(const BucketPlan& plan) : plan_(plan) {}

  void set_static_graph() { static_graph_ = true; }
  bool static_graph() const { return static_graph_; }
  // New parameters: resets all arrivals and the static graph's counts.
  void start(std::size_t parameters);
  // The next backward counts the static graph's gradients again.
  void forget_graph();

  // A backward begins, which sends the first `sending` buckets in any case.
  void begin(std::size_t sending);
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
  void graph_learned() { learned_ = static_graph_; }

  bool ready(std::size_t parameter) const { return states_[parameter].ready; }
  // This rank has a gradient for it in this backward.
  bool used(std::size_t parameter) const { return states_[parameter].used; }
  bool knows_graph() const { return learned_; }
  // Whether this backward counts a static graph's gradients: then no bucket is launched before its end.
  bool learning() const { return static_graph_ && !learned_; }
  std::vector<std::size_t> unexpected() const;  // parameters without gradient in the static graph
  std::size_t size() const { return states_.size(); }
  std::size_t sent() const { return next_bucket_; }
  std::size_t sending() const { return sending_; }
  std::vector<std::size_t> unfinished() const;  // parameters without gradient, or with too few
  const std::vector<std::size_t>& order() const { return order_; }

 private:
  struct State {
    bool used = false;
    bool ready = false;
    int arrivals = 0;  // static graph: in one backward
    int arrivals_left = 0;
  };

  const BucketPlan& plan_;
  std::vector<State> states_;         // by parameter
  std::vector<std::size_t> pending_;  // by bucket: gradients still to come
  std::vector<std::size_t> order_;    // parameters as they arrived
  std::size_t next_bucket_ = 0;
  std::size_t sending_ = 0;
  bool static_graph_ = false;
  bool learned_ = false;
};

}  // namespace ringdp
