// Connector: turns the peers' addresses into one authenticated connection per wanted peer, or several where the pair is
// far apart. Its Dialler begins those with lower ranks, its Acceptor takes those of higher ones, and MadeConnections
// keeps and watches what they have made until it is taken. The Connector waits for all of them at once, and says which
// peer cannot be connected any more.
// Owned by a RendezvousRun, later by LateConnections, and used by that one's thread.
#pragma once

#include <poll.h>

#include <algorithm>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "mesh/acceptor.h"
#include "mesh/dialler.h"
#include "mesh/door.h"
#include "mesh/extra_streams.h"
#include "mesh/handshake.h"
#include "mesh/made_connections.h"
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

  Door& door() { return acceptor_.door(); }

  // Where a peer listens: dialled if it is a lower rank. A higher rank dials itself; with `probe` it is asked to when
  // it takes its time, which also shows whether anything still listens there. `one`: they will share memory, so one
  // connection is enough.
  void set_route(int peer, Candidates candidates, bool probe, bool one = false);

  void want(int peer);    // from now on; its route is known
  void check(int peer);   // whether a lower rank can be reached, large packets too; the connection is not kept
  void forget(int peer);  // it is not wanted any more, and its problems are forgotten
  void lose(int peer);    // its connection, which was taken, has ended: another one is made, and can be taken
  void fix(int peer);     // there is a channel to it: nothing takes the place of its connection here any more
  // All ranks have met, those of the start are connected; in the handshakes of a peer that does not know it yet it
  // finds that.
  void note_met(int64_t round_trip_us);
  uint8_t met(int peer) const {
    return std::max(dialler_.met(peer), acceptor_.met(peer));
  }  // what that peer has said, see HandshakeFields
  bool checking(int peer) const { return dialler_.checks(peer); }

  // Waits until something happens, there or at the descriptors of `also`, at most that long, and deals with it.
  void step(int wait_ms, std::span<const pollfd> also = {});
  bool complete() const;  // all that are wanted are connected
  bool connected(int peer) const { return made_.complete(peer); }
  bool busy() const;  // an attempt is under way whose next step waits for time alone

  // A peer that cannot be connected any more, and the reason in a text that is true on every rank; nullopt while it
  // still may be.
  struct Trouble {
    int peer = -1;
    bool lost = false;     // it has left, or its process has ended; otherwise it may live, but not be reached
    bool refused = false;  // where it listened, nothing does
    bool large = false;    // connected, but large packets do not arrive; `text`: on which connection
    std::string text;
    std::vector<int> also = {};            // if `large`: other peers with whom it looks the same
    std::optional<GivenUp> given_up = {};  // if `lost`: it said why before it left
  };
  std::optional<Trouble> trouble() const;
  std::string problem(int peer) const;  // what goes wrong with a peer that is not connected; may be empty

  std::vector<int> take_ended() { return std::exchange(ended_, {}); }  // peers whose connections ended since
  using Connected = MadeConnections::Connected;
  std::vector<Connected> take() { return made_.take(); }  // those that were not taken before
  using Resumption = Acceptor::Resumption;
  std::vector<Resumption> take_resumptions() { return acceptor_.take_resumptions(); }
  // What the class that answers them needs. `addresses`: by peer; first the one by which this rank has connected to it.
  struct Knowledge {
    HandshakeFields mine;
    std::vector<std::byte> secret;
    std::vector<std::vector<SocketAddress>> addresses;
    ExtraStreams streams;  // with the same settings, of connections that take the place of others
  };
  Knowledge knowledge() const;

  void tell(const GivenUp& why) { made_.tell(why); }  // the peers that are connected, whose connections were not taken

 private:
  bool awaits(int peer) const { return dialler_.aims_at(peer) && !made_.joined(peer); }
  const std::string& large(int peer) const;  // the connection on which large packets from it did not arrive
  Trouble large_trouble(int peer) const;

  HandshakeSelf self_;
  Acceptor acceptor_;
  Dialler dialler_;
  MadeConnections made_;
  std::vector<int> ended_;
};

}  // namespace ringdp
