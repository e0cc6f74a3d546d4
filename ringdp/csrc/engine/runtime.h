// Runtime: everything one process needs to take part in a job: the connections, the engine and its two threads. Explicit
// and countable: tests make one per rank in one process. Created and destroyed by any thread; destruction says goodbye to
// the peers and joins the threads (after a fork, in the child, it does nothing).
#pragma once

#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "collective/choice.h"
#include "engine/engine.h"
#include "mesh/rendezvous.h"

namespace ringdp {

class Runtime {
 public:
  // Meets the other ranks (blocking, see `meet`) and starts the threads.
  Runtime(Store& store, const RendezvousOptions& rendezvous, EngineOptions options, AlgorithmTables tables = {});
  // The ranks have met already. `tables`: the job's; its ranks compare them when they meet (RendezvousOptions::tables).
  Runtime(int rank, std::vector<MetPeer> peers, EngineOptions options, AlgorithmTables tables = {});
  ~Runtime();
  Runtime(const Runtime&) = delete;
  Runtime& operator=(const Runtime&) = delete;

  Engine& engine() { return *engine_; }
  std::shared_ptr<Engine> share_engine() { return engine_; }
  int ranks_on_this_host() const { return ranks_on_this_host_; }
  const std::vector<int>& hosts() const { return hosts_; }  // the number of each rank's host, in order of appearance
  const AlgorithmTables& tables() const { return tables_; }
  const std::map<int, std::string>& transports() const { return transports_; }  // of every other rank: "shm", "tcp"

  void shut_down();  // idempotent

 private:
  std::shared_ptr<Engine> engine_;  // also held by the threads and by works still waited for
  std::unique_ptr<std::thread> communication_;
  std::unique_ptr<std::thread> completion_;
  const unsigned generation_ = fork_generation();
  int ranks_on_this_host_ = 1;
  std::vector<int> hosts_;
  const AlgorithmTables tables_;
  std::map<int, std::string> transports_;
};

}  // namespace ringdp
