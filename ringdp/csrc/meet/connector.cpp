#include "meet/connector.h"

#include <utility>

#include "base/sha256.h"
#include "meet/handshake.h"

namespace ringdp {
namespace {

HandshakeSelf self_of(const HandshakeFields& mine, std::vector<std::byte> secret, std::shared_ptr<const TlsContext> tls,
                      bool turns) {
  HandshakeSelf self{
      .mine = mine, .secret = std::move(secret), .patience = {.padding_ms = padding_patience_ms()}, .turns = turns};
  self.mine.tls = tls ? tls_mode_of(tls.get()) : turns ? TlsMode::kCounted : TlsMode::kPlain;
  self.tls = std::move(tls);
  random_bytes(self.instance);
  return self;
}

}  // namespace

Connector::Connector(const HandshakeFields& mine, std::vector<std::byte> secret, const std::vector<char>& wanted,
                     int streams, std::string congestion, std::shared_ptr<const TlsContext> tls, bool turns)
    : self_(self_of(mine, std::move(secret), std::move(tls), turns)),
      accepting_(self_),
      dialing_(self_, wanted),
      established_(self_.world(), ExtraStreams(self_.world(), streams, std::move(congestion))) {}

void Connector::set_route(int peer, Candidates candidates, bool probe, bool one) {
  if (one) established_.streams().needs_one(peer);
  dialing_.set_route(peer, std::move(candidates), probe);
}

void Connector::want(int peer) {
  if (!established_.joined(peer)) dialing_.want(peer);
}

void Connector::check(int peer) {
  if (!established_.joined(peer)) dialing_.check(peer);
}

void Connector::forget(int peer) {
  dialing_.forget(peer);
  accepting_.forget(peer);
  established_.forget(peer);
}

void Connector::lose(int peer) {
  established_.lose(peer);
  dialing_.again(peer);
  ended_.push_back(peer);
}

void Connector::fix(int peer) {
  established_.fix(peer);
  dialing_.forget(peer);
  accepting_.forget(peer);
}

void Connector::note_met(int64_t round_trip_us) {
  self_.mine.met = met_with(round_trip_us);
  accepting_.set_met(self_.mine.met);
  dialing_.set_met(self_.mine.met);
}

bool Connector::busy() const {
  for (int peer = 0; peer < self_.world(); ++peer)
    if (awaits(peer) || !established_.streams().complete(peer)) return true;
  return !accepting_.attempts().empty() || !dialing_.attempts().empty() || accepting_.listener().paused();
}

bool Connector::complete() const {
  for (int peer = 0; peer < self_.world(); ++peer)
    if (dialing_.wants(peer) && !connected(peer)) return false;
  return true;
}

void Connector::step(int wait_ms, std::span<const pollfd> also) {
  std::vector<pollfd> polled;
  accepting_.poll_for(polled);
  const std::size_t dialled = polled.size();
  dialing_.poll_for(polled);
  const std::size_t watched = polled.size();
  established_.poll_for(polled);
  polled.insert(polled.end(), also.begin(), also.end());
  poll(polled.data(), polled.size(), wait_ms);
  const std::span<const pollfd> seen(polled);
  accepting_.step(seen, established_);
  for (int peer : accepting_.take_knocks())
    if (dialing_.route(peer).known()) want(peer);
  dialing_.step(seen.subspan(dialled), established_);
  for (HandshakeAttempt& it : accepting_.take_turned()) dialing_.adopt(std::move(it));
  for (HandshakeAttempt& it : dialing_.take_turned()) accepting_.adopt(std::move(it));
  established_.watch(seen.subspan(watched));
  for (int peer : established_.take_ended()) lose(peer);
  accepting_.collect(established_);
  dialing_.collect(established_);
}

std::optional<Connector::Failure> Connector::failure() const {
  if (const auto& lost = established_.lost())
    return Failure{.peer = lost->peer, .lost = true, .text = "it gave up", .also = {}, .given_up = lost->given_up};
  const auto now = Clock::now();
  for (int peer = 0; peer < self_.world(); ++peer) {
    const ExtraStreams& streams = established_.streams();
    if (!streams.complete(peer) && streams.hopeless(peer))
      return Failure{.peer = peer, .text = streams.problem(peer), .also = {}};
    if (!awaits(peer)) continue;
    const bool answers = accepting_.answers(peer);
    const Route& route = dialing_.route(peer);
    const Route::Verdict verdict = route.verdict(now);
    if (!large(peer).empty() && !answers && (peer > self_.rank() || verdict != Route::Verdict::kOpen))
      return large_packets_failure(peer);
    if (verdict == Route::Verdict::kOpen || answers) continue;
    if (peer > self_.rank() && verdict != Route::Verdict::kRefused) continue;  // it dials this rank
    const bool refused = verdict == Route::Verdict::kRefused;
    if (refused && route.was_connected())
      return Failure{.peer = peer,
                     .lost = true,
                     .text = "its connection ended, and nothing listens there any more: tried " + route.text(now),
                     .also = {}};
    return Failure{.peer = peer, .refused = refused, .text = route.text(now), .also = {}};
  }
  return std::nullopt;
}

const std::string& Connector::large(int peer) const {
  return peer < self_.rank() ? dialing_.large(peer) : accepting_.large(peer);
}

Connector::Failure Connector::large_packets_failure(int peer) const {
  Failure failure{.peer = peer, .large = true, .text = large(peer), .also = {}};
  for (int other = 0; other < self_.world(); ++other) {
    const bool looks_lost = lack_padding(accepting_.attempts(), other) || lack_padding(dialing_.attempts(), other);
    if (other != peer && !established_.joined(other) && (looks_lost || !large(other).empty()))
      failure.also.push_back(other);
  }
  return failure;
}

std::string Connector::problem(int peer) const {
  if (!established_.streams().complete(peer)) return established_.streams().problem(peer);
  const Route& route = dialing_.route(peer);
  if (peer < self_.rank() && route.known()) return "tried " + route.text(Clock::now());
  return accepting_.problem(peer);
}

Connector::Knowledge Connector::knowledge() const {
  Knowledge out{.self = self_, .addresses = {}, .streams = established_.streams().again()};
  for (int peer = 0; peer < self_.world(); ++peer) {
    std::vector<SocketAddress>& known = out.addresses.emplace_back();
    const SocketAddress& used = established_.dialled(peer);
    if (used.length() > 0) known.push_back(used);
    for (const SocketAddress& it : dialing_.route(peer).addresses())
      if (used.length() == 0 || it.text() != used.text()) known.push_back(it);
  }
  return out;
}

}  // namespace ringdp
