// SimulatedRank: one rank of a Simulation: its operation, the peers to which its flows go, and the thread that works
// for them. Its thread does one piece of work at a time, in the order in which the pieces became possible; what a piece
// does (a frame taken, a sum) shows to other ranks when the piece ends. Owned by the Simulation, used by its thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "collective/operation.h"
#include "collective/scratch.h"
#include "kernels/counting.h"
#include "link/link_sender.h"
#include "simulation/network.h"

namespace ringdp {

class Simulation;
class SimulatedRank;
struct SimulatedPeer;

// A frame on its way, with the control frames that went before it in the same call.
struct SimulatedMessage {
  SimulatedPeer* from = nullptr;
  SimulatedRank* to = nullptr;
  int taken_for = -1;  // the member from which `to` has it
  int from_host = 0;
  int to_host = 0;
  uint64_t grant = 0;  // 0: none
  bool data = false;
  uint64_t offset = 0;
  std::size_t length = 0;     // of the payload
  std::size_t wire_left = 0;  // bytes that have not left yet
  std::size_t wire_bytes = 0;
  std::vector<std::byte> payload;  // with memory that exists
  CriticalPath path;
};

// A rank's way to one other.
struct SimulatedPeer {
  SimulatedRank* rank = nullptr;
  int member = -1;
  bool within_host = false;
  SendFlow* out = nullptr;
  RecvFlow* in = nullptr;
  SendWindow window;
  uint64_t grant = 0;  // to be sent
  bool announces = false;
  bool queued = false;                    // the rank's thread will send to it
  std::size_t unsent = 0;                 // bytes in the socket, or in the shared ring
  std::deque<SimulatedMessage*> waiting;  // for the host's link
};

// What the ranks of a host work on.
struct SimulatedCores {
  int free = 1;
  std::deque<SimulatedRank*> waiting;
  CriticalPath last;  // of the work that ended last
};

class SimulatedRank final : public FlowCarrier {
 public:
  SimulatedRank(Simulation& simulation, int member, SimulatedCores& cores, std::byte* nowhere)
      : simulation_(simulation), member_(member), cores_(cores), scratch_(nowhere) {}

  void begin(std::unique_ptr<Operation> operation);
  void take(SimulatedMessage* message, std::size_t bytes, bool last, const CriticalPath& path);  // bytes have come
  void room(SimulatedPeer& peer, std::size_t bytes, const CriticalPath& path);  // that went to it have left
  void core_is_free();
  void work_ends();

  int member() const { return member_; }
  bool finished() const { return finished_s_ >= 0; }
  double finished_at() const { return finished_s_; }
  uint64_t messages() const { return messages_; }
  std::string waiting_for() const { return operation_->waiting_for(); }

  // ---- FlowCarrier, for the operation.
  void attach(SendFlow& flow) override;
  void attach(RecvFlow& flow) override;
  void detach(SendFlow& flow) override { peer(flow.peer).out = nullptr; }
  void detach(RecvFlow& flow) override { peer(flow.peer).in = nullptr; }
  void widen(RecvFlow& flow) override;
  void will_change(const SendFlow&, std::span<const std::byte>) override {}
  void announce(int to, const FlowIdentity& identity) override;
  std::string peer_text(int of) const override { return "rank " + std::to_string(of) + " ()"; }

 private:
  struct Work {
    enum class Kind { kSend, kTake, kCompute };

    Kind kind;
    SimulatedPeer* peer = nullptr;
    SimulatedMessage* message = nullptr;
    std::size_t bytes = 0;
    bool last = false;
    double possible_s = 0;
    CriticalPath path;  // of what made it possible
  };

  SimulatedPeer& peer(int member);
  void grant(RecvFlow& flow);
  void look(const CriticalPath& path);  // queues what can be sent by now
  bool can_send(const SimulatedPeer& peer) const;
  std::size_t room_of(const SimulatedPeer& peer) const;
  void add(Work work);
  void go_on();  // begins the next piece of work, if the thread is free and has a core
  void begin_work();
  double prepare_send(Work& work);
  double take_message(Work& work);
  double seconds_of_counted();
  void sent(SimulatedMessage* message);
  void flow_ended() { --open_flows_; }

  Simulation& simulation_;
  const int member_;
  SimulatedCores& cores_;
  ScratchPool scratch_;
  std::unique_ptr<Operation> operation_;
  std::map<int, SimulatedPeer> peers_;
  std::vector<SimulatedPeer*> senders_;   // with a flow that is not complete
  std::vector<SimulatedPeer*> controls_;  // with control frames to be sent
  std::deque<Work> queue_;
  Work now_;
  CriticalPath path_;  // of the last piece of work, or of the present one
  bool working_ = false;
  bool waits_for_core_ = false;
  double finished_s_ = -1;
  double owed_s_ = 0;  // for what a send has set free
  long open_flows_ = 0;
  uint64_t messages_ = 0;
};

}  // namespace ringdp
