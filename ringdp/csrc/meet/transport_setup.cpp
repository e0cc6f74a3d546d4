#include "meet/transport_setup.h"

#include <algorithm>
#include <bit>
#include <map>

#include "base/log.h"
#include "base/text.h"
#include "transport/congestion.h"
#include "transport/tcp_health.h"

namespace ringdp {
namespace {

using std::chrono::milliseconds;

constexpr std::size_t kReasonsShown = 4;
// after the deadline: the error of a rank that waits for a connection says more
constexpr int64_t kGraceMs = 2000;
constexpr int64_t kWithoutStoreMs = 5000;  // for the message that all are ready, after the store was lost

}  // namespace

void TransportSetup::check_settings() const {
  auto names_a_site = [](const PeerRecord& it) { return !it.site.empty(); };
  auto named = std::find_if(ranks_.all().begin(), ranks_.all().end(), names_a_site);
  auto silent = std::find_if_not(ranks_.all().begin(), ranks_.all().end(), names_a_site);
  if (named != ranks_.all().end() && silent != ranks_.all().end())
    throw failure_.make_error(
        ErrorKind::kHandshake, silent->info.rank,
        named->info.text() + " has RINGDP_SITE=" + named->site + ", " + silent->info.text() + " has none",
        "set RINGDP_SITE on the ranks of every host, or on none");
  for (const Transport* wanted : transports())
    for (const PeerRecord& it : ranks_.all()) {
      if (it.transport != wanted) continue;
      for (const PeerRecord& other : ranks_.all()) {
        if (other.transport == nullptr || other.transport == wanted) continue;
        if (transport_between(it, other).first != nullptr) continue;
        const bool same_host = it.identity == other.identity;
        throw failure_.make_error(ErrorKind::kHandshake, other.info.rank,
                                  it.info.text() + " has RINGDP_TRANSPORT=" + std::string(wanted->name) + ", " +
                                      other.info.text() + (same_host ? " on the same host" : "") +
                                      " RINGDP_TRANSPORT=" + std::string(other.transport->name),
                                  std::string("give all ranks ") + (same_host ? "of a host " : "") + "the same");
      }
    }
}

SharedSetup::Plan TransportSetup::plan() const {
  SharedSetup::Plan plan;
  plan.transports.resize(world_);
  plan.pids.resize(world_, -1);
  const PeerRecord& self = ranks_.self();
  int sharing = 1;
  auto here = [&](int peer) { return peer == rank_ || plan.shares(peer); };
  for (int peer = 0; peer < world_; ++peer) {
    const PeerRecord& it = ranks_[peer];
    if (peer == rank_) continue;
    plan.transports[peer] = transport_between(self, it);
    if (it.process.space == self.process.space) plan.pids[peer] = it.process.pid;
    sharing += plan.shares(peer) ? 1 : 0;
  }
  plan.ring_bytes = options_.links.shm_ring_bytes > 0 ? options_.links.shm_ring_bytes : shared_ring_bytes(sharing);
  std::vector<int> local;
  for (int peer = 0; peer < world_; ++peer)
    if (here(peer)) local.push_back(peer);
  std::size_t pairs = 0;
  for (int a : local)
    for (int b : local) pairs += b < a && connected_from_start(a, b, world_, options_.links.full_mesh_ranks) ? 1 : 0;
  plan.bytes_on_host = pairs * (2 * plan.ring_bytes + PairMemory::kControlBytes);
  return plan;
}

void TransportSetup::run(Connector& connector, const std::function<void()>& look) {
  begin(connector.take());
  wait_for_all(connector, look);
  log_transports();
}

void TransportSetup::begin(std::vector<Connector::Connected> connected) {
  SharedSetup::Plan plan = this->plan();
  std::vector<PeerSocket> sockets(world_);
  congestion_problem_ = ask_for_congestion(connected, options_.links.congestion);
  std::vector<std::vector<Fd>> streams(world_);
  for (Connector::Connected& it : connected) {
    sockets[it.peer] = std::move(it.socket);
    if (!it.more.empty()) with_streams_[it.more.size() + 1].push_back(it.peer);
    streams[it.peer] = std::move(it.more);
  }
  int64_t round_trip_us = 0;
  const DoorWay& door = options_.addresses.door;
  for (int peer = 0; peer < world_; ++peer) {
    if (!sockets[peer] || ranks_[peer].identity == ranks_.self().identity) continue;
    const int socket = sockets[peer].get();
    relayed_[peer] = !door.folder.empty() && ranks_[peer].network != ranks_.self().network &&
                     SocketAddress::far_end_of(socket).is_loopback();
    const int64_t its = relayed_[peer] != 0 ? 2 * door.round_trip_us : tcp_round_trip_us(socket);
    round_trip_us = std::max(round_trip_us, its);
  }
  plan.round_trip_us = static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(round_trip_us)));
  sharing_.emplace(rank_, std::move(sockets), std::move(plan), std::move(streams));
}

