#include "mesh/redialler.h"

#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <utility>

#include "base/error.h"
#include "mesh/padding.h"
#include "transport/tcp.h"

namespace ringdp {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kFirstPause{10};  // between two attempts at one address
constexpr milliseconds kLongestPause{200};
constexpr milliseconds kHeadStart{50};      // of the address that was in use, before the others
constexpr milliseconds kConnecting{1000};   // a lost SYN is not sent again before that
constexpr milliseconds kLetIn{2000};        // what one that was let in may take to prove itself
constexpr milliseconds kStep{1500};         // what a step may take once both have stopped sending: then again
constexpr milliseconds kSilent{1500};       // that the engine's word of a silent host holds
constexpr std::size_t kMostLetIn = 8;       // of one peer that have proved nothing yet: more are a replay of its hello
constexpr std::ptrdiff_t kMostDialled = 5;  // at one address at a time
constexpr int kKnockRefusals = 2;           // at some address, where others do not answer

bool connected_now(int fd) {
  pollfd polled{fd, POLLOUT, 0};
  return poll(&polled, 1, 0) > 0;
}

}  // namespace

Redialler::Redialler(Connector::Knowledge knowledge, int64_t heal_ms, Events events)
    : knowledge_(std::move(knowledge)),
      heal_(heal_ms),
      events_(std::move(events)),
      cases_(knowledge_.addresses.size()) {}

void Redialler::heal(int peer, bool broken) {
  const auto now = Clock::now();
  if (!broken && now < at(peer).done_at + kSilent) return;  // said before it came about
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
    const auto& addresses = knowledge_.addresses[static_cast<std::size_t>(peer)];
    it.tries.assign(addresses.size(), {});
    for (std::size_t i = 0; i < it.tries.size(); ++i)
      it.tries[i].next = Clock::now() + (i > 0 ? kHeadStart : milliseconds(0));
  }
  it.broken = broken;
  it.until = until;
}

void Redialler::close(int peer) {
  Case& it = at(peer);
  if (it.open) --open_;
  it.open = it.under_way = false;
  for (Attempt& attempt : attempts_)
    if (attempt.peer == peer) attempt.stage = Stage::kOver;
}

void Redialler::take(Connector::Resumption resumption) {
  Case& it = at(resumption.peer);
  if (!resumption.socket) {
    // It knows of the last connection that came about. A knock that is sent again later does not.
    if (!it.open && resumption.number == it.done) heal(resumption.peer, false);
    return;
  }
  auto of_peer = [&](const Attempt& other) {
    return other.peer == resumption.peer && other.stage == Stage::kAwaitConfirm;
  };
  if (static_cast<std::size_t>(std::count_if(attempts_.begin(), attempts_.end(), of_peer)) >= kMostLetIn)
    std::find_if(attempts_.begin(), attempts_.end(), of_peer)->stage = Stage::kOver;
  Attempt& attempt = attempts_.emplace_back();
  attempt.peer = resumption.peer;
  attempt.fd = std::move(resumption.socket);
  attempt.stage = Stage::kAwaitConfirm;
  attempt.begin = Clock::now();
  attempt.number = resumption.number;
  attempt.transcript.assign(resumption.hello.begin(), resumption.hello.end());
  send(attempt, HandshakeType::kReply, attempt.number);
}

void Redialler::poll_for(std::vector<pollfd>& polled) const {
  for (const Attempt& it : attempts_)
    polled.push_back({it.fd.get(), static_cast<short>(it.stage == Stage::kConnecting ? POLLOUT : POLLIN), 0});
}

void Redialler::step() {
  const auto now = Clock::now();
  for (Attempt& it : attempts_)
    if (it.stage != Stage::kOver) advance(it);
  attempts_.remove_if([](const Attempt& it) { return it.stage == Stage::kOver; });
  for (int peer = 0; open_ > 0 && peer < static_cast<int>(cases_.size()); ++peer) {
    Case& it = at(peer);
    if (!it.open) continue;
    if (process_has_ended(it)) {
      give_up(peer, "");
    } else if (now >= it.until) {
      std::string why;
      const auto& addresses = knowledge_.addresses[static_cast<std::size_t>(peer)];
      for (std::size_t i = 0; i < addresses.size(); ++i)
        why += (why.empty() ? (dials(peer) ? "tried " : "it did not come, and asked at ") : ", ") +
               addresses[i].text() + " (" + (it.tries[i].why.empty() ? "no answer" : it.tries[i].why) + ")";
      give_up(peer,
              "for " + std::to_string(heal_.count()) + " ms (RINGDP_HEAL) " + (why.empty() ? "it did not come" : why));
    } else if (!it.under_way) {
      begin_due(peer, now);
    }
  }
}

