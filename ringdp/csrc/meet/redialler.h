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
// Owned by ConnectionThread, used by its thread; nothing blocks but its ConnectionUser, which waits for the engine's
// driver.
//
// ConnectionUser: for whom ConnectionThread makes and replaces connections: the engine, whose Healing it is. Called by
// that thread; a call may wait for the engine's driver.
//
// RedialTries: the results of dialling a peer's addresses to replace its connection: which to dial next and when, and
// whether its process has ended, since its host refuses connections that it accepted before. Bookkeeping only, time
// comes in from outside. Owned by a Redialler, used by its thread.
#pragma once

#include <poll.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/error.h"
#include "base/fd.h"
#include "base/log.h"
#include "meet/connector.h"
#include "meet/established.h"
#include "meet/handshake_attempt.h"
#include "shared/shared_setup.h"
#include "transport/channel.h"
#include "transport/tcp.h"

namespace ringdp {

class ConnectionUser {
 public:
  // The first connection to a peer, which either side wanted; or the reason why there is none. `gone`: nothing listens
  // at its address any more: its process has ended, in good order or not.
  virtual void connect(int peer, std::unique_ptr<Channel> channel, bool checksums) = 0;
  virtual void cannot_connect(int peer, const Error& error, bool gone) = 0;

  // A replacement of a broken connection, see Redialler and LinkRepair. False or nullopt: there is no connection to
  // that peer that could be replaced.
  virtual bool hold(int peer) = 0;
  virtual std::optional<uint64_t> settle(int peer) = 0;  // frames that have come from a peer that has called `hold`
  virtual void resume(int peer, std::unique_ptr<Channel> channel, uint64_t taken) = 0;
  virtual void add_stream(int peer, Fd socket) = 0;            // a further connection
  virtual void give_up(int peer, const std::string& why) = 0;  // there is none; empty: its process has ended

  virtual void notice(LogLevel level, const std::string& line) = 0;

 protected:
  ~ConnectionUser() = default;
};

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
  // `sharing`: knows the transports. `heal_ms`: how long it tries before it gives up.
  Redialler(Connector::Knowledge knowledge, const SharedSetup& sharing, int64_t heal_ms, ConnectionUser& user);

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
  const SharedSetup& sharing_;
  ConnectionUser& user_;
  std::vector<Case> cases_;  // by peer
  std::size_t open_ = 0;
  HandshakeAttempts attempts_;
};

}  // namespace ringdp
