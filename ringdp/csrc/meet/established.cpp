#include "meet/established.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "shared/fd_socket.h"
#include "transport/congestion.h"
#include "transport/tcp_health.h"

namespace ringdp {

namespace {

constexpr auto kAgainAfter = std::chrono::milliseconds(200);
constexpr int kFailures = 5;  // of one stream at one address: no further attempts

}  // namespace

int streams_for(int64_t round_trip_us, bool keeps_rate) {
  if (round_trip_us < 5000) return 1;
  if (round_trip_us < 20'000) return 4;
  return keeps_rate ? 8 : kMostStreams;
}

std::string streams_text(int setting) { return setting == kAutomaticStreams ? "auto" : std::to_string(setting); }

int ExtraStreams::wanted(int peer, int socket) const {
  const int setting = peers_[peer].setting.value_or(setting_);
  if (setting != kAutomaticStreams) return setting;
  // result ignored: set again for all sockets later, where a failure is reported
  ask_for_congestion(socket, congestion_);
  return streams_for(tcp_round_trip_us(socket), keeps_its_rate(socket));
}

void ExtraStreams::expect(int peer, int streams, std::optional<SocketAddress> dial) {
  peers_[peer].others.resize(static_cast<std::size_t>(streams - 1));
  peers_[peer].dial = dial;
}

bool ExtraStreams::lacks(int peer, int stream) const {
  const auto& others = peers_[peer].others;
  return stream >= 1 && stream <= static_cast<int>(others.size()) && !others[stream - 1].made;
}

bool ExtraStreams::complete(int peer) const {
  const auto& others = peers_[peer].others;
  return std::all_of(others.begin(), others.end(), [](const Stream& it) { return it.made; });
}

void ExtraStreams::add(int peer, int stream, Fd socket) {
  Stream& it = peers_[peer].others[stream - 1];
  it.socket = std::move(socket);
  it.made = true;
}

std::vector<Fd> ExtraStreams::take(int peer) {
  std::vector<Fd> out;
  for (Stream& it : peers_[peer].others) out.push_back(std::move(it.socket));
  return out;
}

std::vector<int> ExtraStreams::sockets(int peer) const {
  std::vector<int> out;
  for (const Stream& it : peers_[peer].others)
    if (it.socket) out.push_back(it.socket.get());
  return out;
}

std::optional<int> ExtraStreams::due(int peer, Clock::time_point now) {
  Peer& it = peers_[peer];
  for (std::size_t i = 0; it.dial && i < it.others.size(); ++i) {
    Stream& stream = it.others[i];
    if (stream.made || stream.running || now < stream.next) continue;
    stream.running = true;
    return static_cast<int>(i) + 1;
  }
  return std::nullopt;
}

void ExtraStreams::failed(int peer, int stream, const std::string& why, Clock::time_point now) {
  if (!lacks(peer, stream)) return;
  Stream& it = peers_[peer].others[stream - 1];
  it.running = false;
  it.next = now + kAgainAfter;
  it.why = why;
  ++it.failures;
}

bool ExtraStreams::hopeless(int peer) const {
  const auto& others = peers_[peer].others;
  return std::any_of(others.begin(), others.end(),
                     [](const Stream& it) { return !it.made && it.failures >= kFailures; });
}

std::string ExtraStreams::problem(int peer) const {
  const auto& others = peers_[peer].others;
  const auto missing = std::find_if(others.begin(), others.end(), [](const Stream& it) { return !it.made; });
  if (missing == others.end()) return "";
  const auto number = missing - others.begin() + 2;
  return "connection " + std::to_string(number) + " of " + std::to_string(others.size() + 1) +
         (peers_[peer].dial ? " to " + peers_[peer].dial->text() : "") +
         (missing->why.empty() ? " is not made" : ": " + missing->why);
}

namespace {

// Reads what a peer has sent before its connection ended: perhaps its part of the set-up, and at the end why it left.
std::optional<GivenUp> last_message(const PeerSocket& socket) {
  SharedReader reader(SharedMac::receiving(socket.protection));
  std::optional<GivenUp> why;
  while (!why && reader.read(socket.get()) == SharedReader::Status::kMessage) why = GivenUp::from(reader.message());
  return why;
}

}  // namespace

Established::Established(int world, ExtraStreams streams)
    : streams_(std::move(streams)), peers_(static_cast<std::size_t>(world)) {}

bool Established::same_process(int peer, const Nonce& nonce) const {
  const HandshakeSelf::Instance& instance = peers_[peer].instance;
  return instance == HandshakeSelf::Instance{} || std::equal(instance.begin(), instance.end(), nonce.begin());
}

void Established::collect(HandshakeAttempts& attempts, const HandshakeSelf& self) {
  for (HandshakeAttempt& it : attempts) {
    const HandshakeAttempt::Facts& facts = it.facts();
    if (it.stage() != HandshakeAttempt::Stage::kDone || facts.stream > 0 || !wanting(facts.peer, facts.number))
      continue;
    Peer& peer = peers_[facts.peer];
    if (joined(facts.peer)) streams_.restart(facts.peer);
    peer.joined = peer.watched = true;
    peer.number = facts.number;
    const bool dials = facts.dialled && !facts.turned;
    streams_.expect(facts.peer, facts.streams, dials ? std::optional(facts.address) : std::nullopt);
    peer.socket = it.take_socket(self);
    if (dials) peer.dialled = facts.address;
    std::copy_n(facts.hello.nonce.begin(), peer.instance.size(), peer.instance.begin());
  }
  for (HandshakeAttempt& it :
       attempts) {  // of those that were accepted, the first of a pair may be slower than the others
    const HandshakeAttempt::Facts& facts = it.facts();
    if (it.stage() != HandshakeAttempt::Stage::kDone || facts.stream == 0 || !joined(facts.peer)) continue;
    if (wanting(facts.peer, facts.number)) continue;
    const bool ours = facts.dialled || same_process(facts.peer, facts.hello.nonce);
    if (ours && facts.number == number(facts.peer) && streams_.lacks(facts.peer, facts.stream))
      streams_.add(facts.peer, facts.stream, it.take_socket(self).fd);
    it.close();
  }
}

std::vector<Established::Connected> Established::take() {
  std::vector<Connected> out;
  for (std::size_t i = 0; i < peers_.size(); ++i) {
    const int peer = static_cast<int>(i);
    if (!peers_[i].socket || !streams_.complete(peer)) continue;
    peers_[i].watched = false;
    out.push_back({peer, std::move(peers_[i].socket), streams_.take(peer)});
  }
  return out;
}

void Established::forget(int peer) {
  if (!streams_.complete(peer)) {
    peers_[peer].socket = {};
    peers_[peer].watched = false;
  }
  streams_.forget(peer);
  if (lost_ && lost_->peer == peer) lost_.reset();
}

void Established::poll_for(std::vector<pollfd>& polled) const {
  for (std::size_t peer = 0; peer < peers_.size(); ++peer) {
    if (!peers_[peer].watched) continue;
    polled.push_back({peers_[peer].socket.get(), POLLRDHUP, 0});
    for (int socket : streams_.sockets(static_cast<int>(peer))) polled.push_back({socket, POLLRDHUP, 0});
  }
}

void Established::watch(std::span<const pollfd> polled) {
  std::size_t index = 0;
  for (std::size_t peer = 0; peer < peers_.size(); ++peer) {
    if (!peers_[peer].watched) continue;
    bool ended = false;  // the end of one stream ends all of the pair
    for (std::size_t left = 1 + streams_.sockets(static_cast<int>(peer)).size(); left > 0; --left)
      ended |= polled[index++].revents != 0;
    if (ended) note_end(static_cast<int>(peer));
  }
}

void Established::lose(int peer) {
  Peer& it = peers_[peer];
  it.joined = it.watched = false;
  it.socket = {};
  streams_.restart(peer);
}

void Established::fix(int peer) {
  Peer& it = peers_[peer];
  it.joined = it.fixed = true;
  it.watched = false;
  it.socket = {};
}

// No rank leaves in good order before all are connected: the rank has died, or has failed and written why into the
// store, or the network has ended the connection. Other parts find out which; this one dials again.
void Established::note_end(int peer) {
  auto why = last_message(peers_[peer].socket);
  if (!why) {
    ended_.push_back(peer);
    return lose(peer);
  }
  peers_[peer].watched = false;
  if (!lost_) lost_ = Lost{.peer = peer, .given_up = std::move(*why)};
}

void Established::notify(const GivenUp& why) {
  for (const Peer& it : peers_) {
    if (!it.socket) continue;
    SharedMac mac = SharedMac::sending(it.socket.protection);
    send_shared_message(it.socket.get(), why.message(), mac);  // if that fails, the peer sees the end of the connection
  }
}

std::string ask_for_congestion(const std::vector<Established::Connected>& connected, const std::string& setting) {
  std::string problem;
  const auto ask = [&](int socket) {
    std::string text = ask_for_congestion(socket, setting);
    if (problem.empty()) problem = std::move(text);
  };
  for (const Established::Connected& it : connected) {
    ask(it.socket.get());
    for (const Fd& socket : it.more) ask(socket.get());
  }
  return problem;
}

}  // namespace ringdp
