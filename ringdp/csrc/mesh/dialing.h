// Dialing: the ranks to connect with, and the connections that this rank begins. It dials the lower ranks at all their
// addresses, and the further connections of a pair whose first one it has made (ExtraStreams). Higher ranks dial this
// rank; one that is late is asked to, with a knock. Owned by the Connector, used by its thread.
#pragma once

#include <poll.h>

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "mesh/established.h"
#include "mesh/handshake_attempt.h"
#include "mesh/route.h"

namespace ringdp {

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
};

}  // namespace ringdp
