// Simulation: one all-reduce of many ranks in numbers. Each rank is the product's own operation; its flows are carried
// by a SimulatedRank, over lines whose bandwidth is shared, with latency and the cost of messages. The memory of the
// ranks does not exist (addresses without access, and kernels that only count: kernels/counting.h). Used by one thread;
// the same input gives the same result to the last digit.
//
// What is modelled. A line (a host's link in one direction, a site's line) serves the pairs of ranks that have bytes in
// turns, 64 KiB at a time, or 16 where several have some. A rank's thread does one thing at a time: it sends a frame,
// or takes what has come; ranks beyond the cores of a host wait for one. A frame between hosts goes through the
// sender's link, the sites' lines and the receiver's link, each of which begins when the first byte comes. What a
// connection holds is limited, as in the product. Not modelled: losses, congestion control, interrupts, other programs.
//
// Invariant: events are handled in order of their time, and of two at one time the one that was made first.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <queue>
#include <span>
#include <vector>

#include "collective/all_reduce.h"
#include "collective/scratch.h"
#include "simulation/network.h"
#include "simulation/rank.h"
#include "simulation/virtual_memory.h"

namespace ringdp {

// A host's link in one direction, or a site's line. The host's way out serves pairs in turns; the others serve what
// comes in the order in which it comes.
struct SimulatedLine {
  SimulatedLine(CriticalPath::Part is, double rate, double burst = 0)
      : part(is), bytes_per_s(rate), burst_s(burst / rate), free_s(burst_s) {}

  // When that many bytes have passed of which the first came at `first_s`, and the last not before `last_s`.
  double pass(double first_s, double last_s, double bytes) {
    free_s = std::max(free_s, first_s) + bytes / bytes_per_s;
    return std::max(last_s, free_s - burst_s);
  }

  const CriticalPath::Part part;
  const double bytes_per_s;
  const double burst_s;  // of its rate, which pass at once after a pause
  double free_s;         // when it would have served what has come, without bursts
  CriticalPath last;     // of what it serves, or has served last
  SimulatedTraffic traffic;
  std::deque<SimulatedPeer*> turns;  // pairs with bytes
  std::size_t serving_bytes = 0;     // of the first pair; 0: it is idle
};

class Simulation {
 public:
  // Throws Error(kValue) for what cannot be simulated, or would take too many messages.
  Simulation(const SimulatedNetwork& network, SimulatedCall call);
  ~Simulation();
  Simulation(const Simulation&) = delete;
  Simulation& operator=(const Simulation&) = delete;

  // Once. `look` is called now and then, and may throw. Throws Error(kSystem) if the operations wait for one another
  // for ever.
  SimulatedResult run(const std::function<void()>& look);

  // About how many messages all ranks send.
  static double messages(const SimulatedNetwork& network, const SimulatedCall& call);

 private:
  friend class SimulatedRank;

  enum class EventKind : uint8_t { kWorkEnds, kLineFree, kArrives };
  struct Event {
    double time;
    uint64_t number;
    EventKind kind;
    uint32_t body;  // of kArrives: index in `chunks_`
    void* of;       // of kWorkEnds the SimulatedRank, of kLineFree the SimulatedLine

    bool operator>(const Event& other) const { return time != other.time ? time > other.time : number > other.number; }
  };
  // A part of a message on its way between hosts.
  struct Chunk {
    SimulatedMessage* message = nullptr;
    std::size_t bytes = 0;
    bool last = false;
    int hop = 0;                  // the line that it comes to; behind the last: its receiver
    double sent_bytes_per_s = 0;  // of the line before
    CriticalPath path;
  };

  void make_lines();
  void make_ranks();
  std::unique_ptr<Operation> make_operation(int rank);
  void fold();
  std::size_t bytes_to_fold() const;
  void handle(const Event& event);
  void add_event(double time, EventKind kind, void* of, uint32_t body = 0);
  uint32_t add_chunk(const Chunk& chunk);

  void transmit(SimulatedMessage* message);  // to the line out of the sender's host, or to a rank of that host
  void serve(SimulatedLine& line, bool was_idle);
  void line_free(SimulatedLine& line);
  void arrives(uint32_t chunk);
  void deliver(uint32_t chunk);
  SimulatedLine& of_host(std::vector<SimulatedLine>& lines, int host);
  int site_of(const SimulatedMessage& message, bool sender) const;
  double wait_for_memory(const SimulatedRank& rank, std::size_t bytes, double seconds);
  void rank_finished(const CriticalPath& path);

  SimulatedMessage* new_message();
  void free_message(SimulatedMessage* message);
  int host_of(int member) const { return host_of_[static_cast<std::size_t>(member)]; }
  std::pair<SimulatedRank*, int> receiver(int from, int to);  // and who it takes the sender for

  const SimulatedNetwork network_;
  SimulatedCall call_;
  const std::vector<int> host_of_;
  int folded_hosts_ = 1;
  VirtualMemory memory_;
  double now_ = 0;
  uint64_t events_ = 0;
  uint64_t event_number_ = 0;
  std::priority_queue<Event, std::vector<Event>, std::greater<>> queue_;
  std::vector<Chunk> chunks_;
  std::vector<uint32_t> free_chunks_;
  std::vector<std::unique_ptr<SimulatedMessage>> messages_;
  std::vector<SimulatedMessage*> free_messages_;
  std::vector<SimulatedLine> up_, down_, host_memory_;  // by simulated host
  std::vector<SimulatedLine> site_up_, site_down_;
  std::vector<SimulatedCores> cores_;
  std::vector<std::unique_ptr<SimulatedRank>> ranks_;
  std::size_t unfinished_ = 0;
  CriticalPath last_path_;
};

}  // namespace ringdp
