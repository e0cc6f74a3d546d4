// MessageNumbers: how sends and receives find each other. The n-th send of a member to another under a tag and the n-th
// receive of that kind get the same sequence number, made from those four values, whatever other operations lie between.
// Owned by a group of the engine; used by the thread that drives it.
#pragma once

#include <cstdint>
#include <map>
#include <tuple>

#include "collective/operation.h"

namespace ringdp {

class MessageNumbers {
 public:
  uint64_t peek(const PointToPoint& ends) const;  // what `next` would answer
  uint64_t next(const PointToPoint& ends);

 private:
  using Key = std::tuple<int, int, int32_t>;
  std::map<Key, uint64_t> met_;
};

// Whether an operation has a place in the order of its group's collectives.
inline bool in_order(uint64_t sequence) { return (sequence & (kCallbackBit | kMessageBit)) == 0; }

}  // namespace ringdp
