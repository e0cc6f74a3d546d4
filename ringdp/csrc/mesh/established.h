// Established: the established connections of a Connector, which it watches until they are taken. One that ends is
// dialled again, with a higher number (HandshakeFields::number): of two connections of a pair the one with the higher
// number is used, on both sides, until a channel is made of it (`fix`). A pair that is far apart has further ones
// (ExtraStreams), and is connected when all are established. Owned by the Connector, used by its thread; owns the
// sockets until they are taken.
#pragma once

#include <poll.h>

#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/fd.h"
#include "mesh/extra_streams.h"
#include "mesh/handshake_attempt.h"
#include "mesh/shared_message.h"

namespace ringdp {

class Established {
 public:
  struct Connected {
    int peer = -1;
    Fd socket;
    std::vector<Fd> more = {};  // streams of the same pair
  };
  struct Lost {
    int peer = -1;
    GivenUp given_up;  // the reason, if the peer sent one before it left
  };

  Established(int world, ExtraStreams streams);

  ExtraStreams& streams() { return streams_; }
  const ExtraStreams& streams() const { return streams_; }
  bool joined(int peer) const { return peers_[peer].joined; }  // its first one is made, and perhaps taken
  bool complete(int peer) const { return joined(peer) && streams_.complete(peer); }
  // Whether a connection with that number would replace the present or last one.
  bool wanting(int peer, uint64_t number) const { return !peers_[peer].fixed && number > peers_[peer].number; }
  bool fixed(int peer) const { return peers_[peer].fixed; }
  uint64_t number(int peer) const { return peers_[peer].number; }  // 0: there was none
  // Whether the hello with this nonce is from the process that dialled the peer's first connection, if one did.
  bool same_process(int peer, const Nonce& nonce) const;
  const SocketAddress& dialled(int peer) const { return peers_[peer].dialled; }  // of length 0 where the peer has

  void collect(HandshakeAttempts& attempts);  // those that are done; the others stay as they are
  std::vector<Connected> take();              // pairs that were not taken before
  void forget(int peer);                      // what is incomplete, and that it was lost
  void lose(int peer);                        // its connection has ended, here or after it was taken
  void fix(int peer);                         // a channel was made of it: it is not replaced here any more

  void poll_for(std::vector<pollfd>& polled) const;
  void watch(std::span<const pollfd> polled);                          // which begins with those of `poll_for`
  std::vector<int> take_ended() { return std::exchange(ended_, {}); }  // without a reason
  const std::optional<Lost>& lost() const { return lost_; }
  void notify(const GivenUp& why);  // sends it to the peers whose connections were not taken

 private:
  struct Peer {
    bool joined = false;
    bool watched = false;
    bool fixed = false;
    uint64_t number = 0;
    Fd socket;              // until it is taken
    SocketAddress dialled;  // by which it was made, where this side has dialled
    HandshakeSelf::Instance instance{};
  };

  void note_end(int peer);

  ExtraStreams streams_;
  std::vector<Peer> peers_;
  std::vector<int> ended_;
  std::optional<Lost> lost_;  // the first, until it is forgotten
};

// The first problem, if any, of the sockets of these pairs: see transport/congestion.h.
std::string ask_for_congestion(const std::vector<Established::Connected>& connected, const std::string& setting);

}  // namespace ringdp
