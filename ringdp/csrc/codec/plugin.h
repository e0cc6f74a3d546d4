// Codecs from shared libraries: include/ringdp/compressor.h says what these offer. A library that was accepted stays
// loaded as long as the process. Any thread.
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

// The codec of the library at `path`: `codec_by_name` knows it from now on. The same file again, wherever it lies, is
// the same codec. Throws Error(kValue) for a file that is not a library, that follows no version known here, or that
// brings another codec's name.
const Plugin& load_plugin(const std::string& path);
const Plugin* find_plugin(std::string_view sha256);  // null where no such file was loaded

inline constexpr std::size_t kFirstPlugin = 64;  // their numbers as CodecId, in the order in which they were loaded
inline constexpr std::size_t kMostPlugins = 32;

bool is_plugin(CodecId id);
const Codec* plugin_codec(CodecId id);             // null where there is none
const Codec* plugin_codec(std::string_view name);  // likewise
std::string plugin_names();                        // ", a, b", for messages

// What other ranks call the codec: its CodecId, or a hash of what the library is, whatever the order of loading.
int32_t wire_number(CodecId id);
uint64_t codec_identity(CodecId id);

}  // namespace ringdp
