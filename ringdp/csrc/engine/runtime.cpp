#include "engine/runtime.h"

#include <sched.h>

#include <algorithm>
#include <map>

#include "base/error.h"
#include "base/thread.h"

namespace ringdp {
namespace {

int cores() {
  cpu_set_t set;
  return sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 1;
}

std::vector<int> numbers(const std::vector<MeshPeer>& peers, std::string MeshPeer::* name) {
  std::map<std::string, int> seen;
  std::vector<int> out;
  for (const MeshPeer& peer : peers)
    out.push_back(seen.emplace(peer.*name, static_cast<int>(seen.size())).first->second);
  return out;
}

std::vector<int> host_numbers(const std::vector<MeshPeer>& peers) {
  const bool several_sites =
      std::any_of(peers.begin(), peers.end(), [&](const MeshPeer& it) { return it.site != peers.front().site; });
  return numbers(peers, several_sites ? &MeshPeer::site : &MeshPeer::host_identity);
}

}  // namespace

Runtime::Runtime(Store& store, const RendezvousOptions& rendezvous, EngineOptions options, AlgorithmTables tables)
    : Runtime(rendezvous.rank, meet(store, rendezvous), std::move(options), tables) {}

Runtime::Runtime(int rank, Mesh mesh, EngineOptions options, AlgorithmTables tables)
    : connecting_(std::move(mesh.late)),
      hosts_(host_numbers(mesh.peers)),
      tables_(tables),
      round_trip_us_(mesh.round_trip_us),
      tables_in_use_(tables_for(tables, mesh.round_trip_us)) {
  std::vector<MeshPeer>& peers = mesh.peers;
  const std::string& here = peers[static_cast<std::size_t>(rank)].host_identity;
  ranks_on_this_host_ = static_cast<int>(
      std::count_if(peers.begin(), peers.end(), [&](const MeshPeer& it) { return it.host_identity == here; }));
  for (const MeshPeer& peer : peers)
    if (peer.transport != nullptr) transports_[peer.info.rank] = peer.transport->name;
  // More ranks than cores: polling TCP would take the core from the rank that is waited for. Polling shared memory
  // between two yields is cheap (4 ranks on 2 cores, 4 KiB: 31 us, and 50 to 90 when they sleep after 10 us).
  options.shares_cores = ranks_on_this_host_ > cores();
  bool streams = std::any_of(peers.begin(), peers.end(),
                             [](const MeshPeer& peer) { return peer.transport != nullptr && !peer.transport->direct; });
  if (options.shares_cores && streams) options.spin_us = std::min<int64_t>(options.spin_us, 10);
  if (options.rate_bytes_per_s > 0)  // they share a network card
    options.rate_bytes_per_s = std::max<int64_t>(1, options.rate_bytes_per_s / ranks_on_this_host_);
  if (options.heal_ms == 0 && connecting_ && connecting_->all_connected()) connecting_.reset();  // nothing to do
  if (connecting_ && !connecting_->all_connected())
    options.want_connection = [late = std::weak_ptr(connecting_)](int peer) {
      if (const auto maker = late.lock()) maker->want(peer);
    };
  if (connecting_ && options.heal_ms > 0)
    options.heal_connection = [late = std::weak_ptr(connecting_)](int peer, bool broken) {
      if (const auto maker = late.lock()) maker->heal(peer, broken);
    };
  const int64_t heal_ms = options.heal_ms;
  engine_ = std::make_shared<Engine>(rank, std::move(peers), std::move(options));
  try {
    communication_ = start_thread("ringdp-comm", [engine = engine_] { engine->run_communication_thread(); });
    if (connecting_) connecting_->start(engine_->healing(), heal_ms);  // stopped before the engine is destroyed
    completion_ = start_thread("ringdp-done", [engine = engine_] { engine->completions().run(); });
  } catch (const Error& error) {
    engine_->set_farewell(std::string("it ") + error.what());
    shut_down();
    throw;
  }
}

Runtime::~Runtime() {
  if (fork_generation() != generation_) {
    // The threads exist in the parent only: a child must not touch their state.
    [[maybe_unused]] auto* communication = communication_.release();
    [[maybe_unused]] auto* completion = completion_.release();
    [[maybe_unused]] auto* late = new std::shared_ptr<ConnectionThread>(connecting_);
    [[maybe_unused]] auto* engine = new std::shared_ptr<Engine>(engine_);  // leaked: its mutexes may be locked for ever
    return;
  }
  shut_down();
}

void Runtime::shut_down() {
  if (fork_generation() != generation_) return;
  ended_ = true;
  engine_->take_leave();
  if (connecting_) connecting_->stop();  // until then it replaces broken connections
  engine_->shut_down();
  engine_->completions().stop();
  engine_->notices().stop();
  end_thread(communication_);
  end_thread(completion_);
  engine_->completions().join();
  engine_->notices().join();
}

}  // namespace ringdp
