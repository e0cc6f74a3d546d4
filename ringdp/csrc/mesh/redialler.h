// Redialler: makes a connection again that has broken. As at the start the higher rank of a pair dials; the lower one asks it to
// by knocking, which also shows whether anything listens there: where the peer's address refuses a connection, its process has
// ended. A connection whose host is silent is replaced in the same way, as soon as a new one comes about.
//
//   higher rank                                       lower rank
//   hello, reply, confirm, padding: as in handshake.h. Then both have stopped sending on the old connection (hold):
//                                              <-     reads it to its end (settle): resume (frames taken)
//   reads it to its end (settle): resume       ->
//   goes on with what the other lacks                 goes on with what the other lacks
//
// Owned by LateConnections, used by its thread; nothing blocks but the events, which wait for the engine's driver.
#pragma once

#include <poll.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <optional>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/fd.h"
#include "mesh/connector.h"
#include "mesh/handshake.h"

namespace ringdp {

class Redialler {
 public:
  struct Events {  // see Connections, of the engine
    std::function<bool(int peer)> hold;
    std::function<std::optional<uint64_t>(int peer)> settle;
    std::function<void(int peer, Fd socket, uint64_t taken)> resume;
    std::function<void(int peer, const std::string& why)> not_healed;  // empty: its process has ended
  };

  // `heal_ms`: how long it tries.
  Redialler(Connector::Knowledge knowledge, int64_t heal_ms, Events events);

  // The connection with that peer has broken, or only its host is silent.
  void heal(int peer, bool broken);
  void take(Connector::Resumption it);  // that the peer dials, or asks this rank to
  bool busy() const { return !attempts_.empty() || open_ > 0; }
  void poll_for(std::vector<pollfd>& polled) const;
  void step();  // what can be done now

 private:
  enum class Stage { kConnecting, kAwaitReply, kAwaitConfirm, kAwaitResume, kOver };
  struct Attempt {
    int peer = -1;
    Fd fd;
    Stage stage = Stage::kConnecting;
    bool dialled = false;
    std::size_t address = 0;  // of the case, if this side dials
    Clock::time_point begin;
    uint64_t number = 0;
    HandshakeMessage buffer{};
    std::size_t filled = 0;
    std::size_t padding = 0;  // of the last message that is still to come
    std::vector<std::byte> transcript;
  };
  struct Try {
    Clock::time_point next{};
    int failures = 0;
    bool refused = false;  // the last time
    std::string why;
  };
  struct Case {
    bool open = false;
    bool broken = false;     // otherwise its host is silent
    bool under_way = false;  // an attempt has come so far that no other one may begin
    Clock::time_point until{};
    uint64_t number = 0;  // of the last attempt: dialled, or let in
    uint64_t done = 0;    // of the last that came about
    Clock::time_point done_at{};
    std::vector<Try> tries;
  };

  bool dials(int peer) const { return peer < static_cast<int>(knowledge_.mine.to); }
  Case& at(int peer) { return cases_[static_cast<std::size_t>(peer)]; }
  void open(int peer, bool broken, Clock::time_point until);
  void close(int peer);
  void begin_due(int peer, Clock::time_point now);
  void advance(Attempt& attempt);
  void on_connected(Attempt& attempt);
  void on_message(Attempt& attempt);
  void on_padding(Attempt& attempt);
  void on_reply(Attempt& attempt);
  void on_confirm(Attempt& attempt);
  void on_resume(Attempt& attempt, uint64_t theirs);
  bool tell_frames(Attempt& attempt);  // after reading the old connection to its end
  bool read_message(Attempt& attempt);
  bool read_padding(Attempt& attempt);
  bool send(Attempt& attempt, HandshakeType type, uint64_t number, Refusal refusal = Refusal::kNone);
  void drop(Attempt& attempt, const std::string& why, bool refused = false);
  void give_up(int peer, const std::string& why);
  bool process_has_ended(const Case& it) const;

  const Connector::Knowledge knowledge_;
  const std::chrono::milliseconds heal_;
  const Events events_;
  std::vector<Case> cases_;  // by peer
  std::size_t open_ = 0;
  std::list<Attempt> attempts_;
};

}  // namespace ringdp
