#include "mesh/link.h"

#include <algorithm>
#include <cerrno>

namespace ringdp {
namespace {

constexpr std::size_t kStageBytes = 16 * 1024;  // read-ahead: several small frames in one system call

constexpr int64_t kHeldUpAtEndMs = 2000;  // where the other end has given up

// Small packets may be delayed as well: their acknowledgements travel with the peer's large ones.
std::string held_up_text(const Channel::HeldUp& held_up, const char* otherwise, const Channel& channel) {
  return "the path to it does not pass large packets, or drops those of this connection: none with up to " +
         std::to_string(held_up.packet_bytes) + " bytes has arrived for " + std::to_string(held_up.ms) + " ms, " +
         otherwise + " (" + channel.describe() + ")";
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

uint64_t FlowIdentity::elements(uint64_t bytes) const {
  return bytes / std::max<std::size_t>(1, dtype_size(shape.dtype));
}

std::string FlowIdentity::place() const {
  if (!between.empty()) return between;
  return (sequence & kCallbackBit) != 0 ? "in a callback" : "#" + std::to_string(sequence);
}

std::string FlowIdentity::text() const {
  std::string whole = shape.text();
  auto paren = whole.find('(');
  std::string out = whole.substr(0, paren);
  out += " " + place();
  if (paren != std::string::npos) out += " " + whole.substr(paren);
  if (!name.empty()) out += " '" + name + "'";
  return out;
}

Link::Link(PeerInfo self, PeerInfo peer, std::unique_ptr<Channel> channel, Events events, bool checksums)
    : self_(std::move(self)), peer_(std::move(peer)), events_(std::move(events)) {
  if (channel) connect(std::move(channel), checksums);
  late_ = false;
}

void Link::connect(std::unique_ptr<Channel> channel, bool checksums) {
  channel_ = std::move(channel);
  direct_ = channel_->direct();
  check_ = FrameCheck(checksums && !direct_);
  stage_.resize(direct_ ? 0 : kStageBytes);
  if (silence_ms_ > 0) channel_->watch_host(silence_ms_);
  late_ = true;
  for (auto& [header, payload] : std::exchange(waiting_, {})) append_control(header, payload);
}

void Link::give_up() {
  departed_ = true;
  waiting_.clear();
}

std::size_t Link::padding_of(std::size_t payload) const { return direct_ ? Channel::padding_of(payload) : 0; }

void Link::watch_host(int64_t silence_ms) {
  silence_ms_ = silence_ms;
  if (connected()) channel_->watch_host(silence_ms);
}

void Link::check_host() {
  if (!usable() || !connected() || silence_ms_ == 0) return;
  if (channel_->host_silence_ms() >= silence_ms_)
    fail(ErrorKind::kPeerLost, "its host has not answered for " + std::to_string(silence_ms_) + " ms",
         "look whether that host is up and the network between reaches it");
  const Channel::HeldUp held_up = channel_->held_up();
  if (held_up.ms >= silence_ms_)
    fail(ErrorKind::kPeerLost, held_up_text(held_up, "though its host answers", *channel_), kLargePacketsAdvice);
}

void Link::close() {
  broken_ = true;
  channel_.reset();
}

void Link::report_mismatch(const FlowIdentity& mine, const FrameHeader& header) {
  discarded_.insert(mine.group);
  events_.mismatched({mine, header, peer_.rank});
}

bool Link::Disagreement::name_unknown() const {
  return theirs.shape.name_hash != 0 && theirs.shape.name_hash != mine.shape.name_hash;
}

Error Link::Disagreement::explain(const PeerInfo& self, const PeerInfo& peer_info, const std::string& peer_name) const {
  std::string its = theirs.shape.text(), own = mine.shape.text();
  bool look_alike = its == own;
  if (!mine.name.empty()) own += " '" + mine.name + "'";
  if (!name_unknown())
    its += theirs.shape.name_hash == 0 ? "" : " '" + mine.name + "'";
  else
    its += peer_name.empty() ? " under another name" : " '" + peer_name + "'";
  if (look_alike && theirs.shape.name_hash == mine.shape.name_hash)
    its += " with another layout (splits, parameters, divisor, or which ranks share a host)";
  if (look_alike && theirs.shape.name_hash == 0 && mine.shape.name_hash != 0) its += " (without a name)";
  ErrorContext context;
  self.fill_self(context);
  peer_info.fill_peer(context);
  context.operation = mine.text();
  context.sequence = static_cast<int64_t>(mine.sequence);
  context.name = mine.name;
  context.cause = "the ranks disagree";
  context.advice = "call the same operations with the same shapes and dtypes in the same order on every rank";
  return Error(ErrorKind::kMismatch,
               std::string("ranks disagree about ") + (mine.between.empty() ? "operation " : "a message ") +
                   mine.place() + ": " + self.text() + " does " + own + ", " + peer_info.text() + " does " + its +
                   "; " + context.advice,
               context);
}

void Link::on_closed(int error_number) {
  if (departed_) return;
  if (late_ && bytes_received() == 0) {  // it may have left in good order before it knew of this connection
    departed_ = true;
    return events_.departed(peer_.rank, "it ended while they were being connected");
  }
  if (damaged_) {  // nothing more to be said on it: the error was told
    departed_ = true;
    return;
  }
  if (error_number == ETIMEDOUT || error_number == EHOSTUNREACH || error_number == EHOSTDOWN ||
      error_number == ENETUNREACH)
    fail(ErrorKind::kPeerLost, "its host does not answer any more: " + errno_text(error_number),
         "look whether that host is up and the network between reaches it");
  // The other end may have found that first.
  const bool ended = error_number == 0 || error_number == ECONNRESET;
  const Channel::HeldUp held_up = ended ? channel_->held_up() : Channel::HeldUp{};
  if (held_up.ms >= kHeldUpAtEndMs)
    fail(ErrorKind::kPeerLost, held_up_text(held_up, "and it gave this connection up", *channel_), kLargePacketsAdvice);
  fail(ErrorKind::kPeerLost, error_number == 0 ? "the connection ended without a goodbye" : errno_text(error_number),
       "look at that rank's own log: it crashed, was killed (out of memory?) or its host is gone", true);
}

void Link::fail(ErrorKind kind, const std::string& what, const std::string& advice, bool unexplained) const {
  ErrorContext context;
  self_.fill_self(context);
  peer_.fill_peer(context);
  context.cause = what;
  context.advice = advice;
  context.unexplained = unexplained;
  throw Error(kind, peer_.text() + ": " + what, context);
}

void Link::fail_damaged(const std::string& what) {
  damaged_ = true;
  fail(ErrorKind::kDamaged,
       what + ", on the connection " + channel_->describe() + " (rank " + std::to_string(self_.rank) + "'s end first)",
       "look for what flips bits between those two hosts (cable, network card, switch, proxy; ethtool -S has their "
       "counters) or in the memory of one (edac-util); or the program wrote to a tensor while it was being sent; then "
       "start again from a checkpoint");
}

}  // namespace ringdp
