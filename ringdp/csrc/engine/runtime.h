// Runtime: one rank's part in a job: the connections, the engine and its two threads. Not a global: tests make one per
// rank in one process. Owned by the process groups of the process, or by a test. Created and destroyed by any thread;
// destruction says goodbye to the peers and joins the threads (after a fork, in the child, it does nothing).
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "collective/algorithm_table.h"
#include "engine/engine.h"
#include "meet/connection_thread.h"
#include "meet/rendezvous.h"

namespace ringdp {

class Runtime {
 public:
  // Runs the rendezvous (blocking, see `meet`) and starts the threads.
  Runtime(Store& store, const RendezvousOptions& rendezvous, EngineOptions options, AlgorithmTables tables = {});
  // After a rendezvous. `tables`: the job's; the ranks have compared them there (RendezvousOptions::tables).
  Runtime(int rank, Mesh mesh, EngineOptions options, AlgorithmTables tables = {});
  ~Runtime();
  Runtime(const Runtime&) = delete;
  Runtime& operator=(const Runtime&) = delete;

  Engine& engine() { return *engine_; }
  std::shared_ptr<Engine> share_engine() { return engine_; }
  int ranks_on_this_host() const { return ranks_on_this_host_; }
  // The number of each rank's host, in order of appearance; if the ranks have sites, of its site, which collectives
  // treat as a host.
  const std::vector<int>& hosts() const { return hosts_; }
  const AlgorithmTables& tables() const { return tables_; }                // as configured
  const AlgorithmTables& tables_in_use() const { return tables_in_use_; }  // for this job's round trip
  int64_t round_trip_us() const { return round_trip_us_; }                 // Mesh::round_trip_us
  bool far() const { return tables_in_use_ != tables_; }                   // the round trip counts as long
  // The transport's name to every other rank; the expected one if it is not connected yet.
  const std::map<int, std::string>& transports() const { return transports_; }

  void shut_down();  // idempotent
  bool ended() const { return ended_; }

 private:
  std::shared_ptr<Engine> engine_;                // also held by the threads and by works still waited for
  std::shared_ptr<ConnectionThread> connecting_;  // null if no connection is missing and none can break
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
