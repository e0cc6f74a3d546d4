#include "shared/shared_setup.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "base/memory_limit.h"

namespace ringdp {
namespace {

constexpr int kChildren = 4;

}  // namespace

int ReadyTree::parent_of(int rank) { return rank == 0 ? -1 : (rank - 1) / kChildren; }

ReadyTree::ReadyTree(int rank, int world) : parent_(parent_of(rank)) {
  for (int child = kChildren * rank + 1; child <= kChildren * (rank + 1) && child < world; ++child)
    children_.push_back(child);
  silent_ = children_;
}

bool ReadyTree::is_neighbour(int peer) const {
  return peer == parent_ || std::find(children_.begin(), children_.end(), peer) != children_.end();
}

void ReadyTree::set_ready(int64_t number) {
  if (ready_) return;
  ready_ = true;
  largest_ = std::max(largest_, number);
}

bool ReadyTree::take_report(int peer, int64_t number) {
  if (peer == parent_ || !is_neighbour(peer)) return false;
  if (std::erase(silent_, peer) > 0) largest_ = std::max(largest_, number);
  return true;
}

bool ReadyTree::take_all_ready(int peer, int64_t number) {
  if (peer != parent_ || !reported_) return false;
  if (!all_ready_) largest_ = number;
  all_ready_ = true;
  return true;
}

bool ReadyTree::to_report() const { return ready_ && silent_.empty() && !reported_; }

void ReadyTree::note_reported() {
  reported_ = true;
  all_ready_ = parent_ < 0;
}

std::vector<int> ReadyTree::awaited() const {
  if (!silent_.empty() || all_ready_ || parent_ < 0) return silent_;
  return {parent_};
}

namespace {

constexpr std::size_t kRankBytes = std::size_t{8} << 20;
constexpr std::size_t kLargestRing = std::size_t{1} << 20;    // where few ranks share 8 MiB: what stays in the cache
constexpr std::size_t kBytesToSpare = std::size_t{32} << 20;  // in the control group, for everything else

std::string mebibytes(std::size_t bytes) { return std::to_string(bytes >> 20) + " MiB"; }

// The reason if the limit does not allow so much memory; else empty.
std::string memory_problem(std::size_t bytes) {
  auto left = memory_left_in_groups();
  if (!left || static_cast<std::size_t>(*left) >= bytes + kBytesToSpare) return "";
  return "the memory limit of its control group leaves " + mebibytes(static_cast<std::size_t>(*left)) + ", " +
         mebibytes(bytes + kBytesToSpare) + " are asked for";
}

}  // namespace

std::size_t shared_ring_bytes(int ranks_on_host) {
  std::size_t pairs = static_cast<std::size_t>(std::max(1, ranks_on_host - 1));
  return std::clamp(std::bit_floor(kRankBytes / (2 * pairs)), PairMemory::kMinRingBytes, kLargestRing);
}

std::string must_share_text(const TransportChoice& choice, const std::string& problem) {
  return "are to share memory (RINGDP_TRANSPORT=" + std::string(choice.first->name) + ") and cannot: " + problem;
}

std::string instead_text(const TransportChoice& choice) {
  return "RINGDP_TRANSPORT=auto would use " + std::string(choice.fallback->title) + " between them";
}

SharedSetup::SharedSetup(int rank, std::vector<PeerSocket> sockets, Plan plan, std::vector<std::vector<Fd>> streams)
    : rank_(rank),
      plan_(std::move(plan)),
      pairs_(sockets.size()),
      tree_(rank, static_cast<int>(pairs_.size())),
      said_(sockets.size()) {
  streams.resize(pairs_.size());
  bool makes = false;
  for (int peer = 0; peer < static_cast<int>(pairs_.size()); ++peer) {
    if (!sockets[peer]) continue;
    pairs_[peer] = pair_of(peer, std::move(sockets[peer]), std::move(streams[peer]));
    makes = makes || (plan_.shares(peer) && peer > rank_);
  }
  if (makes) no_memory_ = memory_problem(plan_.bytes_on_host);
  for (int peer = 0; peer < static_cast<int>(pairs_.size()); ++peer)
    if (pairs_[peer].connected()) begin(peer);
  step(0);
}

void SharedSetup::add(int peer, PeerSocket socket, std::vector<Fd> streams) {
  said_[peer] = {};
  pairs_[peer] = pair_of(peer, std::move(socket), std::move(streams));
  if (plan_.shares(peer) && peer > rank_) no_memory_ = memory_problem(2 * plan_.ring_bytes);
  begin(peer);
}

void SharedSetup::reconnect(int peer, PeerSocket socket, std::vector<Fd> streams) {
  if (!pairs_[peer].connected()) return add(peer, std::move(socket), std::move(streams));
  said_[peer] = {};
  pairs_[peer].reconnect(std::move(socket), std::move(streams));
}

std::vector<int> SharedSetup::take_cut() {
  std::vector<int> out;
  for (int peer = 0; peer < static_cast<int>(pairs_.size()); ++peer) {
    if (!pairs_[peer].cut() || std::exchange(said_[peer].is_cut, true)) continue;
    out.push_back(peer);
  }
  return out;
}

void SharedSetup::note_met(int peer, int64_t round_trip_us) {
  if (!pairs_[peer].cut() || !tree_.is_neighbour(peer)) return;
  said_[peer].to_it = said_[peer].by_it = true;
  if (peer == tree_.parent()) tree_.take_all_ready(peer, round_trip_us);
}

PairSetup SharedSetup::pair_of(int peer, PeerSocket socket, std::vector<Fd> streams) const {
  return PairSetup({.self = rank_,
                    .peer = peer,
                    .pid = plan_.pids[peer],
                    .ring_bytes = plan_.ring_bytes,
                    .patience_ms = plan_.patience_ms},
                   std::move(socket), std::move(streams));
}

void SharedSetup::begin(int peer) {
  if (!plan_.shares(peer) || peer == rank_) return;
  PairSetup& pair = pairs_[peer];
  if (peer < rank_) return pair.await_offer();
  std::string problem = no_memory_;
  if (problem.empty() && !fd_socket_) fd_socket_ = FdSocket::open(problem);
  if (fd_socket_ && problem.empty())
    pair.offer(*fd_socket_);
  else
    pair.fail(problem);
  note_failure(pair);
}

void SharedSetup::forget(int peer) {
  pairs_[peer] = {};
  said_[peer] = {};
  failure_.reset();
}

std::vector<int> SharedSetup::decided_now() const {
  std::vector<int> out;
  for (std::size_t peer = 0; peer < pairs_.size(); ++peer)
    if (pairs_[peer].decided() && pairs_[peer].connected()) out.push_back(static_cast<int>(peer));
  return out;
}

bool SharedSetup::complete() const {
  const auto confirmed = [this](int peer) { return said_[peer].to_it && said_[peer].by_it; };
  return tree_.all_ready() && decided() && (tree_.parent() < 0 || confirmed(tree_.parent())) &&
         std::all_of(tree_.children().begin(), tree_.children().end(), confirmed);
}

// Of the settled pairs only the neighbours in the tree send further messages, and are watched for their end. After
// kAllReady a peer's next bytes may be a frame.
bool SharedSetup::waits_for(int peer) const {
  const PairSetup& pair = pairs_[peer];
  if (!pair.connected() || !pair.decided()) return pair.connected();
  return tree_.is_neighbour(peer) && !(said_[peer].to_it && said_[peer].by_it && tree_.all_ready());
}

bool SharedSetup::decided() const {
  return std::all_of(pairs_.begin(), pairs_.end(), [](const PairSetup& it) { return it.decided(); });
}

std::vector<int> SharedSetup::awaited() const {
  std::vector<int> out;
  for (std::size_t peer = 0; peer < pairs_.size(); ++peer)
    if (!pairs_[peer].decided()) out.push_back(static_cast<int>(peer));
  if (out.empty() && tree_.all_ready() && !complete())
    for (int peer = 0; peer < static_cast<int>(pairs_.size()); ++peer)
      if (waits_for(peer)) out.push_back(peer);
  return out.empty() ? tree_.awaited() : out;
}

bool SharedSetup::watches(int peer) const {
  return pairs_[peer].connected() && !tree_.all_ready() && !tree_.is_neighbour(peer);
}

int SharedSetup::poll_pairs(std::vector<pollfd>& polled, std::vector<int>& ranks, int wait_ms) const {
  for (int peer = 0; peer < static_cast<int>(pairs_.size()); ++peer) {
    if (waits_for(peer))
      wait_ms = pairs_[peer].poll_for(polled, wait_ms);
    else if (watches(peer))
      pairs_[peer].watch_for_end(polled);
    ranks.resize(polled.size(), peer);
  }
  return wait_ms;
}

int SharedSetup::poll_for(std::vector<pollfd>& polled, int wait_ms) const {
  std::vector<int> ranks;
  wait_ms = poll_pairs(polled, ranks, wait_ms);
  if (fd_socket_) fd_socket_->poll_for(polled);
  return wait_ms;
}

void SharedSetup::step(int wait_ms) {
  std::vector<pollfd> polled;
  std::vector<int> ranks;
  wait_ms = poll_pairs(polled, ranks, wait_ms);
  if (fd_socket_) fd_socket_->poll_for(polled);
  if (!polled.empty()) poll(polled.data(), polled.size(), complete() ? 0 : wait_ms);
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    if (polled[i].revents == 0) continue;
    if (polled[i].events == POLLRDHUP)
      pairs_[ranks[i]].note_end();
    else
      receive(ranks[i], polled[i].fd);
    note_failure(pairs_[ranks[i]]);
  }
  if (fd_socket_)
    for (FdSocket::Client& client : fd_socket_->serve()) pairs_[client.peer].hand_out(std::move(client));
  bool hands_out = false;
  for (PairSetup& pair : pairs_) {
    pair.move_on();
    note_failure(pair);
    hands_out = hands_out || pair.hands_out();
  }
  if (fd_socket_ && !hands_out) {
    turned_away_ += fd_socket_->turned_away();
    fd_socket_.reset();
  }
  if (!failure_ && decided() && !lacks_required()) tree_.set_ready(plan_.round_trip_us);
  pass_on();
}

