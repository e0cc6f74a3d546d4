// What the ranks of a host do once everybody is connected to everybody: they come to share memory, or learn why not.
#include <algorithm>
#include <map>

#include "base/log.h"
#include "base/text.h"
#include "mesh/meeting.h"

namespace ringdp {
namespace {

using std::chrono::milliseconds;

constexpr int kPollMs = 50;  // how soon signals are seen
constexpr milliseconds kLongestPause{250};
constexpr std::size_t kReasonsShown = 4;
const std::string kTcp = transport_name(TransportChoice::kTcp), kShm = transport_name(TransportChoice::kShm);

}  // namespace

SharedSetup::Plan Meeting::sharing_plan() const {
  SharedSetup::Plan plan;
  plan.share.resize(world_);
  plan.await.resize(world_);
  plan.required.resize(world_);
  plan.pids.resize(world_, -1);
  const Peer& self = peers_[rank_];
  bool somewhere = false;
  for (const Peer& it : peers_) {
    somewhere = somewhere || it.transport == kShm;
    for (const Peer& other : peers_)
      if (it.transport == kShm && other.transport == kTcp && it.identity == other.identity)
        throw failure(ErrorKind::kHandshake, other.info.rank,
                      it.info.text() + " has RINGDP_TRANSPORT=shm, " + other.info.text() +
                          " on the same host RINGDP_TRANSPORT=tcp",
                      "give all ranks of a host the same");
  }
  int sharing = 1;
  for (int peer = 0; peer < world_; ++peer) {
    const Peer& it = peers_[peer];
    if (peer == rank_) continue;
    plan.share[peer] = it.identity == self.identity && it.transport != kTcp && self.transport != kTcp;
    plan.required[peer] = self.transport == kShm || it.transport == kShm;
    plan.await[peer] = somewhere;  // required of others: that it could not be is to be heard here, too
    if (it.process.space == self.process.space) plan.pids[peer] = it.process.pid;
    sharing += plan.share[peer];
  }
  plan.ring_bytes = options_.shm_ring_bytes > 0 ? options_.shm_ring_bytes : shared_ring_bytes(sharing);
  auto pairs = static_cast<std::size_t>(sharing) * static_cast<std::size_t>(sharing - 1) / 2;
  plan.bytes_on_host = pairs * (2 * plan.ring_bytes + PairMemory::kControlBytes);
  return plan;
}

void Meeting::share_memory() {
  sharing_.emplace(rank_, connector_->take(), sharing_plan());
  auto begin = Clock::now(), next_look = begin + milliseconds(2);
  while (!sharing_->complete()) {
    check_sharing();
    sharing_->step(deadline_.remaining_ms(kPollMs));
    if (options_.check_interrupt) options_.check_interrupt();
    if (sharing_->complete()) break;
    hear_trouble_now_and_then(next_look, begin);
    std::vector<int> awaited = sharing_->awaited();
    if (Clock::now() >= notice_at_) {
      notice_every_ *= 2;
      notice_at_ += notice_every_;
      log(LogLevel::kWarning, "rank " + std::to_string(rank_) + " of " + std::to_string(world_) + " waits for " +
                                  ranks_text(awaited) + " to set up shared memory");
    }
    if (!deadline_.expired() || awaited.empty()) continue;
    throw failure(ErrorKind::kTimeout, awaited.front(),
                  peers_[rank_].info.text() + " Timed out: it waited for " + peers_[awaited.front()].info.text() +
                      " to set up shared memory",
                  "look at its log: it may be stopped, or very slow (RINGDP_CONNECT_TIMEOUT is the limit)");
  }
  tell_transports();
}

void Meeting::check_sharing() const {
  if (const auto& trouble = sharing_->trouble()) {
    std::string peer = peers_[trouble->peer].info.text();
    if (trouble->lost)
      throw failure(ErrorKind::kPeerLost, trouble->peer, peer + " died while the ranks met: " + trouble->text,
                    "look at its log for the reason");
    throw failure(ErrorKind::kHandshake, trouble->peer,
                  peers_[rank_].info.text() + " cannot set up shared memory with " + peer + ": " + trouble->text,
                  "start all ranks with the same version of ringdp");
  }
  for (int peer = 0; peer < world_; ++peer) {
    bool required = peers_[rank_].transport == kShm || peers_[peer].transport == kShm;
    if (peer == rank_ || !required || sharing_->problem(peer).empty()) continue;
    int low = std::min(rank_, peer), high = std::max(rank_, peer);
    throw failure(ErrorKind::kHandshake, peer,
                  peers_[low].info.text() + " and " + peers_[high].info.text() +
                      " are to share memory (RINGDP_TRANSPORT=shm) and cannot: " + sharing_->problem(peer),
                  "RINGDP_TRANSPORT=auto would use TCP between them");
  }
}

// What another rank found goes through the store. Who has it, may have been through and left: that is no trouble.
void Meeting::hear_trouble_now_and_then(Clock::time_point& next, Clock::time_point begin) {
  auto now = Clock::now();
  if (now < next) return;
  next = now + std::clamp(std::chrono::duration_cast<milliseconds>(now - begin) / 4, milliseconds(2), kLongestPause);
  try {
    if (auto told = heard_trouble()) throw *told;
  } catch (const StoreLost&) {
    next = Clock::time_point::max();
  }
}

void Meeting::tell_transports() const {
  std::string self = "rank " + std::to_string(rank_);
  std::vector<int> shared, tcp;
  std::map<std::string, std::vector<int>> problems;
  for (int peer = 0; peer < world_; ++peer) {
    if (peer == rank_) continue;
    (sharing_->shared(peer) ? shared : tcp).push_back(peer);
    if (!sharing_->problem(peer).empty()) problems[sharing_->problem(peer)].push_back(peer);
  }
  std::vector<std::string> used;
  if (!shared.empty()) used.push_back("shared memory with " + ranks_text(shared));
  if (!tcp.empty()) used.push_back("TCP with " + ranks_text(tcp));
  log(LogLevel::kInfo,
      self + " uses " + join(used, ", ") + (peers_[rank_].transport == kTcp ? " (RINGDP_TRANSPORT=tcp)" : ""));
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
  log(LogLevel::kWarning, self + " cannot share memory with " + join(reasons, ", ") +
                              " though they are on the same host, and uses TCP, which is slower; RINGDP_TRANSPORT=tcp "
                              "says that this is meant");
}

}  // namespace ringdp
