#include "engine/runtime.h"

#include <sched.h>

#include <algorithm>

#include "engine/thread.h"

namespace ringdp {
namespace {

int cores() {
  cpu_set_t set;
  return sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 1;
}

}  // namespace

Runtime::Runtime(Store& store, const RendezvousOptions& rendezvous, EngineOptions options)
    : Runtime(rendezvous.rank, meet(store, rendezvous), std::move(options)) {}

Runtime::Runtime(int rank, std::vector<MetPeer> peers, EngineOptions options) {
  const std::string here = peers[static_cast<std::size_t>(rank)].host_identity;
  ranks_on_this_host_ = static_cast<int>(
      std::count_if(peers.begin(), peers.end(), [&](const MetPeer& peer) { return peer.host_identity == here; }));
  // More ranks than cores: polling would take the core from the rank that is waited for.
  if (ranks_on_this_host_ > cores()) options.spin_us = std::min<int64_t>(options.spin_us, 10);
  engine_ = std::make_shared<Engine>(rank, std::move(peers), std::move(options));
  communication_ = start_thread("ringdp-comm", [engine = engine_] { engine->run_communication_thread(); });
  completion_ = start_thread("ringdp-done", [engine = engine_] { engine->completions().run(); });
}

Runtime::~Runtime() {
  if (fork_generation() != generation_) {
    // The threads exist in the parent only; nothing of them may be touched here.
    [[maybe_unused]] auto* communication = communication_.release();
    [[maybe_unused]] auto* completion = completion_.release();
    [[maybe_unused]] auto* engine = new std::shared_ptr<Engine>(engine_);  // its mutexes may be locked for ever
    return;
  }
  shut_down();
}

void Runtime::shut_down() {
  if (fork_generation() != generation_) return;
  engine_->shut_down();
  engine_->completions().stop();
  engine_->notices().stop();
  end_thread(communication_);
  end_thread(completion_);
  engine_->completions().join();
  engine_->notices().join();
}

}  // namespace ringdp
