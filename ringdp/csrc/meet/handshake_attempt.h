// HandshakeAttempt: one connection's steps of authentication, on either side, and those of the resume if it replaces a
// broken one (handshake.h). It sends, reads and checks; decisions that depend on other connections are its owner's, by
// an Event. Nothing blocks. Owns the socket until it is taken. Owned by a Dialing, an Accepting or a Redialler, and
// used by its thread.
#pragma once

#include <poll.h>

#include <array>
#include <cstddef>
#include <list>
#include <memory>
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

  // How long the other side may take.
  struct Patience {
    int64_t connecting_ms = 0;  // 0: as long as its owner lets it; a further stream as long as its answer
    int64_t answer_ms = 30'000;
    int64_t stream_ms = 30'000;  // the answer on a further connection of a pair
    int64_t padding_ms = 0;      // 0: it comes within the time of the answer
    int64_t resume_ms = 0;
  };

  HandshakeFields mine;  // job, epoch, world and, in `to`, this rank; and the purpose
  std::vector<std::byte> secret;
  Instance instance{};
  Patience patience = {};
  bool turns = false;  // a knock's connection stays: ranks have a door, since not all can be connected to
  std::shared_ptr<const TlsContext> tls = {};

  bool resumes() const { return mine.purpose == Purpose::kResume; }  // these connections replace broken ones
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
    uint64_t frames_taken = 0;  // by the peer, as its resume says
    uint8_t met = 0;            // of the peer's reply, see HandshakeFields
    std::size_t candidate = 0;  // of the peer's route, if this side dials the first
    SocketAddress address = {};
    bool probe = false;  // the peer is only asked to connect
    bool dialled = false;
    bool turned = false;         // the other side has dialled, and knocked
    HandshakeFields hello = {};  // of an accepted one
  };

  struct Failure {
    std::string why;                      // empty: it is not needed
    bool refused = false;                 // nothing listens there
    bool final = false;                   // a retry cannot succeed (another job, another rank)
    bool foreign = false;                 // it was not the peer that answered there
    std::optional<Refusal> refusal = {};  // of the peer
    std::string large = {};               // if large packets do not arrive: on which connection
  };

  // What its owner decides next.
  enum class Event {
    kNone,
    kConnected,  // dialled: `greet`, or `knock`
    kProven,     // dialled: it is the peer, and large packets arrive: `confirm`, `refuse`, `close` or `fail`
    kHello,      // accepted: its hello (or knock) is authentic: `reply`, `refuse`, `close`, `fail`, or move it away
    kConfirmed,  // accepted, and it resumes: `await_resume`, or for a further stream `take_socket`; or as for kProven
    kResumed     // the peer has said how many frames it has taken: `resume`, unless this side has; and `take_socket`
  };
  enum class Stage {
    kConnecting,
    kAwaitReply,
    kAwaitHello,
    kAwaitConfirm,
    kAwaitPadding,
    kAwaitResume,
    kDone,
    kClosed
  };

  HandshakeAttempt(const HandshakeSelf& self, Facts dialled);
  HandshakeAttempt(Fd accepted, const SocketAddress& from);

  const Facts& facts() const { return facts_; }
  int fd() const { return socket_.fd(); }
  PeerSocket take_socket(const HandshakeSelf& self) {
    stage_ = Stage::kDone;
    return {socket_.take(),
            {.tls = self.tls,
             .key = socket_.key(self.secret),
             .dialled = facts_.dialled,
             .counted = self.mine.tls == TlsMode::kCounted}};
  }
  Stage stage() const { return stage_; }
  bool over() const { return stage_ == Stage::kDone || stage_ == Stage::kClosed; }
  bool lacks_padding() const;  // which is overdue

  Event advance(const HandshakeSelf& self);  // the socket is ready
  void expire(const HandshakeSelf& self);    // if its time is over
  void fail(const std::string& why, bool refused = false, bool final = false);
  void close();  // without a failure
  std::optional<Failure> take_failure() { return std::exchange(failure_, std::nullopt); }

  // `number`: see Facts.
  // And closes; or awaits the hello, as one that was accepted does.
  bool knock(const HandshakeSelf& self, uint64_t number);
  void turn(int peer);  // accepted, with a knock that stays: goes on as one that this side has dialled, by `greet`
  void greet(const HandshakeSelf& self, uint64_t number);
  void confirm(const HandshakeSelf& self, int streams);
  void reply(const HandshakeSelf& self);
  void refuse(const HandshakeSelf& self, Refusal verdict);  // and closes
  void await_resume(const HandshakeSelf& self);
  bool resume(const HandshakeSelf& self, uint64_t frames_taken);

 private:
  Event on_reply(const HandshakeSelf& self);
  Event on_hello(const HandshakeSelf& self);
  Event on_confirm(const HandshakeSelf& self);
  Event on_resume(const HandshakeSelf& self);
  void on_refusal(const HandshakeSelf& self, const HandshakeFields& refusal);
  void await_answer(const HandshakeSelf& self);
  Event await_padding(const HandshakeSelf& self, std::size_t bytes);
  Event on_padding(const HandshakeSelf& self);
  bool send(const HandshakeSelf& self, HandshakeFields fields);

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
