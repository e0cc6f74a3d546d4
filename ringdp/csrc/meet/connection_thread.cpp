#include "meet/connection_thread.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "base/text.h"
#include "base/thread.h"
#include "transport/tcp_health.h"

namespace ringdp {

UnreachableText unreachable_text(const PeerInfo& self, const PeerInfo& peer, const Connector::Failure& failure,
                                 const std::string& when) {
  std::string me = self.text(), it = peer.text();
  if (failure.lost)
    return {ErrorKind::kPeerLost, it + " died " + when + ": " + failure.text, "look at its log for the reason"};
  if (failure.large) {
    std::string also = failure.also.empty() ? "" : " (it looks the same with " + ranks_text(failure.also) + ")";
    return {ErrorKind::kHandshake,
            me + " and " + it +
                " are connected, but the path between them does not pass large packets: " + failure.text + also,
            kLargePacketsAdvice};
  }
  if (failure.refused)
    return {
        ErrorKind::kHandshake, me + " cannot reach " + it + ", nothing listens there any more: tried " + failure.text,
        "most likely it died or gave up: look at its log; or a firewall refuses connections (RINGDP_PORT_RANGE), or "
        "the address is another machine's (RINGDP_IFACE, RINGDP_ADVERTISE)"};
  if (failure.text.find(errno_text(EMFILE)) != std::string::npos)
    return {ErrorKind::kHandshake, me + " cannot reach " + it + ": tried " + failure.text,
            "raise the limit of descriptors where rank " + std::to_string(self.rank) + " runs (ulimit -n)"};
  return {ErrorKind::kHandshake, me + " cannot reach " + it + ": tried " + failure.text,
          "set RINGDP_IFACE where rank " + std::to_string(failure.peer) +
              " runs to the interface that leads to the other hosts, or RINGDP_ADVERTISE to an address they can reach; "
              "behind a firewall set RINGDP_PORT_RANGE to ports that it lets through"};
}

namespace {

constexpr int kBusyMs = 30;         // while something is under way: a dial may be due
constexpr int kRedialMs = 5;        // while a connection is made again
constexpr int kIdleMs = 60'000;     // a call of `want`, or a rank that connects, ends it earlier
constexpr int kChecksTogether = 8;  // at a time
constexpr auto kCheckEvery = std::chrono::milliseconds(10);

void ring(const Fd& bell) {
  if (!bell) return;
  uint64_t one = 1;
  [[maybe_unused]] ssize_t written = ::write(bell.get(), &one, sizeof(one));
}

}  // namespace

ConnectionThread::ConnectionThread(Start start)
    : state_(std::move(start)), wakeup_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!wakeup_) throw_system("eventfd", errno);
  for (int peer = 0; peer < state_->rank; ++peer)
    if (state_->elsewhere[peer] != 0 && !state_->connector.connected(peer)) unchecked_.push_back(peer);
}

ConnectionThread::~ConnectionThread() {
  if (fork_generation() == generation_) {
    stop();
    return;
  }
  [[maybe_unused]] auto* thread = thread_.release();  // it exists in the parent only
}

void ConnectionThread::start(ConnectionUser& user, int64_t heal_ms) {
  user_ = &user;
  if (heal_ms > 0) redialler_.emplace(state_->connector.knowledge(), state_->sharing, heal_ms, user);
  thread_ = start_thread("ringdp-conn", [this] { run(); });
}

void ConnectionThread::want(int peer) {
  std::lock_guard lock(mutex_);
  wishes_.push_back(peer);
  ring(wakeup_);
}

void ConnectionThread::heal(int peer, bool broken) {
  std::lock_guard lock(mutex_);
  broken_.emplace_back(peer, broken);
  ring(wakeup_);
}

void ConnectionThread::stop() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
    ring(wakeup_);
  }
  end_thread(thread_);
  thread_.reset();
  redialler_.reset();
  state_.reset();  // the listeners, and connections that were not taken
  std::lock_guard lock(mutex_);
  wakeup_.reset();
}

void ConnectionThread::run() {
  try {
    while (step()) {
    }
  } catch (const std::exception& error) {
    give_up(error.what());
  }
  if (std::string text = state_->connector.listener().turned_away_text(); !text.empty())
    user_->notice(LogLevel::kWarning, text);
}

// False: it is to stop.
bool ConnectionThread::step() {
  if (!take_wishes()) return false;
  start_checks(Clock::now());
  bool busy = state_->connector.busy() || !unchecked_.empty();
  std::vector<pollfd> also{{wakeup_.get(), POLLIN, 0}};
  int wait_ms = state_->sharing.poll_for(also, busy ? kBusyMs : kIdleMs);
  if (redialler_) redialler_->poll_for(also);
  if (redialler_ && redialler_->busy()) wait_ms = std::min(wait_ms, kRedialMs);
  state_->connector.step(wait_ms, also);
  std::vector<Connector::Connected> connected = state_->connector.take();
  ask_for_congestion(connected, state_->congestion);  // result ignored: a failure was logged at the start
  for (Connector::Connected& it : connected)
    state_->sharing.reconnect(it.peer, std::move(it.socket), std::move(it.more));
  state_->sharing.step(0);
  for (int peer : state_->sharing.take_cut()) state_->connector.lose(peer);
  state_->connector.take_ended();
  for (HandshakeAttempt& it : state_->connector.take_resumptions())
    if (redialler_) redialler_->take(std::move(it));
  if (redialler_) redialler_->step();
  hand_over();
  look_for_failures();
  if (std::string text = state_->connector.listener().shortage(); !text.empty()) throw Error(ErrorKind::kSystem, text);
  return true;
}

