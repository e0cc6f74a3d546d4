#include "meet/redialler.h"

#include <algorithm>
#include <utility>

#include "transport/congestion.h"

namespace ringdp {

namespace {

using std::chrono::milliseconds;

constexpr milliseconds kFirstPause{10};  // between two attempts at one address
constexpr milliseconds kLongestPause{200};
constexpr milliseconds kHeadStart{50};     // for the address that was in use
constexpr milliseconds kRelayAfter{1000};  // a relayed connection costs other hosts
constexpr int kKnockRefusals = 2;          // at one address, while others do not answer
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

// A step may take so long once both have stopped sending; then it is repeated. A lost SYN is sent again after 1 s.
constexpr HandshakeSelf::Patience kPatience{
    .connecting_ms = 1000, .answer_ms = 2000, .stream_ms = 10'000, .resume_ms = 1500};
constexpr milliseconds kSilent{1500};       // how long the engine's report of a silent host is valid
constexpr std::ptrdiff_t kMostLetIn = 8;    // unconfirmed, of one peer: more are a replay of its hello
constexpr std::ptrdiff_t kMostTurned = 4;   // of one peer: more are a replay of its knock
constexpr std::ptrdiff_t kMostDialled = 5;  // at one address at a time

HandshakeSelf redialling(HandshakeSelf self) {
  self.mine.purpose = Purpose::kResume;
  self.patience = kPatience;
  return self;
}

}  // namespace

Redialler::Redialler(Connector::Knowledge knowledge, const SharedSetup& sharing, int64_t heal_ms, ConnectionUser& user)
    : streams_(std::move(knowledge.streams)),
      self_(redialling(std::move(knowledge.self))),
      addresses_(std::move(knowledge.addresses)),
      heal_(heal_ms),
      sharing_(sharing),
      user_(user),
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
    it.tries.restart(addresses_[static_cast<std::size_t>(peer)].size(), dials(peer), Clock::now());
  }
  it.broken = broken;
  it.until = until;
}

void Redialler::close(int peer) {
  Case& it = at(peer);
  if (it.open) --open_;
  it.open = false;
  for (HandshakeAttempt& attempt : attempts_)
    if (attempt.facts().peer == peer && attempt.facts().stream == 0) attempt.close();
}

bool Redialler::under_way(int peer) const {
  return std::any_of(attempts_.begin(), attempts_.end(), [&](const HandshakeAttempt& it) {
    return it.facts().peer == peer && it.stage() == HandshakeAttempt::Stage::kAwaitResume;
  });
}

void Redialler::take(HandshakeAttempt attempt) {
  const HandshakeFields hello = attempt.facts().hello;
  const int peer = static_cast<int>(hello.from);
  if (hello.type == HandshakeType::kKnock) {
    // It has the number of the last established connection; a replayed one has not.
    if (!at(peer).open && hello.number == at(peer).done) heal(peer, false);
    const auto turned = std::count_if(attempts_.begin(), attempts_.end(), [&](const HandshakeAttempt& it) {
      return it.facts().turned && it.facts().peer == peer && !it.over();
    });
    if (!hello.turned || !dials(peer) || !at(peer).open || under_way(peer) || turned >= kMostTurned) return;
    HandshakeAttempt& adopted = attempts_.emplace_back(std::move(attempt));
    adopted.turn(peer);
    adopted.greet(self_, ++at(peer).number);
    return;
  }
  if (dials(peer)) return;
  auto like_this = [&](const HandshakeAttempt& other) {
    return other.facts().peer == peer && other.facts().stream == hello.stream &&
           other.stage() == HandshakeAttempt::Stage::kAwaitConfirm;
  };
  if (std::count_if(attempts_.begin(), attempts_.end(), like_this) >= kMostLetIn)
    std::find_if(attempts_.begin(), attempts_.end(), like_this)->close();
  // Of another connection, or before this side uses the new one: it is dialled again.
  if (hello.stream > 0 && !fits(peer, hello.stream, hello.number)) return;
  attempts_.emplace_back(std::move(attempt)).reply(self_);
}

