// A fast 64-bit hash of bytes, by which ranks tell whether they have the same: some 10 bytes per ns. A flipped bit,
// and any other change within one aligned word of 8 bytes, always changes it. Not against attackers. Any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace ringdp {

uint64_t hash64(std::span<const std::byte> bytes, uint64_t seed = 0);

}  // namespace ringdp
