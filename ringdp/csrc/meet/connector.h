// Connector: turns the peers' addresses into one authenticated connection per wanted peer, or several where the pair
// is far apart. Its Dialing begins those with lower ranks, its Accepting takes those of higher ones, and
// Established keeps the established ones until they are taken. The Connector polls for all of them, and reports a
// peer that cannot be connected. Owned by a RendezvousRun, later by ConnectionThread, and used by its owner's thread.
#pragma once

#include <poll.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "meet/accepting.h"
#include "meet/dialing.h"
#include "meet/established.h"
#include "meet/handshake.h"
#include "shared/fd_socket.h"
#include "transport/congestion.h"
#include "transport/tcp.h"

namespace ringdp {

class Connector {
 public:
  // `turns`: see HandshakeSelf. `mine`: job, epoch, world and, in `to`, this rank. `wanted`: per rank, whether to be
  // connected with it. `streams`, `congestion`: see ExtraStreams.
  Connector(const HandshakeFields& mine, std::vector<std::byte> secret, const std::vector<char>& wanted,
            int streams = 1, std::string congestion = std::string(kSystemCongestion),
            std::shared_ptr<const TlsContext> tls = nullptr, bool turns = false);

  Listener& listener() { return accepting_.listener(); }

  // The addresses of a peer: dialled if it is a lower rank. A higher rank dials this one; with `probe` a late one is
  // asked to, which also shows whether it still listens. `one`: they will share memory, so one connection is enough.
  void set_route(int peer, Candidates candidates, bool probe, bool one = false);

  void want(int peer);    // from now on; its route is known
  void check(int peer);   // tests the path to a lower rank, large packets too; the connection is not kept
  void forget(int peer);  // it is not wanted any more; also drops its problems
  void lose(int peer);    // its connection, which was taken, has ended: makes another one, which can be taken
  void fix(int peer);     // there is a channel to it: its connection is not replaced here any more
  // All ranks are connected; from now on the replies of this rank say so, for a peer that does not know it yet.
  void note_met(int64_t round_trip_us);
  uint8_t met(int peer) const {
    return std::max(dialing_.met(peer), accepting_.met(peer));
  }  // of that peer's last message, see HandshakeFields
  bool checking(int peer) const { return dialing_.checks(peer); }

  // Waits at most `wait_ms` for its sockets or the descriptors of `also`, and handles its own.
  void step(int wait_ms, std::span<const pollfd> also = {});
  bool complete() const;  // all that are wanted are connected
  bool connected(int peer) const { return established_.complete(peer); }
  bool busy() const;  // an attempt is in progress whose next step is a time-out

  // A peer that cannot be connected any more, and the reason in a text that is true on every rank; nullopt if all may
  // still be.
  struct Failure {
    int peer = -1;
    bool lost = false;     // it has left, or its process has ended; otherwise it may live, but not be reached
    bool refused = false;  // its addresses refuse connections
    bool large = false;    // connected, but large packets do not arrive; `text`: on which connection
    std::string text;
    std::vector<int> also = {};            // if `large`: other peers with the same symptom
    std::optional<GivenUp> given_up = {};  // if `lost`: the reason that it sent before it left
  };
  std::optional<Failure> failure() const;
  std::string problem(int peer) const;  // the last problem with a peer that is not connected; may be empty

  std::vector<int> take_ended() { return std::exchange(ended_, {}); }  // peers whose connections ended since
  using Connected = Established::Connected;
  std::vector<Connected> take() { return established_.take(); }  // that were not taken before
  HandshakeAttempts take_resumptions() { return accepting_.take_resumptions(); }
  // For the Redialler, which answers them. `addresses`: by peer; first the one by which this rank has connected to it.
  struct Knowledge {
    HandshakeSelf self;
    std::vector<std::vector<SocketAddress>> addresses;
    ExtraStreams streams;  // with the same settings, for connections that replace others
  };
  Knowledge knowledge() const;

  void notify(const GivenUp& why) {
    established_.notify(why);
  }  // sends it to connected peers whose connections were not taken

 private:
  bool awaits(int peer) const { return dialing_.aims_at(peer) && !established_.joined(peer); }
  const std::string& large(int peer) const;  // the connection on which large packets from it did not arrive
  Failure large_packets_failure(int peer) const;

  HandshakeSelf self_;
  Accepting accepting_;
  Dialing dialing_;
  Established established_;
  std::vector<int> ended_;
};

}  // namespace ringdp
