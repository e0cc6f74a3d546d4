// The names of codec numbers from the wire (docs/reference/wire_format.md): a CodecId, or the hash of a codec from a
// shared library. For messages that name the codec which another rank uses. Any thread.
#pragma once

#include <cstdint>
#include <string>

namespace ringdp {

void remember_codec(int32_t number, std::string text);
std::string codec_text(int32_t number);  // "int8", or "codec N, which is not loaded here"

}  // namespace ringdp
