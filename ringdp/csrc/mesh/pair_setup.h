// PairSetup: how one pair of ranks of a host comes to share memory, or learns why it cannot. The lower rank makes the
// memory and waits with it at its FdSocket; over the pair's authenticated TCP connection it tells the higher one
// where. That one fetches it, and alone decides: accepted, or refused with the reason, and then the pair uses its
// fallback. Nothing blocks. What is decided stays so. The TCP connection may end and another one take its place at any
// time: each side then says again what it had said on it, and ignores what it had heard. A pair that has come to share
// memory does not need it any more. Owns the pair's connections until a channel is made of them. Owned by a
// SharedSetup and used by its thread.
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
#include "mesh/fd_socket.h"
#include "mesh/shared_message.h"
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

  struct Trouble {
    int peer = -1;
    bool lost = false;  // it has left, or died; otherwise it talks nonsense
    std::string text;
    std::optional<GivenUp> given_up = {};  // if `lost`: it said why before it left
  };

  PairSetup() = default;  // without a connection
  // Settled until one of the three below begins the set-up. `streams`: further connections with the same rank.
  PairSetup(const Terms& terms, Fd tcp, std::vector<Fd> streams);

  void offer(FdSocket& fd_socket);        // the lower rank
  void fail(const std::string& problem);  // the lower rank, where it has no memory to offer; tells the peer
  void await_offer();                     // the higher rank

  bool connected() const { return connected_; }                     // until it is taken, also while it is cut
  bool cut() const { return cut_ && !shares(); }                    // its TCP connection has ended, and it needs one
  void reconnect(Fd tcp, std::vector<Fd> streams);                  // another one
  bool shares() const { return settled() && memory_.has_value(); }  // memory, that is
  bool settled() const { return stage_ == Stage::kSettled; }        // it is decided what carries the bytes
  bool hands_out() const { return stage_ == Stage::kAwaitAnswer; }  // this rank's FdSocket is needed
  const std::string& problem() const { return problem_; }           // why it uses its fallback; same words on both

  // Appends what can be read; returns the longest that may be waited for it, given that it may be `wait_ms`.
  int poll_for(std::vector<pollfd>& polled, int wait_ms) const;
  // The same of a settled one that is not to be read yet: only that its connection over TCP ends, see `note_end`.
  void watch_for_end(std::vector<pollfd>& polled) const;
  void note_end() { end_tcp(); }
  // Something came at one of these descriptors. What a settled pair hears is for its owner.
  std::optional<SharedMessage> hear(int fd);
  void hand_out(FdSocket::Client client);          // the peer has come to this rank's FdSocket
  void move_on();                                  // what waits for time alone
  void say(const SharedMessage& message);          // over what connects them: memory has its socket
  void out_of_turn(const SharedMessage& message);  // that its owner does not expect
  std::optional<Trouble> take_trouble() { return std::exchange(trouble_, std::nullopt); }

  std::unique_ptr<Channel> take(const Transport& without_memory);  // once it is settled

 private:
  enum class Stage { kAwaitOffer, kConnecting, kAwaitMemory, kAwaitAnswer, kSettled };

  std::optional<SharedMessage> hear_tcp();
  std::optional<SharedMessage> hear_unix();
  std::optional<SharedMessage> given_up_or(const SharedMessage& message);
  void end_tcp();
  void on_message(const SharedMessage& message);
  void on_offer();
  void on_memory(const SharedMessage& reply);
  void connect();
  void refuse(const std::string& reason);  // tells the peer
  void use_fallback(const std::string& reason);
  void use_memory();
  void report(bool lost, const std::string& text);

  Terms terms_;
  bool connected_ = false;
  bool cut_ = false;
  bool negotiates_ = false;  // memory was, or is, to be set up
  Fd tcp_;                   // if `cut_`: shut down, for a channel that is made again as any that breaks
  std::vector<Fd> streams_;  // further connections
  SharedReader tcp_reader_;
  Stage stage_ = Stage::kSettled;
  SharedMessage offer_;
  Fd handout_;      // what the peer is to fetch
  Fd unix_socket_;  // connected to the peer's, or the peer's connection to ours
  SharedReader unix_reader_;
  Deadline deadline_ = Deadline::never();
  std::optional<PairMemory> memory_;
  std::string problem_;
  std::optional<Trouble> trouble_;  // the first, until it is taken
};

}  // namespace ringdp
