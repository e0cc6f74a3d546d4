// Connector: turns "who can be reached where" into one authenticated socket per peer. Dials the lower ranks at all their
// addresses, accepts the higher ones; strangers get a bounded number of connections, a bounded time, and silence. Watches the
// sockets it has made, so that a rank that dies while others still meet is known at once. Used by one `meet`, on its thread.
#pragma once

#include <poll.h>

#include <array>
#include <list>
#include <optional>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/fd.h"
#include "mesh/handshake.h"
#include "mesh/route.h"
#include "transport/tcp.h"

namespace ringdp {

class Connector {
 public:
  // `mine`: job, epoch, world and, in `to`, this rank.
  Connector(const HandshakeFields& mine, std::vector<std::byte> secret);

  void listen_on(std::vector<TcpListener> listeners) { listeners_ = std::move(listeners); }
  bool listening() const { return !listeners_.empty(); }

  // Where a peer listens: dialled if it is a lower rank. A higher rank dials itself; with `probe` it is called up (no more)
  // when it takes its time, to see whether anything still listens there.
  void set_route(int peer, Candidates candidates, bool probe);

  void step(int wait_ms);  // waits for something to happen, at most that long, and deals with it
  bool complete() const;
  bool connected(int peer) const { return static_cast<bool>(connected_[peer]); }

  // A peer that cannot be had any more, and why in words that are true on every rank; nullopt while there is hope.
  struct Trouble {
    int peer = -1;
    bool lost = false;     // its process has ended; otherwise it may live, but not be reached
    bool refused = false;  // where it listened, nothing does
    std::string text;
  };
  std::optional<Trouble> trouble();
  std::string problem(int peer) const;  // what goes wrong with a peer that is not connected; may be empty

  std::vector<Fd> take();  // a socket per rank (none at this rank's place), when complete

 private:
  enum class Stage { kConnecting, kProbing, kAwaitReply, kAwaitHello, kAwaitConfirm, kDone, kFailed };
  struct Attempt {
    Fd fd;
    Stage stage = Stage::kConnecting;
    int peer = -1;
    std::size_t candidate = 0;  // of the peer's route, if this side dials
    bool dialled = false;
    SocketAddress address;
    Deadline deadline = Deadline::never();
    HandshakeMessage buffer{};
    std::size_t filled = 0;
    std::vector<std::byte> transcript;
    Nonce nonce{};  // of the hello
  };

  void dial_due(int peer);
  void accept_from(TcpListener& listener);
  void evict_strangers();
  void advance(Attempt& attempt);
  bool read_message(Attempt& attempt);
  bool send_message(Attempt& attempt, const HandshakeFields& fields);
  void on_connected(Attempt& attempt);
  void on_reply(Attempt& attempt);
  void on_hello(Attempt& attempt);
  void on_confirm(Attempt& attempt);
  void drop(Attempt& attempt, const std::string& why, bool refused = false, bool final = false);
  void watch(int peer);  // its socket says something
  void settle();         // takes finished attempts in, starts those that are due
  void report(const std::string& line);
  HandshakeFields fields(HandshakeType type, int peer) const;

  int rank() const { return static_cast<int>(mine_.to); }
  int world() const { return static_cast<int>(mine_.world); }

  // Begins the nonces of a rank's hellos, so that its second connection can be told from a second process of that rank.
  using Instance = std::array<std::byte, 8>;

  std::vector<TcpListener> listeners_;
  HandshakeFields mine_;
  Instance instance_{};
  std::vector<Instance> instances_;  // of the peers that are connected
  std::vector<std::byte> secret_;
  std::vector<Route> routes_;
  std::vector<Clock::time_point> probe_from_;  // per peer; for ever away where it is not to be probed
  std::vector<Fd> connected_;
  std::vector<char> watched_;
  std::vector<std::string> problems_;  // of accepted connections, the last per rank
  std::list<Attempt> attempts_;
  std::optional<Trouble> lost_;
  Clock::time_point accept_after_{};  // no descriptors are left: a pause
  Clock::time_point report_after_{};
  int unreported_ = 0;
  int turned_away_ = 0;
};

}  // namespace ringdp
