// RedialTries: the results of dialling a peer's addresses to replace its connection: which to dial next and when, and
// whether its process has ended, since its host refuses connections that it accepted before. Bookkeeping only, time
// comes in from outside. Owned by a Redialler, used by its thread.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "transport/tcp.h"

namespace ringdp {

class RedialTries {
 public:
  // `dials`: false if this side only knocks. The first address is the one that was in use.
  void restart(std::size_t addresses, bool dials, Clock::time_point now);

  bool due(std::size_t address, Clock::time_point now) const { return now >= tries_[address].next; }
  void begun(std::size_t address, Clock::time_point now);
  void connected(std::size_t address);
  void failed(std::size_t address, const std::string& why, bool refused);  // `why`: empty keeps the last reason

  bool process_has_ended() const;
  std::string text(const std::vector<SocketAddress>& addresses) const;  // what was tried

 private:
  struct Try {
    Clock::time_point next{};
    int failures = 0;
    bool refused = false;  // the last time
    std::string why = {};
  };

  std::vector<Try> tries_;
  bool dials_ = false;
};

}  // namespace ringdp
