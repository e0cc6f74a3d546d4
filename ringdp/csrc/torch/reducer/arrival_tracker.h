// ArrivalTracker: which gradients have arrived in this backward, and which bucket may leave: buckets leave in index
// order, each when all its gradients are there. With a static graph it counts in the first backward how often each
// parameter's gradient arrives (once for each use of the parameter), and in later ones takes the last of them. No
// torch. Owned by the Reducer, used under its lock.
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
    kOneOfSeveral,  // others of the same parameter are to come, or all are only counted
    kComplete,      // .grad is what this backward gives
    kTwice,         // it was complete
    kUnexpected     // a static graph had it less often
  };

  explicit ArrivalTracker(const BucketPlan& plan) : plan_(plan) {}

  void set_static_graph() { static_graph_ = true; }
  bool static_graph() const { return static_graph_; }
  // Other parameters: nothing has arrived, and nothing is known about their graph.
  void start(std::size_t parameters);
  // The next backward counts the static graph's gradients again.
  void forget_graph();

  // A backward begins, in which the first `sending` buckets leave without further questions.
  void begin(std::size_t sending);
  Arrival arrived(std::size_t parameter);
  void note_used(std::size_t parameter, bool used) { states_[parameter].used = used; }
  // The parameter's part of its bucket is final. Returns whether the bucket has become full.
  bool mark_ready(std::size_t parameter);
  // The next bucket in order, if it is full; until note_sent says that it has left.
  std::optional<std::size_t> next_full() const;
  void note_sent(std::size_t bucket) { next_bucket_ = bucket + 1; }
  // The backward has run to its end. False: gradients are missing that had to come. `all_required`: each parameter's
  // is.
  bool complete(bool all_required) const;
  void graph_learned() { learned_ = static_graph_; }

  bool ready(std::size_t parameter) const { return states_[parameter].ready; }
  // This rank has a gradient for it in this backward.
  bool used(std::size_t parameter) const { return states_[parameter].used; }
  bool knows_graph() const { return learned_; }
  // In a backward in which a static graph's gradients are counted, no bucket leaves before its end.
  bool learning() const { return static_graph_ && !learned_; }
  std::vector<std::size_t> unexpected() const;  // parameters that a static graph has no gradient for
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
