#include "mesh/rendezvous.h"

#include <unistd.h>

#include "base/error.h"
#include "mesh/meeting.h"

namespace ringdp {

std::vector<MetPeer> meet(Store& store, const RendezvousOptions& options) {
  if (options.rank < 0 || options.rank >= options.world)
    throw Error(ErrorKind::kValue,
                "rank " + std::to_string(options.rank) + " of " + std::to_string(options.world) + " does not exist");
  if (options.world == 1) {
    std::vector<MetPeer> peers(1);
    peers[0].info = {0, options.host_name.empty() ? host_name() : options.host_name, getpid()};
    peers[0].host_identity = host_identity(options.host_id);
    peers[0].hello = options.hello;
    return peers;
  }
  Meeting meeting(store, options);
  try {
    // The sockets close after the others were told: who sees one close first finds the reason in the store.
    try {
      return meeting.run();
    } catch (const StoreLost&) {
      throw;
    } catch (const Error& error) {
      throw meeting.settle_error(error, false);
    } catch (...) {
      Error stopped(ErrorKind::kInterrupted, "was stopped (Ctrl-C, or an exception of its own) while the ranks met");
      meeting.settle_error(stopped, true);
      throw;
    }
  } catch (const StoreLost& error) {
    throw meeting.store_lost(error);
  }
}

}  // namespace ringdp
