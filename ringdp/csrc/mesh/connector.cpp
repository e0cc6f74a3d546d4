#include "mesh/connector.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "base/error.h"
#include "mesh/fd_socket.h"
#include "mesh/padding.h"

namespace ringdp {
namespace {

constexpr int64_t kLooksLostMs = 3000;  // left of that: another peer's padding is lost as well
constexpr auto kProbeAfter = std::chrono::seconds(1);

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
      it.socket.close();
    }
}

bool Connector::busy() const {
  for (int peer = 0; peer < world_; ++peer)
    if (awaits(peer) || !streams_.complete(peer)) return true;
  return !attempts_.empty() || door_.paused();
}

bool Connector::complete() const {
  for (int peer = 0; peer < world_; ++peer)
    if (aims_[peer] == Aim::kConnect && !connected(peer)) return false;
  return true;
}

void Connector::step(int wait_ms, std::span<const pollfd> also) {
  std::vector<pollfd> polled;
  door_.poll_for(polled);
  for (const Attempt& it : attempts_)
    polled.push_back({it.socket.fd(), static_cast<short>(it.connecting() ? POLLOUT : POLLIN), 0});
  std::vector<int> watched;
  for (int peer = 0; peer < world_; ++peer) {
    if (watched_[peer] == 0) continue;
    watched.push_back(peer);
    polled.push_back({connected_[peer].get(), POLLRDHUP, 0});
  }
  polled.insert(polled.end(), also.begin(), also.end());
  poll(polled.data(), polled.size(), wait_ms);
  std::size_t index = door_.size();
  for (Attempt& it : attempts_) {
    if (polled[index++].revents != 0) advance(it);
    if (!it.over() && it.deadline.expired()) expire(it);
  }
  for (int peer : watched)
    if (polled[index++].revents != 0) watch(peer);
  for (std::size_t i = 0; i < door_.size(); ++i)
    if (polled[i].revents != 0)
      door_.let_in(i, [this](Fd socket, const SocketAddress& from) { let_in(std::move(socket), from); });
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

void Connector::dial_due(int peer) {
  const auto now = Clock::now();
  while (auto stream = streams_.due(peer, now)) {
    Attempt attempt;
    attempt.peer = peer;
    attempt.stream = *stream;
    attempt.streams = streams_.streams(peer);
    attempt.address = streams_.address(peer);
    begin(std::move(attempt));
  }
  if (!awaits(peer) || !routes_[peer].known() || now < probe_from_[peer]) return;
  Route& route = routes_[peer];
  while (auto candidate = route.due(now)) {
    Attempt attempt;
    attempt.peer = peer;
    attempt.candidate = *candidate;
    attempt.address = route.address(*candidate);
    if (peer > rank_) attempt.stage = Stage::kProbing;
    route.started(*candidate, now);
    begin(std::move(attempt));
  }
}

Connector::Knowledge Connector::knowledge() const {
  Knowledge out{.mine = mine_, .secret = secret_, .addresses = {}, .streams = streams_.again()};
  for (int peer = 0; peer < world_; ++peer) {
    std::vector<SocketAddress>& known = out.addresses.emplace_back();
    const SocketAddress& used = dialled_[peer];
    if (used.length() > 0) known.push_back(used);
    for (const SocketAddress& it : routes_[peer].addresses())
      if (used.length() == 0 || it.text() != used.text()) known.push_back(it);
  }
  return out;
}

void Connector::collect_attempts() {
  for (Attempt& it : attempts_) {
    if (it.stage != Stage::kDone || it.stream > 0 || joined_[it.peer] != 0) continue;
    joined_[it.peer] = 1;
    streams_.expect(it.peer, it.streams, it.dialled ? std::optional(it.address) : std::nullopt);
    connected_[it.peer] = it.socket.take();
    if (it.dialled) dialled_[it.peer] = it.address;
    std::copy_n(it.nonce.begin(), instances_[it.peer].size(), instances_[it.peer].begin());
    watched_[it.peer] = 1;
  }
  for (Attempt& it : attempts_) {  // of those that were accepted, the first of a pair may be slower than the others
    if (it.stage != Stage::kDone || it.stream == 0 || joined_[it.peer] == 0) continue;
    const bool same =
        it.dialled || std::equal(instances_[it.peer].begin(), instances_[it.peer].end(), it.nonce.begin());
    if (same && streams_.lacks(it.peer, it.stream)) streams_.add(it.peer, it.stream, it.socket.take());
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