void SharedSetup::receive(int peer, int fd) {
  if (failure_ || !waits_for(peer)) return;
  auto message = pairs_[peer].receive(fd);
  if (!message) return;
  const bool expected = (message->type == SharedType::kReady && tree_.take_report(peer, message->round_trip_us)) ||
                        (message->type == SharedType::kAllReady && tree_.take_all_ready(peer, message->round_trip_us));
  said_[peer].by_it |= expected;
  if (!expected) pairs_[peer].out_of_turn(*message);
}

void SharedSetup::notify(const GivenUp& why) {
  for (PairSetup& pair : pairs_)
    if (pair.connected()) pair.say(why.message());  // otherwise the peer sees the end of the connection
}

// A child that dies when all are ready is not noticed here: the links report it, as at any later time.
void SharedSetup::pass_on() {
  if (failure_) return;
  const auto say = [this](int peer, SharedType type) {
    if (said_[peer].to_it || pairs_[peer].cut()) return;
    pairs_[peer].say({.type = type, .round_trip_us = tree_.largest()});
    said_[peer].to_it = !pairs_[peer].cut();
    note_failure(pairs_[peer]);
  };
  if (tree_.to_report()) tree_.note_reported();
  if (tree_.reported() && tree_.parent() >= 0) say(tree_.parent(), SharedType::kReady);
  if (!tree_.all_ready()) return;
  for (int child : tree_.children()) say(child, SharedType::kAllReady);
}

bool SharedSetup::lacks_required() const {
  for (std::size_t peer = 0; peer < pairs_.size(); ++peer)
    if (plan_.transports[peer].required && !pairs_[peer].problem().empty()) return true;
  return false;
}

void SharedSetup::note_failure(PairSetup& pair) {
  auto found = pair.take_failure();
  if (found && !failure_) failure_ = std::move(found);
}

std::unique_ptr<Channel> SharedSetup::take(int peer) { return pairs_[peer].take(transport(peer)); }

}  // namespace ringdp
