// The start of a job in numbers, how its ranks hear of a loss, and how an elastic job agrees on who goes on. What the
// ranks ask the store comes from the product: RecordTree and PeerRecords (meet/) for the start, MemberTurn
// (membership/) for the change. The store is one that answers requests one after the other. Connections, and the
// messages over them, are counted, by the graph of meet/rendezvous.h. Pure functions, any thread.
//
// What is modelled of the store: a request waits behind those of all ranks that were made before it, and takes the
// store its own time, and that of its keys and bytes. What a rank reads or sets is seen by others from then on. Not
// modelled: ranks that begin at different times, connections while records are still read, and processors, except for
// the work of making connections.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

namespace ringdp {

struct StartCosts {
  double store_request_s = 0;  // the store's time for one
  double store_key_s = 0;      // for each key in it
  double store_byte_s = 0;     // for each byte of values
  double round_trip_s = 0;     // between hosts, and to the store
  double message_between_hosts_s = 0;
  double message_within_host_s = 0;
  double connection_s = 0;  // the work of a rank for one connection of the start
  int cores = 1;            // of each host
};

struct SimulatedStart {
  double records_s = 0;  // until the last rank has the records of all
  double seconds = 0;    // until all are connected, and know it
  int64_t requests = 0;  // to the store, of the rank that makes most
  double mean_requests = 0;
  double store_bytes = 0;  // that the store sends and gets
  int rounds = 0;          // reads of the store that follow one another
  int connections = 0;     // of the rank that has most
};

// `host_of`: by rank. `look` is called now and then, and may throw. Throws Error(kValue) where more ranks are to
// connect with all others than can be simulated.
SimulatedStart simulate_start(const std::vector<int>& host_of, int full_mesh_ranks, const StartCosts& costs,
                              const std::function<void()>& look);

struct SimulatedLoss {
  double seconds = 0;    // from the first ranks that notice it until the last one has heard of it
  int hops = 0;          // messages one after another
  int64_t messages = 0;  // of the rank that sends most
};

// The rank in the middle is lost; those that are connected with it notice it at once, and pass it on.
SimulatedLoss simulate_loss(const std::vector<int>& host_of, int full_mesh_ranks, const StartCosts& costs);

struct SimulatedChange {
  double seconds = 0;  // until the last survivor has read the decision
  int64_t requests = 0;
  double mean_requests = 0;
};

// All but one of so many members agree. Throws Error(kValue) for too many of them.
SimulatedChange simulate_change(int members, const StartCosts& costs, const std::function<void()>& look);

}  // namespace ringdp
