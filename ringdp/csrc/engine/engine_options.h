// EngineOptions: a Runtime's settings for its Engine. Value type.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "link/frame.h"
#include "transport/channel.h"

namespace ringdp {

struct EngineOptions {
  int64_t spin_us = 50;       // how long a waiting caller polls before it sleeps
  bool shares_cores = false;  // more ranks than cores here: a thread that polls yields
  // how often the log names the ranks for which an operation waits; 0: never
  int64_t stall_notice_ms = 10'000;
  int64_t host_silence_ms = 4000;  // after which a peer whose host does not answer is lost
  // how long to try to replace a broken connection; 0: the peer is lost at once
  int64_t heal_ms = 4000;
  int64_t rate_bytes_per_s = 0;                        // limit of sending over streams (TCP); 0: none
  std::string dump_folder = {};                        // for dumps and stacks; empty: none are written
  std::function<void(int peer)> want_connection = {};  // to a peer without one; called by any thread, must not block
  // Asks for a replacement of the connection to that peer, which has broken, or (`broken` false) is silent. As above.
  std::function<void(int peer, bool broken)> heal_connection = {};
  std::function<void()> check_interrupt;      // called about ten times a second by threads that wait; may throw
  std::size_t segment_bytes = kSegmentBytes;  // longest payload of a frame sent; for tests
  int64_t listen_ms = 20;                     // waits so long for an earlier failure of another rank; for tests
  std::function<std::unique_ptr<Channel>(std::unique_ptr<Channel>, int peer)> wrap_channel;  // for tests
};

}  // namespace ringdp
