#include "engine/runtime.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <csignal>

namespace ringdp {
namespace {

// Signals are for the main thread: Python's handlers run there.
template <typename Body>
std::unique_ptr<std::thread> start_thread(const char* name, Body body) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  auto thread = std::make_unique<std::thread>(std::move(body));
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  pthread_setname_np(thread->native_handle(), name);
  return thread;
}

void end_thread(std::unique_ptr<std::thread>& thread) {
  if (!thread || !thread->joinable()) return;
  if (thread->get_id() == std::this_thread::get_id())
    thread->detach();  // the last reference went away inside a callback
  else
    thread->join();
}

int cores() {
  cpu_set_t set;
  return sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 1;
}

}  // namespace

Runtime::Runtime(Store& store, const RendezvousOptions& rendezvous, EngineOptions options) {
  std::vector<MetPeer> peers = meet(store, rendezvous);
  const std::string here = peers[static_cast<std::size_t>(rendezvous.rank)].host_identity;
  ranks_on_this_host_ = static_cast<int>(
      std::count_if(peers.begin(), peers.end(), [&](const MetPeer& peer) { return peer.host_identity == here; }));
  // More ranks than cores: polling would take the core from the rank that is waited for.
  if (ranks_on_this_host_ > cores()) options.spin_us = std::min<int64_t>(options.spin_us, 10);
  engine_ = std::make_shared<Engine>(rendezvous.rank, std::move(peers), std::move(options));
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
  end_thread(communication_);
  end_thread(completion_);
}

}  // namespace ringdp