// Makes no more connections: a later `want` fails with the reason.
void ConnectionThread::give_up(const std::string& why) {
  user_->notice(LogLevel::kError, "rank " + std::to_string(state_->rank) + " makes no more connections: " + why);
  for (const PeerInfo& peer : state_->peers) {
    if (peer.rank == state_->rank) continue;
    const std::string message = "rank " + std::to_string(state_->rank) + " cannot make connections any more: " + why;
    user_->cannot_connect(
        peer.rank,
        error_of(peer.rank, ErrorKind::kSystem, message, "look at its limits (ulimit -n, -u) and its memory"), true);
  }
}

// False: this thread must stop. `stop` writes to wakeup_, so it is checked after wakeup_ is read, not before:
// otherwise a stop in between would be noticed only after the next sleep.
bool ConnectionThread::take_wishes() {
  std::vector<int> wishes;
  std::vector<std::pair<int, bool>> broken;
  {
    std::lock_guard lock(mutex_);
    if (stopping_) return false;
    wishes.swap(wishes_);
    broken.swap(broken_);
    uint64_t rung = 0;
    [[maybe_unused]] ssize_t got = ::read(wakeup_.get(), &rung, sizeof(rung));
  }
  for (int peer : wishes) state_->connector.want(peer);
  for (auto [peer, is_broken] : broken)
    if (redialler_) redialler_->heal(peer, is_broken);
  return true;
}

void ConnectionThread::start_checks(Clock::time_point now) {
  if (unchecked_.empty() || now < check_after_) return;
  int under_way = 0;
  for (int peer = 0; peer < state_->rank; ++peer) under_way += state_->connector.checking(peer) ? 1 : 0;
  if (under_way >= kChecksTogether) return;
  check_after_ = now + kCheckEvery;
  state_->connector.check(unchecked_.back());
  unchecked_.pop_back();
}

void ConnectionThread::hand_over() {
  for (int peer : state_->sharing.decided_now()) {
    const std::string problem = state_->sharing.problem(peer);
    const TransportChoice& choice = state_->sharing.plan().transports[peer];
    if (!problem.empty() && choice.required) {
      state_->connector.forget(peer);
      state_->sharing.forget(peer);
      const PeerInfo &self = state_->peers[state_->rank], &other = state_->peers[peer];
      user_->cannot_connect(peer,
                            error_of(peer, ErrorKind::kHandshake,
                                     self.text() + " and " + other.text() + " " + must_share_text(choice, problem),
                                     instead_text(choice) + "; if descriptors ran out: ulimit -n"),
                            false);
      continue;
    }
    if (!problem.empty())
      user_->notice(LogLevel::kWarning, "rank " + std::to_string(state_->rank) + " cannot share memory with rank " +
                                            std::to_string(peer) + " (" + problem + ") and uses " +
                                            std::string(choice.fallback->title) + ", which is slower");
    const bool checksums = state_->checksums && state_->sharing.transport(peer).checksums;
    state_->connector.fix(peer);
    user_->connect(peer, state_->sharing.take(peer), checksums);
  }
}

void ConnectionThread::look_for_failures() {
  while (auto failure = state_->connector.failure()) fail(*failure);
  while (const auto& found = state_->sharing.failure()) {
    Connector::Failure failure{.peer = found->peer, .lost = found->lost, .text = found->text};
    fail(failure);
  }
}

// A rank that leaves in good order stops listening and closes unfinished connections: a failure only if one is needed.
void ConnectionThread::fail(const Connector::Failure& failure) {
  const bool only_checked = state_->connector.checking(failure.peer);
  const Error error = explain(failure);
  state_->connector.forget(failure.peer);
  state_->sharing.forget(failure.peer);
  const bool gone = failure.refused || failure.lost;
  if (!only_checked || !gone) user_->cannot_connect(failure.peer, error, gone);
}

Error ConnectionThread::explain(const Connector::Failure& failure) const {
  UnreachableText text = unreachable_text(state_->peers[state_->rank], state_->peers[failure.peer], failure,
                                          "while they were being connected");
  return error_of(failure.peer, text.kind, text.text, text.advice);
}

Error ConnectionThread::error_of(int peer, ErrorKind kind, const std::string& message,
                                 const std::string& advice) const {
  ErrorContext context;
  state_->peers[state_->rank].fill_self(context);
  state_->peers[peer].fill_peer(context);
  context.cause = message;
  context.advice = advice;
  return Error(kind, message + "; " + advice, context);
}

}  // namespace ringdp
