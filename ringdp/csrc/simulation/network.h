// The network of a simulation: hosts with their links, what work costs on them, and what one all-reduce took there.
// Value types, any thread.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/types.h"
#include "collective/algorithm_table.h"

namespace ringdp {

struct SimulatedHost {
  int ranks = 1;
  int site = 0;
  double up_bytes_per_s = 0;  // what leaves the host, shared by its ranks
  double down_bytes_per_s = 0;
};

// What a rank's thread spends; seconds, and seconds a byte.
struct WorkCosts {
  double message_between_hosts = 0;  // at each end, however short it is
  double message_within_host = 0;
  double copy_between_hosts = 0;  // at each end: to and from the kernel
  double copy_within_host = 0;    // at the sender
  double add = 0;                 // a byte of a sum's operand
  double encode = 0;              // a byte of floats
  double decode = 0;
};

struct SimulatedNetwork {
  std::vector<SimulatedHost> hosts;  // ranks are numbered host by host
  int cores = 1;                     // of each host; more ranks than that work in turns
  bool one_machine = false;          // all hosts share those cores: namespaces of one machine
  double memory_bytes_per_s = 0;     // of each host, for the copies between its ranks; 0: any
  double latency_s = 0;              // of a byte's way from host to host, within a site
  double latency_between_sites_s = 0;
  double site_bytes_per_s = 0;     // of each site's line to the others, in each direction
  double wire_bytes_per_byte = 1;  // with the headers of packets
  double burst_bytes = 0;          // that pass a host's link at once after a pause, as tc's token buckets let them
  WorkCosts costs;

  int ranks() const {
    return std::accumulate(hosts.begin(), hosts.end(), 0,
                           [](int sum, const SimulatedHost& it) { return sum + it.ranks; });
  }
  std::vector<int> host_of_ranks() const {
    std::vector<int> out;
    for (std::size_t host = 0; host < hosts.size(); ++host)
      out.insert(out.end(), static_cast<std::size_t>(hosts[host].ranks), static_cast<int>(host));
    return out;
  }
};

struct SimulatedCall {
  std::size_t bytes = 0;  // of the buffer
  DType dtype = DType::kFloat32;
  Algorithm algorithm = Algorithm::kRing;  // one that reduces all, or kCompressed
  CodecId codec = CodecId::kInt8;          // with kCompressed
  bool barrier = false;                    // not an all-reduce: `bytes` and `algorithm` do not matter
  bool far = false;                        // as in GroupView
  Weights weights;                         // as in GroupView
  double most_messages = 1e7;              // a simulation of more is refused
  // Of hosts that are alike one stands for all in simulations of more messages.
  double fold_from_messages = 2e5;
  // By rank: memory that the operations work on, in place. Empty: none exists, and no byte is moved.
  std::vector<std::span<std::byte>> memory;
};

// Where the time of the critical path went: of the chain of work that ended last, of which each part waited for the one
// before it. The parts add up to the time of the whole.
struct CriticalPath {
  enum Part : std::size_t {
    kMessages,  // cost of messages at their ends
    kCopies,
    kSums,
    kCodes,
    kMemory,  // the host's memory was busy
    kUplinks,
    kSiteLines,
    kDownlinks,
    kLatency,
    kParts
  };

  std::array<double, kParts> seconds{};
  uint32_t hops = 0;  // messages that followed one another

  double total() const { return std::accumulate(seconds.begin(), seconds.end(), 0.0); }
  CriticalPath with(Part part, double more) const {
    CriticalPath out = *this;
    out.seconds[part] += more;
    return out;
  }
};

struct SimulatedTraffic {
  uint64_t bytes = 0;
  double busy_s = 0;
};

struct SimulatedResult {
  double seconds = 0;  // until the last rank has its result
  CriticalPath path;
  int folded_hosts = 1;                    // how many hosts each simulated one stands for
  std::size_t bytes = 0;                   // of the buffer: more than was asked for where one host stands for all
  std::vector<double> finish_s;            // by simulated rank
  std::vector<uint64_t> messages;          // sent, by simulated rank
  std::vector<SimulatedTraffic> up, down;  // by simulated host
  std::vector<SimulatedTraffic> site_up;   // by site
  uint64_t events = 0;
};

}  // namespace ringdp
