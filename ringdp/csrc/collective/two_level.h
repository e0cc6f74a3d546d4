// TwoLevel: all-reduce and reduce-scatter of ranks on several hosts, of which some have several: added up inside each
// host, then between the hosts with every rank of a host carrying its share, then (all-reduce) passed on inside the
// host. Of h hosts each sends 2(h-1)/h of an all-reduce's buffer, however many ranks it has, and a reduce-scatter's
// chunk leaves a host once. Plans list the messages and the order in which inputs are added. Owner and thread: as every
// Operation (operation.h).
//
// AllReducePlan: the stages of an all-reduce in two levels, made from the host map, the element count and the type.
//
// The buffer is cut into shares, h blocks each (h hosts). Share s is carried on host H by that host's rank number s
// modulo its number of ranks. Three things happen to it:
//   inside    the ranks of a host send their part to the host's carrier, which adds up in rank order;
//   between   the carriers of the hosts go round a ring with it (wide types), or exchange its blocks (half types; all
//     types between far hosts, and hosts with weights);
//   result    each carrier passes finished blocks on to the other ranks of its host.
// All stages have one order, by `turn`, in which later shares begin while earlier ones are between hosts. A turn needs
// results of earlier turns only, and every stream is in that order, so the oldest missing piece can always move: no
// deadlock. Owned by one operation, whose thread uses it.
//
// ReduceScatterPlan: the stages of a reduce-scatter in two levels. On its own host a chunk's owner adds up the host's
// parts; on every other host one rank does, its carrier, in memory of its own (inputs are not changed), and sends the
// sum to the owner, which adds the hosts' sums in the order of the hosts. It works block by block, so that a rank
// holds only a few blocks per peer. Owned by one operation, whose thread uses it.
#pragma once

#include <span>
#include <vector>

#include "base/types.h"
#include "collective/host_map.h"
#include "collective/operation.h"
#include "collective/scattered.h"
#include "collective/stages.h"

namespace ringdp {

class ReduceScatterPlan final : public StagePlan {
 public:
  // `chunks[r]` for rank r, all of the size of `out`, which is not empty.
  ReduceScatterPlan(const HostMap& hosts, const std::vector<std::span<std::byte>>& chunks, std::span<std::byte> out,
                    DType dtype, ReduceOp op);

 private:
  // Of the chunk for the member with number `place` on host `home`.
  void make_block(int home, int place, std::span<std::byte> input, std::span<std::byte> out);

  const HostMap& hosts_;
  const bool half_;
  const int ranks_;  // of the group, if the result is their mean; else 1
};

// How many shares an all-reduce of that many bytes has, of hosts of which the fullest has `most` ranks.
int two_level_shares(std::size_t bytes, int hosts, int most, const Weights& weights = {});

class AllReducePlan final : public StagePlan {
 public:
  AllReducePlan(const HostMap& hosts, std::span<std::byte> memory, DType dtype, ReduceOp op, bool far = false);

 private:
  using Step = int;  // of a share between hosts, from 0

  void make_inside(int share);
  void make_ring_step(int share, Step step);
  void make_exchange_step(int share, Step step);
  void make_results(int share, Step step);
  std::vector<int> finished_blocks(Step step) const;  // on this host, by that step

  int carrier(int host, int share) const { return hosts_.carrier(host, share); }
  bool carries(int share) const { return share % static_cast<int>(hosts_.local().size()) == hosts_.place; }
  int host_after(int host, int steps) const {
    return ((host + steps) % hosts_.count() + hosts_.count()) % hosts_.count();
  }
  std::span<std::byte> block(int share, int number) const;
  Stage*& latest(int share, int number);  // of a share that this rank carries

  const HostMap& hosts_;
  const std::span<std::byte> memory_;
  const std::size_t element_bytes_;
  const bool half_;
  const bool in_pairs_;  // between hosts
  const int ranks_;      // of the group, if the result is their mean; else 1
  const int share_count_;
  const int steps_;
  const Chunks shares_;
  std::vector<Stage*> latest_;
};

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
