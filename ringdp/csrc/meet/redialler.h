// Redialler: replaces a broken connection. As at the start the higher rank of a pair dials; the lower one asks it to
// with a knock, which also shows whether the process lives: if the peer's address refuses a connection, its process
// has ended. If the peer's host stops answering, we dial a new connection, and switch to it once it is established.
//
//   higher rank                                       lower rank
//   hello, reply, confirm, padding: as in handshake.h. Then both have stopped sending on the old connection (hold):
//                                              <-     reads it to its end (settle): resume (frames taken)
//   reads it to its end (settle): resume       ->
//   goes on with what the other lacks                 goes on with what the other lacks
//
// A pair with several connections (transport/striped.h) loses them all with one of them. It continues as soon as the
// first of the new ones is made; the confirm has their number. The higher rank dials the others, each up to confirm
// and padding, and both add them to the channel one by one (add_stream). The channel also works without them.
//
// Owned by ConnectionThread, used by its thread; nothing blocks but the events, which wait for the engine's driver.
//
// RedialTries: the results of dialling a peer's addresses to replace its connection: which to dial next and when, and
// whether its process has ended, since its host refuses connections that it accepted before. Bookkeeping only, time
// comes in from outside. Owned by a Redialler, used by its thread.
#pragma once

#include <poll.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/fd.h"
#include "meet/connector.h"
#include "meet/established.h"
#include "meet/handshake_attempt.h"
#include "transport/tcp.h"

namespace ringdp {

class RedialTries {
 public:
  // `dials`: false if this side only knocks. The first address is the one that was in use.
  void restart(std::size_t addresses, bool dials, Clock::time_point now);

  bool due(std::size_t address, Clock::time_point now) const { return now >= tries_[address].next; }
  void begun(std::size_t address, Clock::time_point now);
  void connected(std::size_t address);
  void failed(std::size_t address, const std::string& why, bool refused);  // `why`: empty keeps the last reason

  bool process_has_ended() const;
  std::string text(const std::vector<SocketAddress>& addresses) const;  // what was tried

 private:
  struct Try {
    Clock::time_point next{};
    int failures = 0;
    bool refused = false;  // the last time
    std::string why = {};
  };

  std::vector<Try> tries_;
  bool dials_ = false;
};

class Redialler {
 public:
  struct Events {  // see Connections, of the engine
    std::function<bool(int peer)> hold;
    std::function<std::optional<uint64_t>(int peer)> settle;
    // `streams`: the number of connections of the pair, this one included.
    std::function<void(int peer, Fd socket, int streams, uint64_t taken)> resume;
    std::function<void(int peer, Fd socket)> add_stream;               // a further one
    std::function<void(int peer, const std::string& why)> not_healed;  // empty: its process has ended
  };

  // `heal_ms`: how long it tries before not_healed.
  Redialler(Connector::Knowledge knowledge, int64_t heal_ms, Events events);

  // The connection with that peer has broken, or only its host is silent.
  void heal(int peer, bool broken);
  void take(HandshakeAttempt it);  // with a hello or knock of the peer
  bool busy() const;
  void poll_for(std::vector<pollfd>& polled) const { ringdp::poll_for(attempts_, polled); }
  void step();  // does not block

 private:
  struct Case {
    bool open = false;
    bool broken = false;  // otherwise its host is silent
    Clock::time_point until{};
    uint64_t number = 0;  // of the last attempt: dialled, or let in
    uint64_t done = 0;    // of the last established one
    Clock::time_point done_at{};
    RedialTries tries;
  };

  bool dials(int peer) const { return peer < self_.rank(); }
  Case& at(int peer) { return cases_[static_cast<std::size_t>(peer)]; }
  void open(int peer, bool broken, Clock::time_point until);
  void close(int peer);
  bool under_way(int peer) const;  // an attempt has reached the resume: no other one may begin
  void begin_due(int peer, Clock::time_point now);
  void dial(HandshakeAttempt::Facts facts);
  void move_on(HandshakeAttempt& attempt);
  void on_connected(HandshakeAttempt& attempt);
  void on_proven(HandshakeAttempt& attempt);
  void on_confirmed(HandshakeAttempt& attempt);
  void on_resumed(HandshakeAttempt& attempt);
  bool send_frames_taken(HandshakeAttempt& attempt);  // after reading the old connection to its end
  void dial_streams(int peer, Clock::time_point now);
  void on_stream(HandshakeAttempt& attempt);         // a further one is made
  bool fits(int peer, int stream, uint64_t number);  // that connection is in use, and lacks this stream
  void note_failure(HandshakeAttempt& attempt);
  void give_up(int peer, const std::string& why);

  ExtraStreams streams_;  // of connections made here
  const HandshakeSelf self_;
  const std::vector<std::vector<SocketAddress>> addresses_;  // by peer
  const std::chrono::milliseconds heal_;
  const Events events_;
  std::vector<Case> cases_;  // by peer
  std::size_t open_ = 0;
  HandshakeAttempts attempts_;
};

}  // namespace ringdp
