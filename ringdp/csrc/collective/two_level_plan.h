// What a rank sends and receives in an all-reduce of two levels (two_level.h), as plain lists made from the host map, the
// element count and the type: every rank makes its own, and both ends of a stream find the same pieces in the same order.
//
// The buffer is cut into shares, h blocks each (h hosts). Share s is carried on host H by that host's rank number s modulo
// its number of ranks. Three things happen to it:
//   inside    the ranks of a host send their part to the host's carrier, which adds up in rank order;
//   between   the carriers of the hosts go round a ring with it (wide types), or exchange its blocks (half types);
//   result    each carrier passes finished blocks on to the other ranks of its host.
// All of it has one order: `turns`, in which later shares begin while earlier ones are between hosts. What a turn needs was
// done in earlier turns, and every stream is in that order, so the oldest piece nobody has yet can always move.
// Used by one operation.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <vector>

#include "base/types.h"
#include "collective/chunks.h"
#include "collective/host_map.h"
#include "collective/rank_fold.h"

namespace ringdp {

class TwoLevelPlan {
 public:
  // A block of the buffer after one step of its way on this rank: how many of its bytes are there.
  struct Stage {
    enum class Kind { kInput, kSum, kCopy };

    Stage(Kind is, std::span<std::byte> at) : kind(is), memory(at), done(is == Kind::kInput ? at.size() : 0) {}

    const Kind kind;
    const std::span<std::byte> memory;  // in place: all stages of a block have the same
    std::size_t done;
    // Of a sum: what `parts` ranks have is added in order, and this rank's, at `place`, is `own`'s or, if null, the input.
    int parts = 1;
    int place = 0;
    int divisor = 1;
    Stage* own = nullptr;
    Stage* next = nullptr;                // the sum whose `own` this is
    std::unique_ptr<RankOrderFold> fold;  // while bytes of the others wait in it

    bool complete() const { return done == memory.size(); }
    bool own_complete() const { return own == nullptr || own->complete(); }
  };
  struct Piece {
    Stage* stage;
    uint64_t begin;  // place in the stream
    int part = 0;    // received for a sum: which of its parts
  };
  struct Stream {
    int member;
    std::vector<Piece> pieces;
    uint64_t total = 0;
  };

  TwoLevelPlan(const HostMap& hosts, std::span<std::byte> memory, DType dtype, ReduceOp op);
  TwoLevelPlan(const TwoLevelPlan&) = delete;
  TwoLevelPlan& operator=(const TwoLevelPlan&) = delete;

  std::vector<Stream>& outgoing() { return out_; }
  std::vector<Stream>& incoming() { return in_; }

 private:
  using Step = int;  // of a share between hosts, from 0

  void make_inside(int share);
  void make_ring_step(int share, Step step);
  void make_exchange_step(int share, Step step);
  void make_results(int share, Step step);
  std::vector<int> finished_blocks(Step step) const;  // on this host, by what that step brings

  int carrier(int host, int share) const { return hosts_.carrier(host, share); }
  bool carries(int share) const { return share % static_cast<int>(hosts_.local().size()) == hosts_.place; }
  int host_after(int host, int steps) const {
    return ((host + steps) % hosts_.count() + hosts_.count()) % hosts_.count();
  }
  std::span<std::byte> block(int share, int number) const;
  Stage*& latest(int share, int number);  // of a share that this rank carries
  Stage& add_stage(Stage::Kind kind, std::span<std::byte> memory) { return stages_.emplace_back(kind, memory); }
  Stage& add_sum(std::span<std::byte> memory, int parts, int place, int divisor, Stage* own);
  static void add_piece(std::vector<Stream>& streams, int member, Stage& stage, int part = 0);

  const HostMap& hosts_;
  const std::span<std::byte> memory_;
  const std::size_t element_bytes_;
  const bool half_;
  const int ranks_;  // of the group, if the result is their mean; else 1
  const int share_count_;
  const int steps_;
  const Chunks shares_;
  std::deque<Stage> stages_;  // a deque: pointers stay
  std::vector<Stage*> latest_;
  std::vector<Stream> out_;
  std::vector<Stream> in_;
};

}  // namespace ringdp
