// The built-in codecs for simulations: codes of the right length, which nobody writes (kernels/counting.h).
#include "kernels/counting.h"

#include "codec/table.h"

namespace ringdp::codecs {
namespace {

Encoded compress(std::byte*, const float*, std::size_t count) {
  CountedWork::here()->encoded(count * sizeof(float));
  return Encoded::kFinite;
}

Encoded compress_with_feedback(std::byte*, const float*, const float*, float*, float, std::size_t count) {
  CountedWork::here()->encoded(count * sizeof(float));
  return Encoded::kFinite;
}

void decode(float*, const std::byte*, std::size_t count) { CountedWork::here()->decoded(count * sizeof(float)); }

Encoded inspect(const std::byte*, std::size_t) { return Encoded::kFinite; }

}  // namespace

const CodecTable& counting_table() {
  static const CodecTable made = [] {
    CodecTable table = scalar_table();
    for (Codec& it : table) {
      it.compress = compress;
      it.compress_with_feedback = compress_with_feedback;
      it.decode_set = it.decode_add = decode;
      it.inspect = inspect;
    }
    return table;
  }();
  return made;
}

}  // namespace ringdp::codecs
