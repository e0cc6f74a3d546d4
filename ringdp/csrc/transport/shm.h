// The Channel between two processes of one host, through memory that both have mapped.
//
// SlotWriter: copies bytes into memory that another core reads next. Two ways: through this core's caches, or past
// them (base/stream_copy.h). Which is faster depends on where the two cores are: where they share a cache, the first
// (1.3 to 2 times), where they do not, the second (2 to 3 times); and the kernel moves ranks from core to core. So the
// writer times its larger copies. It affects timing only. Used by one thread at a time.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "base/fd.h"
#include "transport/channel.h"
#include "transport/pair_memory.h"

namespace ringdp {

class SlotWriter {
 public:
  void copy(std::byte* to, const std::byte* from, std::size_t bytes);
  bool streams() const { return streams_; }

 private:
  void judge(bool slow);

  bool streams_ = false;
  int slow_in_a_row_ = 0;
  int until_probe_ = 0;
};

struct SharedPair {
  PairMemory memory;
  Fd socket;         // Unix stream, connected to the peer: its doorbell, and the sign that it lives
  int side = 0;      // 0: this process made the memory; 1: it was handed to it
  std::string peer;  // for descriptions: "rank 1"
};

std::unique_ptr<Channel> make_shm_channel(SharedPair pair);

struct Transport;
const Transport& shm_transport();

}  // namespace ringdp
