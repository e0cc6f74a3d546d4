// PairSetup: sets up shared memory for one pair of ranks of a host, or finds why it cannot. The lower rank makes the
// memory and offers its FdSocket over the pair's authenticated TCP connection. The higher rank fetches the descriptor
// there, and alone decides: accepted, or refused with the reason, and then the pair uses its fallback. Nothing blocks.
// A decision is final. The TCP connection may be replaced at any time: each side then repeats its messages, and
// ignores those that it has already received. A pair that shares memory does not need it any more. Owns the pair's
// connections until a channel is made of them. Owned by a SharedSetup and used by its thread.
//
//   lower rank                     higher rank
//   offer (socket, token)   ->     refused, where there is no memory to be had: nothing follows
//                           <-     token, at the socket
//   memory (descriptor)     ->     or refused, both at the socket
//                           <-     accepted, at the socket; or refused
#pragma once

#include <poll.h>
#include <sys/socket.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "base/fd.h"
#include "shared/fd_socket.h"
#include "transport/channel.h"
#include "transport/pair_memory.h"
#include "transport/transport.h"

namespace ringdp {

class PairSetup {
 public:
  struct Terms {
    int self = -1;
    int peer = -1;
    int64_t pid = -1;            // the peer's as this process sees it; -1 where it does not
    std::size_t ring_bytes = 0;  // each way
    int64_t patience_ms = 0;     // with a peer that has made an offer, and then does not hand the memory out
  };

  struct Failure {
    int peer = -1;
    bool lost = false;  // it has left or died; otherwise it sent an invalid message
    std::string text;
    std::optional<GivenUp> given_up = {};  // if `lost`: the reason that it sent before it left
  };

  PairSetup() = default;  // without a connection
  // Nothing is set up until one of the three below is called. `streams`: further connections with the same rank.
  PairSetup(const Terms& terms, PeerSocket tcp, std::vector<Fd> streams);

  void offer(FdSocket& fd_socket);        // the lower rank
  void fail(const std::string& problem);  // the lower rank, if it has no memory to offer; informs the peer
  void await_offer();                     // the higher rank

  bool connected() const { return connected_; }                     // until it is taken, also while it is cut
  bool cut() const { return cut_ && !shares(); }                    // its TCP connection has ended, and it needs one
  void reconnect(PeerSocket tcp, std::vector<Fd> streams);          // another one
  bool shares() const { return decided() && memory_.has_value(); }  // the pair shares memory
  bool decided() const { return stage_ == Stage::kDecided; }        // the transport is decided
  bool hands_out() const { return stage_ == Stage::kAwaitAnswer; }  // this rank's FdSocket is needed
  // why it uses its fallback; the same text on both ranks
  const std::string& problem() const { return problem_; }

  // Appends the descriptors to read; returns the longest time to wait for them, at most `wait_ms`.
  int poll_for(std::vector<pollfd>& polled, int wait_ms) const;
  // The same for a settled pair whose messages are not read yet: polls for the end of its TCP connection only, see
  // `note_end`.
  void watch_for_end(std::vector<pollfd>& polled) const;
  void note_end() { end_tcp(); }
  // One of these descriptors is ready. Messages to a settled pair are its owner's.
  std::optional<SharedMessage> receive(int fd);
  void hand_out(FdSocket::Client client);          // the peer has come to this rank's FdSocket
  void move_on();                                  // time-outs
  void say(const SharedMessage& message);          // over TCP, or over the Unix socket of shared memory
  void out_of_turn(const SharedMessage& message);  // a message that its owner does not expect
  std::optional<Failure> take_failure() { return std::exchange(failure_, std::nullopt); }

  std::unique_ptr<Channel> take(const Transport& without_memory);  // once it is settled

 private:
  enum class Stage { kAwaitOffer, kConnecting, kAwaitMemory, kAwaitAnswer, kDecided };

  std::optional<SharedMessage> receive_tcp();
  std::optional<SharedMessage> receive_unix();
  std::optional<SharedMessage> given_up_or(const SharedMessage& message);
  void end_tcp();
  void on_message(const SharedMessage& message);
  void on_offer();
  void on_memory(const SharedMessage& reply);
  void connect();
  void refuse(const std::string& reason);  // informs the peer
  void use_fallback(const std::string& reason);
  void use_memory();
  void report(bool lost, const std::string& text);

  Terms terms_;
  bool connected_ = false;
  bool cut_ = false;
  bool negotiates_ = false;  // memory was, or is, to be set up
  PeerSocket tcp_;           // if `cut_`: shut down, for a channel that is made again as any that breaks
  std::vector<Fd> streams_;  // further connections
  SharedReader tcp_reader_;
  SharedMac tcp_mac_;  // of what is sent
  Stage stage_ = Stage::kDecided;
  SharedMessage offer_;
  Fd handout_;      // what the peer is to fetch
  Fd unix_socket_;  // connected to the peer's, or the peer's connection to ours
  SharedReader unix_reader_;
  Deadline deadline_ = Deadline::never();
  std::optional<PairMemory> memory_;
  std::string problem_;
  std::optional<Failure> failure_;  // the first, until it is taken
};

}  // namespace ringdp