// One that listened where it was dialled before, or at all of its addresses.
bool Redialler::process_has_ended(const Case& it) const {
  if (it.tries.empty() || it.under_way) return false;
  const bool all = std::all_of(it.tries.begin(), it.tries.end(), [](const Try& one) { return one.refused; });
  if (all) return true;
  const int peer = static_cast<int>(&it - cases_.data());
  if (dials(peer)) return it.tries.front().refused;
  const bool some = std::any_of(it.tries.begin(), it.tries.end(),
                                [](const Try& one) { return one.refused && one.failures >= kKnockRefusals; });
  const bool other = std::any_of(it.tries.begin(), it.tries.end(),
                                 [](const Try& one) { return !one.refused && one.why == "it answered"; });
  return some && !other;
}

void Redialler::give_up(int peer, const std::string& why) {
  const bool broken = at(peer).broken;
  close(peer);
  if (broken) events_.not_healed(peer, why);
}

void Redialler::begin_due(int peer, Clock::time_point now) {
  Case& it = at(peer);
  const auto& addresses = knowledge_.addresses[static_cast<std::size_t>(peer)];
  for (std::size_t i = 0; i < addresses.size(); ++i) {
    Try& one = it.tries[i];
    const auto under_way = std::count_if(attempts_.begin(), attempts_.end(), [&](const Attempt& other) {
      return other.dialled && other.peer == peer && other.address == i && other.stage != Stage::kOver;
    });
    if (now < one.next || under_way >= kMostDialled) continue;
    one.next = now + std::min(kLongestPause, kFirstPause * (1 << std::min(one.failures, 5)));
    ++one.failures;
    int error_number = 0;
    Attempt& attempt = attempts_.emplace_back();
    attempt.peer = peer;
    attempt.dialled = true;
    attempt.address = i;
    attempt.begin = now;
    attempt.fd = start_connect(addresses[i], error_number);
    if (error_number != 0) drop(attempt, errno_text(error_number), error_number == ECONNREFUSED);
  }
}

void Redialler::advance(Attempt& attempt) {
  const auto age = Clock::now() - attempt.begin;
  if (attempt.stage == Stage::kConnecting) {
    if (connected_now(attempt.fd.get())) return on_connected(attempt);
    if (age > kConnecting) drop(attempt, "Connection timed out");
    return;
  }
  if (attempt.padding > 0) {
    if (read_padding(attempt)) return on_padding(attempt);
  } else if (read_message(attempt)) {
    return on_message(attempt);
  }
  if (attempt.stage == Stage::kAwaitConfirm && age > kLetIn) attempt.stage = Stage::kOver;
  if (attempt.stage == Stage::kAwaitResume && age > kStep) drop(attempt, "the new connection does not move");
}

void Redialler::on_connected(Attempt& attempt) {
  const int error_number = connect_error(attempt.fd.get());
  if (error_number != 0) return drop(attempt, errno_text(error_number), error_number == ECONNREFUSED);
  Case& it = at(attempt.peer);
  it.tries[attempt.address].refused = false;
  if (!dials(attempt.peer)) {
    it.tries[attempt.address].why = "it answered";
    if (send(attempt, HandshakeType::kKnock, it.number)) attempt.stage = Stage::kOver;
    return;
  }
  it.tries[attempt.address].why = "connected, but it did not answer";
  attempt.number = ++it.number;
  if (send(attempt, HandshakeType::kHello, attempt.number)) attempt.stage = Stage::kAwaitReply;
}

// True when a whole message is in the buffer. No more is read: frames follow the last.
bool Redialler::read_message(Attempt& attempt) {
  const ssize_t got =
      recv(attempt.fd.get(), attempt.buffer.data() + attempt.filled, kHandshakeBytes - attempt.filled, MSG_DONTWAIT);
  if (got == 0) drop(attempt, "it closed the connection");
  if (got < 0 && errno != EAGAIN && errno != EINTR) drop(attempt, errno_text(errno));
  if (got > 0) attempt.filled += static_cast<std::size_t>(got);
  if (attempt.stage == Stage::kOver || attempt.filled < kHandshakeBytes) return false;
  attempt.filled = 0;
  return true;
}

bool Redialler::read_padding(Attempt& attempt) {
  std::array<std::byte, kMaxPaddingBytes> nothing;
  const ssize_t got = recv(attempt.fd.get(), nothing.data(), attempt.padding, MSG_DONTWAIT);
  if (got == 0) drop(attempt, "it closed the connection");
  if (got < 0 && errno != EAGAIN && errno != EINTR) drop(attempt, errno_text(errno));
  if (got > 0) attempt.padding -= static_cast<std::size_t>(got);
  return attempt.stage != Stage::kOver && attempt.padding == 0;
}

