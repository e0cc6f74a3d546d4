// CompressedAllReduce: the mean of all ranks' sections, as codes on the wire. Every rank (in two levels: every host)
// encodes each part of its input once, the part's owner decodes and adds them in order, its own part as it is,
// divides, and encodes the mean; all ranks, the owner too, decode those bytes. So 2(n-1)/n of the buffer's codes are
// sent, as in a ring, and each element is encoded at most twice, for any number of ranks. The messages:
// compressed_plan.h. Error feedback adds the residual of an encoding before the next one. On the parts of other ranks
// it is the residual of this rank's encoding, on its own parts that of the mean's. In two levels a rank keeps
// residuals of the parts that it carries, and does not change the others. Owner and thread: as every Operation
// (operation.h). `report` is shared with the caller.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "collective/compressed_plan.h"
#include "collective/finite.h"
#include "collective/operation.h"

namespace ringdp {

class CompressedAllReduce final : public Operation {
 public:
  // `report` may be null.
  CompressedAllReduce(GroupView group, OperationShape shape, std::string name, std::vector<CompressedSection> sections,
                      const Compression& compression, std::shared_ptr<FiniteReport> report);

  std::span<const std::byte> outgoing(SendFlow& flow, uint64_t offset, std::size_t max) override;
  std::span<std::byte> incoming(RecvFlow& flow, uint64_t offset, std::size_t length) override;
  void flushed(SendFlow& flow) override;
  void arrived(RecvFlow& flow, uint64_t offset, std::span<std::byte> data) override;

 protected:
  void prepare() override;

 private:
  using Kind = CompressedPlan::Kind;
  using Piece = CompressedPlan::Piece;
  using Segment = CompressedPlan::Segment;
  using Stream = CompressedPlan::Stream;
  using Tile = CompressedPlan::Tile;

  // Of one segment on this rank.
  struct State {
    std::vector<ScratchPool::Block> inputs;  // [place in the host]: of its other ranks
    std::vector<ScratchPool::Block> codes;   // [host]
    ScratchPool::Block result{nullptr, {}};  // the mean's code, while it is received or forwarded
    std::size_t inputs_missing = 0;
    std::size_t codes_missing = 0;
    std::size_t sends = 0;  // of the result
    bool done = false;      // the mean is at its destination
  };
  struct Outgoing {
    const Stream* stream;
    SendFlow* flow = nullptr;
    std::size_t ready = 0;    // the first piece that cannot be sent yet
    std::size_t current = 0;  // the one that is being sent
    std::size_t sent = 0;     // the first one that is not sent completely
    ScratchPool::Block code{nullptr, {}};
  };
  struct Incoming {
    const Stream* stream;
    RecvFlow* flow = nullptr;
    std::size_t current = 0;
    std::size_t open = 0;  // the first piece without a grant
    std::size_t held = 0;  // the first one whose memory may still be needed
  };

  void add_flows();
  bool ready(const Piece& piece) const;
  bool consumed(const Piece& piece) const;
  ScratchPool::Block& room_of(const Piece& piece);
  uint64_t widened(Incoming& in);
  void make_ready(Outgoing& out);
  void move_on();

  std::span<const std::byte> input(const Segment& segment, uint64_t offset, std::size_t max);
  const float* x(const Tile& tile) const { return sections_[tile.section].x + tile.begin; }
  float* result(const Tile& tile) const {
    const CompressedSection& section = sections_[tile.section];
    return (section.to != nullptr ? section.to : section.x) + tile.begin;
  }
  // The host's sum: x if one rank is a host, else `add_inputs` writes it to the destination of the mean.
  const float* host_sum(const Tile& tile) const { return hosts_.local().size() > 1 ? result(tile) : x(tile); }
  void add_inputs(const Segment& segment, State& state);
  void encode(const Segment& segment, std::byte* code);
  void take_codes(const Segment& segment, State& state);
  const float* add_codes(const Tile& tile, const State& state);
  Encoded compress(const Tile& tile, std::byte* code, const float* values);
  void take_result(const Segment& segment, State& state);

  void look_at(const float* values, std::size_t count);  // of this rank's input
  // Reports the elements that were not finite when the tile was encoded. `code` is the code of this rank's input, or
  // null for the mean's.
  void explain(const Tile& tile, const std::byte* code);

  const std::vector<CompressedSection> sections_;
  const Compression compression_;
  const Codec& codec_;
  const std::shared_ptr<FiniteReport> report_;  // shared with the caller, who reads it
  const HostMap hosts_;
  std::optional<CompressedPlan> plan_;
  std::vector<State> states_;
  ScratchPool::Block sum_{nullptr, {}};  // of one tile
  std::vector<Outgoing> out_;
  std::vector<Incoming> in_;
  std::vector<std::size_t> stream_of_;  // [member]: its place in both
};

}  // namespace ringdp
