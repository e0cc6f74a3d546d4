// A fast 64-bit hash, some 10 bytes per ns, by which ranks compare their bytes. Any change within one aligned word of
// 8 bytes changes the hash. It does not protect against attackers. Any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace ringdp {

uint64_t hash64(std::span<const std::byte> bytes, uint64_t seed = 0);

}  // namespace ringdp
