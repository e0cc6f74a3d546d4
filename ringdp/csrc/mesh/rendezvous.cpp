#include "mesh/rendezvous.h"

#include <unistd.h>

#include <bit>

#include "base/error.h"
#include "mesh/connection_thread.h"
#include "mesh/rendezvous_run.h"
#include "transport/pair_memory.h"

namespace ringdp {
Mesh::Mesh() = default;
Mesh::~Mesh() = default;
Mesh::Mesh(Mesh&&) noexcept = default;
Mesh& Mesh::operator=(Mesh&&) noexcept = default;

Mesh meet(Store& store, const RendezvousOptions& options) {
  if (options.rank < 0 || options.rank >= options.world)
    throw Error(ErrorKind::kValue,
                "rank " + std::to_string(options.rank) + " of " + std::to_string(options.world) + " does not exist");
  std::size_t ring = options.shm_ring_bytes;
  if (ring != 0 && (!std::has_single_bit(ring) || ring < PairMemory::kMinRingBytes || ring > PairMemory::kMaxRingBytes))
    throw Error(ErrorKind::kValue, "shm_ring_bytes must be a power of two from " +
                                       std::to_string(PairMemory::kMinRingBytes) + " to " +
                                       std::to_string(PairMemory::kMaxRingBytes) + ", not " + std::to_string(ring));
  if (options.world == 1) {
    Mesh alone;
    alone.peers.resize(1);
    MeshPeer& self = alone.peers[0];
    self.info = {0, options.host_name.empty() ? host_name() : options.host_name, getpid()};
    self.host_identity = host_identity(options.host_id);
    self.site = options.site;
    self.hello = options.hello;
    return alone;
  }
  RendezvousRun rendezvous(store, options);
  try {
    // Publishes the failure before the sockets close: a rank that sees one close finds the reason in the store.
    try {
      return rendezvous.run();
    } catch (const StoreLost&) {
      throw;
    } catch (const Error& error) {
      throw rendezvous.agree_on_error(error, false);
    } catch (const std::exception& error) {  // of check_interrupt: a signal's handler raised it
      std::string what = error.what();
      what = what.substr(0, what.find('\n'));
      Error stopped(ErrorKind::kInterrupted, "was stopped while the ranks met, by " + what);
      rendezvous.agree_on_error(stopped, true);
      throw;
    }
  } catch (const StoreLost& error) {
    throw rendezvous.store_lost(error);
  }
}

}  // namespace ringdp
