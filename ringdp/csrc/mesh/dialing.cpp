#include "mesh/dialing.h"

#include <algorithm>
#include <utility>

namespace ringdp {
namespace {

constexpr auto kProbeAfter = std::chrono::seconds(1);
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
  const auto begin = lower ? now : now + kProbeAfter;
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
    case HandshakeAttempt::Event::kHello:
    case HandshakeAttempt::Event::kNone:
      return;
  }
}

void Dialing::on_connected(HandshakeAttempt& attempt) {
  const HandshakeAttempt::Facts& facts = attempt.facts();
  Route& route = routes_[facts.peer];
  if (facts.probe) {
    if (attempt.knock(self_)) route.restart(Clock::now() + kKnockAgain);
    return;
  }
  if (facts.stream == 0) route.answered(facts.candidate);
  attempt.greet(self_);
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
  attempt.confirm(self_, first ? made.streams().wanted(facts.peer, attempt.fd()) : facts.streams);
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
  else
    routes_[facts.peer].failed(facts.candidate, failure->why, failure->refused, failure->final, Clock::now());
}

void Dialing::collect(Established& made) {
  made.collect(attempts_);
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
  HandshakeAttempt attempt(std::move(facts));
  note_failure(attempt, made);
  if (!attempt.over()) attempts_.push_back(std::move(attempt));
}

}  // namespace ringdp
