// Texts from the network, or for it with a limit: valid UTF-8 without control characters, never cut inside a
// character. Pure functions, any thread.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>

namespace ringdp {

// At most `max_bytes` of `text`; bytes that are not UTF-8 (RFC 3629) become '?', control characters become blanks.
std::string clean_text(std::string_view text, std::size_t max_bytes);

// "rank 3", "ranks 0-2, 5 and 7"; `ranks` ascend.
std::string ranks_text(std::span<const int> ranks);

inline std::string_view text_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

}  // namespace ringdp
