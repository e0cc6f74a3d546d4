// The padding of a handshake: a packet each way, as large as the connection sends them, by which ranks learn whether
// the path between them passes such packets. Used by a HandshakeAttempt and a Redialler, on their threads.
#pragma once

#include <cstdint>

namespace ringdp {

uint32_t padding_for(int fd);   // its bytes on a connected socket; 0 inside a host
int64_t padding_patience_ms();  // how long it may take

}  // namespace ringdp