void Redialler::on_message(Attempt& attempt) {
  const auto message = decode_handshake(attempt.buffer, knowledge_.secret, attempt.transcript);
  if (!message) {
    if (attempt.stage != Stage::kAwaitReply) return drop(attempt, "a handshake was replayed");
    // Another process has the port by now.
    const int peer = attempt.peer;
    return attempt.address == 0 ? give_up(peer, "") : drop(attempt, "another process listens there");
  }
  attempt.transcript.insert(attempt.transcript.end(), attempt.buffer.begin(), attempt.buffer.end());
  if (message->type == HandshakeType::kRefusal) {
    const int peer = attempt.peer;
    at(peer).broken = true;  // on its side, certainly
    return give_up(peer,
                   message->refusal == Refusal::kGone ? "" : refusal_text(message->refusal, *message, knowledge_.mine));
  }
  const bool reply = attempt.stage == Stage::kAwaitReply && message->type == HandshakeType::kReply;
  const bool confirm = attempt.stage == Stage::kAwaitConfirm && message->type == HandshakeType::kConfirm;
  const bool of_peer = message->from == static_cast<uint32_t>(attempt.peer) && message->to == knowledge_.mine.to;
  if ((reply || confirm) && of_peer && message->padding <= kMaxPaddingBytes) {
    attempt.padding = message->padding;
    return attempt.padding == 0 ? on_padding(attempt) : void();
  }
  if (attempt.stage == Stage::kAwaitResume && message->type == HandshakeType::kResume)
    return on_resume(attempt, message->number);
  drop(attempt, "it talks nonsense");
}

// Large packets arrive, too.
void Redialler::on_padding(Attempt& attempt) { attempt.dialled ? on_reply(attempt) : on_confirm(attempt); }

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
  send(attempt, HandshakeType::kConfirm, attempt.number);
}

// An attempt that comes late, after a later one, counts no more.
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
    if (&other != &attempt && other.peer == attempt.peer) other.stage = Stage::kOver;
  open(attempt.peer, true, Clock::now() + heal_);
  it.under_way = true;
  attempt.stage = Stage::kAwaitResume;
  attempt.begin = Clock::now();
  tell_frames(attempt);
}

bool Redialler::tell_frames(Attempt& attempt) {
  const auto taken = events_.settle(attempt.peer);
  if (taken) return send(attempt, HandshakeType::kResume, *taken);
  send(attempt, HandshakeType::kRefusal, attempt.number, Refusal::kGone);
  close(attempt.peer);
  return false;
}

void Redialler::on_resume(Attempt& attempt, uint64_t theirs) {
  if (attempt.dialled && !tell_frames(attempt)) return;
  const int peer = attempt.peer;
  at(peer).done = attempt.number;
  at(peer).done_at = Clock::now();
  Fd socket = std::move(attempt.fd);
  close(peer);
  events_.resume(peer, std::move(socket), theirs);
}

bool Redialler::send(Attempt& attempt, HandshakeType type, uint64_t number, Refusal refusal) {
  HandshakeFields fields = knowledge_.mine;
  fields.type = type;
  fields.from = knowledge_.mine.to;
  fields.to = static_cast<uint32_t>(attempt.peer);
  fields.refusal = refusal;
  fields.purpose = Purpose::kResume;
  fields.number = number;
  random_bytes(fields.nonce);
  if (type == HandshakeType::kReply || type == HandshakeType::kConfirm) fields.padding = padding_for(attempt.fd.get());
  const HandshakeMessage message = encode_handshake(fields, knowledge_.secret, attempt.transcript);
  attempt.transcript.insert(attempt.transcript.end(), message.begin(), message.end());
  // They always fit into a fresh socket's buffer. The padding goes by itself, as when the ranks meet.
  static constexpr std::array<std::byte, kMaxPaddingBytes> kPadding{};
  for (std::span<const std::byte> bytes :
       {std::span<const std::byte>(message), std::span(kPadding).first(fields.padding)}) {
    if (bytes.empty()) continue;
    if (::send(attempt.fd.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT) ==
        static_cast<ssize_t>(bytes.size()))
      continue;
    drop(attempt, errno_text(errno));
    return false;
  }
  return true;
}

void Redialler::drop(Attempt& attempt, const std::string& why, bool refused) {
  Case& it = at(attempt.peer);
  if (attempt.dialled && it.open) {
    Try& one = it.tries[attempt.address];
    one.refused = refused;
    if (!why.empty()) one.why = why;
  }
  if (attempt.stage == Stage::kAwaitResume) it.under_way = false;  // another one may begin
  attempt.stage = Stage::kOver;
}

}  // namespace ringdp
