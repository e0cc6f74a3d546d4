// HandshakeAttempt: one connection's steps of authentication, on either side (handshake.h). It sends, reads and
// checks; decisions that depend on other connections are its owner's, by an Event. Nothing blocks. Owns the socket
// until it is taken. Owned by a Dialing or an Accepting, and used by its thread.
#pragma once

#include <poll.h>

#include <array>
#include <cstddef>
#include <list>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "base/fd.h"
#include "meet/handshake.h"
#include "transport/tcp.h"

namespace ringdp {

// This rank's part of each of its handshakes.
struct HandshakeSelf {
  // The beginning of the nonces of its hellos, which distinguishes its second connection from a second process of that
  // rank.
  using Instance = std::array<std::byte, 8>;

  HandshakeFields mine;  // job, epoch, world and, in `to`, this rank
  std::vector<std::byte> secret;
  Instance instance{};
  int64_t padding_ms = 0;  // how long padding may take

  int rank() const { return static_cast<int>(mine.to); }
  int world() const { return static_cast<int>(mine.world); }
  HandshakeFields fields(HandshakeType type, int peer) const;
};

class HandshakeAttempt {
 public:
  struct Facts {
    int peer = -1;              // of an accepted one: once it has said hello and was answered
    int stream = 0;             // 0: the pair's first connection
    int streams = 1;            // of the pair
    uint64_t number = 0;        // of the pair's connection; a later one takes the place of this
    uint8_t met = 0;            // of the peer's reply, see HandshakeFields
    std::size_t candidate = 0;  // of the peer's route, if this side dials the first
    SocketAddress address = {};
    bool probe = false;  // the peer is only asked to connect
    bool dialled = false;
    HandshakeFields hello = {};  // of an accepted one
  };

  struct Failure {
    std::string why;         // empty: it is not needed
    bool refused = false;    // nothing listens there
    bool final = false;      // a retry cannot succeed (another job, another rank)
    std::string large = {};  // if large packets do not arrive: on which connection
  };

  // What its owner decides next.
  enum class Event {
    kNone,
    kConnected,  // dialled: `greet`, or `knock`
    kProven,     // dialled: it is the peer, and large packets arrive: `confirm`, `close` or `fail`
    kHello       // accepted: its hello (or knock) is authentic: `reply`, `refuse`, `close`, `fail` or `take_socket`
  };
  enum class Stage { kConnecting, kAwaitReply, kAwaitHello, kAwaitConfirm, kAwaitPadding, kDone, kClosed };

  explicit HandshakeAttempt(Facts dialled);
  HandshakeAttempt(Fd accepted, const SocketAddress& from);

  const Facts& facts() const { return facts_; }
  int fd() const { return socket_.fd(); }
  HandshakeSocket take_socket() { return std::move(socket_); }
  Stage stage() const { return stage_; }
  bool over() const { return stage_ == Stage::kDone || stage_ == Stage::kClosed; }
  bool lacks_padding() const;  // which is overdue

  Event advance(const HandshakeSelf& self);  // the socket is ready
  void expire(const HandshakeSelf& self);    // if its time is over
  void fail(const std::string& why, bool refused = false, bool final = false);
  void close();  // without a failure
  std::optional<Failure> take_failure() { return std::exchange(failure_, std::nullopt); }

  bool knock(const HandshakeSelf& self);  // and closes
  void greet(const HandshakeSelf& self);
  void confirm(const HandshakeSelf& self, int streams);
  void reply(const HandshakeSelf& self);
  void refuse(const HandshakeSelf& self, Refusal verdict);

 private:
  Event on_reply(const HandshakeSelf& self);
  Event on_hello(const HandshakeSelf& self);
  Event on_confirm(const HandshakeSelf& self);
  Event await_padding(const HandshakeSelf& self, std::size_t bytes);
  Event on_padding();
  bool send(const HandshakeSelf& self, const HandshakeFields& fields);

  Facts facts_;
  HandshakeSocket socket_;
  Stage stage_ = Stage::kConnecting;
  Deadline deadline_ = Deadline::never();
  std::optional<Failure> failure_;
};

// Those of one side that are under way.
using HandshakeAttempts = std::list<HandshakeAttempt>;
void poll_for(const HandshakeAttempts& attempts, std::vector<pollfd>& polled);  // one of each
bool lack_padding(const HandshakeAttempts& attempts, int peer);

}  // namespace ringdp
