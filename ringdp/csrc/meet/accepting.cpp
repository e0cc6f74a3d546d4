#include "meet/accepting.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "shared/fd_socket.h"
#include "transport/striped.h"

namespace ringdp {

namespace {

constexpr int kAcceptsPerStep = 256;  // then the other listeners have their turn
constexpr auto kReportEvery = std::chrono::seconds(1);
constexpr auto kPauseForDescriptors = std::chrono::milliseconds(50);
constexpr auto kShortTooLong = std::chrono::seconds(5);

}  // namespace

void Listener::poll_for(std::vector<pollfd>& polled) const {
  const auto events = static_cast<short>(paused() ? 0 : POLLIN);
  for (const TcpListener& it : listeners_) polled.push_back({it.poll_fd(), events, 0});
}

void Listener::let_in(std::size_t listener, const std::function<void(Fd, const SocketAddress&)>& each) {
  for (int i = 0; i < kAcceptsPerStep; ++i) {
    int error_number = 0;
    auto newcomer = listeners_[listener].accept(error_number);
    if (error_number != 0) {
      const auto now = Clock::now();
      accept_after_ = now + kPauseForDescriptors;
      if (!short_since_ || now - short_last_ > std::chrono::seconds(1)) short_since_ = now;  // a new shortage
      short_last_ = now;
      short_of_ = errno_text(error_number);
      report("cannot let a connection in: " + short_of_);
    }
    if (!newcomer) return;
    short_since_.reset();
    each(std::move(newcomer->first), newcomer->second);
  }
}

std::string Listener::shortage() const {
  if (!short_since_ || short_last_ - *short_since_ < kShortTooLong) return "";
  return "no connection could be let in for " + std::to_string(kShortTooLong.count()) + " s: " + short_of_;
}

std::string Listener::turned_away_text() const {
  if (turned_away_ == 0) return "";
  return "turned away " + std::to_string(turned_away_) +
         " connections that could not prove that they belong to this job";
}

void Listener::report(const std::string& line) {
  const auto now = Clock::now();
  if (now < report_after_) {
    ++unreported_;
    return;
  }
  const std::string more = unreported_ > 0 ? " (and " + std::to_string(unreported_) + " more since the last line)" : "";
  log(LogLevel::kWarning, line + more);
  unreported_ = 0;
  report_after_ = now + kReportEvery;
}

namespace {

// Connections that are not authenticated yet; one per rank in larger jobs, fewer where descriptors are few.
constexpr int kMaxStrangers = 64;
constexpr int kMaxUnconfirmed = 4;  // of one rank: more are a replay of its hello

bool is_stranger(const HandshakeAttempt& it) { return it.stage() == HandshakeAttempt::Stage::kAwaitHello; }

}  // namespace

Accepting::Accepting(HandshakeSelf self)
    : self_(std::move(self)), problems_(self_.mine.world), met_(self_.mine.world), large_(self_.mine.world) {}

bool Accepting::answers(int peer) const {
  return std::any_of(attempts_.begin(), attempts_.end(),
                     [&](const HandshakeAttempt& it) { return it.facts().peer == peer; });
}

void Accepting::poll_for(std::vector<pollfd>& polled) const {
  listener_.poll_for(polled);
  ringdp::poll_for(attempts_, polled);
}

void Accepting::step(std::span<const pollfd> polled, const Established& made) {
  std::size_t index = listener_.size();
  for (HandshakeAttempt& it : attempts_) {
    if (polled[index++].revents != 0) move_on(it, made);
    it.expire(self_);
    note_failure(it);
  }
  for (std::size_t i = 0; i < listener_.size(); ++i)
    if (polled[i].revents != 0)
      listener_.let_in(i, [&](Fd socket, const SocketAddress& from) { let_in(std::move(socket), from, made); });
}

void Accepting::let_in(Fd socket, const SocketAddress& from, const Established& made) {
  const int descriptor = socket.get();
  HandshakeAttempt& attempt = attempts_.emplace_back(std::move(socket), from);
  move_on(attempt, made);  // a rank of this job has sent its hello by now
  note_failure(attempt);
  evict_strangers(descriptor);
}

// When the table is full the oldest attempt is closed, not the newest: a rank of this job sends its hello at once, and
// dials again.
void Accepting::adopt(HandshakeAttempt attempt) { attempts_.push_back(std::move(attempt)); }

void Accepting::evict_strangers(int newest) {
  auto strangers = static_cast<std::size_t>(std::count_if(attempts_.begin(), attempts_.end(), is_stranger));
  const auto most = static_cast<std::size_t>(std::max(kMaxStrangers, self_.world()));
  for (const std::size_t room = most_strangers(most, newest, strangers); strangers > room; --strangers) {
    HandshakeAttempt& oldest = *std::find_if(attempts_.begin(), attempts_.end(), is_stranger);
    oldest.fail("others waited");
    note_failure(oldest);
  }
  // Closed here, not only in `collect`: otherwise a flood would hold a descriptor for each until the step ends.
  attempts_.remove_if([](const HandshakeAttempt& it) { return it.stage() == HandshakeAttempt::Stage::kClosed; });
}

void Accepting::collect(Established& made) {
  made.collect(attempts_, self_);
  attempts_.remove_if([](const HandshakeAttempt& it) {
    // A further connection of a pair waits for the first one.
    return it.stage() == HandshakeAttempt::Stage::kClosed ||
           (it.stage() == HandshakeAttempt::Stage::kDone && it.facts().stream == 0);
  });
}

void Accepting::forget(int peer) {
  large_[peer].clear();
  for (HandshakeAttempt& it : attempts_)
    if (it.facts().peer == peer) it.close();
}

void Accepting::move_on(HandshakeAttempt& attempt, const Established& made) {
  if (attempt.advance(self_) == HandshakeAttempt::Event::kHello) on_hello(attempt, made);
}

void Accepting::on_hello(HandshakeAttempt& attempt, const Established& made) {
  const HandshakeFields& hello = attempt.facts().hello;
  const int peer = static_cast<int>(hello.from);
  const bool knock = hello.type == HandshakeType::kKnock;
  const Refusal verdict = judge_hello(hello, self_.mine);
  if (knock && (verdict != Refusal::kNone || peer >= self_.rank())) return attempt.close();
  if (verdict != Refusal::kNone) return refuse(attempt, verdict);
  if (!knock && hello.stream >= kMostStreams) return attempt.fail("no hello");
  if (hello.purpose == Purpose::kResume) {
    met_[peer] = hello.met;
    resumptions_.push_back(std::move(attempt));
    return attempt.close();
  }
  if (knock) {
    if (hello.turned && !made.joined(peer) && !made.fixed(peer)) turned_.push_back(std::move(attempt));
    knocks_.push_back(peer);
    return attempt.close();
  }
  if (made.number(peer) > 0 || made.joined(peer)) {
    if (!made.same_process(peer, hello.nonce)) return refuse(attempt, Refusal::kDuplicate);
    const bool another = made.wanting(peer, hello.number);
    const bool further = hello.number == made.number(peer) && made.streams().lacks(peer, hello.stream);
    // the reply says that all are connected
    const bool tells_all_met = made.fixed(peer) && hello.stream == 0 && self_.mine.met != 0;
    if (!another && !further && !tells_all_met) return attempt.close();
  }
  const auto unconfirmed = std::count_if(attempts_.begin(), attempts_.end(), [&](const HandshakeAttempt& it) {
    return it.facts().peer == peer && it.facts().stream == hello.stream &&
           it.stage() == HandshakeAttempt::Stage::kAwaitConfirm;
  });
  if (unconfirmed >= kMaxUnconfirmed) return attempt.fail("a handshake was replayed");
  attempt.reply(self_);
}

void Accepting::refuse(HandshakeAttempt& attempt, Refusal verdict) {
  const HandshakeFields& hello = attempt.facts().hello;
  const std::string reason = refusal_text(verdict, hello, self_.mine);
  listener_.report("refused a connection from " + attempt.facts().address.text() + ": " + reason);
  attempt.refuse(self_, verdict);
  if (verdict != Refusal::kDuplicate && hello.from < self_.mine.world) problems_[hello.from] = reason;
}

void Accepting::note_failure(HandshakeAttempt& attempt) {
  const auto failure = attempt.take_failure();
  if (!failure) return;
  const int peer = attempt.facts().peer;
  if (peer < 0) {
    if (!failure->why.empty()) listener_.turned_away();
    return;
  }
  if (!failure->large.empty()) large_[peer] = failure->large;
  problems_[peer] = attempt.facts().address.text() + ": " + failure->why;
}

}  // namespace ringdp
