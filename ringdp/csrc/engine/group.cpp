#include "engine/group.h"

#include <sched.h>

#include <algorithm>
#include <map>
#include <utility>

#include "base/bytes.h"
#include "base/error.h"
#include "base/naming.h"
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

bool several_sites(const std::vector<MeshPeer>& peers) {
  return std::any_of(peers.begin(), peers.end(), [&](const MeshPeer& it) { return it.site != peers.front().site; });
}

std::vector<int> host_numbers(const std::vector<MeshPeer>& peers) {
  return numbers(peers, several_sites(peers) ? &MeshPeer::site : &MeshPeer::host_identity);
}

std::vector<Runtime::Uplink> uplinks_of(const std::vector<MeshPeer>& peers, const std::vector<int>& hosts,
                                        const std::map<std::string, std::size_t>& map) {
  std::vector<Runtime::Uplink> out;
  if (map.empty()) return out;
  std::size_t fastest = 0;
  for (const auto& [name, rate] : map) fastest = std::max(fastest, rate);
  const bool sites = several_sites(peers);
  for (std::size_t rank = 0; rank < peers.size(); ++rank) {
    if (static_cast<std::size_t>(hosts[rank]) < out.size()) continue;
    const std::string& name = sites ? peers[rank].site : peers[rank].info.host;
    const auto found = map.find(name);
    out.push_back({name, found != map.end() ? found->second : fastest, found != map.end()});
  }
  return out;
}

}  // namespace

Runtime::Runtime(Store& store, const RendezvousOptions& rendezvous, EngineOptions options, AlgorithmTables tables)
    : Runtime(rendezvous.rank, meet(store, rendezvous), std::move(options), tables) {}

