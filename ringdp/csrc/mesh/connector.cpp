#include "mesh/connector.h"

#include <utility>

#include "base/sha256.h"
#include "mesh/padding.h"

namespace ringdp {
namespace {

HandshakeSelf self_of(const HandshakeFields& mine, std::vector<std::byte> secret) {
  HandshakeSelf self{.mine = mine, .secret = std::move(secret), .padding_ms = padding_patience_ms()};
  random_bytes(self.instance);
  return self;
}

}  // namespace

Connector::Connector(const HandshakeFields& mine, std::vector<std::byte> secret, const std::vector<char>& wanted,
                     int streams, std::string congestion)
    : self_(self_of(mine, std::move(secret))),
      acceptor_(self_),
      dialler_(self_, wanted),
      made_(self_.world(), ExtraStreams(self_.world(), streams, std::move(congestion))) {}

void Connector::set_route(int peer, Candidates candidates, bool probe, bool one) {
  if (one) made_.streams().needs_one(peer);
  dialler_.set_route(peer, std::move(candidates), probe);
}

void Connector::want(int peer) {
  if (!made_.joined(peer)) dialler_.want(peer);
}

void Connector::check(int peer) {
  if (!made_.joined(peer)) dialler_.check(peer);
}

void Connector::forget(int peer) {
  dialler_.forget(peer);
  acceptor_.forget(peer);
  made_.forget(peer);
}

void Connector::lose(int peer) {
  made_.lose(peer);
  dialler_.again(peer);
  ended_.push_back(peer);
}

void Connector::fix(int peer) {
  made_.fix(peer);
  dialler_.forget(peer);
  acceptor_.forget(peer);
}

void Connector::note_met(int64_t round_trip_us) {
  self_.mine.met = met_with(round_trip_us);
  acceptor_.set_met(self_.mine.met);
  dialler_.set_met(self_.mine.met);
  for (int peer = 0; peer < self_.world(); ++peer)
    if (dialler_.wants(peer)) fix(peer);
}

bool Connector::busy() const {
  for (int peer = 0; peer < self_.world(); ++peer)
    if (awaits(peer) || !made_.streams().complete(peer)) return true;
  return !acceptor_.attempts().empty() || !dialler_.attempts().empty() || acceptor_.door().paused();
}

bool Connector::complete() const {
  for (int peer = 0; peer < self_.world(); ++peer)
    if (dialler_.wants(peer) && !connected(peer)) return false;
  return true;
}

void Connector::step(int wait_ms, std::span<const pollfd> also) {
  std::vector<pollfd> polled;
  acceptor_.poll_for(polled);
  const std::size_t dialled = polled.size();
  dialler_.poll_for(polled);
  const std::size_t watched = polled.size();
  made_.poll_for(polled);
  polled.insert(polled.end(), also.begin(), also.end());
  poll(polled.data(), polled.size(), wait_ms);
  const std::span<const pollfd> seen(polled);
  acceptor_.step(seen, made_);
  for (int peer : acceptor_.take_knocks())
    if (dialler_.route(peer).known()) want(peer);
  dialler_.step(seen.subspan(dialled), made_);
  made_.watch(seen.subspan(watched));
  for (int peer : made_.take_ended()) lose(peer);
  acceptor_.collect(made_);
  dialler_.collect(made_);
}

std::optional<Connector::Trouble> Connector::trouble() const {
  if (const auto& lost = made_.lost())
    return Trouble{.peer = lost->peer, .lost = true, .text = "it gave up", .also = {}, .given_up = lost->given_up};
  const auto now = Clock::now();
  for (int peer = 0; peer < self_.world(); ++peer) {
    const ExtraStreams& streams = made_.streams();
    if (!streams.complete(peer) && streams.hopeless(peer))
      return Trouble{.peer = peer, .text = streams.problem(peer), .also = {}};
    if (!awaits(peer)) continue;
    const bool answers = acceptor_.answers(peer);
    const Route& route = dialler_.route(peer);
    const Route::Verdict verdict = route.verdict(now);
    if (!large(peer).empty() && !answers && (peer > self_.rank() || verdict != Route::Verdict::kOpen))
      return large_trouble(peer);
    if (verdict == Route::Verdict::kOpen || answers) continue;
    if (peer > self_.rank() && verdict != Route::Verdict::kRefused) continue;  // it dials this rank
    const bool refused = verdict == Route::Verdict::kRefused;
    if (refused && route.was_connected())
      return Trouble{.peer = peer,
                     .lost = true,
                     .text = "its connection ended, and nothing listens there any more: tried " + route.text(now),
                     .also = {}};
    return Trouble{.peer = peer, .refused = refused, .text = route.text(now), .also = {}};
  }
  return std::nullopt;
}

const std::string& Connector::large(int peer) const {
  return peer < self_.rank() ? dialler_.large(peer) : acceptor_.large(peer);
}

Connector::Trouble Connector::large_trouble(int peer) const {
  Trouble trouble{.peer = peer, .large = true, .text = large(peer), .also = {}};
  for (int other = 0; other < self_.world(); ++other) {
    const bool looks_lost = lack_padding(acceptor_.attempts(), other) || lack_padding(dialler_.attempts(), other);
    if (other != peer && !made_.joined(other) && (looks_lost || !large(other).empty())) trouble.also.push_back(other);
  }
  return trouble;
}

std::string Connector::problem(int peer) const {
  if (!made_.streams().complete(peer)) return made_.streams().problem(peer);
  const Route& route = dialler_.route(peer);
  if (peer < self_.rank() && route.known()) return "tried " + route.text(Clock::now());
  return acceptor_.problem(peer);
}

Connector::Knowledge Connector::knowledge() const {
  Knowledge out{.mine = self_.mine, .secret = self_.secret, .addresses = {}, .streams = made_.streams().again()};
  for (int peer = 0; peer < self_.world(); ++peer) {
    std::vector<SocketAddress>& known = out.addresses.emplace_back();
    const SocketAddress& used = made_.dialled(peer);
    if (used.length() > 0) known.push_back(used);
    for (const SocketAddress& it : dialler_.route(peer).addresses())
      if (used.length() == 0 || it.text() != used.text()) known.push_back(it);
  }
  return out;
}

}  // namespace ringdp
