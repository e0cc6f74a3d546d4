// Accepting: the connections that other processes begin. It accepts them and checks their hellos: those of higher ranks
// get an answer, whether this rank wants a connection or not. Unauthenticated processes get a bounded number of
// connections, a bounded time, and no answer. Owned by the Connector, used by its thread.
//
// Listener: this rank's listeners. It accepts a bounded number of connections at a time, detects a shortage of
// descriptors, counts refused connections, and logs at most a line a second. Owned by an Accepting, used by its thread.
#pragma once

#include <poll.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "base/fd.h"
#include "meet/addresses.h"
#include "meet/established.h"
#include "meet/handshake.h"
#include "meet/handshake_attempt.h"
#include "transport/tcp.h"

namespace ringdp {

class Listener {
 public:
  void listen_on(std::vector<TcpListener> listeners, std::optional<ListedPort> listed = std::nullopt) {
    listeners_ = std::move(listeners);
    if (listed) listed_.emplace(std::move(*listed));
  }
  bool listening() const { return !listeners_.empty(); }
  std::size_t size() const { return listeners_.size(); }
  bool paused() const { return Clock::now() < accept_after_; }  // for want of descriptors

  void poll_for(std::vector<pollfd>& polled) const;  // `size` of them
  // Accepts up to kAcceptsPerStep connections of the listener with that number, one at a call.
  void let_in(std::size_t listener, const std::function<void(Fd, const SocketAddress&)>& each);

  // A text if no connection could be accepted for seconds, because descriptors are short; else empty.
  std::string shortage() const;
  void turned_away() { ++turned_away_; }
  std::string turned_away_text() const;  // for the log; empty if no stranger came
  void report(const std::string& line);

 private:
  std::vector<TcpListener> listeners_;
  std::optional<ListedPort> listed_;              // of the one on loopback, where the job has a door
  Clock::time_point accept_after_{};              // a pause, since descriptors have run out
  std::optional<Clock::time_point> short_since_;  // they have been short
  Clock::time_point short_last_{};
  std::string short_of_;
  Clock::time_point report_after_{};
  int unreported_ = 0;
  int turned_away_ = 0;
};

class Accepting {
 public:
  explicit Accepting(HandshakeSelf self);

  Listener& listener() { return listener_; }
  const Listener& listener() const { return listener_; }
  const HandshakeAttempts& attempts() const { return attempts_; }
  bool answers(int peer) const;                                           // a connection of that peer is under way
  const std::string& problem(int peer) const { return problems_[peer]; }  // the last, of a connection of that peer
  const std::string& large(int peer) const { return large_[peer]; }       // see HandshakeAttempt::Failure

  void poll_for(std::vector<pollfd>& polled) const;
  void step(std::span<const pollfd> polled, const Established& made);  // which begins with those of `poll_for`
  void collect(Established& made);                                     // hands over those that are established
  void forget(int peer);
  void set_met(uint8_t met) { self_.mine.met = met; }
  uint8_t met(int peer) const { return met_[peer]; }  // of its last hello that replaces a broken connection
  // With an authentic hello or knock for a connection that replaces a broken one: the Redialler answers it.
  HandshakeAttempts take_resumptions() { return std::exchange(resumptions_, {}); }
  // With a knock of a lower rank, that stay for this rank's hello.
  HandshakeAttempts take_turned() { return std::exchange(turned_, {}); }
  void adopt(HandshakeAttempt attempt);  // one that this rank has dialled, and that awaits the peer's hello
  // Lower ranks that need a connection. A replayed knock has no other effect.
  std::vector<int> take_knocks() { return std::exchange(knocks_, {}); }

 private:
  void let_in(Fd socket, const SocketAddress& from, const Established& made);
  void evict_strangers(int newest);  // `newest`: the descriptor of the last one
  void move_on(HandshakeAttempt& attempt, const Established& made);
  void on_hello(HandshakeAttempt& attempt, const Established& made);
  void refuse(HandshakeAttempt& attempt, Refusal verdict);
  void note_failure(HandshakeAttempt& attempt);

  HandshakeSelf self_;
  Listener listener_;
  HandshakeAttempts attempts_;
  std::vector<std::string> problems_;  // these are per peer
  std::vector<uint8_t> met_;
  std::vector<std::string> large_;
  HandshakeAttempts resumptions_;
  HandshakeAttempts turned_;
  std::vector<int> knocks_;
};

}  // namespace ringdp
