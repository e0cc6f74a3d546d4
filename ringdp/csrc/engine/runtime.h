// Runtime: one rank's part in a job: the connections, the engine and its two threads. It is not a global: tests make
// one per rank in one process. Owned by the process groups of the process, or by a test. Created and destroyed by any
// thread; destruction says goodbye to the peers and joins the threads (after a fork, in the child, it does nothing).
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "collective/algorithm_table.h"
#include "engine/engine.h"
#include "mesh/late_connections.h"
#include "mesh/rendezvous.h"

namespace ringdp {

class Runtime {
 public:
  // Meets the other ranks (blocking, see `meet`) and starts the threads.
  Runtime(Store& store, const RendezvousOptions& rendezvous, EngineOptions options, AlgorithmTables tables = {});
  // The ranks have met already. `tables`: the job's; its ranks compare them when they meet (RendezvousOptions::tables).
  Runtime(int rank, Mesh mesh, EngineOptions options, AlgorithmTables tables = {});
  ~Runtime();
  Runtime(const Runtime&) = delete;
  Runtime& operator=(const Runtime&) = delete;

  Engine& engine() { return *engine_; }
  std::shared_ptr<Engine> share_engine() { return engine_; }
  int ranks_on_this_host() const { return ranks_on_this_host_; }
  // The number of each rank's host, in order of appearance; of its site, where ranks name several: what collectives
  // take for a host.
  const std::vector<int>& hosts() const { return hosts_; }
  const AlgorithmTables& tables() const { return tables_; }                // as they were asked for
  const AlgorithmTables& tables_in_use() const { return tables_in_use_; }  // for this job's round trip
  int64_t round_trip_us() const { return round_trip_us_; }                 // Mesh::round_trip_us
  bool far() const { return tables_in_use_ != tables_; }                   // it counts as long
  // Of every other rank: its transport's name; where it is not connected yet, what it is expected to be.
  const std::map<int, std::string>& transports() const { return transports_; }

  void shut_down();  // idempotent
  bool ended() const { return ended_; }

 private:
  void start_connecting(int64_t heal_ms);

  std::shared_ptr<Engine> engine_;         // also held by the threads and by works still waited for
  std::shared_ptr<LateConnections> late_;  // null where no connection is missing and none can break
  std::unique_ptr<std::thread> communication_;
  std::unique_ptr<std::thread> completion_;
  const unsigned generation_ = fork_generation();
  std::atomic<bool> ended_{false};
  int ranks_on_this_host_ = 1;
  std::vector<int> hosts_;
  const AlgorithmTables tables_;
  const int64_t round_trip_us_;
  const AlgorithmTables tables_in_use_;
  std::map<int, std::string> transports_;
};

}  // namespace ringdp
