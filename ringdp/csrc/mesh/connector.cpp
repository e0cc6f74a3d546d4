#include "mesh/connector.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "mesh/fd_socket.h"
#include "mesh/padding.h"

namespace ringdp {
namespace {

constexpr int kMaxStrangers = 64;       // connections that have not proved anything yet; one per rank in larger jobs
constexpr int kAcceptsPerStep = 256;    // then the others have their turn
constexpr int kMaxUnconfirmed = 4;      // of one rank: more are a replay of its hello
constexpr int64_t kStrangerMs = 2000;   // how long each may take to prove itself
constexpr int64_t kPeerMs = 30'000;     // what one of ours may take to answer: it may be slow
constexpr int64_t kLooksLostMs = 3000;  // left of that: another peer's padding is lost as well
constexpr auto kProbeAfter = std::chrono::seconds(1);
constexpr auto kReportEvery = std::chrono::seconds(1);
constexpr auto kPauseForDescriptors = std::chrono::milliseconds(50);
constexpr auto kShortTooLong = std::chrono::seconds(5);

// What a peer has sent before its connection ended: perhaps its part of the set-up, and at the end why it left.
std::optional<GivenUp> last_words(int socket) {
  std::array<std::byte, 8 * kSharedMessageBytes> read{};
  const ssize_t got = recv(socket, read.data(), read.size(), MSG_DONTWAIT);
  if (got < static_cast<ssize_t>(kSharedMessageBytes)) return std::nullopt;
  SharedBytes last;
  std::copy_n(read.begin() + got - static_cast<ssize_t>(last.size()), last.size(), last.begin());
  const auto message = SharedMessage::decode(last);
  return message ? GivenUp::from(*message) : std::nullopt;
}

bool connection_refused(int error_number) { return error_number == ECONNREFUSED; }

}  // namespace

Connector::Connector(const HandshakeFields& mine, std::vector<std::byte> secret, const std::vector<char>& wanted,
                     int streams, std::string congestion)
    : mine_(mine),
      rank_(static_cast<int>(mine.to)),
      world_(static_cast<int>(mine.world)),
      padding_ms_(padding_patience_ms()),
      instances_(mine.world),
      secret_(std::move(secret)),
      routes_(mine.world),
      streams_(static_cast<int>(mine.world), streams, std::move(congestion)),
      aims_(mine.world, Aim::kNone),
      probe_from_(mine.world, Clock::time_point::max()),
      joined_(mine.world, 0),
      connected_(mine.world),
      dialled_(mine.world),
      watched_(mine.world, 0),
      problems_(mine.world),
      large_(mine.world) {
  random_bytes(instance_);
  for (int peer = 0; peer < world_; ++peer)
    if (peer != rank_ && wanted[peer] != 0) aims_[peer] = Aim::kConnect;
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

void Connector::set_route(int peer, Candidates candidates, bool probe, bool one) {
  if (one) streams_.needs_one(peer);
  auto now = Clock::now();
  auto begin = peer < rank_ ? now : now + kProbeAfter;
  routes_[peer] = Route(std::move(candidates), begin);
  if (peer < rank_ || probe) probe_from_[peer] = begin;
}

void Connector::want(int peer) {
  if (joined_[peer] != 0 || aims_[peer] == Aim::kConnect || peer == rank_) return;
  if (aims_[peer] == Aim::kNone) routes_[peer].restart(Clock::now());
  aims_[peer] = Aim::kConnect;
  probe_from_[peer] = Clock::time_point::min();
}

void Connector::check(int peer) {
  if (joined_[peer] != 0 || aims_[peer] != Aim::kNone || peer >= rank_) return;
  aims_[peer] = Aim::kCheck;
  routes_[peer].restart(Clock::now());
}

void Connector::forget(int peer) {
  aims_[peer] = Aim::kNone;
  large_[peer].clear();
  if (!streams_.complete(peer)) {
    connected_[peer].reset();
    watched_[peer] = 0;
  }
  streams_.forget(peer);
  if (lost_ && lost_->peer == peer) lost_.reset();
  for (Attempt& it : attempts_)
    if (it.peer == peer) {
      it.stage = Stage::kFailed;
      it.fd.reset();
    }
}

bool Connector::busy() const {
  for (int peer = 0; peer < world_; ++peer)
    if (awaits(peer) || !streams_.complete(peer)) return true;
  return !attempts_.empty() || Clock::now() < accept_after_;
}

bool Connector::complete() const {
  for (int peer = 0; peer < world_; ++peer)
    if (aims_[peer] == Aim::kConnect && !connected(peer)) return false;
  return true;
}

void Connector::step(int wait_ms, std::span<const pollfd> also) {
  std::vector<pollfd> polled;
  bool accepting = Clock::now() >= accept_after_;
  for (const TcpListener& it : listeners_)
    polled.push_back({it.poll_fd(), static_cast<short>(accepting ? POLLIN : 0), 0});
  for (const Attempt& it : attempts_) {
    bool connecting = it.stage == Stage::kConnecting || it.stage == Stage::kProbing;
    polled.push_back({it.fd.get(), static_cast<short>(connecting ? POLLOUT : POLLIN), 0});
  }
  std::vector<int> watched;
  for (int peer = 0; peer < world_; ++peer) {
    if (watched_[peer] == 0) continue;
    watched.push_back(peer);
    polled.push_back({connected_[peer].get(), POLLRDHUP, 0});
  }
  polled.insert(polled.end(), also.begin(), also.end());
  poll(polled.data(), polled.size(), wait_ms);
  std::size_t index = listeners_.size();
  for (Attempt& it : attempts_) {
    if (polled[index++].revents != 0) advance(it);
    if (it.stage != Stage::kDone && it.stage != Stage::kFailed && it.deadline.expired()) expire(it);
  }
  for (int peer : watched)
    if (polled[index++].revents != 0) watch(peer);
  for (std::size_t i = 0; i < listeners_.size(); ++i)
    if (polled[i].revents != 0) accept_from(listeners_[i]);
  collect_attempts();
}

// No rank leaves in good order before all are connected: the end of a connection means that the rank has died, or that it
// has failed and has written why into the store.
void Connector::watch(int peer) {
  int error_number = connect_error(connected_[peer].get());
  watched_[peer] = 0;
  if (!lost_)
    lost_ = Trouble{.peer = peer,
                    .lost = true,
                    .text = error_number == 0 ? "its connection was closed" : errno_text(error_number),
                    .also = {},
                    .given_up = last_words(connected_[peer].get())};
}

void Connector::tell(const GivenUp& why) {
  for (const Fd& socket : connected_)
    if (socket)
      send_shared_message(socket.get(), why.message());  // where that fails, the end of the connection says it
}

std::optional<Connector::Trouble> Connector::trouble() {
  if (lost_) return lost_;
  auto now = Clock::now();
  for (int peer = 0; peer < world_; ++peer) {
    if (!streams_.complete(peer) && streams_.hopeless(peer))
      return Trouble{.peer = peer, .text = streams_.problem(peer), .also = {}};
    if (!awaits(peer)) continue;
    bool confirming = std::any_of(attempts_.begin(), attempts_.end(),
                                  [&](const Attempt& it) { return it.peer == peer && !it.dialled; });
    if (!large_[peer].empty() && !confirming && (peer > rank_ || routes_[peer].verdict(now) != Route::Verdict::kOpen))
      return large_trouble(peer);
    Route::Verdict verdict = routes_[peer].verdict(now);
    if (verdict == Route::Verdict::kOpen || confirming) continue;
    if (peer > rank_ && verdict != Route::Verdict::kRefused) continue;  // it need not be reached from here
    return Trouble{
        .peer = peer, .refused = verdict == Route::Verdict::kRefused, .text = routes_[peer].text(now), .also = {}};
  }
  return std::nullopt;
}

Connector::Trouble Connector::large_trouble(int peer) const {
  Trouble trouble{.peer = peer, .large = true, .text = large_[peer], .also = {}};
  for (int other = 0; other < world_; ++other) {
    bool looks_lost = std::any_of(attempts_.begin(), attempts_.end(), [&](const Attempt& it) {
      return it.peer == other && it.stage == Stage::kAwaitPadding &&
             it.deadline.remaining_ms(kLooksLostMs + 1) <= kLooksLostMs;
    });
    if (other != peer && joined_[other] == 0 && (looks_lost || !large_[other].empty())) trouble.also.push_back(other);
  }
  return trouble;
}

std::string Connector::problem(int peer) const {
  if (!streams_.complete(peer)) return streams_.problem(peer);
  if (peer < rank_ && routes_[peer].known()) return "tried " + routes_[peer].text(Clock::now());
  return problems_[peer];
}

std::vector<Connector::Connected> Connector::take() {
  std::vector<Connected> out;
  for (int peer = 0; peer < world_; ++peer) {
    if (!connected_[peer] || !streams_.complete(peer)) continue;
    watched_[peer] = 0;
    out.push_back({peer, std::move(connected_[peer]), streams_.take(peer)});
  }
  return out;
}

std::string Connector::turned_away_text() const {
  if (turned_away_ == 0) return "";
  return "turned away " + std::to_string(turned_away_) +
         " connections that could not prove that they belong to this job";
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
  while (auto stream = streams_.due(peer, now)) {
    Attempt attempt;
    attempt.peer = peer;
    attempt.stream = *stream;
    attempt.streams = streams_.streams(peer);
    attempt.dialled = true;
    attempt.address = streams_.address(peer);
    attempt.deadline = Deadline::after_ms(kPeerMs);
    int error_number = 0;
    attempt.fd = start_connect(attempt.address, error_number);
    if (error_number != 0)
      drop(attempt, errno_text(error_number));
    else
      attempts_.push_back(std::move(attempt));
  }
  if (!awaits(peer) || !routes_[peer].known() || now < probe_from_[peer]) return;
  Route& route = routes_[peer];
  while (auto candidate = route.due(now)) {
    Attempt attempt;
    attempt.peer = peer;
    attempt.candidate = *candidate;
    attempt.dialled = true;
    attempt.address = route.address(*candidate);
    attempt.stage = peer < rank_ ? Stage::kConnecting : Stage::kProbing;
    route.started(*candidate, now);
    int error_number = 0;
    attempt.fd = start_connect(attempt.address, error_number);
    if (error_number != 0)
      drop(attempt, errno_text(error_number), connection_refused(error_number));
    else
      attempts_.push_back(std::move(attempt));
  }
}

std::string Connector::shortage() const {
  if (!short_since_ || short_last_ - *short_since_ < kShortTooLong) return "";
  return "no connection could be let in for " + std::to_string(kShortTooLong.count()) + " s: " + short_of_;
}

void Connector::accept_from(TcpListener& listener) {
  for (int i = 0; i < kAcceptsPerStep; ++i) {
    int error_number = 0;
    auto newcomer = listener.accept(error_number);
    if (error_number != 0) {
      auto now = Clock::now();
      accept_after_ = now + kPauseForDescriptors;
      if (!short_since_ || now - short_last_ > std::chrono::seconds(1)) short_since_ = now;  // another time
      short_last_ = now;
      short_of_ = errno_text(error_number);
      report("cannot let a connection in: " + errno_text(error_number));
    }
    if (!newcomer) return;
    short_since_.reset();
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
  attempt.fd.reset();
  if (attempt.stream > 0 && attempt.dialled)
    streams_.failed(attempt.peer, attempt.stream, why, Clock::now());
  else if (attempt.dialled)
    routes_[attempt.peer].failed(attempt.candidate, why, refused, final, Clock::now());
  else if (attempt.peer >= 0)
    problems_[attempt.peer] = attempt.address.text() + ": " + why;
  else if (!why.empty())
    ++turned_away_;
}

void Connector::expire(Attempt& attempt) {
  if (attempt.stage != Stage::kAwaitPadding) return drop(attempt, "it did not answer in time");
  std::string bytes = std::to_string(attempt.padding);
  large_[attempt.peer] = connection_text(attempt.fd.get()) + ": a packet with " + bytes +
                         " bytes did not arrive within " + std::to_string(padding_ms_ / 1000) + " s, short ones did";
  drop(attempt, "connected, but a packet with " + bytes + " bytes does not arrive", false, true);
}

void Connector::advance(Attempt& attempt) {
  if (attempt.stage == Stage::kConnecting || attempt.stage == Stage::kProbing) return on_connected(attempt);
  if (attempt.stage == Stage::kAwaitPadding) {
    if (read_padding(attempt)) on_padding(attempt);
    return;
  }
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
    // A connection that closes without a message came from a rank that connected by another address, or was a probe.
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
  HandshakeFields sent = fields;
  sent.stream = static_cast<uint16_t>(attempt.stream);
  sent.streams = static_cast<uint16_t>(attempt.streams);
  HandshakeMessage message = encode_handshake(sent, secret_, attempt.transcript);
  attempt.transcript.insert(attempt.transcript.end(), message.begin(), message.end());
  // They always fit into a fresh socket's buffer. The padding goes by itself: the message is to arrive where that does not.
  static constexpr std::array<std::byte, kMaxPaddingBytes> kPadding{};
  for (std::span<const std::byte> bytes :
       {std::span<const std::byte>(message), std::span(kPadding).first(fields.padding)}) {
    if (bytes.empty()) continue;
    if (send(attempt.fd.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT) ==
        static_cast<ssize_t>(bytes.size()))
      continue;
    drop(attempt, errno_text(errno));
    return false;
  }
  return true;
}

void Connector::on_connected(Attempt& attempt) {
  if (int error_number = connect_error(attempt.fd.get()); error_number != 0)
    return drop(attempt, errno_text(error_number), connection_refused(error_number));
  Route& route = routes_[attempt.peer];
  if (attempt.stage == Stage::kProbing) {
    if (!send_message(attempt, fields(HandshakeType::kKnock, attempt.peer))) return;
    attempt.stage = Stage::kFailed;
    route.restart(Clock::now() + kProbeAfter);
    return;
  }
  if (attempt.stream == 0) route.answered(attempt.candidate);
  attempt.deadline = Deadline::after_ms(kPeerMs);
  if (send_message(attempt, fields(HandshakeType::kHello, attempt.peer))) attempt.stage = Stage::kAwaitReply;
}

void Connector::on_reply(Attempt& attempt) {
  auto reply = decode_handshake(attempt.buffer, secret_, attempt.transcript);
  if (!reply) return drop(attempt, "the process there does not belong to this job (another secret?)", false, true);
  if (reply->type == HandshakeType::kRefusal)
    return drop(attempt, "refused: " + refusal_text(reply->refusal, *reply, mine_), false, true);
  if (reply->type != HandshakeType::kReply || reply->from != static_cast<uint32_t>(attempt.peer) ||
      reply->to != mine_.to)
    return drop(attempt, "it answered as another rank", false, true);
  attempt.transcript.insert(attempt.transcript.end(), attempt.buffer.begin(), attempt.buffer.end());
  await_padding(attempt, reply->padding);
}

void Connector::await_padding(Attempt& attempt, std::size_t bytes) {
  if (bytes > kMaxPaddingBytes)
    return drop(attempt, "it announced padding of " + std::to_string(bytes) + " bytes", false, true);
  attempt.padding = attempt.padding_left = bytes;
  attempt.stage = Stage::kAwaitPadding;
  attempt.deadline = Deadline::after_ms(padding_ms_);
  if (bytes == 0 || read_padding(attempt)) on_padding(attempt);
}

// True when all padding has come.
bool Connector::read_padding(Attempt& attempt) {
  std::array<std::byte, kMaxPaddingBytes> nothing;
  ssize_t got = recv(attempt.fd.get(), nothing.data(), attempt.padding_left, MSG_DONTWAIT);
  if (got == 0) drop(attempt, "it closed the connection");
  if (got < 0 && errno != EAGAIN && errno != EINTR) drop(attempt, errno_text(errno));
  if (got > 0) attempt.padding_left -= static_cast<std::size_t>(got);
  return attempt.padding_left == 0;
}

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
  if (attempt.stream == 0) attempt.streams = streams_.wanted(attempt.peer, attempt.fd.get());
  HandshakeFields confirm = fields(HandshakeType::kConfirm, attempt.peer);
  confirm.padding = padding_for(attempt.fd.get());
  if (send_message(attempt, confirm)) attempt.stage = Stage::kDone;
}

void Connector::on_hello(Attempt& attempt) {
  auto hello = decode_handshake(attempt.buffer, secret_, attempt.transcript);
  if (hello && hello->type == HandshakeType::kKnock) {
    on_knock(*hello);
    return drop(attempt, "");
  }
  if (!hello || hello->type != HandshakeType::kHello) return drop(attempt, "no hello");
  Refusal verdict = judge_hello(*hello, mine_);
  int peer = static_cast<int>(hello->from);
  if (verdict == Refusal::kNone && hello->purpose == Purpose::kResume) {
    resumptions_.push_back({peer, hello->number, std::move(attempt.fd), attempt.buffer});
    attempt.stage = Stage::kFailed;
    return;
  }
  if (verdict == Refusal::kNone && joined_[peer] != 0) {
    const bool same = std::equal(instances_[peer].begin(), instances_[peer].end(), hello->nonce.begin());
    if (same && !streams_.lacks(peer, hello->stream)) return drop(attempt, "");
    if (!same) verdict = Refusal::kDuplicate;
  }
  if (verdict == Refusal::kNone && hello->stream >= kMostStreams) return drop(attempt, "no hello");
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
    return it.peer == peer && it.stream == hello->stream && it.stage == Stage::kAwaitConfirm;
  });
  if (unconfirmed >= kMaxUnconfirmed) return drop(attempt, "a handshake was replayed");
  attempt.peer = peer;
  attempt.stream = hello->stream;
  attempt.nonce = hello->nonce;
  attempt.deadline = Deadline::after_ms(kPeerMs);
  HandshakeFields reply = fields(HandshakeType::kReply, peer);
  reply.padding = padding_for(attempt.fd.get());
  if (send_message(attempt, reply)) attempt.stage = Stage::kAwaitConfirm;
}