void Redialler::step() {
  std::vector<pollfd> polled;
  poll_for(polled);
  poll(polled.data(), polled.size(), 0);
  std::size_t index = 0;
  for (HandshakeAttempt& it : attempts_) {
    if (polled[index++].revents != 0 && !it.over()) move_on(it);
    it.expire(self_);
    note_failure(it);
  }
  attempts_.remove_if([](const HandshakeAttempt& it) { return it.over(); });
  const auto now = Clock::now();
  for (int peer = 0; peer < static_cast<int>(cases_.size()); ++peer) {
    Case& it = at(peer);
    if (!it.open || !it.broken) dial_streams(peer, now);
    if (!it.open) continue;
    const bool waits = !under_way(peer);
    if (waits && it.tries.process_has_ended()) {
      give_up(peer, "");
    } else if (now >= it.until) {
      give_up(peer, "for " + std::to_string(heal_.count()) + " ms (RINGDP_HEAL) " +
                        it.tries.text(addresses_[static_cast<std::size_t>(peer)]));
    } else if (waits) {
      begin_due(peer, now);
    }
  }
}

void Redialler::give_up(int peer, const std::string& why) {
  const bool broken = at(peer).broken;
  close(peer);
  if (broken) user_.give_up(peer, why);
}

void Redialler::begin_due(int peer, Clock::time_point now) {
  Case& it = at(peer);
  const auto& addresses = addresses_[static_cast<std::size_t>(peer)];
  for (std::size_t i = 0; i < addresses.size(); ++i) {
    if (!it.tries.due(i, now)) continue;
    if (addresses[i].is_relayed() && i > 0 && now < it.until - heal_ + std::min(kRelayAfter, heal_ / 2)) continue;
    const auto dialled = std::count_if(attempts_.begin(), attempts_.end(), [&](const HandshakeAttempt& other) {
      const HandshakeAttempt::Facts& facts = other.facts();
      return (facts.dialled || facts.turned) && facts.stream == 0 && facts.peer == peer && facts.candidate == i &&
             !other.over();
    });
    if (dialled >= kMostDialled) continue;
    it.tries.begun(i, now);
    dial({.peer = peer, .candidate = i, .address = addresses[i]});
  }
}

void Redialler::dial_streams(int peer, Clock::time_point now) {
  if (streams_.hopeless(peer)) return;
  while (auto stream = streams_.due(peer, now))
    dial({.peer = peer,
          .stream = *stream,
          .streams = streams_.streams(peer),
          .number = at(peer).done,
          .address = streams_.address(peer)});
}

void Redialler::dial(HandshakeAttempt::Facts facts) { note_failure(attempts_.emplace_back(self_, std::move(facts))); }

void Redialler::move_on(HandshakeAttempt& attempt) {
  switch (attempt.advance(self_)) {
    case HandshakeAttempt::Event::kConnected:
      return on_connected(attempt);
    case HandshakeAttempt::Event::kProven:
      return attempt.facts().stream > 0 ? on_stream(attempt) : on_proven(attempt);
    case HandshakeAttempt::Event::kConfirmed:
      return attempt.facts().stream > 0 ? on_stream(attempt) : on_confirmed(attempt);
    case HandshakeAttempt::Event::kResumed:
      return on_resumed(attempt);
    case HandshakeAttempt::Event::kHello: {  // on a connection that has knocked
      const HandshakeFields& hello = attempt.facts().hello;
      const bool fits = judge_hello(hello, self_.mine) == Refusal::kNone && hello.type == HandshakeType::kHello &&
                        hello.purpose == Purpose::kResume && static_cast<int>(hello.from) == attempt.facts().peer;
      return fits ? attempt.reply(self_) : attempt.close();
    }
    default:
      return;
  }
}

void Redialler::on_connected(HandshakeAttempt& attempt) {
  const HandshakeAttempt::Facts& facts = attempt.facts();
  if (facts.stream > 0) return attempt.greet(self_, facts.number);
  Case& it = at(facts.peer);
  it.tries.connected(facts.candidate);
  if (dials(facts.peer))
    attempt.greet(self_, ++it.number);
  else
    attempt.knock(self_, it.number);
}

