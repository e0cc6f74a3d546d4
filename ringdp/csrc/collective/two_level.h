// TwoLevel: all-reduce of ranks on several hosts, of which some have several: added up inside each host, then between the
// hosts with every rank of a host carrying its share, then passed on inside the host. 2(h-1)/h of the buffer leave each host
// (h hosts), however many ranks it has. two_level_plan.h says who sends what to whom and in which order things are added.
#pragma once

#include "collective/host_map.h"
#include "collective/operation.h"
#include "collective/two_level_plan.h"

namespace ringdp {

class TwoLevel final : public Operation {
 public:
  // `group` spans several hosts and has several ranks on one of them at least (Layout::kSeveralRanksPerHost).
  TwoLevel(GroupView group, OperationShape shape, std::string name, std::span<std::byte> memory);

  std::span<const std::byte> outgoing(SendFlow& flow, uint64_t offset, std::size_t max) override;
  std::span<std::byte> incoming(RecvFlow& flow, uint64_t offset, std::size_t length) override;
  void arrived(RecvFlow& flow, uint64_t offset, std::span<std::byte> data) override;

 protected:
  void prepare() override;

 private:
  using Stage = TwoLevelPlan::Stage;
  using Piece = TwoLevelPlan::Piece;

  struct Outgoing {
    explicit Outgoing(TwoLevelPlan::Stream& to) : stream(&to) {}

    TwoLevelPlan::Stream* stream;
    SendFlow* flow = nullptr;
    std::size_t current = 0;  // the piece that is being sent
    std::size_t ready = 0;    // the first one that is not all there
  };
  struct Incoming {
    explicit Incoming(TwoLevelPlan::Stream& from) : stream(&from) {}

    TwoLevelPlan::Stream* stream;
    RecvFlow* flow = nullptr;
    std::size_t current = 0;
    std::size_t open = 0;      // the first piece that may not come yet
    std::vector<Stage*> held;  // sums of open pieces that may have to keep what comes
  };

  std::size_t advance(Stage& stage);  // adds what is there; returns how many bytes of the result are
  void begin_sum(Stage& stage);
  uint64_t widened(Incoming& in);
  void make_ready(Outgoing& out);
  void move_on();

  const HostMap hosts_;
  const std::span<std::byte> memory_;
  std::unique_ptr<TwoLevelPlan> plan_;
  std::vector<Outgoing> out_;
  std::vector<Incoming> in_;
  std::vector<std::size_t> out_of_;  // [member]: its place in out_
  std::vector<std::size_t> in_of_;
};

}  // namespace ringdp
