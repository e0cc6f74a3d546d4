// The memory that the ranks of a host share (SharedSetup), and how all ranks learn that all are ready (ReadyTree).
#pragma once

#include <poll.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/fd.h"
#include "shared/fd_socket.h"
#include "shared/pair_setup.h"
#include "transport/channel.h"
#include "transport/transport.h"

namespace ringdp {

// ReadyTree: a barrier over existing connections. The parent of rank r is rank (r - 1) / 4. A rank that is ready, and
// has the reports of its children, reports to its parent; rank 0 then knows that all are ready and informs its
// children, and these theirs. Each report has the largest number of its subtree, and the way down the largest of all.
// All ranks together send 2 (n - 1) messages, of which 2 log4(n) follow one another, and no rank communicates with
// more than five others. Bookkeeping only: SharedSetup sends the messages. Used by the thread of the rendezvous.
class ReadyTree {
 public:
  ReadyTree(int rank, int world);

  bool is_neighbour(int peer) const;
  int parent() const { return parent_; }  // -1: this is rank 0
  static int parent_of(int rank);         // the same
  const std::vector<int>& children() const { return children_; }

  void set_ready(int64_t number);  // the first call counts
  // The report of a child: its subtree is ready, with the largest `number`. False: it was not expected. It may come
  // again, over another connection.
  bool take_report(int peer, int64_t number);
  // the parent's message that all are ready; false and repetition as above
  bool take_all_ready(int peer, int64_t number);

  bool to_report() const;  // this rank and all behind it are ready, and the parent (rank 0: itself) does not know yet
  void note_reported();
  bool reported() const { return reported_; }
  bool all_ready() const { return all_ready_; }
  int64_t largest() const { return largest_; }  // of this rank's subtree; once all are ready, of all ranks
  std::vector<int> awaited() const;             // the neighbours whose message is missing

 private:
  const int parent_;
  std::vector<int> children_;
  std::vector<int> silent_;  // children that have not reported
  bool ready_ = false;
  bool reported_ = false;
  bool all_ready_ = false;
  int64_t largest_ = 0;
};

// Such that a rank shares at most 8 MiB in all with up to 64 others on its host; with more, 64 KiB each way per pair.
std::size_t shared_ring_bytes(int ranks_on_host);

// Text and advice of the error of a pair that must share memory and cannot.
std::string must_share_text(const TransportChoice& choice, const std::string& problem);
std::string instead_text(const TransportChoice& choice);

// SharedSetup: sets up the memory that the ranks of a host share: a PairSetup for each peer, several at once. When the
// pairs of the start are done, a barrier (ReadyTree) tells all ranks, even if no pair shares memory. Pairs may be
// added later. Nothing blocks. A pair whose transport needs no memory has nothing to set up: its channel is opened
// over the TCP connection. A TCP connection that ends while a pair, or the tree, needs it is replaced (`take_cut`,
// `reconnect`). The messages of the tree are sent once on each connection: when this is complete, all messages to this
// rank have been read. Used by one thread, that of a `meet` and later that of ConnectionThread; owns the pairs, and
// with them their connections until they become channels.
class SharedSetup {
 public:
  struct Plan {
    // Per rank; the same at both ends. If the set-up of a required one fails, this rank does not become ready.
    std::vector<TransportChoice> transports;
    std::vector<int64_t> pids;      // per rank: as this process sees it, -1 where it does not
    int64_t round_trip_us = 0;      // the longest to a rank of another host; 0: there is none
    std::size_t ring_bytes = 0;     // each way
    std::size_t bytes_on_host = 0;  // of all pairs of the start on this host; 0: not checked against the limit
    int64_t patience_ms = 5000;     // for a peer that has made an offer, and then does not hand the memory out

    bool shares(int peer) const {  // memory will be set up with it
      const Transport* first = transports[peer].first;
      return first != nullptr && first->open == nullptr;
    }
  };

  // `sockets`: of the start: connected and authenticated, one per rank; none at this rank's place, and for those that
  // are not connected then. `streams`: further connections with them, per rank; or empty.
  SharedSetup(int rank, std::vector<PeerSocket> sockets, Plan plan, std::vector<std::vector<Fd>> streams = {});

  void add(int peer, PeerSocket socket, std::vector<Fd> streams = {});  // one that was connected later
  std::vector<int> take_cut();  // peers whose connections have ended since, and which need another one
  void reconnect(int peer, PeerSocket socket, std::vector<Fd> streams = {});  // that; or one that was connected later
  // That peer has said elsewhere that all ranks are ready, and sends nothing more here, since its connection has
  // ended.
  void note_met(int peer, int64_t round_trip_us);
  void step(int wait_ms);
  // Appends the descriptors for `step`; returns the longest time to wait for them, at most `wait_ms`.
  int poll_for(std::vector<pollfd>& polled, int wait_ms) const;
  // all ranks are ready, and this rank's children were informed
  bool complete() const;
  int64_t round_trip_us() const { return tree_.largest(); }  // when complete: the longest that any rank has
  void notify(const GivenUp& why);                           // informs the peers before this rank leaves
  const Plan& plan() const { return plan_; }
  bool needs_connection(int peer) const { return !pairs_[peer].shares(); }  // over TCP

  using Failure = PairSetup::Failure;
  const std::optional<Failure>& failure() const { return failure_; }
  void forget(int peer);  // drops its connection, and a failure with it
  // Why the pair uses its fallback; the same text on both ranks.
  const std::string& problem(int peer) const { return pairs_[peer].problem(); }
  bool decided() const;  // the transport is decided with every peer
  // peers with which it is not; after that, those whose report of the barrier is missing
  std::vector<int> awaited() const;
  int turned_away() const { return turned_away_; }

  // The pair's transport, as far as it is decided.
  const Transport& transport(int peer) const {
    const TransportChoice& choice = plan_.transports[peer];
    return problem(peer).empty() ? *choice.first : *choice.fallback;
  }
  std::vector<int> decided_now() const;     // peers whose channels can be taken
  std::unique_ptr<Channel> take(int peer);  // when complete

 private:
  PairSetup pair_of(int peer, PeerSocket socket, std::vector<Fd> streams) const;
  void begin(int peer);
  struct Said {
    bool to_it = false;   // on its present connection this rank has sent kReady or kAllReady
    bool by_it = false;   // the same
    bool is_cut = false;  // see take_cut
  };

  bool waits_for(int peer) const;  // for its part of the set-up, or of the tree
  bool watches(int peer) const;    // it may not be ready yet, and need another connection
  int poll_pairs(std::vector<pollfd>& polled, std::vector<int>& ranks, int wait_ms) const;  // and their peers
  void receive(int peer, int fd);
  void pass_on();  // sends the messages of the ReadyTree
  bool lacks_required() const;
  void note_failure(PairSetup& pair);  // keeps the first, until `forget`

  const int rank_;
  Plan plan_;
  std::string no_memory_;  // for the pairs of the start
  std::vector<PairSetup> pairs_;
  std::optional<FdSocket> fd_socket_;
  std::optional<Failure> failure_;
  ReadyTree tree_;
  std::vector<Said> said_;  // by peer
  int turned_away_ = 0;
};

}  // namespace ringdp
