#include "base/text.h"

#include <vector>

namespace ringdp {
namespace {

// Bytes of the character at the start of `text`; 0 if there is none (RFC 3629, section 4).
std::size_t character_bytes(std::string_view text) {
  auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  unsigned char lead = byte(0);
  if (lead < 0x80) return 1;
  std::size_t length = lead >= 0xc2 && lead < 0xe0   ? 2
                       : lead >= 0xe0 && lead < 0xf0 ? 3
                       : lead >= 0xf0 && lead < 0xf5 ? 4
                                                     : 0;
  if (length == 0 || text.size() < length) return 0;
  for (std::size_t i = 1; i < length; ++i)
    if ((byte(i) & 0xc0) != 0x80) return 0;
  bool overlong = (lead == 0xe0 && byte(1) < 0xa0) || (lead == 0xf0 && byte(1) < 0x90);
  bool surrogate = lead == 0xed && byte(1) >= 0xa0;
  bool too_high = lead == 0xf4 && byte(1) >= 0x90;
  return overlong || surrogate || too_high ? 0 : length;
}

}  // namespace

std::string clean_text(std::string_view text, std::size_t max_bytes) {
  std::string out;
  while (!text.empty()) {
    std::size_t length = character_bytes(text);
    std::string_view piece = length == 0 ? std::string_view("?") : text.substr(0, length);
    bool control = length == 1 && (static_cast<unsigned char>(text[0]) < 0x20 || text[0] == 0x7f) && text[0] != '\n';
    if (control) piece = " ";
    if (out.size() + piece.size() > max_bytes) break;
    out += piece;
    text.remove_prefix(length == 0 ? 1 : length);
  }
  return out;
}

std::string ranks_text(std::span<const int> ranks) {
  std::vector<std::string> runs;
  for (std::size_t i = 0; i < ranks.size();) {
    std::size_t end = i + 1;
    while (end < ranks.size() && ranks[end] == ranks[end - 1] + 1) ++end;
    if (end - i == 2) end = i + 1;  // two are not a range
    runs.push_back(std::to_string(ranks[i]) + (end - i > 1 ? "-" + std::to_string(ranks[end - 1]) : ""));
    i = end;
  }
  std::string out = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < runs.size(); ++i) out += (i == 0 ? "" : i + 1 == runs.size() ? " and " : ", ") + runs[i];
  return out;
}

}  // namespace ringdp
