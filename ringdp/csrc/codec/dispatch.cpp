#include "base/error.h"
#include "codec/plugin.h"
#include "codec/table.h"
#include "kernels/counting.h"
#include "kernels/kernels.h"

namespace ringdp {
namespace {

const codecs::CodecTable& table_of(Isa isa) {
  if (isa == Isa::kAvx512 && codecs::avx512_table() != nullptr) return *codecs::avx512_table();
  if (isa == Isa::kAvx2 && codecs::avx2_table() != nullptr) return *codecs::avx2_table();
  return codecs::scalar_table();
}

const Codec& find(const codecs::CodecTable& table, CodecId id) {
  const auto index = static_cast<std::size_t>(id);
  if (index < table.size()) return table[index];
  if (const Codec* plugin = plugin_codec(id)) return *plugin;
  throw Error(ErrorKind::kValue, "there is no codec number " + std::to_string(index));
}

}  // namespace

const Codec& codec(CodecId id) {
  return find(CountedWork::here() != nullptr ? codecs::counting_table() : table_of(current_isa()), id);
}

CodecId codec_by_name(std::string_view name) {
  std::string known;
  for (const Codec& one : codecs::scalar_table()) {
    if (one.name == name) return one.id;
    known += (known.empty() ? "" : ", ") + std::string(one.name);
  }
  if (const Codec* plugin = plugin_codec(name)) return plugin->id;
  throw Error(ErrorKind::kValue, "there is no codec '" + std::string(name) + "'; there are " + known + plugin_names());
}

Encoded inspect(const Codec& codec, const std::byte* code, const float* decoded, std::size_t count) {
  return codec.inspect_decodes ? inspect_elements(decoded, count) : codec.inspect(code, count);
}

Encoded inspect_elements(const float* x, std::size_t count) {
  static const FirstNonFinite find = first_non_finite(DType::kFloat32);
  return find(x, count) == count ? Encoded::kFinite : Encoded::kNonFinite;
}

}  // namespace ringdp
