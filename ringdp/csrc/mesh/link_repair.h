// LinkRepair: how a connection that has broken is made again. In the meantime its Link works as one that waits for its
// first connection: it keeps what it has to send. Each side says how many frames it has taken; the other sends the
// rest again. So that a frame which one side has forgotten is never missing on the other, neither forgets any while
// the other may not have read all that its host acknowledged: `hold` on both sides comes before `settle` on either
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

  // Whether its connection is made again when it breaks. Shared memory does not break.
  bool possible() const {
    return on_ && connection_.usable() && (connection_.connected() || connection_.healing()) && !connection_.direct();
  }
  void hold() { connection_.hold(); }  // nothing is sent on this channel any more, nor forgotten
  void stop_sending();                 // nothing can be: the peer hears the end, what it still sends is read
  void drain();                        // takes in what has come on it; throws ConnectionBroken where it had ended
  void interrupt();                    // the channel goes
  uint64_t frames_taken() const { return receiver_.frames(); }
  // To a peer that has taken so many. False: one that it lacks is not here any more.
  bool resume(std::unique_ptr<Channel> channel, uint64_t taken);
  void add_stream(Fd socket);  // to the channel that it has resumed with, if that is whole

 private:
  Connection& connection_;
  LinkSender& sender_;
  LinkReceiver& receiver_;
  const bool on_;
};

}  // namespace ringdp