bool Redialler::fits(int peer, int stream, uint64_t number) {
  const Case& it = at(peer);
  return it.done > 0 && number == it.done && !(it.open && under_way(peer)) && streams_.lacks(peer, stream);
}

// The side that dialled adds it first: nothing is sent on it before the other side has it.
void Redialler::on_stream(HandshakeAttempt& attempt) {
  const HandshakeAttempt::Facts& facts = attempt.facts();
  if (!fits(facts.peer, facts.stream, facts.number)) return attempt.fail("");
  if (facts.dialled) attempt.confirm(self_, facts.streams);
  if (attempt.stage() == HandshakeAttempt::Stage::kClosed) return;
  streams_.add(facts.peer, facts.stream, Fd());
  ask_for_congestion(attempt.fd(), streams_.congestion());
  user_.add_stream(facts.peer, attempt.take_socket(self_).fd);
}

void Redialler::on_proven(HandshakeAttempt& attempt) {
  const int peer = attempt.facts().peer;
  Case& it = at(peer);
  if (!it.open || under_way(peer)) return attempt.fail("");
  if (!user_.hold(peer)) {
    attempt.refuse(self_, Refusal::kGone);
    return close(peer);
  }
  if (!it.broken) it.until = Clock::now() + heal_;
  it.broken = true;
  attempt.confirm(self_, attempt.facts().turned ? 1 : streams_.wanted(peer, attempt.fd()));
}

// An attempt that ends after a later one is ignored.
void Redialler::on_confirmed(HandshakeAttempt& attempt) {
  const HandshakeAttempt::Facts& facts = attempt.facts();
  Case& it = at(facts.peer);
  if (facts.number <= it.number) return attempt.close();
  if (!user_.hold(facts.peer)) return attempt.refuse(self_, Refusal::kGone);
  it.number = facts.number;
  for (HandshakeAttempt& other : attempts_)
    if (&other != &attempt && other.facts().peer == facts.peer && other.facts().stream == 0) other.close();
  open(facts.peer, true, Clock::now() + heal_);
  attempt.await_resume(self_);
  send_frames_taken(attempt);
}

bool Redialler::send_frames_taken(HandshakeAttempt& attempt) {
  const int peer = attempt.facts().peer;
  if (const auto taken = user_.settle(peer)) return attempt.resume(self_, *taken);
  attempt.refuse(self_, Refusal::kGone);
  close(peer);
  return false;
}

void Redialler::on_resumed(HandshakeAttempt& attempt) {
  const HandshakeAttempt::Facts facts = attempt.facts();
  if (facts.dialled && !send_frames_taken(attempt)) return;
  at(facts.peer).done = facts.number;
  at(facts.peer).done_at = Clock::now();
  PeerSocket first = attempt.take_socket(self_);
  const int socket = first.get();
  streams_.forget(facts.peer);
  streams_.expect(facts.peer, facts.streams,
                  facts.dialled && !facts.turned ? std::optional(facts.address) : std::nullopt);
  close(facts.peer);
  ask_for_congestion(socket, streams_.congestion());
  user_.resume(facts.peer,
               open_channel(sharing_.transport(facts.peer), std::move(first),
                            std::vector<Fd>(static_cast<std::size_t>(facts.streams - 1))),
               facts.frames_taken);
}

void Redialler::note_failure(HandshakeAttempt& attempt) {
  const auto failure = attempt.take_failure();
  if (!failure) return;
  const HandshakeAttempt::Facts& facts = attempt.facts();
  Case& it = at(facts.peer);
  if (failure->refusal) {
    it.broken = true;  // it has broken on the peer's side
    return give_up(facts.peer, *failure->refusal == Refusal::kGone ? "" : failure->why);
  }
  if (facts.stream > 0) {
    if (facts.dialled) streams_.failed(facts.peer, facts.stream, failure->why, Clock::now());
  } else if (facts.turned) {
    return;
  } else if (failure->foreign && facts.candidate == 0) {
    give_up(facts.peer, "");  // another process has the port by now
  } else if (facts.dialled && it.open) {
    it.tries.failed(facts.candidate, failure->foreign ? "another process listens there" : failure->why,
                    failure->refused);
  }
}

}  // namespace ringdp
