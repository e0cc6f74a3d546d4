#include "link/connection.h"

#include <cerrno>
#include <utility>

#include "transport/tcp_health.h"

namespace ringdp {
namespace {

constexpr int64_t kHeldUpAtEndMs = 2000;  // where the other end has closed the connection

constexpr const char* kTlsAdvice =
    "look at both ranks' RINGDP_TLS_CERT, at RINGDP_TLS_CA, which must be the same on all ranks, and at both hosts' "
    "clocks";
constexpr const char* kChangedAdvice =
    "look for what changes bytes between the two hosts: a proxy, a firewall that inspects TLS, a cable or network card "
    "(ethtool -S), or an attacker";

// Small packets may be lost as well: their acknowledgements travel in the peer's large packets.
std::string held_up_text(const NetworkPath::HeldUp& held_up, const char* otherwise, const Channel& channel) {
  return "the path to it does not pass large packets, or drops those of this connection: none with up to " +
         std::to_string(held_up.packet_bytes) + " bytes has arrived for " + std::to_string(held_up.ms) + " ms, " +
         otherwise + " (" + channel.describe() + ")";
}

ErrorContext context_of(const Connection& it, const std::string& what, const std::string& advice) {
  ErrorContext context;
  it.self().fill_self(context);
  it.peer().fill_peer(context);
  context.cause = what;
  context.advice = advice;
  return context;
}

}  // namespace

std::string PeerInfo::text() const {
  return "rank " + std::to_string(rank) + " (host " + host + ", pid " + std::to_string(pid) + ")";
}

void PeerInfo::fill_self(ErrorContext& context) const {
  context.rank = rank;
  context.host = host;
}

void PeerInfo::fill_peer(ErrorContext& context) const {
  context.peer = rank;
  context.peer_host = host;
  context.peer_pid = pid;
}

Connection::Connection(PeerInfo self, PeerInfo peer) : self_(std::move(self)), peer_(std::move(peer)) {}

void Connection::open(std::unique_ptr<Channel> channel, bool late) {
  channel_ = std::move(channel);
  direct_ = channel_->direct();
  path_ = channel_->path();
  late_ = late;
  broken_at_.reset();
  if (path_ != nullptr && silence_ms_ > 0) path_->watch_host(silence_ms_);
}

void Connection::hold() {
  if (!broken_at_) broken_at_ = Clock::now();
}

void Connection::interrupt() {
  hold();
  destroy_channel();
}

int64_t Connection::broken_for_ms() const {
  return broken_at_ ? std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - *broken_at_).count() : 0;
}

void Connection::close() {
  broken_ = true;
  destroy_channel();
}

void Connection::destroy_channel() {
  direct_ = nullptr;
  path_ = nullptr;
  channel_.reset();
}

void Connection::watch_host(int64_t silence_ms) {
  silence_ms_ = silence_ms;
  if (path_ != nullptr) path_->watch_host(silence_ms);
}

void Connection::check_host() {
  if (!usable() || path_ == nullptr || healing() || silence_ms_ == 0) return;
  if (path_->host_silence_ms() >= silence_ms_)
    fail(ErrorKind::kPeerLost, "its host has not answered for " + std::to_string(silence_ms_) + " ms",
         "look whether that host is up and the network between reaches it");
  const NetworkPath::HeldUp held_up = path_->held_up();
  if (held_up.ms >= silence_ms_)
    fail(ErrorKind::kPeerLost, held_up_text(held_up, "though its host answers", *channel_), kLargePacketsAdvice);
}

// The way the connection ended is reported if no other one replaces it; only dialling shows whether one can. While
// another one is being made, the peer closes this one, and what was in flight on it is ignored.
void Connection::fail_closed(int error_number) const {
  const bool unreachable = error_number == ETIMEDOUT || error_number == EHOSTUNREACH || error_number == EHOSTDOWN ||
                           error_number == ENETUNREACH;
  if (unreachable && !healing())
    fail(ErrorKind::kPeerLost, "its host does not answer any more: " + errno_text(error_number),
         "look whether that host is up and the network between reaches it");
  if (error_number == EBADF || error_number == ENOTSOCK) {  // something in this process has closed the descriptor
    ErrorContext context;
    self_.fill_self(context);
    context.cause = errno_text(error_number);
    throw Error(ErrorKind::kSystem,
                self_.text() + " could not use its connection to " + peer_.text() + ": " + context.cause, context);
  }
  const std::string why = channel_->why_ended();
  if (error_number == EKEYREJECTED) fail(ErrorKind::kHandshake, why + " (" + channel_->describe() + ")", kTlsAdvice);
  // The other end may have found it first.
  const bool ended = error_number == 0 || error_number == ECONNRESET;
  const NetworkPath::HeldUp held_up =
      path_ != nullptr && ended && !healing() ? path_->held_up() : NetworkPath::HeldUp{};
  const bool held = held_up.ms >= kHeldUpAtEndMs;
  const std::string what = held                ? held_up_text(held_up, "and it gave this connection up", *channel_)
                           : !why.empty()      ? why + " (" + channel_->describe() + ")"
                           : error_number == 0 ? "the connection ended without a goodbye"
                                               : errno_text(error_number);
  ErrorContext context = context_of(
      *this, what,
      held           ? kLargePacketsAdvice
      : !why.empty() ? kChangedAdvice
                     : "look at that rank's own log: it crashed, was killed (out of memory?) or its host is gone");
  context.unexplained = !held && why.empty();
  const ConnectionBroken broken(ErrorKind::kPeerLost, peer_.text() + ": " + what, context);
  if (!why.empty()) throw broken.by_tampering();
  throw broken;
}

void Connection::fail(ErrorKind kind, const std::string& what, const std::string& advice) const {
  throw Error(kind, peer_.text() + ": " + what, context_of(*this, what, advice));
}

void Connection::fail_damaged(const std::string& what) {
  damaged_ = true;
  fail(ErrorKind::kDamaged,
       what + ", on the connection " + channel_->describe() + " (rank " + std::to_string(self_.rank) + "'s end first)",
       "look for what flips bits between those two hosts (cable, network card, switch, proxy; ethtool -S has their "
       "counters) or in the memory of one (edac-util); or the program wrote to a tensor while it was being sent; then "
       "start again from a checkpoint");
}

}  // namespace ringdp
