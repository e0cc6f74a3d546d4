// Connector: turns "everybody's address" into one authenticated socket per peer. Connects to the lower ranks, accepts the
// higher ones; strangers get a bounded number of connections, a bounded time, and silence. Used once, by `meet`.
#pragma once

#include <poll.h>

#include <functional>
#include <list>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/fd.h"
#include "mesh/handshake.h"
#include "transport/tcp.h"

namespace ringdp {

class Connector {
 public:
  // `mine`: job, epoch, world and, in `to`, this rank.
  Connector(TcpListener& listener, const HandshakeFields& mine, std::vector<std::byte> secret);

  // `addresses[r]` for every lower rank r. Returns a socket per rank (none at this rank's place).
  // Throws Error(kHandshake) if a peer refuses, Error(kTimeout) naming who is missing and why.
  // `check_interrupt` is called some twenty times a second and may throw.
  std::vector<Fd> run(const std::vector<SocketAddress>& addresses, Deadline deadline,
                      const std::function<void()>& check_interrupt);

 private:
  enum class Stage { kConnecting, kAwaitReply, kAwaitHello, kAwaitConfirm, kDone, kFailed };
  struct Attempt {
    Fd fd;
    Stage stage = Stage::kConnecting;
    int peer = -1;
    SocketAddress address;
    Deadline deadline = Deadline::never();
    HandshakeMessage buffer{};
    std::size_t filled = 0;
    std::vector<std::byte> transcript;
  };

  void dial(int peer);
  void accept_all();
  void advance(Attempt& attempt);
  bool read_message(Attempt& attempt);
  bool send_message(Attempt& attempt, const HandshakeFields& fields);
  void on_connected(Attempt& attempt);
  void on_reply(Attempt& attempt);
  void on_hello(Attempt& attempt);
  void on_confirm(Attempt& attempt);
  void drop(Attempt& attempt, const std::string& why);
  void settle();  // takes finished attempts in, dials failed ones again
  HandshakeFields fields(HandshakeType type, int peer) const;
  std::string missing_text() const;

  TcpListener& listener_;
  HandshakeFields mine_;
  std::vector<std::byte> secret_;
  std::vector<SocketAddress> addresses_;
  std::vector<Fd> connected_;
  std::vector<std::string> problems_;  // what went wrong last, per rank
  std::vector<Clock::time_point> dial_after_;
  std::list<Attempt> attempts_;
  int dropped_strangers_ = 0;
};

}  // namespace ringdp
