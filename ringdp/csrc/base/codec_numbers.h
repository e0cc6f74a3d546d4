// What the numbers of codecs on the wire mean here (docs/reference/wire_format.md): a CodecId, or the hash of what a
// shared library brought. So that a message can say which codec another rank believes in. Any thread.
#pragma once

#include <cstdint>
#include <string>

namespace ringdp {

void remember_codec(int32_t number, std::string text);
std::string codec_text(int32_t number);  // "int8", or that it is not known here

}  // namespace ringdp
