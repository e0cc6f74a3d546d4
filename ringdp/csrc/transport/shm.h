// The Channel between two processes of one host, through memory that both have mapped.
#pragma once

#include <memory>
#include <string>

#include "base/fd.h"
#include "transport/channel.h"
#include "transport/pair_memory.h"

namespace ringdp {

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