Connector::Knowledge Connector::knowledge() const {
  Knowledge out{.mine = mine_, .secret = secret_, .addresses = {}};
  for (int peer = 0; peer < world_; ++peer) {
    std::vector<SocketAddress>& known = out.addresses.emplace_back();
    const SocketAddress& used = dialled_[peer];
    if (used.length() > 0) known.push_back(used);
    for (const SocketAddress& it : routes_[peer].addresses())
      if (used.length() == 0 || it.text() != used.text()) known.push_back(it);
  }
  return out;
}

// A lower rank needs a connection. A knock that was recorded and is sent again has no other effect.
void Connector::on_knock(const HandshakeFields& knock) {
  int peer = static_cast<int>(knock.from);
  if (knock.purpose == Purpose::kResume) {
    if (judge_hello(knock, mine_) == Refusal::kNone && peer < rank_)
      resumptions_.push_back({.peer = peer, .number = knock.number, .socket = {}, .hello = {}});
    return;
  }
  if (judge_hello(knock, mine_) == Refusal::kNone && peer < rank_ && routes_[peer].known()) want(peer);
}

void Connector::on_confirm(Attempt& attempt) {
  auto confirm = decode_handshake(attempt.buffer, secret_, attempt.transcript);
  if (!confirm || confirm->type != HandshakeType::kConfirm) return drop(attempt, "a handshake was replayed");
  if (confirm->streams < 1 || confirm->streams > kMostStreams)
    return drop(attempt, "it announced " + std::to_string(confirm->streams) + " connections", false, true);
  attempt.streams = confirm->streams;
  await_padding(attempt, confirm->padding);
}

