// Codecs from shared libraries, whose interface is include/ringdp/compressor.h. An accepted library stays loaded until
// the process ends. Any thread.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "codec/codec.h"

namespace ringdp {

struct Plugin {
  std::string name;
  std::string path;    // absolute, of the file that was loaded
  std::string sha256;  // of the file, in hexadecimal
  uint32_t abi_version = 0;
  std::size_t block = 0;
  uint64_t identity = 0;  // a hash of name, version, block and the file
};

// Loads the codec of the library at `path`; `codec_by_name` finds it from now on. The same file under another path is
// the same codec. Throws Error(kValue) if the file is not a library, has an unknown version of the interface, or
// another codec's name.
const Plugin& load_plugin(const std::string& path);
const Plugin* find_plugin(std::string_view sha256);  // null where no such file was loaded

inline constexpr std::size_t kFirstPlugin = 64;  // their numbers as CodecId, in the order in which they were loaded
inline constexpr std::size_t kMostPlugins = 32;

bool is_plugin(CodecId id);
const Codec* plugin_codec(CodecId id);             // null where there is none
const Codec* plugin_codec(std::string_view name);  // likewise
std::string plugin_names();                        // ", a, b", for messages

// The codec's number on the wire: its CodecId, or a hash of the library, which does not depend on the order of
// loading.
int32_t wire_number(CodecId id);
uint64_t codec_identity(CodecId id);

}  // namespace ringdp
