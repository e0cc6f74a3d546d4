// LinkRepair: replaces a broken connection. Until then its Link queues frames, as before its first connection. Each
// side says how many frames it has received; the other sends the rest again. Neither side may drop a sent frame before
// the peer has read it (not only its kernel acknowledged it): so `hold` on both sides comes before `settle` on either
// (mesh/redialler.h). Owned by a Link, used by its owner on the thread that drives the engine.
#pragma once

#include <cstdint>
#include <memory>

#include "base/fd.h"
#include "mesh/connection.h"
#include "mesh/link_receiver.h"
#include "mesh/link_sender.h"

namespace ringdp {

class LinkRepair {
 public:
  LinkRepair(Connection& connection, LinkSender& sender, LinkReceiver& receiver, bool on)
      : connection_(connection), sender_(sender), receiver_(receiver), on_(on) {}

  // Whether its connection is replaced when it breaks. Shared memory does not break.
  bool possible() const {
    return on_ && connection_.usable() && (connection_.connected() || connection_.healing()) && !connection_.direct();
  }
  void hold() { connection_.hold(); }  // from now on this channel sends nothing, and no sent frame is dropped
  // closes the sending side: the peer sees the end, and what it still sends is read
  void stop_sending();
  void drain();      // reads what has come on it; throws ConnectionBroken if it had ended
  void interrupt();  // destroys the channel
  uint64_t frames_taken() const { return receiver_.frames(); }
  // To a peer that has received `taken` frames. False: a frame that it lacks was dropped here.
  bool resume(std::unique_ptr<Channel> channel, uint64_t taken);
  void add_stream(Fd socket);  // to the channel of `resume`, if that is intact

 private:
  Connection& connection_;
  LinkSender& sender_;
  LinkReceiver& receiver_;
  const bool on_;
};

}  // namespace ringdp
