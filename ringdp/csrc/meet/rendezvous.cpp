#include "meet/rendezvous.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/text.h"
#include "link/frame.h"
#include "meet/addresses.h"
#include "meet/connection_thread.h"
#include "meet/connector.h"
#include "meet/records.h"
#include "meet/transport_setup.h"
#include "shared/shared_setup.h"
#include "transport/pair_memory.h"

namespace ringdp {

std::vector<int> overlay_neighbours(int place, int size) {
  std::set<int> out;
  for (int distance = 1; distance < size; distance *= 2) {
    out.insert((place + distance) % size);
    out.insert((place + size - distance) % size);
  }
  out.erase(place);
  return {out.begin(), out.end()};
}

bool connected_from_start(int a, int b, int world, int full_mesh_ranks) {
  if (a == b) return false;
  if (world <= full_mesh_ranks) return true;
  auto one_way = static_cast<unsigned>(a > b ? a - b : b - a);
  if (std::has_single_bit(one_way) || std::has_single_bit(static_cast<unsigned>(world) - one_way)) return true;
  return ReadyTree::parent_of(a) == b || ReadyTree::parent_of(b) == a;
}

namespace {

using std::chrono::milliseconds;

constexpr milliseconds kCheckEvery{200};  // interval of looking whether the processes of this host live
constexpr int kLookUpMs = 3000;
constexpr milliseconds kPlacesWait{1000};  // for the addresses of ranks that have connected
constexpr milliseconds kNamingTime{2000};  // after the deadline, for rank 0 to name the missing ranks of a large job
// In the kernel: with less, a burst of unauthenticated connections makes a rank of this job send its SYN twice.
constexpr int kBacklog = 1024;

std::string in_seconds(Clock::duration time) {
  return std::to_string(std::chrono::duration_cast<std::chrono::seconds>(time).count()) + " s";
}

// RendezvousRun: one `meet`: a loop that reads the other ranks' records (PeerRecords), advances the connections
// (Connector) and checks which processes die, until this rank has all connections of the start. Then the
// TransportSetup makes channels of them. RendezvousFailure publishes failures. Owned by `meet`, and used by its thread.
class RendezvousRun {
 public:
  RendezvousRun(Store& store, const RendezvousOptions& options);

  Mesh run();

  // After an error of `run`: the error that this rank raises, published to the others. See RendezvousFailure.
  Error agree_on_error(const Error& error, bool stopped);
  Error store_lost(const Error& error) const { return failure_.store_lost(error); }

 private:
  void introduce();
  void connect();
  bool look();  // reads missing records; true if there were any
  void take_job(const std::string& text);
  void set_route(int peer);
  void listen_if_known();
  std::vector<std::string> addresses_to_listen_on(bool alone) const;
  // Whether this rank and that one connect before `run` returns.
  bool at_start(int peer) const { return connected_from_start(rank_, peer, world_, options_.links.full_mesh_ranks); }
  bool connected(int peer) const { return connector_ && connector_->connected(peer); }
  bool look_at_ended();  // of connections that have ended; true: one has
  void check_processes();
  void check_connections();
  bool time_is_up() const;
  void notice();
  std::string missing_text(const RecordTree::Awaited& awaited) const;
  [[noreturn]] void time_out();
  Mesh mesh();
  std::unique_ptr<ConnectionThread> leave_the_rest();

