// Dialing: the ranks to connect with, and the connections that this rank begins. It dials the lower ranks at all their
// addresses, and the further connections of a pair whose first one it has made (ExtraStreams). Higher ranks dial this
// rank; one that is late is asked to, with a knock. Owned by the Connector, used by its thread.
//
// Route: the addresses of one peer, dialled one after the other with a short head start each, and the results; it
// decides when to give up. Bookkeeping only, time comes in from outside. Owned by a Dialing, used by its thread.
#pragma once

#include <poll.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "meet/addresses.h"
#include "meet/established.h"
#include "meet/handshake_attempt.h"

namespace ringdp {

class Route {
 public:
  enum class Verdict {
    kOpen,
    kRefused,     // a host answers, but nothing listens there: the process has gone, or a firewall refuses
    kUnreachable  // no host answers, or another process than the peer does
  };

  Route() = default;
  Route(Candidates candidates, Clock::time_point now);

  bool known() const { return known_; }
  std::optional<std::size_t> due(Clock::time_point now) const;  // the candidate to try now
  const SocketAddress& address(std::size_t index) const { return tries_[index].address; }
  std::vector<SocketAddress> addresses() const;

  void started(std::size_t index, Clock::time_point now);
  void answered(std::size_t index);  // connected: the process may be slow
  // `final`: a retry cannot succeed (another job, another rank).
  void failed(std::size_t index, const std::string& why, bool refused, bool final, Clock::time_point now);
  void restart(Clock::time_point now);
  void again(Clock::time_point now);  // the peer's connection has ended: it listened at one of these addresses
  bool was_connected() const { return was_connected_; }

  Verdict verdict(Clock::time_point now) const;
  std::string text(Clock::time_point now) const;  // "10.0.0.1:29600 (Connection refused), …"

 private:
  struct Try {
    SocketAddress address;
    Clock::time_point begin;  // not before
    bool running = false;
    bool answered = false;
    bool refused = false;  // the last time
    bool final = false;
    bool ended = false;  // the last time it had been connected
    int failures = 0;
    std::string why;
  };

  bool known_ = false;
  bool was_connected_ = false;
  std::optional<Clock::time_point> begin_;  // of the first try
  std::vector<Try> tries_;
  std::vector<std::string> left_out_;
};

class Dialing {
 public:
  Dialing(HandshakeSelf self, const std::vector<char>& wanted);

  // See Connector for these. The peers of `want` and `check` are not connected yet.
  void set_route(int peer, Candidates candidates, bool probe);
  void want(int peer);
  void check(int peer);
  void forget(int peer);
  void again(int peer);  // its connection has ended: dials it again
  void set_met(uint8_t met) { self_.mine.met = met; }

  bool aims_at(int peer) const { return aims_[peer] != Aim::kNone; }  // to connect with it, or to check its addresses
  bool wants(int peer) const { return aims_[peer] == Aim::kConnect; }
  bool checks(int peer) const { return aims_[peer] == Aim::kCheck; }
  const Route& route(int peer) const { return routes_[peer]; }
  const std::string& large(int peer) const { return large_[peer]; }  // see HandshakeAttempt::Failure
  const HandshakeAttempts& attempts() const { return attempts_; }
  uint8_t met(int peer) const { return met_[peer]; }  // what its last reply said, see HandshakeFields

  void poll_for(std::vector<pollfd>& polled) const { ringdp::poll_for(attempts_, polled); }
  void step(std::span<const pollfd> polled, Established& made);  // which begins with those of `poll_for`
  // Connections that have knocked at higher ranks, and await their hellos.
  HandshakeAttempts take_turned() { return std::exchange(turned_, {}); }
  // One that a lower rank has dialled, which has knocked: as if this side had dialled it.
  void adopt(HandshakeAttempt attempt);
  // hands over those that are established, begins those that are due
  void collect(Established& made);

 private:
  enum class Aim { kNone, kCheck, kConnect };

  bool awaits(int peer, const Established& made) const { return aims_at(peer) && !made.joined(peer); }
  void move_on(HandshakeAttempt& attempt, Established& made);
  void on_connected(HandshakeAttempt& attempt);
  void on_proven(HandshakeAttempt& attempt, const Established& made);
  void note_failure(HandshakeAttempt& attempt, Established& made);
  void dial_due(int peer, Established& made);
  void dial(HandshakeAttempt::Facts facts, Established& made);

  HandshakeSelf self_;
  std::vector<Aim> aims_;          // these are per peer
  std::vector<uint64_t> numbers_;  // of the connection that is dialled now, or next
  std::vector<uint8_t> met_;
  std::vector<Route> routes_;
  std::vector<Clock::time_point> probe_from_;  // the maximum where it is not to be probed
  std::vector<std::string> large_;
  HandshakeAttempts attempts_;
  HandshakeAttempts turned_;
};

}  // namespace ringdp
