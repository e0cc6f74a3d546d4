// Established: the established connections of a Connector, which it watches until they are taken. One that ends is
// dialled again, with a higher number (HandshakeFields::number): of two connections of a pair the one with the higher
// number is used, on both sides, until a channel is made of it (`fix`). A pair that is far apart has further ones
// (ExtraStreams), and is connected when all are established. Owned by the Connector, used by its thread; owns the
// sockets until they are taken.
//
// ExtraStreams: the connections that a pair of ranks needs beside its first one (transport/striped.h), and those of
// them that are made. The rank that dials decides how many, by the round trips of the first connection, and sends the
// number in its confirm; it dials the others at the address of the first one. Bookkeeping only, time comes in from
// outside. Owned by Established or a Redialler, used by its thread.
#pragma once

#include <poll.h>

#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "base/fd.h"
#include "meet/handshake_attempt.h"
#include "shared/fd_socket.h"
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

  const std::string& congestion() const { return congestion_; }
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

class Established {
 public:
  struct Connected {
    int peer = -1;
    PeerSocket socket;
    std::vector<Fd> more = {};  // streams of the same pair
  };
  struct Lost {
    int peer = -1;
    GivenUp given_up;  // the reason, if the peer sent one before it left
  };

  Established(int world, ExtraStreams streams);

  ExtraStreams& streams() { return streams_; }
  const ExtraStreams& streams() const { return streams_; }
  bool joined(int peer) const { return peers_[peer].joined; }  // its first one is made, and perhaps taken
  bool complete(int peer) const { return joined(peer) && streams_.complete(peer); }
  // Whether a connection with that number would replace the present or last one.
  bool wanting(int peer, uint64_t number) const { return !peers_[peer].fixed && number > peers_[peer].number; }
  bool fixed(int peer) const { return peers_[peer].fixed; }
  uint64_t number(int peer) const { return peers_[peer].number; }  // 0: there was none
  // Whether the hello with this nonce is from the process that dialled the peer's first connection, if one did.
  bool same_process(int peer, const Nonce& nonce) const;
  const SocketAddress& dialled(int peer) const { return peers_[peer].dialled; }  // of length 0 where the peer has

  void collect(HandshakeAttempts& attempts,
               const HandshakeSelf& self);  // those that are done; the others stay as they are
  std::vector<Connected> take();            // pairs that were not taken before
  void forget(int peer);                    // what is incomplete, and that it was lost
  void lose(int peer);                      // its connection has ended, here or after it was taken
  void fix(int peer);                       // a channel was made of it: it is not replaced here any more

  void poll_for(std::vector<pollfd>& polled) const;
  void watch(std::span<const pollfd> polled);                          // which begins with those of `poll_for`
  std::vector<int> take_ended() { return std::exchange(ended_, {}); }  // without a reason
  const std::optional<Lost>& lost() const { return lost_; }
  void notify(const GivenUp& why);  // sends it to the peers whose connections were not taken

 private:
  struct Peer {
    bool joined = false;
    bool watched = false;
    bool fixed = false;
    uint64_t number = 0;
    PeerSocket socket;      // until it is taken
    SocketAddress dialled;  // by which it was made, where this side has dialled
    HandshakeSelf::Instance instance{};
  };

  void note_end(int peer);

  ExtraStreams streams_;
  std::vector<Peer> peers_;
  std::vector<int> ended_;
  std::optional<Lost> lost_;  // the first, until it is forgotten
};

// The first problem, if any, of the sockets of these pairs: see transport/congestion.h.
std::string ask_for_congestion(const std::vector<Established::Connected>& connected, const std::string& setting);

}  // namespace ringdp