bool TransportSetup::step(Connector& connector) {
  std::vector<pollfd> also;
  const int wait_ms = sharing_->poll_for(also, wait_.deadline().remaining_ms(RendezvousWait::kPollMs));
  connector.step(sharing_->decided() && wait_.deadline().expired() ? RendezvousWait::kPollMs : wait_ms, also);
  std::vector<Connector::Connected> connected = connector.take();
  ask_for_congestion(connected, options_.links.congestion);
  for (Connector::Connected& it : connected) {
    sharing_->reconnect(it.peer, std::move(it.socket), std::move(it.more));
    std::erase(cut_, it.peer);
  }
  for (int peer : cut_)
    if (const uint8_t met = connector.met(peer); met != 0) sharing_->note_met(peer, round_trip_in(met));
  sharing_->step(0);
  const std::vector<int> ended = sharing_->take_cut();
  for (int peer : ended) {
    connector.lose(peer);
    cut_.push_back(peer);
  }
  // Its memory was ready before the end of its connection was seen; or the peer is complete, and its channel will be
  // replaced together with this rank's.
  std::erase_if(cut_, [&](int peer) {
    const bool needless = !sharing_->needs_connection(peer) || connector.met(peer) != 0;
    if (needless) connector.fix(peer);
    return needless;
  });
  return !ended.empty();
}

void TransportSetup::wait_for_all(Connector& connector, const std::function<void()>& look) {
  auto begin = Clock::now(), next_look = begin + milliseconds(2);
  while (!sharing_->complete()) {
    check();
    if (step(connector)) next_look = std::min(next_look, Clock::now());  // the store may have the reason
    if (options_.waiting.check_interrupt) options_.waiting.check_interrupt();
    if (sharing_->complete()) break;
    check_failures(next_look, begin);
    look();
    std::vector<int> awaited = sharing_->awaited();
    if (wait_.notice_due()) wait_.notice(ranks_text(awaited) + what_for());
    if (!wait_.deadline().expired() || awaited.empty()) continue;
    if (sharing_->decided() && Clock::now() < wait_.deadline().at() + milliseconds(kGraceMs)) continue;
    throw failure_.make_error(
        ErrorKind::kTimeout, awaited.front(),
        ranks_.self().info.text() + " Timed out: it waited for " + ranks_[awaited.front()].info.text() + what_for(),
        "look at its log: it may be stopped, or very slow (RINGDP_CONNECT_TIMEOUT is the limit)");
  }
}

std::string TransportSetup::what_for() const {
  if (!sharing_->decided()) return " to set up shared memory";
  return ", or ranks that report through it, to be connected to all others";
}

