#include "mesh/rendezvous.h"

#include <unistd.h>

#include <array>
#include <bit>
#include <utility>

#include "base/error.h"
#include "mesh/meeting.h"
#include "transport/pair_memory.h"

namespace ringdp {
namespace {

constexpr std::array<std::pair<TransportChoice, const char*>, 3> kTransports{
    {{TransportChoice::kAuto, "auto"}, {TransportChoice::kTcp, "tcp"}, {TransportChoice::kShm, "shm"}}};

}  // namespace

TransportChoice transport_choice(const std::string& name) {
  for (const auto& [choice, text] : kTransports)
    if (name == text) return choice;
  throw Error(ErrorKind::kValue, "transport must be auto, tcp or shm, not '" + name + "'");
}

std::string transport_name(TransportChoice choice) {
  for (const auto& [it, text] : kTransports)
    if (it == choice) return text;
  return "";
}

std::vector<MetPeer> meet(Store& store, const RendezvousOptions& options) {
  if (options.rank < 0 || options.rank >= options.world)
    throw Error(ErrorKind::kValue,
                "rank " + std::to_string(options.rank) + " of " + std::to_string(options.world) + " does not exist");
  std::size_t ring = options.shm_ring_bytes;
  if (ring != 0 && (!std::has_single_bit(ring) || ring < PairMemory::kMinRingBytes || ring > PairMemory::kMaxRingBytes))
    throw Error(ErrorKind::kValue, "shm_ring_bytes must be a power of two from " +
                                       std::to_string(PairMemory::kMinRingBytes) + " to " +
                                       std::to_string(PairMemory::kMaxRingBytes) + ", not " + std::to_string(ring));
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
