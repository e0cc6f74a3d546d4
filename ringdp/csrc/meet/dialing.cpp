#include "meet/dialing.h"

#include <algorithm>
#include <utility>

namespace ringdp {

namespace {

using std::chrono::milliseconds;

constexpr milliseconds kHeadStart{150};    // RFC 8305 advises 250 ms, for the whole internet
constexpr milliseconds kRelayAfter{1000};  // a relayed connection costs other hosts, so the others have a second
constexpr milliseconds kAgainSoon{100};    // after a failure; later less often
constexpr milliseconds kAgain{1000};
constexpr int kSoonTries = 5;
constexpr milliseconds kUnreachableAfter{8000};  // in all, every rank has the error within ten seconds
constexpr milliseconds kEndedAfter{30'000};      // if something listens, but its connections end
constexpr milliseconds kRefusedAfter{1500};      // everywhere
constexpr milliseconds kRefusedAgain{200};       // everywhere, where one was connected
constexpr milliseconds kRefusedPartly{4000};     // no other address answers: three lost packets are not chance
constexpr int kRefusedTries = 3;

}  // namespace

Route::Route(Candidates candidates, Clock::time_point now) : known_(true), left_out_(std::move(candidates.left_out)) {
  for (const SocketAddress& address : candidates.addresses)
    tries_.push_back({.address = address, .begin = {}, .why = {}});
  restart(now);
}

void Route::restart(Clock::time_point now) {
  begin_.reset();
  for (std::size_t i = 0; i < tries_.size(); ++i) {
    const bool relayed = tries_[i].address.is_relayed() && i > 0;
    const auto head_start = relayed ? kRelayAfter : kHeadStart * static_cast<int>(i);
    tries_[i] = {.address = tries_[i].address, .begin = now + head_start, .why = {}};
  }
}

void Route::again(Clock::time_point now) {
  restart(now);
  was_connected_ = true;
}

std::optional<std::size_t> Route::due(Clock::time_point now) const {
  for (std::size_t i = 0; i < tries_.size(); ++i)
    if (!tries_[i].running && !tries_[i].final && now >= tries_[i].begin) return i;
  return std::nullopt;
}

std::vector<SocketAddress> Route::addresses() const {
  std::vector<SocketAddress> out;
  for (const Try& it : tries_) out.push_back(it.address);
  return out;
}

// Time counts from here: before, this rank may have waited for the job's store.
void Route::started(std::size_t index, Clock::time_point now) {
  if (!begin_) begin_ = now;
  tries_[index].running = true;
  tries_[index].begin = now;
}

void Route::answered(std::size_t index) { tries_[index].answered = true; }

void Route::failed(std::size_t index, const std::string& why, bool refused, bool final, Clock::time_point now) {
  Try& it = tries_[index];
  it.ended = it.answered && !refused;
  it.running = it.answered = false;
  it.refused = refused;
  it.final = final;
  it.why = why;
  it.begin = now + (++it.failures < kSoonTries || it.ended ? kAgainSoon : kAgain);
  // This address had the head start: the others may follow at once.
  for (Try& next : tries_)
    if (!next.running && next.failures == 0) {
      next.begin = std::min(next.begin, now);
      break;
    }
}

Route::Verdict Route::verdict(Clock::time_point now) const {
  if (!known_) return Verdict::kOpen;
  auto answered = [](const Try& it) { return it.answered; };
  auto refused = [](const Try& it) { return it.refused && it.failures >= kRefusedTries; };
  auto final = [](const Try& it) { return it.final; };
  if (std::all_of(tries_.begin(), tries_.end(), final)) return Verdict::kUnreachable;  // also without any
  if (std::any_of(tries_.begin(), tries_.end(), answered)) return Verdict::kOpen;
  milliseconds took = std::chrono::duration_cast<milliseconds>(now - begin_.value_or(now));
  if (took >= (was_connected_ ? kRefusedAgain : kRefusedAfter) && std::all_of(tries_.begin(), tries_.end(), refused))
    return Verdict::kRefused;
  if (took >= kRefusedPartly && std::any_of(tries_.begin(), tries_.end(), refused)) return Verdict::kRefused;
  const bool ended = std::any_of(tries_.begin(), tries_.end(), [](const Try& it) { return it.ended; });
  return took >= (ended ? kEndedAfter : kUnreachableAfter) ? Verdict::kUnreachable : Verdict::kOpen;
}

std::string Route::text(Clock::time_point now) const {
  std::string out;
  auto add = [&](const std::string& part) { out += (out.empty() ? "" : ", ") + part; };
  for (const Try& it : tries_) {
    auto seconds = std::chrono::duration_cast<std::chrono::seconds>(now - it.begin).count();
    std::string state = it.why.empty() ? "not tried" : it.why;
    if (it.running && it.answered)
      state = "connected, but no greeting came for " + std::to_string(seconds) + " s";
    else if (it.running && it.why.empty())
      state = "Connection timed out: no answer for " + std::to_string(seconds) + " s";
    add(it.address.text() + " (" + state + ")");
  }
  for (const std::string& it : left_out_) add(it);
  return out.empty() ? "no address at all" : out;
}

namespace {

constexpr auto kProbeAfter = std::chrono::seconds(1);
constexpr auto kTurnAfter = std::chrono::milliseconds(300);  // sooner than a relayed connection begins
constexpr int kMostTurned = 4;                               // of one peer: more are a replay of its knock
constexpr auto kKnockAgain = std::chrono::seconds(1);

}  // namespace

Dialing::Dialing(HandshakeSelf self, const std::vector<char>& wanted)
    : self_(std::move(self)),
      aims_(wanted.size(), Aim::kNone),
      numbers_(wanted.size(), 1),
      met_(wanted.size(), 0),
      routes_(wanted.size()),
      probe_from_(wanted.size(), Clock::time_point::max()),
      large_(wanted.size()) {
  for (int peer = 0; peer < self_.world(); ++peer)
    if (peer != self_.rank() && wanted[peer] != 0) aims_[peer] = Aim::kConnect;
}

void Dialing::set_route(int peer, Candidates candidates, bool probe) {
  const auto now = Clock::now();
  const bool lower = peer < self_.rank();
  const auto begin = lower ? now : now + (self_.turns ? Clock::duration(kTurnAfter) : Clock::duration(kProbeAfter));
  const bool ended = routes_[peer].was_connected();  // it had dialled this rank before its addresses were known here
  routes_[peer] = Route(std::move(candidates), begin);
  if (ended) routes_[peer].again(now);
  if (lower || probe) probe_from_[peer] = ended ? Clock::time_point::min() : begin;
}

void Dialing::want(int peer) {
  if (wants(peer) || peer == self_.rank()) return;
  if (aims_[peer] == Aim::kNone) routes_[peer].restart(Clock::now());
  aims_[peer] = Aim::kConnect;
  probe_from_[peer] = Clock::time_point::min();
}

void Dialing::check(int peer) {
  if (aims_[peer] != Aim::kNone || peer >= self_.rank()) return;
  aims_[peer] = Aim::kCheck;
  routes_[peer].restart(Clock::now());
}

void Dialing::forget(int peer) {
  aims_[peer] = Aim::kNone;
  large_[peer].clear();
  for (HandshakeAttempt& it : attempts_)
    if (it.facts().peer == peer) it.close();
}

void Dialing::again(int peer) {
  ++numbers_[peer];
  for (HandshakeAttempt& it : attempts_)
    if (it.facts().peer == peer) it.close();
  routes_[peer].again(Clock::now());
  if (probe_from_[peer] != Clock::time_point::max()) probe_from_[peer] = Clock::time_point::min();
}

void Dialing::step(std::span<const pollfd> polled, Established& made) {
  std::size_t index = 0;
  for (HandshakeAttempt& it : attempts_) {
    if (polled[index++].revents != 0) move_on(it, made);
    it.expire(self_);
    note_failure(it, made);
  }
}

void Dialing::move_on(HandshakeAttempt& attempt, Established& made) {
  switch (attempt.advance(self_)) {
    case HandshakeAttempt::Event::kConnected:
      return on_connected(attempt);
    case HandshakeAttempt::Event::kProven:
      return on_proven(attempt, made);
    default:
      return;
  }
}

void Dialing::on_connected(HandshakeAttempt& attempt) {
  const HandshakeAttempt::Facts& facts = attempt.facts();
  Route& route = routes_[facts.peer];
  if (facts.probe) {
    if (!attempt.knock(self_, facts.number)) return;
    route.restart(Clock::now() + kKnockAgain);
    if (!self_.turns) return;
    turned_.push_back(std::move(attempt));
    return attempt.close();
  }
  if (facts.stream == 0) route.answered(facts.candidate);
  attempt.greet(self_, facts.number);
}

void Dialing::adopt(HandshakeAttempt attempt) {
  const auto peer = static_cast<int>(attempt.facts().hello.from);
  const auto like_this = std::count_if(attempts_.begin(), attempts_.end(), [&](const HandshakeAttempt& it) {
    return it.facts().turned && it.facts().peer == peer;
  });
  if (!aims_at(peer) || like_this >= kMostTurned) return;
  attempt.turn(peer);
  attempt.greet(self_, numbers_[peer]);
  if (!attempt.over()) attempts_.push_back(std::move(attempt));
}

void Dialing::on_proven(HandshakeAttempt& attempt, const Established& made) {
  const HandshakeAttempt::Facts& facts = attempt.facts();
  if (checks(facts.peer)) {
    aims_[facts.peer] = Aim::kNone;  // it can be reached
    return attempt.close();
  }
  met_[facts.peer] = facts.met;
  const bool first = facts.stream == 0;
  const bool late = first && facts.number != numbers_[facts.peer];
  if (late || (facts.met != 0 && self_.mine.met == 0))
    return attempt.fail("");  // it has a channel to this rank already
  const auto is_made = [&](const HandshakeAttempt& it) {
    return it.facts().peer == facts.peer && it.facts().stream == 0 && it.stage() == HandshakeAttempt::Stage::kDone;
  };
  const bool better = first ? made.joined(facts.peer) || std::any_of(attempts_.begin(), attempts_.end(), is_made)
                            : !made.streams().lacks(facts.peer, facts.stream);
  if (better) return attempt.fail("");  // one confirm per peer: the other side may believe it
  // Of a pair whose other side has dialled this one cannot dial more.
  const int wanted = facts.turned ? 1 : made.streams().wanted(facts.peer, attempt.fd());
  attempt.confirm(self_, first ? wanted : facts.streams);
  // the confirm may have arrived
  if (first && attempt.stage() != HandshakeAttempt::Stage::kDone) ++numbers_[facts.peer];
}

void Dialing::note_failure(HandshakeAttempt& attempt, Established& made) {
  const auto failure = attempt.take_failure();
  if (!failure) return;
  const HandshakeAttempt::Facts& facts = attempt.facts();
  if (!failure->large.empty()) large_[facts.peer] = failure->large;
  if (facts.stream > 0)
    made.streams().failed(facts.peer, facts.stream, failure->why, Clock::now());
  else if (!facts.turned)
    routes_[facts.peer].failed(facts.candidate, failure->why, failure->refused, failure->final, Clock::now());
}

void Dialing::collect(Established& made) {
  made.collect(attempts_, self_);
  attempts_.remove_if([&](const HandshakeAttempt& it) {
    const int peer = it.facts().peer, stream = it.facts().stream;
    const bool needless = stream > 0 ? !made.streams().lacks(peer, stream) : !awaits(peer, made);
    return it.over() || needless;
  });
  for (int peer = 0; peer < self_.world(); ++peer) dial_due(peer, made);
}

void Dialing::dial_due(int peer, Established& made) {
  const auto now = Clock::now();
  ExtraStreams& streams = made.streams();
  while (auto stream = streams.due(peer, now))
    dial({.peer = peer,
          .stream = *stream,
          .streams = streams.streams(peer),
          .number = made.number(peer),
          .address = streams.address(peer)},
         made);
  Route& route = routes_[peer];
  if (!awaits(peer, made) || !route.known() || now < probe_from_[peer]) return;
  while (auto candidate = route.due(now)) {
    route.started(*candidate, now);
    dial({.peer = peer,
          .number = numbers_[peer],
          .candidate = *candidate,
          .address = route.address(*candidate),
          .probe = peer > self_.rank()},
         made);
  }
}

void Dialing::dial(HandshakeAttempt::Facts facts, Established& made) {
  HandshakeAttempt attempt(self_, std::move(facts));
  note_failure(attempt, made);
  if (!attempt.over()) attempts_.push_back(std::move(attempt));
}

}  // namespace ringdp
