#include "mesh/shared_setup.h"

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <utility>

#include "base/error.h"
#include "base/memory_limit.h"
#include "base/sha256.h"
#include "transport/shm.h"

namespace ringdp {
namespace {

constexpr std::size_t kRankBytes = std::size_t{8} << 20;
constexpr std::size_t kLargestRing = std::size_t{1} << 20;    // where few ranks share 8 MiB: what stays in the cache
constexpr std::size_t kBytesToSpare = std::size_t{32} << 20;  // in the control group, for everything else
constexpr int kConnectAgainMs = 5;

std::string mebibytes(std::size_t bytes) { return std::to_string(bytes >> 20) + " MiB"; }

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

SharedSetup::SharedSetup(int rank, std::vector<Fd> sockets, Plan plan, std::vector<std::vector<Fd>> streams)
    : rank_(rank), plan_(std::move(plan)), pairs_(sockets.size()), tree_(rank, static_cast<int>(pairs_.size())) {
  bool makes = false;
  for (std::size_t peer = 0; peer < pairs_.size(); ++peer) {
    Pair& pair = pairs_[peer];
    pair.tcp = std::move(sockets[peer]);
    if (!streams.empty()) pair.streams = std::move(streams[peer]);
    makes = makes || (pair.tcp && plan_.shares(static_cast<int>(peer)) && static_cast<int>(peer) > rank_);
  }
  if (makes) no_memory_ = memory_problem(plan_.bytes_on_host);
  for (int peer = 0; peer < static_cast<int>(pairs_.size()); ++peer)
    if (pairs_[peer].tcp) begin(peer);
  step(0);
}

void SharedSetup::add(int peer, Fd socket, std::vector<Fd> streams) {
  pairs_[peer] = {};
  pairs_[peer].tcp = std::move(socket);
  pairs_[peer].streams = std::move(streams);
  if (plan_.shares(peer) && peer > rank_) no_memory_ = memory_problem(2 * plan_.ring_bytes);
  begin(peer);
}

void SharedSetup::begin(int peer) {
  if (!plan_.shares(peer) || peer == rank_) return;
  if (peer < rank_) {
    pairs_[peer].stage = Stage::kAwaitOffer;
    return;
  }
  std::string problem = no_memory_;
  if (problem.empty() && !fd_socket_) fd_socket_ = FdSocket::open(problem);
  if (fd_socket_ && problem.empty())
    offer(peer);
  else
    refuse(peer, own(problem));
}

std::string SharedSetup::memory_problem(std::size_t bytes) const {
  auto left = memory_left_in_groups();
  if (!left || static_cast<std::size_t>(*left) >= bytes + kBytesToSpare) return "";
  return "the memory limit of its control group leaves " + mebibytes(static_cast<std::size_t>(*left)) + ", " +
         mebibytes(bytes + kBytesToSpare) + " are asked for";
}

void SharedSetup::forget(int peer) {
  pairs_[peer] = {};
  trouble_.reset();
}

std::vector<int> SharedSetup::settled_now() const {
  std::vector<int> out;
  for (std::size_t peer = 0; peer < pairs_.size(); ++peer)
    if (pairs_[peer].stage == Stage::kSettled && pairs_[peer].tcp) out.push_back(static_cast<int>(peer));
  return out;
}

bool SharedSetup::complete() const { return tree_.all_ready() && told_children_; }

bool SharedSetup::settled() const {
  return std::all_of(pairs_.begin(), pairs_.end(), [](const Pair& it) { return it.stage == Stage::kSettled; });
}

std::vector<int> SharedSetup::awaited() const {
  std::vector<int> out;
  for (std::size_t peer = 0; peer < pairs_.size(); ++peer)
    if (pairs_[peer].stage != Stage::kSettled) out.push_back(static_cast<int>(peer));
  return out.empty() ? tree_.awaited() : out;
}

int SharedSetup::poll_for(std::vector<pollfd>& polled, int wait_ms) const {
  for (const Pair& pair : pairs_) {
    if (!pair.tcp || pair.stage == Stage::kSettled) continue;
    if (pair.stage == Stage::kConnecting) wait_ms = std::min(wait_ms, kConnectAgainMs);
    if (pair.stage == Stage::kAwaitMemory) wait_ms = pair.deadline.remaining_ms(wait_ms);
    polled.push_back({pair.tcp.get(), POLLIN, 0});
    if (pair.stage == Stage::kAwaitMemory) polled.push_back({pair.unix_socket.get(), POLLIN, 0});
  }
  if (fd_socket_) fd_socket_->poll_for(polled);
  return wait_ms;
}

void SharedSetup::step(int wait_ms) {
  std::vector<pollfd> polled;
  std::vector<int> ranks;
  for (int peer = 0; peer < static_cast<int>(pairs_.size()); ++peer) {
    Pair& pair = pairs_[peer];
    // Of the settled ones only the neighbours in the tree have anything more to say, and notice if they end.
    if (!pair.tcp || (pair.stage == Stage::kSettled && !tree_.is_neighbour(peer))) continue;
    if (pair.stage == Stage::kConnecting) wait_ms = std::min(wait_ms, kConnectAgainMs);
    if (pair.stage == Stage::kAwaitMemory) wait_ms = pair.deadline.remaining_ms(wait_ms);
    polled.push_back({pair.tcp.get(), POLLIN, 0});
    ranks.push_back(peer);
    if (pair.stage != Stage::kAwaitMemory) continue;
    polled.push_back({pair.unix_socket.get(), POLLIN, 0});
    ranks.push_back(peer);
  }
  if (fd_socket_) fd_socket_->poll_for(polled);
  if (!polled.empty()) poll(polled.data(), polled.size(), complete() ? 0 : wait_ms);
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    if (polled[i].revents == 0) continue;
    Pair& pair = pairs_[ranks[i]];
    if (polled[i].fd == pair.tcp.get())
      hear(ranks[i]);
    else if (pair.stage == Stage::kAwaitMemory)
      fetch(ranks[i]);
  }
  if (fd_socket_)
    for (FdSocket::Client& client : fd_socket_->serve()) hand_out(std::move(client));
  bool makes = false;
  for (int peer = 0; peer < static_cast<int>(pairs_.size()); ++peer) {
    Pair& pair = pairs_[peer];
    if (pair.stage == Stage::kConnecting) connect_to(peer);
    if ((pair.stage == Stage::kAwaitMemory || pair.stage == Stage::kConnecting) && pair.deadline.expired())
      refuse(peer, "rank " + std::to_string(peer) + " did not hand the memory out in time");
    makes = makes || pair.stage == Stage::kAwaitAnswer;
  }
  if (fd_socket_ && !makes) {
    turned_away_ += fd_socket_->turned_away();
    fd_socket_.reset();
  }
  if (!trouble_ && settled() && !lacks_required()) tree_.set_ready(plan_.round_trip_us);
  pass_on();
}

// ---- The lower rank ----

void SharedSetup::offer(int peer) {
  Pair& pair = pairs_[peer];
  std::string problem;
  pair.handout = PairMemory::create(plan_.ring_bytes, problem);
  if (pair.handout) pair.memory = PairMemory::map(pair.handout, plan_.ring_bytes, problem);
  if (!pair.memory) return refuse(peer, own(problem));
  SharedMessage message;
  message.type = SharedType::kOffer;
  message.ring_bytes = plan_.ring_bytes;
  message.name = fd_socket_->name();
  random_bytes(message.token);
  fd_socket_->expect(message.token, peer);
  pair.stage = Stage::kAwaitAnswer;
  say(peer, message);
}

void SharedSetup::hand_out(FdSocket::Client client) {
  Pair& pair = pairs_[client.peer];
  if (pair.stage != Stage::kAwaitAnswer) return;  // it gave up meanwhile
  SharedMessage reply;
  reply.type = SharedType::kMemory;
  reply.reason = stranger_text(client.peer, client.credentials);
  if (reply.reason.empty()) {
    int error_number = send_shared_message(client.socket.get(), reply, pair.handout);
    pair.handout.reset();
    pair.unix_socket = std::move(client.socket);
    if (error_number == 0) return;
    reply.reason = own("handing the memory over: " + errno_text(error_number));
    client.socket = std::move(pair.unix_socket);
  }
  reply.type = SharedType::kRefused;
  send_shared_message(client.socket.get(), reply);  // where that fails, too, the end of the connection says it
}

// ---- The higher rank ----

void SharedSetup::on_offer(int peer) {
  Pair& pair = pairs_[peer];
  std::size_t bytes = pair.offer.ring_bytes;
  if (!std::has_single_bit(bytes) || bytes < PairMemory::kMinRingBytes || bytes > PairMemory::kMaxRingBytes)
    return object(peer, "it offered to share rings of " + std::to_string(bytes) + " bytes");
  pair.stage = Stage::kConnecting;
  pair.deadline = Deadline::after_ms(plan_.patience_ms);
  connect_to(peer);
}

void SharedSetup::connect_to(int peer) {
  Pair& pair = pairs_[peer];
  int error_number = 0;
  pair.unix_socket = connect_fd_socket(pair.offer.name, error_number);
  if (!pair.unix_socket && (error_number == EAGAIN || error_number == EINTR)) return;  // many wait there
  if (!pair.unix_socket) return refuse(peer, own("a Unix socket: " + errno_text(error_number)));
  std::string problem = stranger_text(peer, credentials_of(pair.unix_socket.get()));
  if (!problem.empty()) return refuse(peer, problem);
  SharedMessage message;
  message.type = SharedType::kToken;
  message.token = pair.offer.token;
  error_number = send_shared_message(pair.unix_socket.get(), message);
  if (error_number != 0) return refuse(peer, own("a Unix socket: " + errno_text(error_number)));
  pair.stage = Stage::kAwaitMemory;
}

void SharedSetup::fetch(int peer) {
  Pair& pair = pairs_[peer];
  SharedReader::Status status = pair.unix_reader.read(pair.unix_socket.get());
  if (status == SharedReader::Status::kWaiting) return;
  Fd memory = pair.unix_reader.take_descriptor();
  const SharedMessage& reply = pair.unix_reader.message();
  if (status == SharedReader::Status::kClosed)
    return refuse(peer, "rank " + std::to_string(peer) + " did not hand the memory out: " + pair.unix_reader.why());
  if (status == SharedReader::Status::kMessage && reply.type == SharedType::kRefused) return refuse(peer, reply.reason);
  if (status != SharedReader::Status::kMessage || reply.type != SharedType::kMemory)
    return refuse(peer, "rank " + std::to_string(peer) + " answered something else than memory");
  if (!memory)
    return refuse(peer, own("the memory's descriptor did not come through (ulimit -n, or a security module?)"));
  std::string problem;
  pair.memory = PairMemory::map(memory, pair.offer.ring_bytes, problem);
  if (!pair.memory) return refuse(peer, own(problem));
  say(peer, {.type = SharedType::kAccepted});
  use_memory(peer);
}

// ---- Both ----

void SharedSetup::hear(int peer) {
  Pair& pair = pairs_[peer];
  if (trouble_) return;
  SharedReader::Status status = pair.tcp_reader.read(pair.tcp.get());
  if (status == SharedReader::Status::kWaiting) return;
  if (status == SharedReader::Status::kClosed) return lose(peer, pair.tcp_reader.why());
  if (status == SharedReader::Status::kNonsense)
    return object(peer, "it sent something that is not part of the set-up");
  on_message(peer, pair.tcp_reader.message());
}

void SharedSetup::tell(const GivenUp& why) {
  for (const Pair& pair : pairs_)
    if (pair.tcp) send_shared_message(pair.tcp.get(), why.message());  // else the end of the connection says it
}

void SharedSetup::on_message(int peer, const SharedMessage& message) {
  Pair& pair = pairs_[peer];
  if (auto why = GivenUp::from(message)) {
    trouble_ = Trouble{peer, true, "it gave up", std::move(why)};
    return;
  }
  if (pair.stage == Stage::kAwaitOffer && message.type == SharedType::kRefused)
    return use_fallback(peer, message.reason);
  if (pair.stage == Stage::kAwaitOffer && message.type == SharedType::kOffer) {
    pair.offer = message;
    return on_offer(peer);
  }
  if (pair.stage == Stage::kAwaitAnswer && message.type == SharedType::kRefused)
    return use_fallback(peer, message.reason);
  if (pair.stage == Stage::kAwaitAnswer && message.type == SharedType::kAccepted && pair.unix_socket)
    return use_memory(peer);
  if (pair.stage == Stage::kSettled && message.type == SharedType::kReady &&
      tree_.take_report(peer, message.round_trip_us))
    return;
  if (pair.stage == Stage::kSettled && message.type == SharedType::kAllReady &&
      tree_.take_all_ready(peer, message.round_trip_us))
    return;
  object(peer, "it sent a message out of turn (" + std::to_string(static_cast<int>(message.type)) + ")");
}

std::string SharedSetup::stranger_text(int peer, const ucred& credentials) const {
  std::string who = "rank " + std::to_string(peer);
  if (credentials.uid != geteuid())
    return who + " runs as another user than rank " + std::to_string(rank_) + " (" + std::to_string(credentials.uid) +
           " and " + std::to_string(geteuid()) + ", as rank " + std::to_string(rank_) + " sees it)";
  if (plan_.pids[peer] < 0 || credentials.pid == plan_.pids[peer]) return "";
  return "process " + std::to_string(credentials.pid) + " came in the place of " + who + ", which is process " +
         std::to_string(plan_.pids[peer]);
}

void SharedSetup::say(int peer, SharedMessage message) {
  // 256 bytes, three of them at most, always fit into a fresh socket's buffer.
  if (int error_number = send_shared_message(pairs_[peer].tcp.get(), message); error_number != 0)
    lose(peer, errno_text(error_number));
}

void SharedSetup::refuse(int peer, const std::string& reason) {
  SharedMessage message;
  message.reason = reason;
  use_fallback(peer, SharedMessage::decode(message.encode())->reason);  // the peer's words are cut, so are these
  say(peer, message);
}

void SharedSetup::use_fallback(int peer, const std::string& reason) {
  Pair& pair = pairs_[peer];
  pair.stage = Stage::kSettled;
  pair.problem = reason.empty() ? "no reason was given" : reason;
  pair.handout.reset();
  pair.memory.reset();
  pair.unix_socket.reset();
}

void SharedSetup::use_memory(int peer) {
  pairs_[peer].stage = Stage::kSettled;
  pairs_[peer].handout.reset();
}

// A child that dies when all are ready is not heard here: the others' links tell, as at any time later.
void SharedSetup::pass_on() {
  if (trouble_) return;
  if (tree_.to_report()) {
    if (tree_.parent() >= 0) say(tree_.parent(), {.type = SharedType::kReady, .round_trip_us = tree_.largest()});
    tree_.note_reported();
  }
  if (!tree_.all_ready() || told_children_) return;
  for (int child : tree_.children()) say(child, {.type = SharedType::kAllReady, .round_trip_us = tree_.largest()});
  told_children_ = true;
}

bool SharedSetup::lacks_required() const {
  for (std::size_t peer = 0; peer < pairs_.size(); ++peer)
    if (plan_.transports[peer].required && !pairs_[peer].problem.empty()) return true;
  return false;
}

// The first one counts, until it is forgotten.
void SharedSetup::lose(int peer, const std::string& text) {
  if (!trouble_) trouble_ = Trouble{peer, true, text};
}

void SharedSetup::object(int peer, const std::string& text) {
  if (!trouble_) trouble_ = Trouble{peer, false, text};
}

std::unique_ptr<Channel> SharedSetup::take(int peer) {
  Pair& pair = pairs_[peer];
  if (!pair.memory) {
    std::vector<Fd> sockets = std::move(pair.streams);
    sockets.insert(sockets.begin(), std::move(pair.tcp));
    return transport(peer).open(std::move(sockets));
  }
  pair.tcp.reset();
  int side = peer > rank_ ? 0 : 1;
  return make_shm_channel({std::move(*pair.memory), std::move(pair.unix_socket), side, "rank " + std::to_string(peer)});
}

}  // namespace ringdp
