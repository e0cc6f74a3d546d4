// Stages: what a rank sends and receives in an operation of two levels (two_level.h), as plain lists. A stage is a block after
// one step of its way on this rank; a stream is all that goes to or comes from one member, stage by stage in an order that
// both ends derive alike. Plans fill them in (two_level_plan.h, two_level_scatter.h); `TwoLevel` carries them out.
// Used by one operation.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <vector>

#include "collective/host_map.h"
#include "collective/rank_fold.h"

namespace ringdp {

struct Stage {
  enum class Kind { kInput, kSum, kCopy };

  Stage(Kind is, std::span<std::byte> at)
      : kind(is), size(at.size()), memory(at), done(is == Kind::kInput ? size : 0) {}

  const Kind kind;
  const std::size_t size;
  std::span<std::byte> memory;
  std::size_t done;  // bytes that are there

  // Of a sum: what `parts` ranks have is added in order. This rank's, at `place`, is `own`'s or, if null, `input`.
  int parts = 1;
  int place = 0;
  int divisor = 1;  // of a mean: taken here
  std::span<const std::byte> input;
  Stage* own = nullptr;
  Stage* next = nullptr;                // the sum whose `own` this is
  bool final = false;                   // its sum is what the result is
  std::unique_ptr<RankOrderFold> fold;  // while bytes of the others wait in it

  // Of a sum that only passes through: its memory is there from its first byte until it has been sent.
  bool passes_through = false;
  bool sent = false;
  ScratchPool::Block room{nullptr, {}};

  bool complete() const { return done == size; }
  bool adds_input() const { return own == nullptr || own->kind == Kind::kInput; }  // this rank's, not a sum
  bool own_complete() const { return own == nullptr || own->complete(); }
};

class StagePlan {
 public:
  struct Piece {
    Stage* stage;
    uint64_t begin;  // place in the stream
    int part = 0;    // received for a sum: which of its parts

    uint64_t end() const { return begin + stage->size; }
  };
  struct Stream {
    int member;
    std::vector<Piece> pieces;
    uint64_t total = 0;
  };

  virtual ~StagePlan() = default;
  StagePlan(const StagePlan&) = delete;
  StagePlan& operator=(const StagePlan&) = delete;

  std::vector<Stream>& outgoing() { return out_; }
  std::vector<Stream>& incoming() { return in_; }

 protected:
  StagePlan() = default;

  Stage& add_stage(Stage::Kind kind, std::span<std::byte> memory) { return stages_.emplace_back(kind, memory); }
  // In place of this rank's own part.
  Stage& add_sum(std::span<std::byte> memory, int parts, int place, int divisor, Stage* own);
  void add_outgoing(int member, Stage& stage) { add_piece(out_, member, stage, 0); }
  void add_incoming(int member, Stage& stage, int part = 0) { add_piece(in_, member, stage, part); }

 private:
  static void add_piece(std::vector<Stream>& streams, int member, Stage& stage, int part);

  std::deque<Stage> stages_;  // a deque: pointers stay
  std::vector<Stream> out_;
  std::vector<Stream> in_;
};

}  // namespace ringdp
