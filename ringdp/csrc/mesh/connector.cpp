#include "mesh/connector.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>

#include "base/error.h"
#include "base/log.h"

namespace ringdp {
namespace {

constexpr std::size_t kMaxStrangers = 64;  // connections that have not proved anything yet
constexpr int kMaxUnconfirmed = 4;         // of one rank: more are a replay of its hello
constexpr int64_t kStrangerMs = 2000;      // how long each may take to do so
constexpr auto kRedial = std::chrono::milliseconds(50);

}  // namespace

Connector::Connector(TcpListener& listener, const HandshakeFields& mine, std::vector<std::byte> secret)
    : listener_(listener), mine_(mine), secret_(std::move(secret)) {}

HandshakeFields Connector::fields(HandshakeType type, int peer) const {
  HandshakeFields out = mine_;
  out.type = type;
  out.from = mine_.to;
  out.to = static_cast<uint32_t>(peer);
  random_bytes(out.nonce);
  return out;
}

std::vector<Fd> Connector::run(const std::vector<SocketAddress>& addresses, Deadline deadline,
                               const std::function<void()>& check_interrupt) {
  addresses_ = addresses;
  int rank = static_cast<int>(mine_.to), world = static_cast<int>(mine_.world);
  connected_.resize(world);
  problems_.resize(world);
  dial_after_.assign(world, Clock::now());
  for (int peer = 0; peer < rank; ++peer) dial(peer);
  auto complete = [&] {
    for (int peer = 0; peer < world; ++peer)
      if (peer != rank && !connected_[peer]) return false;
    return true;
  };
  std::vector<pollfd> polled;
  while (!complete()) {
    if (deadline.expired()) {
      ErrorContext context;
      context.rank = rank;
      for (int peer = world; peer-- > 0;)
        if (peer != rank && !connected_[peer]) context.peer = peer;
      context.cause = missing_text();
      context.advice = "check that every rank was started and that nothing between the hosts blocks the ports";
      throw Error(ErrorKind::kTimeout,
                  "rank " + std::to_string(rank) + " Timed out connecting to its peers: " + context.cause + "; " +
                      context.advice,
                  context);
    }
    polled.clear();
    std::size_t strangers = std::count_if(attempts_.begin(), attempts_.end(),
                                          [](const Attempt& a) { return a.stage == Stage::kAwaitHello; });
    // With the table full, newcomers wait in the kernel's queue until somebody's time is up.
    polled.push_back({listener_.poll_fd(), static_cast<short>(strangers < kMaxStrangers ? POLLIN : 0), 0});
    for (const Attempt& attempt : attempts_)
      polled.push_back(
          {attempt.fd.get(), static_cast<short>(attempt.stage == Stage::kConnecting ? POLLOUT : POLLIN), 0});
    poll(polled.data(), polled.size(), deadline.remaining_ms(50));
    if (check_interrupt) check_interrupt();
    std::size_t index = 1;
    for (Attempt& attempt : attempts_) {
      if (polled[index++].revents != 0) advance(attempt);
      if (attempt.stage != Stage::kDone && attempt.stage != Stage::kFailed && attempt.deadline.expired())
        drop(attempt, "it did not answer in time");
    }
    if (polled[0].revents != 0) accept_all();
    settle();
  }
  if (dropped_strangers_ > 0)
    log(LogLevel::kWarning, "turned away " + std::to_string(dropped_strangers_) +
                                " connections that could not prove that "
                                "they belong to this job");
  return std::move(connected_);
}

void Connector::dial(int peer) {
  Attempt attempt;
  attempt.peer = peer;
  attempt.address = addresses_[peer];
  attempt.deadline = Deadline::after_ms(10'000);
  dial_after_[peer] = Clock::now() + kRedial;
  try {
    attempt.fd = start_connect(attempt.address);
    attempts_.push_back(std::move(attempt));
  } catch (const Error& error) {
    problems_[peer] = error.what();
  }
}

void Connector::accept_all() {
  std::size_t strangers =
      std::count_if(attempts_.begin(), attempts_.end(), [](const Attempt& a) { return a.stage == Stage::kAwaitHello; });
  for (; strangers < kMaxStrangers; ++strangers) {
    auto newcomer = listener_.accept();
    if (!newcomer) return;
    Attempt attempt;
    attempt.fd = std::move(newcomer->first);
    attempt.address = newcomer->second;
    attempt.stage = Stage::kAwaitHello;
    attempt.deadline = Deadline::after_ms(kStrangerMs);
    attempts_.push_back(std::move(attempt));
  }
}

void Connector::drop(Attempt& attempt, const std::string& why) {
  if (attempt.peer >= 0)
    problems_[attempt.peer] = attempt.address.text() + ": " + why;
  else
    ++dropped_strangers_;
  attempt.stage = Stage::kFailed;
}

void Connector::advance(Attempt& attempt) {
  if (attempt.stage == Stage::kConnecting) return on_connected(attempt);
  if (!read_message(attempt)) return;
  switch (attempt.stage) {
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

// True when a whole message is in the buffer.
bool Connector::read_message(Attempt& attempt) {
  ssize_t got =
      recv(attempt.fd.get(), attempt.buffer.data() + attempt.filled, kHandshakeBytes - attempt.filled, MSG_DONTWAIT);
  if (got == 0) {
    drop(attempt, "it closed the connection");
  } else if (got < 0) {
    if (errno != EAGAIN && errno != EINTR) drop(attempt, errno_text(errno));
  } else {
    attempt.filled += static_cast<std::size_t>(got);
  }
  if (attempt.stage == Stage::kFailed || attempt.filled < kHandshakeBytes) return false;
  attempt.filled = 0;
  return true;
}

bool Connector::send_message(Attempt& attempt, const HandshakeFields& fields) {
  HandshakeMessage message = encode_handshake(fields, secret_, attempt.transcript);
  attempt.transcript.insert(attempt.transcript.end(), message.begin(), message.end());
  // 128 bytes always fit into a fresh socket's buffer.
  if (send(attempt.fd.get(), message.data(), message.size(), MSG_NOSIGNAL | MSG_DONTWAIT) ==
      static_cast<ssize_t>(message.size()))
    return true;
  drop(attempt, errno_text(errno));
  return false;
}

void Connector::on_connected(Attempt& attempt) {
  if (int error_number = connect_error(attempt.fd.get()); error_number != 0)
    return drop(attempt, errno_text(error_number));
  if (send_message(attempt, fields(HandshakeType::kHello, attempt.peer))) attempt.stage = Stage::kAwaitReply;
}

void Connector::on_reply(Attempt& attempt) {
  auto reply = decode_handshake(attempt.buffer, secret_, attempt.transcript);
  if (!reply) return drop(attempt, "what answers there is not this job (another secret?)");
  if (reply->type == HandshakeType::kRefusal) {
    ErrorContext context;
    context.rank = static_cast<int>(mine_.to);
    context.peer = attempt.peer;
    context.cause = refusal_text(reply->refusal, *reply, mine_);
    context.advice = "start all ranks with the same version of ringdp and the same settings";
    throw Error(ErrorKind::kHandshake,
                "rank " + std::to_string(attempt.peer) + " at " + attempt.address.text() + " refused rank " +
                    std::to_string(mine_.to) + ": " + context.cause,
                context);
  }
  if (reply->type != HandshakeType::kReply || reply->from != static_cast<uint32_t>(attempt.peer) ||
      reply->to != mine_.to)
    return drop(attempt, "it answered as another rank");
  attempt.transcript.insert(attempt.transcript.end(), attempt.buffer.begin(), attempt.buffer.end());
  if (send_message(attempt, fields(HandshakeType::kConfirm, attempt.peer))) attempt.stage = Stage::kDone;
}

void Connector::on_hello(Attempt& attempt) {
  auto hello = decode_handshake(attempt.buffer, secret_, attempt.transcript);
  if (!hello || hello->type != HandshakeType::kHello) return drop(attempt, "");
  Refusal verdict = judge_hello(*hello, mine_);
  int peer = static_cast<int>(hello->from);
  if (verdict == Refusal::kNone && connected_[peer]) verdict = Refusal::kDuplicate;
  attempt.transcript.assign(attempt.buffer.begin(), attempt.buffer.end());
  if (verdict != Refusal::kNone) {
    std::string reason = refusal_text(verdict, *hello, mine_);
    log(LogLevel::kWarning, "refused a connection from " + attempt.address.text() + ": " + reason);
    HandshakeFields refusal = fields(HandshakeType::kRefusal, peer);
    refusal.refusal = verdict;
    send_message(attempt, refusal);
    if (verdict != Refusal::kDuplicate && hello->from < mine_.world) problems_[peer] = reason;
    attempt.stage = Stage::kFailed;
    return;
  }
  auto unconfirmed = std::count_if(attempts_.begin(), attempts_.end(), [&](const Attempt& it) {
    return it.peer == peer && it.stage == Stage::kAwaitConfirm;
  });
  if (unconfirmed >= kMaxUnconfirmed) return drop(attempt, "");
  attempt.peer = peer;
  attempt.deadline = Deadline::after_ms(30'000);  // one of ours: it may be slow
  if (send_message(attempt, fields(HandshakeType::kReply, peer))) attempt.stage = Stage::kAwaitConfirm;
}

void Connector::on_confirm(Attempt& attempt) {
  auto confirm = decode_handshake(attempt.buffer, secret_, attempt.transcript);
  if (!confirm || confirm->type != HandshakeType::kConfirm) return drop(attempt, "a handshake was replayed");
  attempt.stage = Stage::kDone;
}

void Connector::settle() {
  for (auto it = attempts_.begin(); it != attempts_.end();) {
    if (it->stage == Stage::kDone) {
      if (!connected_[it->peer]) connected_[it->peer] = std::move(it->fd);
      it = attempts_.erase(it);
    } else if (it->stage == Stage::kFailed) {
      it = attempts_.erase(it);
    } else {
      ++it;
    }
  }
  for (int peer = 0; peer < static_cast<int>(mine_.to); ++peer) {
    bool trying = std::any_of(attempts_.begin(), attempts_.end(), [&](const Attempt& a) { return a.peer == peer; });
    if (!connected_[peer] && !trying && Clock::now() >= dial_after_[peer]) dial(peer);
  }
}

std::string Connector::missing_text() const {
  std::string out;
  for (uint32_t peer = 0; peer < mine_.world; ++peer) {
    if (peer == mine_.to || connected_[peer]) continue;
    out += (out.empty() ? "rank " : ", rank ") + std::to_string(peer);
    if (!problems_[peer].empty()) out += " (" + problems_[peer] + ")";
  }
  return out + " missing";
}

}  // namespace ringdp
