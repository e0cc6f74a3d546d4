// Connector: turns the peers' addresses into one authenticated socket per wanted peer. It dials the lower ranks at all their
// addresses, and accepts the higher ones, whether they are wanted or not; strangers get a bounded number of connections, a
// bounded time, and no answer. It watches the sockets it has made until they are taken, so that the death of a rank is known
// at once while others still meet. A pair that is far apart gets further connections (ExtraStreams).
// connector.cpp: who is dialled, what is made, what goes wrong; connector_handshake.cpp: the steps of one connection.
// Owned by a RendezvousRun, later by LateConnections, and used by that one's thread.
#pragma once

#include <poll.h>

#include <array>
#include <list>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "base/fd.h"
#include "mesh/door.h"
#include "mesh/extra_streams.h"
#include "mesh/handshake.h"
#include "mesh/handshake_socket.h"
#include "mesh/route.h"
#include "mesh/shared_message.h"
#include "transport/congestion.h"
#include "transport/tcp.h"

namespace ringdp {

class Connector {
 public:
  // `mine`: job, epoch, world and, in `to`, this rank. `wanted`: per rank, whether to be connected with it. `streams`,
  // `congestion`: see ExtraStreams.
  Connector(const HandshakeFields& mine, std::vector<std::byte> secret, const std::vector<char>& wanted,
            int streams = 1, std::string congestion = std::string(kSystemCongestion));

  Door& door() { return door_; }

  // Where a peer listens: dialled if it is a lower rank. A higher rank dials itself; with `probe` it is asked to when it takes
  // its time, which also shows whether anything still listens there.
  // `one`: they will share memory, so one connection is enough.
  void set_route(int peer, Candidates candidates, bool probe, bool one = false);

  void want(int peer);    // from now on; its route is known
  void check(int peer);   // whether a lower rank can be reached, large packets too; the connection is not kept
  void forget(int peer);  // it is not wanted any more, and its problems are forgotten
  bool checking(int peer) const { return aims_[peer] == Aim::kCheck; }

  // Waits until something happens, there or at the descriptors of `also`, at most that long, and deals with it.
  void step(int wait_ms, std::span<const pollfd> also = {});
  bool complete() const;  // all that are wanted are connected
  bool connected(int peer) const { return joined_[peer] != 0 && streams_.complete(peer); }
  bool busy() const;  // an attempt is under way whose next step waits for time alone

  // A peer that cannot be connected any more, and the reason in a text that is true on every rank; nullopt while it still
  // may be.
  struct Trouble {
    int peer = -1;
    bool lost = false;     // its process has ended; otherwise it may live, but not be reached
    bool refused = false;  // where it listened, nothing does
    bool large = false;    // connected, but large packets do not arrive; `text`: on which connection
    std::string text;
    std::vector<int> also = {};            // if `large`: other peers with whom it looks the same
    std::optional<GivenUp> given_up = {};  // if `lost`: it said why before it left
  };
  std::optional<Trouble> trouble();
  std::string problem(int peer) const;  // what goes wrong with a peer that is not connected; may be empty

  struct Connected {
    int peer = -1;
    Fd socket;
    std::vector<Fd> more = {};  // streams of the same pair
  };
  std::vector<Connected> take();  // those that were not taken before
  // An authentic hello or knock for a connection in place of one that has broken: it is answered by another class. A knock has
  // no socket.
  struct Resumption {
    int peer = -1;
    uint64_t number = 0;
    int stream = 0;
    std::optional<HandshakeSocket> socket = {};
  };
  std::vector<Resumption> take_resumptions() { return std::exchange(resumptions_, {}); }
  // What that class needs. `addresses`: by peer; first the one by which this rank has connected to it.
  struct Knowledge {
    HandshakeFields mine;
    std::vector<std::byte> secret;
    std::vector<std::vector<SocketAddress>> addresses;
    ExtraStreams streams;  // with the same settings, of connections that take the place of others
  };
  Knowledge knowledge() const;

  void tell(const GivenUp& why);  // the peers that are connected, whose connections were not taken

 private:
  enum class Aim { kNone, kCheck, kConnect };
  enum class Stage { kConnecting, kProbing, kAwaitReply, kAwaitHello, kAwaitConfirm, kAwaitPadding, kDone, kFailed };
  struct Attempt {
    HandshakeSocket socket;
    Stage stage = Stage::kConnecting;
    int peer = -1;
    int stream = 0;             // 0: the pair's first connection
    int streams = 1;            // of the pair
    std::size_t candidate = 0;  // of the peer's route, if this side dials
    bool dialled = false;
    SocketAddress address;
    Deadline deadline = Deadline::never();
    Nonce nonce{};  // of the hello

    bool over() const { return stage == Stage::kDone || stage == Stage::kFailed; }
    bool connecting() const { return stage == Stage::kConnecting || stage == Stage::kProbing; }
  };

  void dial_due(int peer);
  void begin(Attempt&& attempt);
  void let_in(Fd socket, const SocketAddress& from);
  void evict_strangers();
  void advance(Attempt& attempt);
  bool send_message(Attempt& attempt, const HandshakeFields& fields);
  void on_connected(Attempt& attempt);
  void on_reply(Attempt& attempt);
  void on_hello(Attempt& attempt);
  void on_confirm(Attempt& attempt);
  void on_knock(const HandshakeFields& knock);
  void await_padding(Attempt& attempt, std::size_t bytes);
  void on_padding(Attempt& attempt);
  void expire(Attempt& attempt);
  Trouble large_trouble(int peer) const;
  void drop(Attempt& attempt, const std::string& why, bool refused = false, bool final = false);
  void watch(int peer);     // its socket says something
  void collect_attempts();  // takes finished attempts in, starts those that are due
  HandshakeFields fields(HandshakeType type, int peer) const;
  bool awaits(int peer) const { return aims_[peer] != Aim::kNone && joined_[peer] == 0; }

  // Begins the nonces of a rank's hellos, so that its second connection can be told from a second process of that rank.
  using Instance = std::array<std::byte, 8>;

  Door door_;
  HandshakeFields mine_;
  const int rank_;
  const int world_;
  const int64_t padding_ms_;
  Instance instance_{};
  std::vector<Instance> instances_;  // of the peers that are connected
  std::vector<std::byte> secret_;
  std::vector<Route> routes_;
  ExtraStreams streams_;
  std::vector<Aim> aims_;                      // per peer
  std::vector<Clock::time_point> probe_from_;  // per peer; for ever away where it is not to be probed
  std::vector<char> joined_;                   // per peer: a connection was made, and perhaps taken
  std::vector<Fd> connected_;                  // until they are taken
  std::vector<SocketAddress> dialled_;         // by which they were made, where this side has dialled
  std::vector<Resumption> resumptions_;
  std::vector<char> watched_;
  std::vector<std::string> problems_;  // of accepted connections, the last per rank
  std::vector<std::string> large_;     // per rank: the connection on which large packets from it did not arrive
  std::list<Attempt> attempts_;
  std::optional<Trouble> lost_;
};

// The first problem, if any, of the sockets of these pairs: see transport/congestion.h.
std::string ask_for_congestion(const std::vector<Connector::Connected>& connected, const std::string& setting);

}  // namespace ringdp