void TransportSetup::check() const {
  if (const auto& failure = sharing_->failure()) {
    std::string peer = ranks_[failure->peer].info.text();
    if (failure->lost && store_lost_) throw *store_lost_;  // it left because the store was lost
    if (failure->given_up) throw failure_.make_error(failure->peer, *failure->given_up);
    if (failure->lost)
      throw failure_.make_error(ErrorKind::kPeerLost, failure->peer,
                                peer + " died while the ranks met: " + failure->text, "look at its log for the reason");
    throw failure_.make_error(
        ErrorKind::kHandshake, failure->peer,
        ranks_.self().info.text() + " cannot set up shared memory with " + peer + ": " + failure->text,
        "start all ranks with the same version of ringdp");
  }
  for (int peer = 0; peer < world_; ++peer) {
    if (!at_start(peer)) continue;
    const TransportChoice& choice = sharing_->plan().transports[peer];
    if (peer == rank_ || !choice.required || sharing_->problem(peer).empty()) continue;
    int low = std::min(rank_, peer), high = std::max(rank_, peer);
    throw failure_.make_error(ErrorKind::kHandshake, peer,
                              ranks_[low].info.text() + " and " + ranks_[high].info.text() + " " +
                                  must_share_text(choice, sharing_->problem(peer)),
                              instead_text(choice));
  }
}

// Failures of other ranks are in the store. Its process may know already that all are ready, and have left.
void TransportSetup::check_failures(Clock::time_point& next, Clock::time_point begin) {
  auto now = Clock::now();
  if (now < next) return;
  if (store_lost_) throw *store_lost_;
  next = now + store_pause(now - begin, world_);
  try {
    if (auto error = failure_.published()) throw *error;
  } catch (const StoreLost& error) {
    store_lost_ = error;
    next = now + milliseconds(kWithoutStoreMs);
  }
}

void TransportSetup::log_transports() const {
  std::string self = "rank " + std::to_string(rank_);
  std::map<const Transport*, std::vector<int>> users;
  std::map<std::string, std::vector<int>> problems;
  const Transport* fallback = nullptr;
  for (int peer = 0; peer < world_; ++peer) {
    if (!at_start(peer)) continue;
    users[&sharing_->transport(peer)].push_back(peer);
    if (sharing_->problem(peer).empty()) continue;
    problems[sharing_->problem(peer)].push_back(peer);
    fallback = &sharing_->transport(peer);
  }
  std::vector<std::string> used;
  for (const Transport* it : transports())
    if (users.contains(it))
      used.push_back(std::string(it->title) + (options_.links.tls && it->open != nullptr ? kWithTls : "") + " with " +
                     ranks_text(users[it]));
  const Transport* named = ranks_.self().transport;
  const bool usual = named == nullptr || named == transports().front();
  log(LogLevel::kInfo,
      self + " uses " + join(used, ", ") + (usual ? "" : " (RINGDP_TRANSPORT=" + std::string(named->name) + ")"));
  std::vector<int> through_the_door;
  for (int peer = 0; peer < world_; ++peer)
    if (relayed_[peer] != 0) through_the_door.push_back(peer);
  if (!through_the_door.empty())
    log(LogLevel::kInfo,
        self + " and " + ranks_text(through_the_door) + " cannot connect to each other, and do through the door");
  for (const auto& [count, ranks] : with_streams_)
    log(LogLevel::kInfo,
        self + " has " + std::to_string(count) + " connections with " + ranks_text(ranks) +
            (options_.links.streams == kAutomaticStreams ? ", which is far away" : " (RINGDP_STREAMS)"));
  if (!congestion_problem_.empty())
    log(options_.links.congestion == kAutomaticCongestion ? LogLevel::kInfo : LogLevel::kWarning,
        self + " " + congestion_problem_);
  if (sharing_->turned_away() > 0)
    log(LogLevel::kWarning, "turned away " + std::to_string(sharing_->turned_away()) +
                                " connections that came for shared memory and do not belong to this job");
  if (problems.empty()) return;
  std::vector<std::string> reasons;
  for (const auto& [reason, ranks] : problems) reasons.push_back(ranks_text(ranks) + " (" + reason + ")");
  if (std::size_t more = reasons.size() - std::min(reasons.size(), kReasonsShown); more > 0) {
    reasons.resize(kReasonsShown);
    reasons.push_back("and " + std::to_string(more) + " more reasons");
  }
  log(LogLevel::kWarning, self + " cannot share memory with " + join(reasons, ",\n") +
                              "\nthough they are on the same host, and uses " + std::string(fallback->title) +
                              ", which is slower; RINGDP_TRANSPORT=" + std::string(fallback->name) +
                              " says that this is meant");
}

}  // namespace ringdp
