// ExtraStreams: the connections that a pair of ranks needs beside its first one (transport/striped.h), and those of
// them that are made. The rank that dials decides how many, by the round trips of the first connection, and sends the
// number in its confirm; it dials the others at the address of the first one. Bookkeeping only, time comes in from
// outside. Owned by Established or a Redialler, used by its thread.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "base/fd.h"
#include "transport/striped.h"
#include "transport/tcp.h"

namespace ringdp {

inline constexpr int kAutomaticStreams = 0;

std::string streams_text(int setting);  // as RINGDP_STREAMS says it

// How many connections a pair has where RINGDP_STREAMS leaves it open. `keeps_rate`: see transport/congestion.h.
int streams_for(int64_t round_trip_us, bool keeps_rate);

class ExtraStreams {
 public:
  // `setting`: the number for all pairs, or kAutomaticStreams. `congestion`: the congestion control to ask for, on
  // which the number depends.
  ExtraStreams(int world, int setting, std::string congestion)
      : setting_(setting), congestion_(std::move(congestion)), peers_(static_cast<std::size_t>(world)) {}

  // With the same settings, without connections.
  ExtraStreams again() const { return {static_cast<int>(peers_.size()), setting_, congestion_}; }

  void needs_one(int peer) { peers_[peer].setting = 1; }  // it will share memory
  int wanted(int peer, int socket) const;                 // in all; `socket`: the first, connected

  // The first connection is made; the pair will have `streams`. `dial`: the address at which this side dials the
  // others.
  void expect(int peer, int streams, std::optional<SocketAddress> dial);
  bool lacks(int peer, int stream) const;
  bool complete(int peer) const;
  void add(int peer, int stream, Fd socket);
  std::vector<Fd> take(int peer);
  std::vector<int> sockets(int peer) const;  // that are made and not taken
  void forget(int peer) { peers_[peer] = {}; }
  void restart(int peer) {
    peers_[peer] = {.setting = peers_[peer].setting, .dial = {}, .others = {}};
  }  // another first one
  int streams(int peer) const { return static_cast<int>(peers_[peer].others.size()) + 1; }

  // The stream to dial now, and its address; it counts as begun.
  std::optional<int> due(int peer, Clock::time_point now);
  const SocketAddress& address(int peer) const { return *peers_[peer].dial; }
  void failed(int peer, int stream, const std::string& why, Clock::time_point now);
  bool hopeless(int peer) const;
  std::string problem(int peer) const;  // of those that are missing; may be empty

 private:
  struct Stream {
    Fd socket;
    bool made = false;  // and perhaps taken
    bool running = false;
    int failures = 0;
    Clock::time_point next{};
    std::string why;
  };
  struct Peer {
    std::optional<int> setting;
    std::optional<SocketAddress> dial;
    std::vector<Stream> others;  // stream 1 first
  };

  const int setting_;
  const std::string congestion_;
  std::vector<Peer> peers_;
};

}  // namespace ringdp
