#include "mesh/connector.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>

#include "base/error.h"
#include "base/log.h"

namespace ringdp {
namespace {

constexpr int kMaxStrangers = 64;      // connections that have not proved anything yet; one per rank in larger jobs
constexpr int kAcceptsPerStep = 256;   // then the others have their turn
constexpr int kMaxUnconfirmed = 4;     // of one rank: more are a replay of its hello
constexpr int64_t kStrangerMs = 2000;  // how long each may take to prove itself
constexpr int64_t kPeerMs = 30'000;    // what one of ours may take to answer: it may be slow
constexpr auto kProbeAfter = std::chrono::seconds(1);
constexpr auto kReportEvery = std::chrono::seconds(1);
constexpr auto kPauseForDescriptors = std::chrono::milliseconds(50);

bool connection_refused(int error_number) { return error_number == ECONNREFUSED; }

}  // namespace

Connector::Connector(const HandshakeFields& mine, std::vector<std::byte> secret)
    : mine_(mine),
      instances_(mine.world),
      secret_(std::move(secret)),
      routes_(mine.world),
      probe_from_(mine.world, Clock::time_point::max()),
      connected_(mine.world),
      watched_(mine.world, 0),
      problems_(mine.world) {
  random_bytes(instance_);
}

HandshakeFields Connector::fields(HandshakeType type, int peer) const {
  HandshakeFields out = mine_;
  out.type = type;
  out.from = mine_.to;
  out.to = static_cast<uint32_t>(peer);
  random_bytes(out.nonce);
  if (type == HandshakeType::kHello) std::copy(instance_.begin(), instance_.end(), out.nonce.begin());
  return out;
}

void Connector::set_route(int peer, Candidates candidates, bool probe) {
  auto now = Clock::now();
  auto begin = peer < rank() ? now : now + kProbeAfter;
  if (peer > rank() && !probe) return;
  routes_[peer] = Route(std::move(candidates), begin);
  probe_from_[peer] = begin;
}

bool Connector::complete() const {
  for (int peer = 0; peer < world(); ++peer)
    if (peer != rank() && !connected_[peer]) return false;
  return true;
}

void Connector::step(int wait_ms) {
  std::vector<pollfd> polled;
  bool accepting = Clock::now() >= accept_after_;
  for (const TcpListener& it : listeners_)
    polled.push_back({it.poll_fd(), static_cast<short>(accepting ? POLLIN : 0), 0});
  for (const Attempt& it : attempts_) {
    bool connecting = it.stage == Stage::kConnecting || it.stage == Stage::kProbing;
    polled.push_back({it.fd.get(), static_cast<short>(connecting ? POLLOUT : POLLIN), 0});
  }
  std::vector<int> watched;
  for (int peer = 0; peer < world(); ++peer) {
    if (watched_[peer] == 0) continue;
    watched.push_back(peer);
    polled.push_back({connected_[peer].get(), POLLRDHUP, 0});
  }
  poll(polled.data(), polled.size(), wait_ms);
  std::size_t index = listeners_.size();
  for (Attempt& it : attempts_) {
    if (polled[index++].revents != 0) advance(it);
    if (it.stage != Stage::kDone && it.stage != Stage::kFailed && it.deadline.expired())
      drop(it, "it did not answer in time");
  }
  for (int peer : watched)
    if (polled[index++].revents != 0) watch(peer);
  for (std::size_t i = 0; i < listeners_.size(); ++i)
    if (polled[i].revents != 0) accept_from(listeners_[i]);
  settle();
}

void Connector::watch(int peer) {
  std::byte byte{};
  ssize_t got = recv(connected_[peer].get(), &byte, 1, MSG_PEEK | MSG_DONTWAIT);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
  watched_[peer] = 0;
  // Who has sent something was through with meeting, and may have left in good order since.
  if (got > 0 || lost_) return;
  lost_ = Trouble{peer, true, false, got == 0 ? "its connection was closed" : errno_text(errno)};
}

std::optional<Connector::Trouble> Connector::trouble() {
  if (lost_) return lost_;
  auto now = Clock::now();
  for (int peer = 0; peer < world(); ++peer) {
    if (peer == rank() || connected_[peer] || !routes_[peer].known()) continue;
    bool confirming = std::any_of(attempts_.begin(), attempts_.end(),
                                  [&](const Attempt& it) { return it.peer == peer && !it.dialled; });
    Route::Verdict verdict = routes_[peer].verdict(now);
    if (verdict == Route::Verdict::kOpen || confirming) continue;
    if (peer > rank() && verdict != Route::Verdict::kRefused) continue;  // it need not be reached from here
    return Trouble{peer, false, verdict == Route::Verdict::kRefused, routes_[peer].text(now)};
  }
  return std::nullopt;
}

std::string Connector::problem(int peer) const {
  if (peer < rank() && routes_[peer].known()) return "tried " + routes_[peer].text(Clock::now());
  return problems_[peer];
}

std::vector<Fd> Connector::take() {
  if (turned_away_ > 0)
    log(LogLevel::kWarning, "turned away " + std::to_string(turned_away_) +
                                " connections that could not prove that they belong to this job");
  return std::move(connected_);
}

void Connector::report(const std::string& line) {
  auto now = Clock::now();
  if (now < report_after_) {
    ++unreported_;
    return;
  }
  std::string more = unreported_ > 0 ? " (and " + std::to_string(unreported_) + " more since the last line)" : "";
  log(LogLevel::kWarning, line + more);
  unreported_ = 0;
  report_after_ = now + kReportEvery;
}

void Connector::dial_due(int peer) {
  auto now = Clock::now();
  Route& route = routes_[peer];
  while (auto candidate = route.due(now)) {
    Attempt attempt;
    attempt.peer = peer;
    attempt.candidate = *candidate;
    attempt.dialled = true;
    attempt.address = route.address(*candidate);
    attempt.stage = peer < rank() ? Stage::kConnecting : Stage::kProbing;
    route.started(*candidate, now);
    int error_number = 0;
    attempt.fd = start_connect(attempt.address, error_number);
    if (error_number != 0)
      drop(attempt, errno_text(error_number), connection_refused(error_number));
    else
      attempts_.push_back(std::move(attempt));
  }
}

void Connector::accept_from(TcpListener& listener) {
  for (int i = 0; i < kAcceptsPerStep; ++i) {
    int error_number = 0;
    auto newcomer = listener.accept(error_number);
    if (error_number != 0) {
      accept_after_ = Clock::now() + kPauseForDescriptors;
      report("cannot let a connection in: " + errno_text(error_number));
    }
    if (!newcomer) return;
    Attempt attempt;
    attempt.fd = std::move(newcomer->first);
    attempt.address = newcomer->second;
    attempt.stage = Stage::kAwaitHello;
    attempt.deadline = Deadline::after_ms(kStrangerMs);
    attempts_.push_back(std::move(attempt));
    advance(attempts_.back());  // one of ours has spoken by now
    evict_strangers();
  }
}

// With the table full the oldest has to go, not the newest: one of ours speaks at once, and calls again.
void Connector::evict_strangers() {
  auto is_stranger = [](const Attempt& it) { return it.stage == Stage::kAwaitHello; };
  auto strangers = std::count_if(attempts_.begin(), attempts_.end(), is_stranger);
  if (strangers > std::max(kMaxStrangers, world()))
    drop(*std::find_if(attempts_.begin(), attempts_.end(), is_stranger), "others waited");
  // Not by settle() alone: a flood would hold a descriptor for each until the step ends.
  attempts_.remove_if([](const Attempt& it) { return it.stage == Stage::kFailed; });
}

void Connector::drop(Attempt& attempt, const std::string& why, bool refused, bool final) {
  attempt.stage = Stage::kFailed;
  attempt.fd.reset();
  if (attempt.dialled)
    routes_[attempt.peer].failed(attempt.candidate, why, refused, final, Clock::now());
  else if (attempt.peer >= 0)
    problems_[attempt.peer] = attempt.address.text() + ": " + why;
  else if (!why.empty())
    ++turned_away_;
}

void Connector::advance(Attempt& attempt) {
  if (attempt.stage == Stage::kConnecting || attempt.stage == Stage::kProbing) return on_connected(attempt);
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
    // Whoever goes without a word was one of ours who found a better way in, or a probe.
    bool silent = attempt.stage == Stage::kAwaitHello && attempt.filled == 0;
    drop(attempt, silent ? "" : "it closed the connection");
  } else if (got < 0) {
    if (errno != EAGAIN && errno != EINTR) drop(attempt, errno_text(errno), connection_refused(errno));
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
    return drop(attempt, errno_text(error_number), connection_refused(error_number));
  Route& route = routes_[attempt.peer];
  if (attempt.stage == Stage::kProbing) {
    attempt.stage = Stage::kFailed;
    route.restart(Clock::now() + kProbeAfter);
    return;
  }
  route.answered(attempt.candidate);
  attempt.deadline = Deadline::after_ms(kPeerMs);
  if (send_message(attempt, fields(HandshakeType::kHello, attempt.peer))) attempt.stage = Stage::kAwaitReply;
}

void Connector::on_reply(Attempt& attempt) {
  auto reply = decode_handshake(attempt.buffer, secret_, attempt.transcript);
  if (!reply) return drop(attempt, "what answers there is not this job (another secret?)", false, true);
  if (reply->type == HandshakeType::kRefusal)
    return drop(attempt, "refused: " + refusal_text(reply->refusal, *reply, mine_), false, true);
  if (reply->type != HandshakeType::kReply || reply->from != static_cast<uint32_t>(attempt.peer) ||
      reply->to != mine_.to)
    return drop(attempt, "it answered as another rank", false, true);
  bool better = connected_[attempt.peer] || std::any_of(attempts_.begin(), attempts_.end(), [&](const Attempt& it) {
                  return it.peer == attempt.peer && it.stage == Stage::kDone;
                });
  if (better) return drop(attempt, "");  // one confirm per peer: the other side may believe it
  attempt.transcript.insert(attempt.transcript.end(), attempt.buffer.begin(), attempt.buffer.end());
  if (send_message(attempt, fields(HandshakeType::kConfirm, attempt.peer))) attempt.stage = Stage::kDone;
}

void Connector::on_hello(Attempt& attempt) {
  auto hello = decode_handshake(attempt.buffer, secret_, attempt.transcript);
  if (!hello || hello->type != HandshakeType::kHello) return drop(attempt, "no hello");
  Refusal verdict = judge_hello(*hello, mine_);
  int peer = static_cast<int>(hello->from);
  if (verdict == Refusal::kNone && connected_[peer]) {
    if (std::equal(instances_[peer].begin(), instances_[peer].end(), hello->nonce.begin())) return drop(attempt, "");
    verdict = Refusal::kDuplicate;
  }
  attempt.transcript.assign(attempt.buffer.begin(), attempt.buffer.end());
  if (verdict != Refusal::kNone) {
    std::string reason = refusal_text(verdict, *hello, mine_);
    report("refused a connection from " + attempt.address.text() + ": " + reason);
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
  if (unconfirmed >= kMaxUnconfirmed) return drop(attempt, "a handshake was replayed");
  attempt.peer = peer;
  attempt.nonce = hello->nonce;
  attempt.deadline = Deadline::after_ms(kPeerMs);
  if (send_message(attempt, fields(HandshakeType::kReply, peer))) attempt.stage = Stage::kAwaitConfirm;
}

void Connector::on_confirm(Attempt& attempt) {
  auto confirm = decode_handshake(attempt.buffer, secret_, attempt.transcript);
  if (!confirm || confirm->type != HandshakeType::kConfirm) return drop(attempt, "a handshake was replayed");
  attempt.stage = Stage::kDone;
}

void Connector::settle() {
  for (Attempt& it : attempts_) {
    if (it.stage != Stage::kDone || connected_[it.peer]) continue;
    connected_[it.peer] = std::move(it.fd);
    std::copy_n(it.nonce.begin(), instances_[it.peer].size(), instances_[it.peer].begin());
    watched_[it.peer] = 1;
  }
  attempts_.remove_if([&](const Attempt& it) {
    return it.stage == Stage::kDone || it.stage == Stage::kFailed || (it.dialled && connected_[it.peer]);
  });
  for (int peer = 0; peer < world(); ++peer)
    if (peer != rank() && !connected_[peer] && routes_[peer].known() && Clock::now() >= probe_from_[peer])
      dial_due(peer);
}

}  // namespace ringdp
