// The steps of one connection of a Connector.
#include <algorithm>
#include <cerrno>
#include <utility>

#include "base/error.h"
#include "mesh/connector.h"
#include "mesh/padding.h"

namespace ringdp {
namespace {

constexpr int kMaxStrangers = 64;      // connections that have not proved anything yet; one per rank in larger jobs
constexpr int kMaxUnconfirmed = 4;     // of one rank: more are a replay of its hello
constexpr int64_t kStrangerMs = 2000;  // how long each may take to prove itself
constexpr int64_t kPeerMs = 30'000;    // what one of ours may take to answer: it may be slow
constexpr auto kKnockAgain = std::chrono::seconds(1);

bool connection_refused(int error_number) { return error_number == ECONNREFUSED; }

}  // namespace

HandshakeFields Connector::fields(HandshakeType type, int peer) const {
  HandshakeFields out = mine_;
  out.type = type;
  out.from = mine_.to;
  out.to = static_cast<uint32_t>(peer);
  random_bytes(out.nonce);
  if (type == HandshakeType::kHello) std::copy(instance_.begin(), instance_.end(), out.nonce.begin());
  return out;
}

// Dials: its peer and address are known.
void Connector::begin(Attempt&& attempt) {
  attempt.dialled = true;
  if (attempt.stream > 0) attempt.deadline = Deadline::after_ms(kPeerMs);
  int error_number = 0;
  attempt.socket = HandshakeSocket(start_connect(attempt.address, error_number));
  if (error_number != 0)
    drop(attempt, errno_text(error_number), connection_refused(error_number));
  else
    attempts_.push_back(std::move(attempt));
}

void Connector::let_in(Fd socket, const SocketAddress& from) {
  Attempt attempt;
  attempt.socket = HandshakeSocket(std::move(socket));
  attempt.address = from;
  attempt.stage = Stage::kAwaitHello;
  attempt.deadline = Deadline::after_ms(kStrangerMs);
  attempts_.push_back(std::move(attempt));
  advance(attempts_.back());  // one of ours has spoken by now
  evict_strangers();
}

// When the table is full the oldest attempt goes, not the newest: a rank of this job speaks at once, and dials again.
void Connector::evict_strangers() {
  auto is_stranger = [](const Attempt& it) { return it.stage == Stage::kAwaitHello; };
  auto strangers = std::count_if(attempts_.begin(), attempts_.end(), is_stranger);
  if (strangers > std::max(kMaxStrangers, world_))
    drop(*std::find_if(attempts_.begin(), attempts_.end(), is_stranger), "others waited");
  // Not by collect_attempts() alone: a flood would hold a descriptor for each until the step ends.
  attempts_.remove_if([](const Attempt& it) { return it.stage == Stage::kFailed; });
}

void Connector::drop(Attempt& attempt, const std::string& why, bool refused, bool final) {
  attempt.stage = Stage::kFailed;
  attempt.socket.close();
  if (attempt.stream > 0 && attempt.dialled)
    streams_.failed(attempt.peer, attempt.stream, why, Clock::now());
  else if (attempt.dialled)
    routes_[attempt.peer].failed(attempt.candidate, why, refused, final, Clock::now());
  else if (attempt.peer >= 0)
    problems_[attempt.peer] = attempt.address.text() + ": " + why;
  else if (!why.empty())
    door_.turned_away();
}

void Connector::expire(Attempt& attempt) {
  if (attempt.stage != Stage::kAwaitPadding) return drop(attempt, "it did not answer in time");
  const std::string bytes = std::to_string(attempt.socket.padding());
  large_[attempt.peer] = connection_text(attempt.socket.fd()) + ": a packet with " + bytes +
                         " bytes did not arrive within " + std::to_string(padding_ms_ / 1000) + " s, short ones did";
  drop(attempt, "connected, but a packet with " + bytes + " bytes does not arrive", false, true);
}

void Connector::advance(Attempt& attempt) {
  if (attempt.connecting()) return on_connected(attempt);
  const bool padding = attempt.stage == Stage::kAwaitPadding;
  // A connection that closes without a message came from a rank that connected by another address, or was a probe.
  const bool may_be_silent = attempt.stage == Stage::kAwaitHello && !attempt.socket.begun();
  switch (padding ? attempt.socket.read_padding() : attempt.socket.read_message()) {
    case HandshakeSocket::Read::kWaits:
      return;
    case HandshakeSocket::Read::kEnded:
      return drop(attempt, may_be_silent && attempt.socket.error_number() == 0 ? "" : attempt.socket.why(),
                  connection_refused(attempt.socket.error_number()));
    case HandshakeSocket::Read::kDone:
      break;
  }
  switch (attempt.stage) {
    case Stage::kAwaitPadding:
      return on_padding(attempt);
    case Stage::kAwaitReply:
      return on_reply(attempt);
    case Stage::kAwaitHello:
      return on_hello(attempt);
    case Stage::kAwaitConfirm:
      return on_confirm(attempt);
    default:
      return;
  }
}

bool Connector::send_message(Attempt& attempt, const HandshakeFields& fields) {
  HandshakeFields sent = fields;
  sent.stream = static_cast<uint16_t>(attempt.stream);
  sent.streams = static_cast<uint16_t>(attempt.streams);
  if (attempt.socket.send(sent, secret_)) return true;
  drop(attempt, attempt.socket.why());
  return false;
}

void Connector::on_connected(Attempt& attempt) {
  if (int error_number = connect_error(attempt.socket.fd()); error_number != 0)
    return drop(attempt, errno_text(error_number), connection_refused(error_number));
  Route& route = routes_[attempt.peer];
  if (attempt.stage == Stage::kProbing) {
    if (!send_message(attempt, fields(HandshakeType::kKnock, attempt.peer))) return;
    attempt.stage = Stage::kFailed;
    route.restart(Clock::now() + kKnockAgain);
    return;
  }
  if (attempt.stream == 0) route.answered(attempt.candidate);
  attempt.deadline = Deadline::after_ms(kPeerMs);
  if (send_message(attempt, fields(HandshakeType::kHello, attempt.peer))) attempt.stage = Stage::kAwaitReply;
}

void Connector::on_reply(Attempt& attempt) {
  auto reply = attempt.socket.decode(secret_);
  if (!reply) return drop(attempt, "the process there does not belong to this job (another secret?)", false, true);
  if (reply->type == HandshakeType::kRefusal)
    return drop(attempt, "refused: " + refusal_text(reply->refusal, *reply, mine_), false, true);
  if (reply->type != HandshakeType::kReply || reply->from != static_cast<uint32_t>(attempt.peer) ||
      reply->to != mine_.to)
    return drop(attempt, "it answered as another rank", false, true);
  attempt.socket.heard();
  await_padding(attempt, reply->padding);
}

void Connector::await_padding(Attempt& attempt, std::size_t bytes) {
  if (!attempt.socket.announced(bytes))
    return drop(attempt, "it announced padding of " + std::to_string(bytes) + " bytes", false, true);
  attempt.stage = Stage::kAwaitPadding;
  attempt.deadline = Deadline::after_ms(padding_ms_);
  if (bytes == 0)
    on_padding(attempt);
  else
    advance(attempt);
}

// All of it has come.
void Connector::on_padding(Attempt& attempt) {
  if (!attempt.dialled) {
    attempt.stage = Stage::kDone;
    return;
  }
  if (aims_[attempt.peer] == Aim::kCheck) {
    aims_[attempt.peer] = Aim::kNone;  // it can be reached
    attempt.stage = Stage::kFailed;
    return;
  }
  const bool better =
      attempt.stream > 0
          ? !streams_.lacks(attempt.peer, attempt.stream)
          : joined_[attempt.peer] != 0 || std::any_of(attempts_.begin(), attempts_.end(), [&](const Attempt& it) {
              return it.peer == attempt.peer && it.stream == 0 && it.stage == Stage::kDone;
            });
  if (better) return drop(attempt, "");  // one confirm per peer: the other side may believe it
  if (attempt.stream == 0) attempt.streams = streams_.wanted(attempt.peer, attempt.socket.fd());
  HandshakeFields confirm = fields(HandshakeType::kConfirm, attempt.peer);
  confirm.padding = padding_for(attempt.socket.fd());
  if (send_message(attempt, confirm)) attempt.stage = Stage::kDone;
}

void Connector::on_hello(Attempt& attempt) {
  auto hello = attempt.socket.decode(secret_);
  if (hello && hello->type == HandshakeType::kKnock) {
    on_knock(*hello);
    return drop(attempt, "");
  }
  if (!hello || hello->type != HandshakeType::kHello) return drop(attempt, "no hello");
  Refusal verdict = judge_hello(*hello, mine_);
  int peer = static_cast<int>(hello->from);
  if (verdict == Refusal::kNone && hello->stream >= kMostStreams) return drop(attempt, "no hello");
  attempt.socket.heard();
  if (verdict == Refusal::kNone && hello->purpose == Purpose::kResume) {
    resumptions_.push_back({peer, hello->number, hello->stream, std::move(attempt.socket)});
    attempt.stage = Stage::kFailed;
    return;
  }
  if (verdict == Refusal::kNone && joined_[peer] != 0) {
    const bool same = std::equal(instances_[peer].begin(), instances_[peer].end(), hello->nonce.begin());
    if (same && !streams_.lacks(peer, hello->stream)) return drop(attempt, "");
    if (!same) verdict = Refusal::kDuplicate;
  }
  if (verdict != Refusal::kNone) {
    std::string reason = refusal_text(verdict, *hello, mine_);
    door_.report("refused a connection from " + attempt.address.text() + ": " + reason);
    HandshakeFields refusal = fields(HandshakeType::kRefusal, peer);
    refusal.refusal = verdict;
    send_message(attempt, refusal);
    if (verdict != Refusal::kDuplicate && hello->from < mine_.world) problems_[peer] = reason;
    attempt.stage = Stage::kFailed;
    return;
  }
  auto unconfirmed = std::count_if(attempts_.begin(), attempts_.end(), [&](const Attempt& it) {
    return it.peer == peer && it.stream == hello->stream && it.stage == Stage::kAwaitConfirm;
  });
  if (unconfirmed >= kMaxUnconfirmed) return drop(attempt, "a handshake was replayed");
  attempt.peer = peer;
  attempt.stream = hello->stream;
  attempt.nonce = hello->nonce;
  attempt.deadline = Deadline::after_ms(kPeerMs);
  HandshakeFields reply = fields(HandshakeType::kReply, peer);
  reply.padding = padding_for(attempt.socket.fd());
  if (send_message(attempt, reply)) attempt.stage = Stage::kAwaitConfirm;
}

// A lower rank needs a connection. A knock that was recorded and is sent again has no other effect.
void Connector::on_knock(const HandshakeFields& knock) {
  int peer = static_cast<int>(knock.from);
  if (knock.purpose == Purpose::kResume) {
    if (judge_hello(knock, mine_) == Refusal::kNone && peer < rank_)
      resumptions_.push_back({.peer = peer, .number = knock.number});
    return;
  }
  if (judge_hello(knock, mine_) == Refusal::kNone && peer < rank_ && routes_[peer].known()) want(peer);
}

void Connector::on_confirm(Attempt& attempt) {
  auto confirm = attempt.socket.decode(secret_);
  if (!confirm || confirm->type != HandshakeType::kConfirm) return drop(attempt, "a handshake was replayed");
  if (confirm->streams < 1 || confirm->streams > kMostStreams)
    return drop(attempt, "it announced " + std::to_string(confirm->streams) + " connections", false, true);
  attempt.streams = confirm->streams;
  await_padding(attempt, confirm->padding);
}

}  // namespace ringdp
