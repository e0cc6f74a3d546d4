// Stages: lists of a rank's sends and receives in an operation of two levels (two_level.h). A stage is the state of a
// block after one step on this rank (its input, a sum, a copy); a stream lists the stages that go to or come from one
// member, in an order that both ends derive alike. The plans of two_level.h make the
// lists; `TwoLevel` executes them. Owned by one operation, used by the thread that drives the engine.
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
  std::size_t done;  // bytes that are complete

  // A sum adds the inputs of `parts` ranks in order. This rank's input, at `place`, is the stage `own` or, if null,
  // `input`.
  int parts = 1;
  int place = 0;
  int divisor = 1;  // of a mean: taken here
  std::span<const std::byte> input;
  Stage* own = nullptr;
  Stage* next = nullptr;                // the sum whose `own` this is
  bool final = false;                   // its sum is the result
  std::unique_ptr<RankOrderFold> fold;  // while it holds bytes of other ranks

  // A sum that this rank only forwards has memory from its first byte until it has been sent.
  bool passes_through = false;
  bool sent = false;
  ScratchPool::Block room{nullptr, {}};

  bool complete() const { return done == size; }
  bool adds_input() const { return own == nullptr || own->kind == Kind::kInput; }  // this rank's, not a sum
  bool own_complete() const { return own == nullptr || own->complete(); }
};

// Both ends of a stream list its pieces in the same order, without gaps; stages do not move once they are added.
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
  // Replaces this rank's own part.
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
