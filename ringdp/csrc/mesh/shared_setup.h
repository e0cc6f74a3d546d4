// SharedSetup: how the ranks of a host come to share memory, pair by pair and all pairs at once. The lower rank of a pair
// makes the memory and waits with it behind a door; over the authenticated TCP connection it tells the higher one where. That
// one fetches it, and alone decides: accepted, or refused with the reason, and then the pair stays with TCP. At the end every
// rank tells the others that it is through, so that a death on the way is a death while the ranks met. Nothing blocks.
// Used by one `meet`, on its thread; owns the connections until they become channels.
//
//   lower rank                     higher rank
//   offer (door, token)     ->     refused, where there is no memory to be had: nothing follows
//                           <-     token, at the door
//   memory (descriptor)     ->     or refused
//                           <-     accepted, or refused
#pragma once

#include <sys/socket.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/fd.h"
#include "mesh/door.h"
#include "transport/channel.h"
#include "transport/pair_memory.h"

namespace ringdp {

// So that a rank has at most 8 MiB in all with up to 64 others on its host; with more, 64 KiB each way per pair.
std::size_t shared_ring_bytes(int ranks_on_host);

class SharedSetup {
 public:
  struct Plan {
    std::vector<char> share;        // per rank: memory is to be shared with it; both say so, or neither
    std::vector<char> await;        // per rank: that it is through matters; all that share are meant in any case
    std::vector<int64_t> pids;      // per rank: as this process sees it, -1 where it does not
    std::size_t ring_bytes = 0;     // each way
    std::size_t bytes_on_host = 0;  // of all pairs here together; 0: not to be asked for
    std::vector<char> required;     // per rank: this rank is not through while it cannot share with that one
    int64_t patience_ms = 5000;     // with a peer that has made an offer, and then does not hand the memory out
  };

  // `sockets`: connected and authenticated, one per rank; none at this rank's place.
  SharedSetup(int rank, std::vector<Fd> sockets, Plan plan);

  void step(int wait_ms);
  bool complete() const;

  struct Trouble {
    int peer = -1;
    bool lost = false;  // its connection has ended; otherwise it talks nonsense
    std::string text;
  };
  const std::optional<Trouble>& trouble() const { return trouble_; }
  const std::string& problem(int peer) const {
    return pairs_[peer].problem;
  }  // why it stays with TCP; same words on both
  std::vector<int> awaited() const;
  int turned_away() const { return turned_away_; }

  bool shared(int peer) const { return pairs_[peer].memory.has_value(); }
  std::unique_ptr<Channel> take(int peer);  // when complete

 private:
  enum class Stage { kAwaitOffer, kKnocking, kAwaitMemory, kAwaitAnswer, kSettled };
  struct Pair {
    Fd tcp;
    SharedReader tcp_reader;
    Stage stage = Stage::kSettled;
    SharedMessage offer;
    Fd handout;  // what the peer is to fetch
    Fd door;     // connected to the peer's, or the peer's visit at ours
    SharedReader door_reader;
    Deadline deadline = Deadline::never();
    std::optional<PairMemory> memory;
    std::string problem;
    bool awaited = false;
    bool through = false;
  };

  void offer(int peer);
  void say(int peer, SharedMessage message);
  void refuse(int peer, const std::string& reason);  // tells the peer
  void stay_with_tcp(int peer, const std::string& reason);
  void use_memory(int peer);
  void hear(int peer);
  void on_message(int peer, const SharedMessage& message);
  void on_offer(int peer);
  void knock_at(int peer);
  void fetch(int peer);
  void hand_out(Door::Guest guest);
  void watch(int peer);
  void say_through();
  void lose(int peer, const std::string& text);
  void object(int peer, const std::string& text);
  std::string stranger_text(int peer, const ucred& credentials) const;  // empty: it is that rank
  std::string own(const std::string& problem) const { return "rank " + std::to_string(rank_) + ": " + problem; }

  const int rank_;
  const Plan plan_;
  std::vector<Pair> pairs_;
  std::optional<Door> door_;
  std::optional<Trouble> trouble_;
  bool said_through_ = false;
  int turned_away_ = 0;
};

}  // namespace ringdp
