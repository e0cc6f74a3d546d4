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
#include "transport/tcp.h"

namespace ringdp {
namespace {

constexpr std::size_t kRankBytes = std::size_t{8} << 20;
constexpr std::size_t kLargestRing = std::size_t{1} << 20;    // where few ranks share 8 MiB: what stays in the cache
constexpr std::size_t kBytesToSpare = std::size_t{32} << 20;  // in the control group, for everything else
constexpr int kKnockAgainMs = 5;

std::string mebibytes(std::size_t bytes) { return std::to_string(bytes >> 20) + " MiB"; }

}  // namespace

std::size_t shared_ring_bytes(int ranks_on_host) {
  std::size_t pairs = static_cast<std::size_t>(std::max(1, ranks_on_host - 1));
  return std::clamp(std::bit_floor(kRankBytes / (2 * pairs)), PairMemory::kMinRingBytes, kLargestRing);
}

SharedSetup::SharedSetup(int rank, std::vector<Fd> sockets, Plan plan)
    : rank_(rank), plan_(std::move(plan)), pairs_(sockets.size()) {
  std::string problem;
  bool makes = false;
  for (std::size_t peer = 0; peer < pairs_.size(); ++peer) {
    Pair& pair = pairs_[peer];
    pair.tcp = std::move(sockets[peer]);
    pair.awaited = pair.tcp && (plan_.share[peer] != 0 || plan_.await[peer] != 0);
    pair.through = !pair.awaited;
    makes = makes || (plan_.share[peer] != 0 && static_cast<int>(peer) > rank_);
  }
  if (makes) {
    auto left = memory_left_in_groups();
    if (left && static_cast<std::size_t>(*left) < plan_.bytes_on_host + kBytesToSpare)
      problem = "the memory limit of its control group leaves " + mebibytes(static_cast<std::size_t>(*left)) + ", " +
                mebibytes(plan_.bytes_on_host + kBytesToSpare) + " are asked for";
    else
      door_ = Door::open(problem);
  }
  for (int peer = 0; peer < static_cast<int>(pairs_.size()); ++peer) {
    if (plan_.share[peer] == 0 || peer == rank_) continue;
    if (peer < rank_)
      pairs_[peer].stage = Stage::kAwaitOffer;
    else if (door_)
      offer(peer);
    else
      refuse(peer, own(problem));
  }
  step(0);
}

bool SharedSetup::complete() const {
  return said_through_ && std::all_of(pairs_.begin(), pairs_.end(), [](const Pair& it) { return it.through; });
}

std::vector<int> SharedSetup::awaited() const {
  std::vector<int> out;
  for (std::size_t peer = 0; peer < pairs_.size(); ++peer)
    if (!pairs_[peer].through) out.push_back(static_cast<int>(peer));
  return out;
}

void SharedSetup::step(int wait_ms) {
  std::vector<pollfd> polled;
  std::vector<int> ranks;
  for (int peer = 0; peer < static_cast<int>(pairs_.size()); ++peer) {
    Pair& pair = pairs_[peer];
    if (!pair.awaited) continue;
    if (pair.stage == Stage::kKnocking) wait_ms = std::min(wait_ms, kKnockAgainMs);
    if (pair.stage == Stage::kAwaitMemory) wait_ms = pair.deadline.remaining_ms(wait_ms);
    // Of a peer that is through only its end could still be heard, and that may be in good order once it knows of ours.
    if (pair.through && said_through_) continue;
    polled.push_back({pair.tcp.get(), POLLIN, 0});
    ranks.push_back(peer);
    if (pair.stage != Stage::kAwaitMemory) continue;
    polled.push_back({pair.door.get(), POLLIN, 0});
    ranks.push_back(peer);
  }
  if (door_) door_->poll_for(polled);
  if (!polled.empty()) poll(polled.data(), polled.size(), complete() ? 0 : wait_ms);
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    if (polled[i].revents == 0) continue;
    Pair& pair = pairs_[ranks[i]];
    if (polled[i].fd == pair.tcp.get())
      hear(ranks[i]);
    else if (pair.stage == Stage::kAwaitMemory)
      fetch(ranks[i]);
  }
  if (door_)
    for (Door::Guest& guest : door_->serve()) hand_out(std::move(guest));
  bool settled = true, makes = false;
  for (int peer = 0; peer < static_cast<int>(pairs_.size()); ++peer) {
    Pair& pair = pairs_[peer];
    if (pair.stage == Stage::kKnocking) knock_at(peer);
    if ((pair.stage == Stage::kAwaitMemory || pair.stage == Stage::kKnocking) && pair.deadline.expired())
      refuse(peer, "rank " + std::to_string(peer) + " did not hand the memory out in time");
    settled = settled && pair.stage == Stage::kSettled;
    makes = makes || pair.stage == Stage::kAwaitAnswer;
  }
  if (door_ && !makes) {
    turned_away_ += door_->turned_away();
    door_.reset();
  }
  if (settled && !said_through_ && !trouble_) say_through();
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
  message.name = door_->name();
  random_bytes(message.token);
  door_->expect(message.token, peer);
  pair.stage = Stage::kAwaitAnswer;
  say(peer, message);
}