  Store& store_;
  const RendezvousOptions& options_;
  const int rank_;
  const int world_;
  std::vector<Interface> interfaces_;
  PeerRecords ranks_;
  RendezvousFailure failure_;
  RendezvousWait wait_;
  TransportSetup transports_;
  std::optional<Job> job_;
  std::optional<Connector> connector_;
  std::vector<char> suspected_;  // per rank: its process was once not found
  Clock::time_point check_after_ = Clock::now();
  Clock::time_point last_answer_ = check_after_;  // the last new record in the store
};

RendezvousRun::RendezvousRun(Store& store, const RendezvousOptions& options)
    : store_(store),
      options_(options),
      rank_(options.rank),
      world_(options.world),
      interfaces_(interfaces()),
      ranks_(store, options),
      failure_(store, options, ranks_),
      wait_(options),
      transports_(options, ranks_, failure_, wait_),
      suspected_(options.world, 0) {}

Mesh RendezvousRun::run() {
  introduce();
  connect();
  transports_.check_settings();  // before the sockets are taken, because they must stay open for a while if it throws
  transports_.run(*connector_, [this] {
    look_at_ended();
    check_connections();
    check_processes();
  });
  return mesh();
}

Error RendezvousRun::agree_on_error(const Error& error, bool stopped) {
  if (!options_.addresses.listeners) return failure_.agree(error, stopped);
  const GivenUp why = failure_.given_up(error);
  if (transports_.begun()) {
    transports_.sharing().notify(why);
  } else if (connector_) {
    connector_->notify(why);
  }
  return error;
}

void RendezvousRun::connect() {
  auto next_look = Clock::now();
  // A peer may have connected before its record was read. Its addresses are needed if the two connect later.
  const bool later = world_ > options_.links.full_mesh_ranks;
  // Replacing a broken connection needs its addresses.
  std::optional<Clock::time_point> connected_at;
  auto places_come = [&] {
    if (!connected_at) connected_at = Clock::now();
    return options_.links.heals && !ranks_.all_placed() && Clock::now() - *connected_at < kPlacesWait;
  };
  while (!connector_ || !connector_->complete() || !ranks_.all_present() || (later && !ranks_.all_placed()) ||
         places_come()) {
    auto now = Clock::now();
    if (now >= next_look) {
      if (look()) last_answer_ = now;
      next_look = now + store_pause(now - last_answer_, world_);
    }
    auto until_look = std::chrono::ceil<milliseconds>(next_look - Clock::now()).count();
    auto wait_ms = static_cast<int>(std::clamp<int64_t>(until_look, 0, RendezvousWait::kPollMs));
    if (!wait_.deadline().expired()) wait_ms = wait_.deadline().remaining_ms(wait_ms);
    if (connector_)
      connector_->step(wait_ms);
    else
      poll(nullptr, 0, wait_ms);
    if (options_.waiting.check_interrupt) options_.waiting.check_interrupt();
    if (look_at_ended()) next_look = Clock::now();  // the store may have the reason
    check_connections();
    check_processes();
    if (ranks_.all_present()) wait_.note_all_came();
    if (wait_.notice_due()) notice();
    if (time_is_up()) time_out();
  }
}

Mesh RendezvousRun::mesh() {
  SharedSetup& sharing = transports_.sharing();
  Mesh mesh;
  mesh.peers.resize(world_);
  for (int peer = 0; peer < world_; ++peer) {
    MeshPeer& met = mesh.peers[peer];
    met.info = ranks_[peer].info;
    met.host_identity = ranks_[peer].identity;
    met.site = ranks_[peer].site;
    met.hello = ranks_[peer].hello;
    if (peer == rank_) continue;
    met.transport = &sharing.transport(peer);
    met.relayed = transports_.relayed()[peer] != 0;
    met.tls = options_.links.tls && met.transport->open != nullptr;
    met.checksums = options_.links.checksums && met.transport->checksums;
    if (!at_start(peer)) continue;  // a rank that was ready earlier may have asked for it: it is made later
    met.channel = sharing.take(peer);
    connector_->fix(peer);
  }
  mesh.round_trip_us = sharing.round_trip_us();
  const bool streams = std::any_of(mesh.peers.begin(), mesh.peers.end(),
                                   [](const MeshPeer& it) { return it.channel && it.channel->direct() == nullptr; });
  connector_->note_met(mesh.round_trip_us);
  if (world_ > options_.links.full_mesh_ranks || (options_.links.heals && streams)) mesh.late = leave_the_rest();
  return mesh;
}

std::unique_ptr<ConnectionThread> RendezvousRun::leave_the_rest() {
  ConnectionThread::Start rest{.rank = rank_,
                               .connector = std::move(*connector_),
                               .sharing = std::move(transports_.sharing()),
                               .peers = {},
                               .elsewhere = {},
                               .congestion = options_.links.congestion,
                               .all_connected = world_ <= options_.links.full_mesh_ranks,
                               .checksums = options_.links.checksums};
  for (const PeerRecord& it : ranks_.all()) {
    rest.peers.push_back(it.info);
    rest.elsewhere.push_back(it.network != ranks_.self().network);
  }
  return std::make_unique<ConnectionThread>(std::move(rest));
}

// ---- The records in the store ----

void RendezvousRun::introduce() {
  if (const auto other = ranks_.rival()) {
    const PeerInfo& self = ranks_.self().info;
    throw failure_.make_error(
        ErrorKind::kHandshake, rank_,
        "two processes have rank " + std::to_string(rank_) + ": pid " + field(*other, "pid") + " on host " +
            field(*other, "host") + " and pid " + std::to_string(self.pid) + " on host " + self.host,
        "give every process a rank of its own; two jobs must not use the same MASTER_ADDR and MASTER_PORT");
  }
  ranks_.publish();
  if (rank_ > 0) return;
  Record record;
  job_ = make_job(options_, record);
  store_.set("job", write_record(record));
}

bool RendezvousRun::look() {
  if (auto error = failure_.published()) throw *error;
  bool found = false;
  if (!job_) {
    auto text = store_.find("job");
    if (text) take_job(*text);
    found = text.has_value();
  }
  const PeerRecords::Answers answers = ranks_.ask(connector_.has_value(), Clock::now() - last_answer_);
  if (const int rank = answers.unreadable; rank >= 0)
    throw failure_.make_error(ErrorKind::kHandshake, rank,
                              ranks_[rank].info.text() + " left records of the ranks in the store that cannot be read",
                              "start all ranks with the same version of ringdp; nothing else may write there");
  for (int peer : answers.placed) set_route(peer);
  listen_if_known();
  return found || answers.any;
}

void RendezvousRun::take_job(const std::string& text) {
  std::string problem;
  if (ranks_.gathers()) ranks_.ask_for(0);  // whose process may keep the store
  job_ = join_job(read_record(text), options_, problem);
  if (!problem.empty())
    throw failure_.make_error(ErrorKind::kHandshake, 0, problem,
                              "start all ranks with the same version of ringdp and the same settings");
}

void RendezvousRun::set_route(int rank) {
  const PeerRecord &self = ranks_.self(), &peer = ranks_[rank];
  const bool same_network = peer.network == self.network;
  // The process of this host lives, but the group that it had, with its listeners, may be destroyed.
  const bool same_processes = peer.process.space == self.process.space && !options_.addresses.listeners;
  const Transport* first = transport_between(self, peer).first;
  Candidates candidates = candidates_of_peer(peer.addresses, same_network, interfaces_, kLookUpMs);
  for (const std::string& published : same_network ? std::vector<std::string>() : peer.addresses)
    if (auto address = options_.addresses.door.address_of(published, options_.secret))
      candidates.addresses.push_back(std::move(*address));
  // With a door a lower rank's knock may be the only way.
  const bool probe = !same_processes || (!same_network && !options_.addresses.door.folder.empty());
  connector_->set_route(rank, std::move(candidates), probe, first == nullptr || first->open == nullptr);
}

// Listens on loopback once all ranks are known to be on this host; on addresses that others can reach as soon as one
// is not.
void RendezvousRun::listen_if_known() {
  if (!job_ || connector_) return;
  const PeerRecord& self = ranks_.self();
  bool away = options_.addresses.several_hosts && !self.ips.empty();
  for (const PeerRecord& it : ranks_.all()) {
    bool chosen = !options_.addresses.interface.empty() && it.identity != self.identity;
    away = away || (it.present && (it.network != self.network || chosen));
  }
  if (!ranks_.all_present() && !away) return;
  HandshakeFields mine;
  mine.job = job_->id;
  mine.epoch = options_.epoch;
  mine.to = static_cast<uint32_t>(rank_);
  mine.world = static_cast<uint32_t>(world_);
  auto listeners = options_.addresses.listeners
                       ? options_.addresses.listeners()
                       : open_listeners(addresses_to_listen_on(!away), options_.addresses.port_low,
                                        options_.addresses.port_high, std::max(kBacklog, world_));
  auto published = addresses_to_publish(listeners, away ? options_.addresses.advertise : "");
  std::optional<ListedPort> listed;
  if (const DoorWay& door = options_.addresses.door; !door.folder.empty() && away && !options_.addresses.listeners) {
    auto on_loopback = open_listeners({"127.0.0.1"}, 0, 0, std::max(kBacklog, world_));
    const uint16_t port = on_loopback.front().address().port();
    published.push_back(door.published(port));
    listed.emplace(door, port);
    std::move(on_loopback.begin(), on_loopback.end(), std::back_inserter(listeners));
  }
  std::vector<char> wanted(world_, 0);
  for (int peer = 0; peer < world_; ++peer) wanted[peer] = at_start(peer);
  connector_.emplace(mine, job_->secret, wanted, options_.links.streams, options_.links.congestion, options_.links.tls,
                     /*turns=*/!options_.addresses.door.folder.empty());
  connector_->listener().listen_on(std::move(listeners), std::move(listed));
  ranks_.publish_addresses(published);
}

std::vector<std::string> RendezvousRun::addresses_to_listen_on(bool alone) const {
  if (alone) {
    for (const Interface& it : interfaces_)
      if (it.is_loopback && it.ip == "127.0.0.1") return {it.ip};
    for (const Interface& it : interfaces_)
      if (it.is_loopback) return {it.ip};
    return {"127.0.0.1"};
  }
  // An address that another host has too (docker0) is useless, as is a family that no other rank has.
  std::set<std::string> elsewhere, families;
  auto family = [](const std::string& ip) { return std::string(ip.find(':') == std::string::npos ? "4" : "6"); };
  for (const PeerRecord& it : ranks_.all()) {
    if (!it.present || it.network == ranks_.self().network) continue;
    elsewhere.insert(it.ips.begin(), it.ips.end());
    for (const std::string& ip : it.ips) families.insert(family(ip));
  }
  std::vector<std::string> wanted, useful;
  for (const Interface& it : select_interfaces(interfaces_, options_.addresses.interface)) {
    wanted.push_back(it.ip);
    bool leads_somewhere = !elsewhere.contains(it.ip) && (families.empty() || families.contains(family(it.ip)));
    if (leads_somewhere) useful.push_back(it.ip);
  }
  return useful.empty() ? wanted : useful;
}

// ---- Which ranks live ----

// Either end may have died: checks its process at once.
bool RendezvousRun::look_at_ended() {
  if (!connector_ || connector_->take_ended().empty()) return false;
  check_after_ = Clock::now();
  return true;
}

void RendezvousRun::check_processes() {
  auto now = Clock::now();
  if (now < check_after_) return;
  check_after_ = now + std::max(kCheckEvery, milliseconds(10 * world_));
  for (int rank = 0; rank < world_; ++rank) {
    const PeerRecord& peer = ranks_[rank];
    // A connection shows the end by itself, and distinguishes a rank that left in good order from one that died.
    if (rank == rank_ || !peer.present || connected(rank)) continue;
    bool gone = certainly_gone(peer.process);
    // Checked twice: its last message may still be in flight.
    if (gone && suspected_[rank] != 0)
      throw failure_.make_error(ErrorKind::kPeerLost, rank,
                                peer.info.text() + " died while the ranks met: there is no such process",
                                "look at its log for the reason");
    if (gone) check_after_ = now + milliseconds(RendezvousWait::kPollMs);
    suspected_[rank] = gone;
  }
}

void RendezvousRun::check_connections() {
  if (!connector_) return;
  auto failure = connector_->failure();
  if (!failure) return;
  if (failure->given_up) throw failure_.make_error(failure->peer, *failure->given_up);
  ranks_.ask_for(failure->peer);  // it may have connected before its record was read
  UnreachableText text =
      unreachable_text(ranks_.self().info, ranks_[failure->peer].info, *failure, "while the ranks met");
  throw failure_.make_error(text.kind, failure->peer, text.text, text.advice);
}

// To find out who is missing in a large job takes reads: rank 0 is the first to make them, and publishes what it finds.
bool RendezvousRun::time_is_up() const {
  const bool later = ranks_.gathers() && rank_ > 0 && job_ && !ranks_.all_placed();
  return wait_.deadline().expired() && (!later || Clock::now() >= wait_.deadline().at() + kNamingTime);
}

void RendezvousRun::notice() {
  if (ranks_.gathers() && rank_ > 0 && !ranks_.all_placed())
    return wait_.notice("what all ranks publish: the log of rank 0 names those that have not");
  wait_.notice(missing_text(ranks_.awaited()) + (wait_.all_came() ? " to connect" : " to join"));
}

std::string RendezvousRun::missing_text(const RecordTree::Awaited& awaited) const {
  const auto listed = [](std::vector<std::string> all) {
    constexpr std::size_t kShown = 8;
    const std::size_t more = all.size() > kShown ? all.size() - kShown : 0;
    all.resize(all.size() - more);
    return join(all, ", ") + (more > 0 ? " and " + std::to_string(more) + " more" : "");
  };
  std::vector<std::string> absent, silent, unconnected;
  for (int rank : awaited.absent)
    if (!connected(rank)) absent.push_back(std::to_string(rank));
  if (!absent.empty()) return (absent.size() > 1 ? "ranks " : "rank ") + listed(absent);
  for (int rank : awaited.silent) silent.push_back(ranks_[rank].info.text());
  if (!silent.empty()) return listed(silent);
  for (int rank = 0; rank < world_; ++rank) {
    if (connected(rank) || !at_start(rank)) continue;
    std::string why = connector_ ? connector_->problem(rank) : "";
    unconnected.push_back(ranks_[rank].info.text() + (why.empty() ? "" : " [" + why + "]"));
  }
  return join(unconnected, ", ");
}

void RendezvousRun::time_out() {
  std::string waited = " Timed out after " + in_seconds(wait_.waited()) + ": it waited for ";
  std::string me = ranks_.self().info.text();
  const RecordTree::Awaited awaited = ranks_.awaited();
  if (!awaited.absent.empty())
    throw failure_.make_error(
        ErrorKind::kTimeout, awaited.absent.front(),
        me + waited + missing_text(awaited) + " of " + std::to_string(world_) + ", which never came",
        "did they start, and with the same MASTER_ADDR and MASTER_PORT? Their logs say more");
  int first = 0;
  auto waits_for = [&](int peer) {
    return peer != rank_ && (at_start(peer) ? !connected(peer) : !ranks_[peer].placed);
  };
  while (first + 1 < world_ && !waits_for(first)) ++first;
  if (!awaited.silent.empty()) first = awaited.silent.front();
  throw failure_.make_error(
      ErrorKind::kTimeout, first, me + waited + missing_text(awaited) + " to connect",
      "look at their logs: they may be stopped, or very slow (RINGDP_CONNECT_TIMEOUT is the limit)");
}

}  // namespace

milliseconds store_pause(Clock::duration quiet, int world) {
  constexpr milliseconds kShortest{2}, kLongest{250};
  constexpr int kRanksPerMs = 40;  // a store answers some 40,000 single requests a second
  const milliseconds shortest = std::clamp(milliseconds(world / kRanksPerMs), kShortest, kLongest);
  return std::clamp(std::chrono::duration_cast<milliseconds>(quiet) / 4, shortest, kLongest);
}

Mesh::Mesh() = default;
Mesh::~Mesh() = default;
Mesh::Mesh(Mesh&&) noexcept = default;
Mesh& Mesh::operator=(Mesh&&) noexcept = default;

Mesh meet(Store& store, const RendezvousOptions& options) {
  if (options.rank < 0 || options.rank >= options.world)
    throw Error(ErrorKind::kValue,
                "rank " + std::to_string(options.rank) + " of " + std::to_string(options.world) + " does not exist");
  std::size_t ring = options.links.shm_ring_bytes;
  if (ring != 0 && (!std::has_single_bit(ring) || ring < PairMemory::kMinRingBytes || ring > PairMemory::kMaxRingBytes))
    throw Error(ErrorKind::kValue, "shm_ring_bytes must be a power of two from " +
                                       std::to_string(PairMemory::kMinRingBytes) + " to " +
                                       std::to_string(PairMemory::kMaxRingBytes) + ", not " + std::to_string(ring));
  if (options.world == 1) {
    Mesh alone;
    alone.peers.resize(1);
    MeshPeer& self = alone.peers[0];
    self.info = {0, options.host.name.empty() ? host_name() : options.host.name, getpid()};
    self.host_identity = host_identity(options.host.id);
    self.site = options.host.site;
    self.hello = options.hello;
    return alone;
  }
  RendezvousRun rendezvous(store, options);
  try {
    // Publishes the failure before the sockets close: a rank that sees one close finds the reason in the store.
    try {
      return rendezvous.run();
    } catch (const StoreLost&) {
      throw;
    } catch (const Error& error) {
      throw rendezvous.agree_on_error(error, false);
    } catch (const std::exception& error) {  // of check_interrupt: a signal's handler raised it
      std::string what = error.what();
      what = what.substr(0, what.find('\n'));
      Error stopped(ErrorKind::kInterrupted, "was stopped while the ranks met, by " + what);
      rendezvous.agree_on_error(stopped, true);
      throw;
    }
  } catch (const StoreLost& error) {
    throw rendezvous.store_lost(error);
  }
}

namespace {

constexpr int64_t kGoodbyeMs = 1000;

}  // namespace

PendingMesh::PendingMesh(Store& store, const RendezvousOptions& options)
    : rank_(options.rank), mesh_(meet(store, options)) {
  for (const MeshPeer& peer : mesh_.peers) hellos_.push_back(peer.hello);
}

Mesh PendingMesh::take() {
  if (taken_) throw Error(ErrorKind::kState, "the connections of this PendingMesh were taken already");
  taken_ = true;
  return std::exchange(mesh_, {});
}

void PendingMesh::close(const std::string& reason) {
  std::string payload = clean_text(reason, kReasonBytes);
  FrameHeader header;
  header.type = FrameType::kBye;
  header.length = static_cast<uint32_t>(payload.size());
  std::array<std::byte, kFrameHeaderBytes + kFrameCheckBytes> head{};
  const std::string padding(DirectReader::padding_of(payload.size()), '\0');
  mesh_.late.reset();
  const Deadline limit = Deadline::after_ms(kGoodbyeMs);
  for (MeshPeer& peer : mesh_.peers) {
    if (!peer.channel) continue;
    const FrameCheck check(peer.checksums);
    check.write_head(header, std::as_bytes(std::span(payload)), head.data());
    const std::string bytes = peer.channel->direct() != nullptr ? payload + padding : payload;
    std::array<iovec, 2> pieces{{{head.data(), check.head_bytes()}, {const_cast<char*>(bytes.data()), bytes.size()}}};
    // The first bytes on it: there is room, unless the peer has ended, or TLS waits for it to answer.
    while (peer.channel->send(pieces).status == IoStatus::kWouldBlock && !limit.expired()) {
      pollfd polled{peer.channel->poll_fd(), POLLIN, 0};
      poll(&polled, 1, limit.remaining_ms(RendezvousWait::kPollMs));
    }
    peer.channel.reset();
  }
}

}  // namespace ringdp
