// EngineOptions: what a Runtime tells its Engine. Value type.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "mesh/frame.h"
#include "transport/channel.h"

namespace ringdp {

struct EngineOptions {
  int64_t spin_us = 50;                                // how long a waiting caller polls before it sleeps
  bool shares_cores = false;                           // more ranks than cores here: a thread that polls yields
  int64_t stall_notice_ms = 10'000;                    // how often a log line says who an operation waits for; 0: never
  int64_t host_silence_ms = 4000;                      // after which a peer whose host does not answer is lost
  int64_t heal_ms = 4000;                              // for which a connection that broke is made again; 0: it is lost
  int64_t rate_bytes_per_s = 0;                        // what is sent over streams (TCP) at most; 0: all that goes
  std::string dump_folder = {};                        // for dumps and stacks; empty: none are written
  std::function<void(int peer)> want_connection = {};  // to a peer without one; by any thread, must not block
  // The connection with that peer has broken, or (`broken` false) may be about to: another one is wanted. As above.
  std::function<void(int peer, bool broken)> heal_connection = {};
  std::function<void()> check_interrupt;      // called about ten times a second by threads that wait; may throw
  std::size_t segment_bytes = kSegmentBytes;  // longest payload of a frame sent; for tests
  int64_t listen_ms = 20;                     // for an earlier cause of a failure, from another rank; the same
  std::function<std::unique_ptr<Channel>(std::unique_ptr<Channel>, int peer)> wrap_channel;  // the same
};

}  // namespace ringdp