void SharedSetup::hand_out(Door::Guest guest) {
  Pair& pair = pairs_[guest.peer];
  if (pair.stage != Stage::kAwaitAnswer) return;  // it gave up meanwhile
  SharedMessage reply;
  reply.type = SharedType::kMemory;
  reply.reason = stranger_text(guest.peer, guest.credentials);
  if (reply.reason.empty()) {
    int error_number = send_shared_message(guest.socket.get(), reply, pair.handout);
    pair.handout.reset();
    pair.door = std::move(guest.socket);
    if (error_number == 0) return;
    reply.reason = own("handing the memory over: " + errno_text(error_number));
    guest.socket = std::move(pair.door);
  }
  reply.type = SharedType::kRefused;
  send_shared_message(guest.socket.get(), reply);  // where that fails, too, the end of the connection says it
}

// ---- The higher rank ----

void SharedSetup::on_offer(int peer) {
  Pair& pair = pairs_[peer];
  std::size_t bytes = pair.offer.ring_bytes;
  if (!std::has_single_bit(bytes) || bytes < PairMemory::kMinRingBytes || bytes > PairMemory::kMaxRingBytes)
    return object(peer, "it offered to share rings of " + std::to_string(bytes) + " bytes");
  pair.stage = Stage::kKnocking;
  pair.deadline = Deadline::after_ms(plan_.patience_ms);
  knock_at(peer);
}

void SharedSetup::knock_at(int peer) {
  Pair& pair = pairs_[peer];
  int error_number = 0;
  pair.door = knock(pair.offer.name, error_number);
  if (!pair.door && (error_number == EAGAIN || error_number == EINTR)) return;  // many wait there
  if (!pair.door) return refuse(peer, own("a Unix socket: " + errno_text(error_number)));
  std::string problem = stranger_text(peer, credentials_of(pair.door.get()));
  if (!problem.empty()) return refuse(peer, problem);
  SharedMessage message;
  message.type = SharedType::kToken;
  message.token = pair.offer.token;
  error_number = send_shared_message(pair.door.get(), message);
  if (error_number != 0) return refuse(peer, own("a Unix socket: " + errno_text(error_number)));
  pair.stage = Stage::kAwaitMemory;
}

void SharedSetup::fetch(int peer) {
  Pair& pair = pairs_[peer];
  SharedReader::Status status = pair.door_reader.read(pair.door.get());
  if (status == SharedReader::Status::kWaiting) return;
  Fd memory = pair.door_reader.take_descriptor();
  const SharedMessage& reply = pair.door_reader.message();
  if (status == SharedReader::Status::kClosed)
    return refuse(peer, "rank " + std::to_string(peer) + " did not hand the memory out: " + pair.door_reader.why());
  if (status == SharedReader::Status::kMessage && reply.type == SharedType::kRefused) return refuse(peer, reply.reason);
  if (status != SharedReader::Status::kMessage || reply.type != SharedType::kMemory)
    return refuse(peer, "rank " + std::to_string(peer) + " answered something else than memory");
  if (!memory)
    return refuse(peer, own("the memory's descriptor did not come through (ulimit -n, or a security module?)"));
  std::string problem;
  pair.memory = PairMemory::map(memory, pair.offer.ring_bytes, problem);
  if (!pair.memory) return refuse(peer, own(problem));
  SharedMessage message;
  message.type = SharedType::kAccepted;
  say(peer, message);
  use_memory(peer);
}