void Connector::collect_attempts() {
  for (Attempt& it : attempts_) {
    if (it.stage != Stage::kDone || it.stream > 0 || joined_[it.peer] != 0) continue;
    joined_[it.peer] = 1;
    streams_.expect(it.peer, it.streams, it.dialled ? std::optional(it.address) : std::nullopt);
    connected_[it.peer] = std::move(it.fd);
    if (it.dialled) dialled_[it.peer] = it.address;
    std::copy_n(it.nonce.begin(), instances_[it.peer].size(), instances_[it.peer].begin());
    watched_[it.peer] = 1;
  }
  for (Attempt& it : attempts_) {  // of those that were accepted, the first of a pair may be slower than the others
    if (it.stage != Stage::kDone || it.stream == 0 || joined_[it.peer] == 0) continue;
    const bool same =
        it.dialled || std::equal(instances_[it.peer].begin(), instances_[it.peer].end(), it.nonce.begin());
    if (same && streams_.lacks(it.peer, it.stream)) streams_.add(it.peer, it.stream, std::move(it.fd));
    it.stage = Stage::kFailed;
  }
  attempts_.remove_if([&](const Attempt& it) {
    bool needless = it.dialled && (it.stream > 0 ? !streams_.lacks(it.peer, it.stream) : !awaits(it.peer));
    return (it.stage == Stage::kDone && it.stream == 0) || it.stage == Stage::kFailed || needless;
  });
  for (int peer = 0; peer < world_; ++peer) dial_due(peer);
}

std::string ask_for_congestion(const std::vector<Connector::Connected>& connected, const std::string& setting) {
  std::string problem;
  const auto ask = [&](const Fd& socket) {
    std::string text = ask_for_congestion(socket.get(), setting);
    if (problem.empty()) problem = std::move(text);
  };
  for (const Connector::Connected& it : connected) {
    ask(it.socket);
    for (const Fd& socket : it.more) ask(socket);
  }
  return problem;
}

}  // namespace ringdp
