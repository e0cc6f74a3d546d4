#include "mesh/extra_streams.h"

#include <algorithm>
#include <utility>

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

}  // namespace ringdp
