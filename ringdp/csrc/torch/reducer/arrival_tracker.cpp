#include "torch/reducer/arrival_tracker.h"

#include <algorithm>

namespace ringdp {

void ArrivalTracker::start(std::size_t parameters) {
  states_.assign(parameters, {});
  order_.clear();
  learned_ = false;
}

void ArrivalTracker::forget_graph() {
  learned_ = false;
  for (State& state : states_) state.arrivals = 0;
}

void ArrivalTracker::begin(std::size_t sending) {
  next_bucket_ = 0;
  sending_ = sending;
  order_.clear();
  pending_.clear();
  for (const BucketMembers& members : plan_.buckets()) pending_.push_back(members.size());
  for (State& state : states_) {
    state.ready = state.used = false;
    state.arrivals_left = state.arrivals;
  }
}

ArrivalTracker::Arrival ArrivalTracker::arrived(std::size_t parameter) {
  State& state = states_[parameter];
  if (learning()) {
    if (state.arrivals++ == 0) order_.push_back(parameter);
    return Arrival::kOneOfSeveral;
  }
  if (learned_) {
    if (state.arrivals_left <= 0) return Arrival::kUnexpected;
    if (--state.arrivals_left > 0) return Arrival::kOneOfSeveral;
  }
  if (state.ready) return Arrival::kTwice;
  order_.push_back(parameter);
  return Arrival::kComplete;
}

bool ArrivalTracker::mark_ready(std::size_t parameter) {
  states_[parameter].ready = true;
  return --pending_[plan_.bucket_of(parameter)] == 0 && !learning();
}

std::optional<std::size_t> ArrivalTracker::next_full() const {
  if (next_bucket_ >= sending_ || pending_[next_bucket_] > 0) return std::nullopt;
  return next_bucket_;
}

bool ArrivalTracker::complete(bool all_required) const {
  return std::none_of(states_.begin(), states_.end(), [&](const State& state) {
    return (all_required && !static_graph_ && !state.ready) || (learned_ && state.arrivals_left > 0);
  });
}

std::vector<std::size_t> ArrivalTracker::unexpected() const {
  std::vector<std::size_t> result;
  for (std::size_t i = 0; i < states_.size(); ++i) {
    if (states_[i].arrivals == 0) result.push_back(i);
  }
  return result;
}

std::vector<std::size_t> ArrivalTracker::unfinished() const {
  std::vector<std::size_t> result;
  for (std::size_t i = 0; i < states_.size(); ++i) {
    if (!states_[i].ready || (learned_ && states_[i].arrivals_left > 0)) result.push_back(i);
  }
  return result;
}

}  // namespace ringdp