Runtime::Runtime(int rank, Mesh mesh, EngineOptions options, AlgorithmTables tables)
    : connecting_(std::move(mesh.late)),
      hosts_(host_numbers(mesh.peers)),
      tables_(tables),
      uplinks_(uplinks_of(mesh.peers, hosts_, tables.uplinks)),
      round_trip_us_(mesh.round_trip_us),
      tables_in_use_(tables_for(tables, mesh.round_trip_us)) {
  std::vector<MeshPeer>& peers = mesh.peers;
  const std::string& here = peers[static_cast<std::size_t>(rank)].host_identity;
  const auto ranks_on_this_host = static_cast<int>(
      std::count_if(peers.begin(), peers.end(), [&](const MeshPeer& it) { return it.host_identity == here; }));
  for (const MeshPeer& peer : peers)
    if (peer.transport != nullptr)
      transports_[peer.info.rank] =
          std::string(peer.transport->name) + (peer.relayed ? ", relayed" : "") + (peer.tls ? kWithTls : "");
  // More ranks than cores: polling TCP would take the core from the rank that is waited for. Polling shared memory
  // between two yields is cheap (4 ranks on 2 cores, 4 KiB: 31 us, and 50 to 90 when they sleep after 10 us).
  options.shares_cores = ranks_on_this_host > cores();
  bool streams = std::any_of(peers.begin(), peers.end(),
                             [](const MeshPeer& peer) { return peer.transport != nullptr && !peer.transport->direct; });
  if (options.shares_cores && streams) options.spin_us = std::min<int64_t>(options.spin_us, 10);
  if (options.rate_bytes_per_s > 0)  // they share a network card
    options.rate_bytes_per_s = std::max<int64_t>(1, options.rate_bytes_per_s / ranks_on_this_host);
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

namespace {

GroupView view_of(int world_rank, const Runtime& runtime, std::vector<int> members) {
  const std::vector<int>& hosts = runtime.hosts();
  int world = static_cast<int>(hosts.size());
  for (std::size_t i = 0; i < members.size(); ++i) {
    if (members[i] < 0 || members[i] >= world)
      throw Error(ErrorKind::kValue, "group member " + std::to_string(members[i]) + " is out of range: the job has " +
                                         std::to_string(world) + " ranks");
    if (std::find(members.begin(), members.begin() + static_cast<std::ptrdiff_t>(i), members[i]) !=
        members.begin() + static_cast<std::ptrdiff_t>(i))
      throw Error(ErrorKind::kValue, "rank " + std::to_string(members[i]) + " is listed twice in a group");
  }
  auto found = std::find(members.begin(), members.end(), world_rank);
  if (found == members.end())
    throw Error(ErrorKind::kValue, "rank " + std::to_string(world_rank) + " is not a member of its own group");
  GroupView view;
  view.rank = static_cast<int>(found - members.begin());
  view.size = static_cast<int>(members.size());
  std::map<int, int> seen;
  for (int member : members)
    view.hosts.push_back(
        seen.emplace(hosts[static_cast<std::size_t>(member)], static_cast<int>(seen.size())).first->second);
  view.members = std::move(members);
  view.far = runtime.far() && seen.size() > 1;
  if (!runtime.uplinks().empty()) {
    std::vector<std::size_t> rates(seen.size());
    for (const auto& [host, number] : seen)
      rates[static_cast<std::size_t>(number)] = runtime.uplinks()[static_cast<std::size_t>(host)].bytes_per_s;
    view.weights = owner_weights(rates);
  }
  return view;
}

// The same on all members: the group's number on the wire is made of it.
uint64_t key_of(const std::string& name, const std::vector<int>& members) {
  uint64_t key = hash_text(name);
  for (int member : members) key = hash_mix(key, static_cast<uint64_t>(member));
  return key;
}

}  // namespace

OpenGroup::OpenGroup(std::shared_ptr<Runtime> runtime, const std::string& name, const std::vector<int>& members,
                     int64_t timeout_ms, const std::shared_ptr<ElasticGroup>& elastic)
    : runtime_(std::move(runtime)),
      engine_(runtime_->share_engine()),
      view_(view_of(engine_->rank(), *runtime_, members)),
      id_(engine_->add_group(key_of(name, members), view_, name, elastic != nullptr)),
      elastic_(elastic),
      timeout_ms_(timeout_ms) {}

std::map<int, std::string> OpenGroup::transports() const {
  std::map<int, std::string> result;
  for (int place = 0; place < view_.size; ++place) {
    const auto found = runtime_->transports().find(view_.members[static_cast<std::size_t>(place)]);
    if (found != runtime_->transports().end()) result[place] = found->second;
  }
  return result;
}

void OpenGroup::close(const std::string& how) {
  if (open_.exchange(false)) engine_->remove_group(id_, how);
}

std::shared_ptr<Work> OpenGroup::submit(std::unique_ptr<Operation> operation, CallOptions options) {
  operation->mutable_identity().bulk = current_is_bulk();
  Engine::Submission submission;
  if (options.before || options.after) operation->wrap(std::move(options.before), std::move(options.after));
  if (options.staging) operation->stage(std::move(options.staging));
  submission.operation = std::move(operation);
  submission.timeout_ms = options.timeout_ms > 0 ? options.timeout_ms : timeout_ms_.load();
  submission.caller_waits = options.caller_waits;
  submission.on_done = std::move(options.on_done);
  submission.keep_alive = std::move(options.keep_alive);
  submission.call_site = options.call_site;
  return engine_->submit(id_, std::move(submission));
}

void OpenGroup::wait(Work& work, int64_t timeout_ms) {
  engine_->wait(work, timeout_ms > 0 ? Deadline::after_ms(timeout_ms) : Deadline::never());
}

GroupHandle::GroupHandle(std::shared_ptr<Runtime> runtime, const std::string& name, const std::vector<int>& members,
                         int64_t timeout_ms, const AlgorithmTables& tables,
                         const std::shared_ptr<ElasticGroup>& elastic)
    : OpenGroup(std::move(runtime), name, members, timeout_ms, elastic),
      table_(tables.of(view().hosts, view().weights)) {}

GroupView GroupHandle::all_reduce_view() const {
  GroupView out = view();
  out.rank_order = rank_order_;
  return out;
}

std::shared_ptr<Work> GroupHandle::barrier(CallOptions options) {
  return submit(make_barrier(view(), current_name(), table_), std::move(options));
}

std::shared_ptr<Work> GroupHandle::announce(const Announcement& what, CallOptions options) {
  return submit(make_announcement(view(), what, current_name(), table_), std::move(options));
}

std::shared_ptr<Work> GroupHandle::all_reduce(std::span<std::byte> memory, DType dtype, ReduceOp op,
                                              CallOptions options) {
  if (!options.input.empty() && !options.factors.empty())
    throw Error(ErrorKind::kValue, "all_reduce: an input that is left as it is cannot be multiplied");
  const GroupView group = all_reduce_view();
  InputFactors factors(dtype, std::move(options.factors), group.rank, group.size);
  auto operation = make_all_reduce(table_, group, memory, dtype, op, current_name(), options.input);
  operation->watch(options.finite);
  operation->multiply(memory, std::move(factors));
  return submit(std::move(operation), std::move(options));
}

std::shared_ptr<Work> GroupHandle::all_reduce_compressed(std::vector<CompressedSection> sections,
                                                         const Compression& compression, CallOptions options) {
  auto report = std::move(options.finite);
  auto operation = make_all_reduce_compressed(all_reduce_view(), std::move(sections), compression, std::move(report),
                                              current_name());
  return submit(std::move(operation), std::move(options));
}

std::shared_ptr<Work> GroupHandle::broadcast(std::span<std::byte> memory, DType dtype, int root, CallOptions options) {
  return submit(make_broadcast(table_, view(), memory, dtype, root, current_name()), std::move(options));
}

std::shared_ptr<Work> GroupHandle::all_gather(const std::vector<GatheredTensor>& tensors, DType dtype,
                                              CallOptions options) {
  return submit(make_all_gather(table_, view(), tensors, dtype, current_name()), std::move(options));
}

std::shared_ptr<Work> GroupHandle::all_gather(std::span<const std::byte> input,
                                              std::vector<std::span<std::byte>> blocks, DType dtype,
                                              CallOptions options) {
  return all_gather({{input, std::move(blocks)}}, dtype, std::move(options));
}

std::shared_ptr<Work> GroupHandle::reduce_scatter(const std::vector<ScatteredTensor>& tensors, DType dtype, ReduceOp op,
                                                  CallOptions options) {
  return submit(make_reduce_scatter(table_, view(), tensors, dtype, op, current_name()), std::move(options));
}

std::shared_ptr<Work> GroupHandle::reduce_scatter(std::vector<std::span<std::byte>> chunks, std::span<std::byte> output,
                                                  DType dtype, ReduceOp op, CallOptions options) {
  return reduce_scatter({{std::move(chunks), output}}, dtype, op, std::move(options));
}

std::shared_ptr<Work> GroupHandle::reduce(std::span<std::byte> memory, DType dtype, ReduceOp op, int root,
                                          CallOptions options) {
  return submit(make_reduce(table_, view(), memory, dtype, op, root, current_name()), std::move(options));
}

std::shared_ptr<Work> GroupHandle::gather(std::span<const std::byte> input, std::vector<std::span<std::byte>> blocks,
                                          DType dtype, int root, CallOptions options) {
  return submit(make_gather(view(), input, std::move(blocks), dtype, root, current_name(), table_), std::move(options));
}

std::shared_ptr<Work> GroupHandle::scatter(std::vector<std::span<std::byte>> chunks, std::span<std::byte> output,
                                           DType dtype, int root, CallOptions options) {
  return submit(make_scatter(view(), std::move(chunks), output, dtype, root, current_name(), table_),
                std::move(options));
}

std::shared_ptr<Work> GroupHandle::all_to_all(std::vector<std::span<std::byte>> chunks,
                                              std::vector<std::span<std::byte>> blocks, DType dtype,
                                              CallOptions options) {
  return submit(make_all_to_all(view(), std::move(chunks), std::move(blocks), dtype, current_name()),
                std::move(options));
}

std::shared_ptr<Work> GroupHandle::send(std::span<std::byte> memory, DType dtype, int to, int32_t tag,
                                        CallOptions options) {
  return submit(make_send(view(), memory, dtype, to, tag, current_name()), std::move(options));
}

std::shared_ptr<Work> GroupHandle::receive(std::span<std::byte> memory, DType dtype, int from, int32_t tag,
                                           CallOptions options) {
  return submit(make_receive(view(), memory, dtype, from, tag, current_name()), std::move(options));
}

}  // namespace ringdp
