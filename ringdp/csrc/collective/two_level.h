// TwoLevel: all-reduce and reduce-scatter of ranks on several hosts, of which some have several: added up inside each
// host, then between the hosts with every rank of a host carrying its share, then (all-reduce) passed on inside the
// host. Of h hosts each sends 2(h-1)/h of an all-reduce's buffer, however many ranks it has, and a reduce-scatter's
// chunk leaves a host once. Plans list the messages and the order in which inputs are added: two_level_plan.h,
// two_level_scatter.h. Owner and thread: as every Operation (operation.h).
#pragma once

#include "collective/host_map.h"
#include "collective/operation.h"
#include "collective/stages.h"

namespace ringdp {

class TwoLevel final : public Operation {
 public:
  // `group` spans several hosts and has several ranks on one of them at least (Layout::kSeveralRanksPerHost).
  // All-reduce: `chunks` is the buffer, in place, and `out` empty. Reduce-scatter: `chunks[r]` for rank r, not
  // changed, none empty; `out` receives this rank's.
  TwoLevel(GroupView group, OperationShape shape, std::string name, std::vector<std::span<std::byte>> chunks,
           std::span<std::byte> out);

  std::span<const std::byte> outgoing(SendFlow& flow, uint64_t offset, std::size_t max) override;
  std::span<std::byte> incoming(RecvFlow& flow, uint64_t offset, std::size_t length) override;
  void flushed(SendFlow& flow) override;
  void arrived(RecvFlow& flow, uint64_t offset, std::span<std::byte> data) override;
  bool take(RecvFlow& flow, uint64_t offset, std::span<const std::byte> data) override;

 protected:
  void prepare() override;

 private:
  using Piece = StagePlan::Piece;
  using Stream = StagePlan::Stream;

  struct Outgoing {
    explicit Outgoing(Stream& to) : stream(&to) {}

    Stream* stream;
    SendFlow* flow = nullptr;
    std::size_t current = 0;  // the piece that is being sent
    std::size_t sent = 0;     // the first one that is not sent completely
    std::size_t ready = 0;    // the first one that is not complete
  };
  struct Incoming {
    explicit Incoming(Stream& from) : stream(&from) {}

    Stream* stream;
    RecvFlow* flow = nullptr;
    std::size_t current = 0;
    std::size_t open = 0;      // the first piece without a grant
    std::vector<Stage*> held;  // sums of open pieces that may have to keep their bytes
  };

  std::size_t advance(Stage& stage);  // adds available bytes; returns how many bytes of the result are complete
  void begin_sum(Stage& stage);
  const Piece& piece_at(RecvFlow& flow, uint64_t offset);
  uint64_t widened(Incoming& in);
  void make_ready(Outgoing& out);
  void move_on();

  const HostMap hosts_;
  const std::size_t held_pieces_;  // of a peer, at most
  const std::vector<std::span<std::byte>> chunks_;
  const std::span<std::byte> result_;
  std::unique_ptr<StagePlan> plan_;
  std::vector<Outgoing> out_;
  std::vector<Incoming> in_;
  std::vector<std::size_t> out_of_;  // [member]: its place in out_
  std::vector<std::size_t> in_of_;
};

}  // namespace ringdp
