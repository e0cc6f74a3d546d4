#include "meet/redialler.h"

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <utility>

#include "base/error.h"
#include "meet/handshake.h"
#include "transport/tcp.h"

namespace ringdp {

namespace {

using std::chrono::milliseconds;

constexpr milliseconds kFirstPause{10};  // between two attempts at one address
constexpr milliseconds kLongestPause{200};
constexpr milliseconds kHeadStart{50};  // for the address that was in use
constexpr int kKnockRefusals = 2;       // at one address, while others do not answer
constexpr const char* kAnswered = "it answered";

}  // namespace

void RedialTries::restart(std::size_t addresses, bool dials, Clock::time_point now) {
  dials_ = dials;
  tries_.assign(addresses, Try{.next = now + kHeadStart});
  if (!tries_.empty()) tries_.front().next = now;
}

void RedialTries::begun(std::size_t address, Clock::time_point now) {
  Try& it = tries_[address];
  it.next = now + std::min(kLongestPause, kFirstPause * (1 << std::min(it.failures, 5)));
  ++it.failures;
}

void RedialTries::connected(std::size_t address) {
  tries_[address].refused = false;
  tries_[address].why = dials_ ? "connected, but it did not answer" : kAnswered;
}

void RedialTries::failed(std::size_t address, const std::string& why, bool refused) {
  tries_[address].refused = refused;
  if (!why.empty()) tries_[address].why = why;
}

// Refused at the address that was dialled before, or at all addresses.
bool RedialTries::process_has_ended() const {
  if (tries_.empty()) return false;
  if (std::all_of(tries_.begin(), tries_.end(), [](const Try& it) { return it.refused; })) return true;
  if (dials_) return tries_.front().refused;
  const bool some = std::any_of(tries_.begin(), tries_.end(),
                                [](const Try& it) { return it.refused && it.failures >= kKnockRefusals; });
  const bool other =
      std::any_of(tries_.begin(), tries_.end(), [](const Try& it) { return !it.refused && it.why == kAnswered; });
  return some && !other;
}

std::string RedialTries::text(const std::vector<SocketAddress>& addresses) const {
  std::string out;
  for (std::size_t i = 0; i < tries_.size(); ++i)
    out += (!out.empty() ? ", "
            : dials_     ? "tried "
                         : "it did not come, and asked at ") +
           addresses[i].text() + " (" + (tries_[i].why.empty() ? "no answer" : tries_[i].why) + ")";
  return out.empty() ? "it did not come" : out;
}

namespace {

constexpr milliseconds kConnecting{1000};      // a lost SYN is not sent again before that
constexpr milliseconds kAnswer{2000};          // how long the other side may take for its next message
constexpr milliseconds kStreamAnswer{10'000};  // the same for a further connection of the pair
// how long a step may take once both have stopped sending; then it is repeated
constexpr milliseconds kStep{1500};
constexpr milliseconds kSilent{1500};       // how long the engine's report of a silent host is valid
constexpr std::ptrdiff_t kMostLetIn = 8;    // unconfirmed, of one peer: more are a replay of its hello
constexpr std::ptrdiff_t kMostDialled = 5;  // at one address at a time

bool connected_now(int fd) {
  pollfd polled{fd, POLLOUT, 0};
  return poll(&polled, 1, 0) > 0;
}

}  // namespace

Redialler::Redialler(Connector::Knowledge knowledge, int64_t heal_ms, Events events)
    : streams_(std::move(knowledge.streams)),
      mine_(knowledge.mine),
      secret_(std::move(knowledge.secret)),
      addresses_(std::move(knowledge.addresses)),
      heal_(heal_ms),
      events_(std::move(events)),
      cases_(addresses_.size()) {}

bool Redialler::busy() const {
  bool whole = open_ == 0 && attempts_.empty();
  for (int peer = 0; whole && peer < static_cast<int>(cases_.size()); ++peer)
    whole = streams_.complete(peer) || streams_.hopeless(peer) || !dials(peer);
  return !whole;
}

void Redialler::heal(int peer, bool broken) {
  const auto now = Clock::now();
  if (!broken && now < at(peer).done_at + kSilent) return;  // reported before the new connection was established
  open(peer, broken, now + (broken ? heal_ : kSilent));
}

void Redialler::open(int peer, bool broken, Clock::time_point until) {
  Case& it = at(peer);
  if (it.open && (it.broken || !broken)) {
    if (!it.broken) it.until = std::max(it.until, until);
    return;
  }
  if (!it.open) {
    ++open_;
    it.open = true;
    it.under_way = false;
    it.tries.restart(addresses_[static_cast<std::size_t>(peer)].size(), dials(peer), Clock::now());
  }
  it.broken = broken;
  it.until = until;
}

void Redialler::close(int peer) {
  Case& it = at(peer);
  if (it.open) --open_;
  it.open = it.under_way = false;
  for (Attempt& attempt : attempts_)
    if (attempt.peer == peer && attempt.stream == 0) attempt.stage = Stage::kOver;
}

void Redialler::take(Connector::Resumption resumption) {
  Case& it = at(resumption.peer);
  if (!resumption.socket) {
    // The knock has the number of the last established connection; a replayed one has not.
    if (!it.open && resumption.number == it.done) heal(resumption.peer, false);
    return;
  }
  if (dials(resumption.peer)) return;
  auto like_this = [&](const Attempt& other) {
    return other.peer == resumption.peer && other.stream == resumption.stream && other.stage == Stage::kAwaitConfirm;
  };
  if (std::count_if(attempts_.begin(), attempts_.end(), like_this) >= kMostLetIn)
    std::find_if(attempts_.begin(), attempts_.end(), like_this)->stage = Stage::kOver;
  Attempt& attempt = attempts_.emplace_back();
  attempt.peer = resumption.peer;
  attempt.socket = std::move(*resumption.socket);
  attempt.stage = Stage::kAwaitConfirm;
  attempt.begin = Clock::now();
  attempt.number = resumption.number;
  attempt.stream = resumption.stream;
  // Of another connection, or before this side uses the new one: it is dialled again.
  if (attempt.stream > 0 && !fits(attempt)) return drop(attempt, "");
  send(attempt, HandshakeType::kReply, attempt.number);
}

void Redialler::poll_for(std::vector<pollfd>& polled) const {
  for (const Attempt& it : attempts_)
    polled.push_back({it.socket.fd(), static_cast<short>(it.stage == Stage::kConnecting ? POLLOUT : POLLIN), 0});
}

void Redialler::step() {
  const auto now = Clock::now();
  for (Attempt& it : attempts_)
    if (it.stage != Stage::kOver) advance(it);
  attempts_.remove_if([](const Attempt& it) { return it.stage == Stage::kOver; });
  for (int peer = 0; peer < static_cast<int>(cases_.size()); ++peer) {
    Case& it = at(peer);
    if (!it.open || !it.broken) dial_streams(peer, now);
    if (!it.open) continue;
    if (!it.under_way && it.tries.process_has_ended()) {
      give_up(peer, "");
    } else if (now >= it.until) {
      give_up(peer, "for " + std::to_string(heal_.count()) + " ms (RINGDP_HEAL) " +
                        it.tries.text(addresses_[static_cast<std::size_t>(peer)]));
    } else if (!it.under_way) {
      begin_due(peer, now);
    }
  }
}

void Redialler::give_up(int peer, const std::string& why) {
  const bool broken = at(peer).broken;
  close(peer);
  if (broken) events_.not_healed(peer, why);
}

void Redialler::begin_due(int peer, Clock::time_point now) {
  Case& it = at(peer);
  const auto& addresses = addresses_[static_cast<std::size_t>(peer)];
  for (std::size_t i = 0; i < addresses.size(); ++i) {
    if (!it.tries.due(i, now)) continue;
    const auto under_way = std::count_if(attempts_.begin(), attempts_.end(), [&](const Attempt& other) {
      return other.dialled && other.stream == 0 && other.peer == peer && other.address == i &&
             other.stage != Stage::kOver;
    });
    if (under_way >= kMostDialled) continue;
    it.tries.begun(i, now);
    int error_number = 0;
    Attempt& attempt = attempts_.emplace_back();
    attempt.peer = peer;
    attempt.dialled = true;
    attempt.address = i;
    attempt.begin = now;
    attempt.socket = HandshakeSocket(start_connect(addresses[i], error_number));
    if (error_number != 0) drop(attempt, errno_text(error_number), error_number == ECONNREFUSED);
  }
}

void Redialler::dial_streams(int peer, Clock::time_point now) {
  if (streams_.hopeless(peer)) return;
  while (auto stream = streams_.due(peer, now)) {
    Attempt& attempt = attempts_.emplace_back();
    attempt.peer = peer;
    attempt.dialled = true;
    attempt.stream = *stream;
    attempt.streams = streams_.streams(peer);
    attempt.number = at(peer).done;
    attempt.begin = now;
    int error_number = 0;
    attempt.socket = HandshakeSocket(start_connect(streams_.address(peer), error_number));
    if (error_number != 0) drop(attempt, errno_text(error_number));
  }
}

void Redialler::advance(Attempt& attempt) {
  const auto age = Clock::now() - attempt.begin;
  if (attempt.stage == Stage::kConnecting) {
    if (connected_now(attempt.socket.fd())) return on_connected(attempt);
    if (age > kConnecting) drop(attempt, "Connection timed out");
    return;
  }
  const bool padding = attempt.socket.awaits_padding();
  switch (padding ? attempt.socket.read_padding() : attempt.socket.read_message()) {
    case HandshakeSocket::Read::kDone:
      return padding ? on_padding(attempt) : on_message(attempt);
    case HandshakeSocket::Read::kEnded:
      return drop(attempt, attempt.socket.why());
    case HandshakeSocket::Read::kWaits:
      break;
  }
  if (attempt.stage == Stage::kAwaitResume) {
    if (age > kStep) drop(attempt, "the new connection does not move");
  } else if (age > (attempt.stream > 0 ? kStreamAnswer : kAnswer)) {
    drop(attempt,
         padding ? "connected, but a packet with " + std::to_string(attempt.socket.padding()) + " bytes does not arrive"
                 : "connected, but it did not answer");
  }
}

void Redialler::on_connected(Attempt& attempt) {
  const int error_number = connect_error(attempt.socket.fd());
  if (error_number != 0) return drop(attempt, errno_text(error_number), error_number == ECONNREFUSED);
  if (attempt.stream > 0) {
    if (send(attempt, HandshakeType::kHello, attempt.number)) attempt.stage = Stage::kAwaitReply;
    return;
  }
  Case& it = at(attempt.peer);
  it.tries.connected(attempt.address);
  if (!dials(attempt.peer)) {
    if (send(attempt, HandshakeType::kKnock, it.number)) attempt.stage = Stage::kOver;
    return;
  }
  attempt.number = ++it.number;
  attempt.begin = Clock::now();
  if (send(attempt, HandshakeType::kHello, attempt.number)) attempt.stage = Stage::kAwaitReply;
}

void Redialler::on_message(Attempt& attempt) {
  const auto message = attempt.socket.decode(secret_);
  if (!message) {
    if (attempt.stage != Stage::kAwaitReply || attempt.stream > 0) return drop(attempt, "a handshake was replayed");
    // Another process has the port by now.
    const int peer = attempt.peer;
    return attempt.address == 0 ? give_up(peer, "") : drop(attempt, "another process listens there");
  }
  attempt.socket.add_to_transcript();
  if (message->type == HandshakeType::kRefusal) {
    const int peer = attempt.peer;
    at(peer).broken = true;  // it has broken on the peer's side
    return give_up(peer, message->refusal == Refusal::kGone ? "" : refusal_text(message->refusal, *message, mine_));
  }
  const bool reply = attempt.stage == Stage::kAwaitReply && message->type == HandshakeType::kReply;
  const bool confirm = attempt.stage == Stage::kAwaitConfirm && message->type == HandshakeType::kConfirm;
  const bool of_peer = message->from == static_cast<uint32_t>(attempt.peer) && message->to == mine_.to;
  const bool streams = !confirm || (message->streams >= 1 && message->streams <= kMostStreams);
  if ((reply || confirm) && of_peer && streams && attempt.socket.announced(message->padding)) {
    if (confirm) attempt.streams = message->streams;
    return attempt.socket.awaits_padding() ? void() : on_padding(attempt);
  }
  if (attempt.stage == Stage::kAwaitResume && message->type == HandshakeType::kResume)
    return on_resume(attempt, message->number);
  drop(attempt, "it sent an invalid message");
}

// Large packets arrive, too.
void Redialler::on_padding(Attempt& attempt) {
  if (attempt.stream > 0) return on_stream(attempt);
  attempt.dialled ? on_reply(attempt) : on_confirm(attempt);
}

bool Redialler::fits(const Attempt& stream) {
  const Case& it = at(stream.peer);
  return it.done > 0 && stream.number == it.done && !(it.open && it.under_way) &&
         streams_.lacks(stream.peer, stream.stream);
}

// The side that dialled adds it first: nothing is sent on it before the other side has it.
void Redialler::on_stream(Attempt& attempt) {
  if (!fits(attempt)) return drop(attempt, "");
  if (attempt.dialled && !send(attempt, HandshakeType::kConfirm, attempt.number)) return;
  streams_.add(attempt.peer, attempt.stream, Fd());
  attempt.stage = Stage::kOver;
  events_.add_stream(attempt.peer, attempt.socket.take());
}

void Redialler::on_reply(Attempt& attempt) {
  Case& it = at(attempt.peer);
  if (!it.open || it.under_way) return drop(attempt, "");
  if (!events_.hold(attempt.peer)) {
    send(attempt, HandshakeType::kRefusal, attempt.number, Refusal::kGone);
    return close(attempt.peer);
  }
  if (!it.broken) it.until = Clock::now() + heal_;
  it.broken = it.under_way = true;
  attempt.stage = Stage::kAwaitResume;
  attempt.begin = Clock::now();
  attempt.streams = streams_.wanted(attempt.peer, attempt.socket.fd());
  send(attempt, HandshakeType::kConfirm, attempt.number);
}

// An attempt that ends after a later one is ignored.
void Redialler::on_confirm(Attempt& attempt) {
  Case& it = at(attempt.peer);
  if (attempt.number <= it.number) return drop(attempt, "");
  if (!events_.hold(attempt.peer)) {
    send(attempt, HandshakeType::kRefusal, attempt.number, Refusal::kGone);
    attempt.stage = Stage::kOver;
    return;
  }
  it.number = attempt.number;
  for (Attempt& other : attempts_)
    if (&other != &attempt && other.peer == attempt.peer && other.stream == 0) other.stage = Stage::kOver;
  open(attempt.peer, true, Clock::now() + heal_);
  it.under_way = true;
  attempt.stage = Stage::kAwaitResume;
  attempt.begin = Clock::now();
  send_frames_taken(attempt);
}

bool Redialler::send_frames_taken(Attempt& attempt) {
  const auto taken = events_.settle(attempt.peer);
  if (taken) return send(attempt, HandshakeType::kResume, *taken);
  send(attempt, HandshakeType::kRefusal, attempt.number, Refusal::kGone);
  close(attempt.peer);
  return false;
}

void Redialler::on_resume(Attempt& attempt, uint64_t theirs) {
  if (attempt.dialled && !send_frames_taken(attempt)) return;
  const int peer = attempt.peer;
  at(peer).done = attempt.number;
  at(peer).done_at = Clock::now();
  Fd socket = attempt.socket.take();
  const int streams = attempt.streams;
  streams_.forget(peer);
  streams_.expect(peer, streams,
                  attempt.dialled ? std::optional(SocketAddress::far_end_of(socket.get())) : std::nullopt);
  close(peer);
  events_.resume(peer, std::move(socket), streams, theirs);
}

bool Redialler::send(Attempt& attempt, HandshakeType type, uint64_t number, Refusal refusal) {
  HandshakeFields fields = mine_;
  fields.type = type;
  fields.from = mine_.to;
  fields.to = static_cast<uint32_t>(attempt.peer);
  fields.refusal = refusal;
  fields.purpose = Purpose::kResume;
  fields.number = number;
  fields.stream = static_cast<uint16_t>(attempt.stream);
  fields.streams = static_cast<uint16_t>(attempt.streams);
  random_bytes(fields.nonce);
  if (type == HandshakeType::kReply || type == HandshakeType::kConfirm)
    fields.padding = padding_for(attempt.socket.fd());
  if (attempt.socket.send(fields, secret_)) return true;
  drop(attempt, attempt.socket.why());
  return false;
}

void Redialler::drop(Attempt& attempt, const std::string& why, bool refused) {
  Case& it = at(attempt.peer);
  if (attempt.stream > 0) {
    if (attempt.dialled) streams_.failed(attempt.peer, attempt.stream, why, Clock::now());
  } else if (attempt.dialled && it.open) {
    it.tries.failed(attempt.address, why, refused);
  }
  if (attempt.stage == Stage::kAwaitResume) it.under_way = false;  // another one may begin
  attempt.stage = Stage::kOver;
}

}  // namespace ringdp