// ---- Both ----

void SharedSetup::hear(int peer) {
  Pair& pair = pairs_[peer];
  if (trouble_) return;
  if (pair.through) return watch(peer);
  SharedReader::Status status = pair.tcp_reader.read(pair.tcp.get());
  if (status == SharedReader::Status::kWaiting) return;
  if (status == SharedReader::Status::kClosed) return lose(peer, pair.tcp_reader.why());
  if (status == SharedReader::Status::kNonsense) return object(peer, "it sent something that is no part of the set-up");
  on_message(peer, pair.tcp_reader.message());
}

void SharedSetup::on_message(int peer, const SharedMessage& message) {
  Pair& pair = pairs_[peer];
  if (pair.stage == Stage::kAwaitOffer && message.type == SharedType::kRefused)
    return stay_with_tcp(peer, message.reason);
  if (pair.stage == Stage::kAwaitOffer && message.type == SharedType::kOffer) {
    pair.offer = message;
    return on_offer(peer);
  }
  if (pair.stage == Stage::kAwaitAnswer && message.type == SharedType::kRefused)
    return stay_with_tcp(peer, message.reason);
  if (pair.stage == Stage::kAwaitAnswer && message.type == SharedType::kAccepted && pair.door) return use_memory(peer);
  if (pair.stage == Stage::kSettled && message.type == SharedType::kThrough) {
    pair.through = true;
    return;
  }
  object(peer, "it sent a message out of turn (" + std::to_string(static_cast<int>(message.type)) + ")");
}

// It is through, this rank is not: it waits, and only its end can be heard.
void SharedSetup::watch(int peer) {
  std::byte byte{};
  ssize_t got = recv(pairs_[peer].tcp.get(), &byte, 1, MSG_PEEK | MSG_DONTWAIT);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (got > 0) return object(peer, "it went on before this rank was through");
  lose(peer, got == 0 ? "its connection was closed" : errno_text(errno));
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
  stay_with_tcp(peer, SharedMessage::decode(message.encode())->reason);  // the peer's words are cut, so are these
  say(peer, message);
}

void SharedSetup::stay_with_tcp(int peer, const std::string& reason) {
  Pair& pair = pairs_[peer];
  pair.stage = Stage::kSettled;
  pair.problem = reason.empty() ? "no reason was given" : reason;
  pair.handout.reset();
  pair.memory.reset();
  pair.door.reset();
}

void SharedSetup::use_memory(int peer) {
  pairs_[peer].stage = Stage::kSettled;
  pairs_[peer].handout.reset();
}

void SharedSetup::say_through() {
  for (std::size_t peer = 0; peer < pairs_.size(); ++peer)
    if (plan_.required[peer] != 0 && !pairs_[peer].problem.empty()) return;
  said_through_ = true;
  SharedMessage message;
  message.type = SharedType::kThrough;
  for (int peer = 0; peer < static_cast<int>(pairs_.size()); ++peer)
    if (pairs_[peer].awaited) say(peer, message);
}

void SharedSetup::lose(int peer, const std::string& text) {
  if (!trouble_) trouble_ = Trouble{peer, true, text};
}

void SharedSetup::object(int peer, const std::string& text) {
  if (!trouble_) trouble_ = Trouble{peer, false, text};
}

std::unique_ptr<Channel> SharedSetup::take(int peer) {
  Pair& pair = pairs_[peer];
  if (!pair.memory) return make_tcp_channel(std::move(pair.tcp));
  pair.tcp.reset();
  int side = peer > rank_ ? 0 : 1;
  return make_shm_channel({std::move(*pair.memory), std::move(pair.door), side, "rank " + std::to_string(peer)});
}

}  // namespace ringdp
