// Passes of the codecs and of memcpy over buffers that no cache holds, timed one by one. kernels.py compiles it with
// the codecs' own sources and flags, and calls it through ctypes. One thread.
#include "kernels/kernels.h"

#include <chrono>
#include <cstring>
#include <memory>
#include <string>

#include "codec/codec.h"

namespace {

using namespace ringdp;

constexpr std::size_t kSegment = 64 * 1024;  // elements, as in the engine

enum class Pass { kMemcpy, kCompress, kCompressWithFeedback, kDecodeSet, kDecodeAdd };

struct Buffers {
  explicit Buffers(std::size_t count)
      : x(new float[count]), other(new float[count]), residual(new float[count]), code(new std::byte[4 * count]) {
    uint32_t random = 1;
    for (std::size_t i = 0; i < count; ++i) {
      random = random * 1664525U + 1013904223U;
      x[i] = static_cast<float>(static_cast<int32_t>(random)) * 1e-12F;
      other[i] = residual[i] = 0.0F;
    }
    std::memset(code.get(), 0, 4 * count);
  }
  std::unique_ptr<float[]> x, other, residual;
  std::unique_ptr<std::byte[]> code;
};

void run(Pass pass, const Codec& codec, Buffers& it, std::size_t count) {
  for (std::size_t begin = 0; begin < count; begin += kSegment) {
    std::size_t n = std::min(kSegment, count - begin);
    float *x = it.x.get() + begin, *other = it.other.get() + begin, *residual = it.residual.get() + begin;
    std::byte* code = it.code.get() + begin / kSegment * codec.encoded_bytes(kSegment);
    switch (pass) {
      case Pass::kMemcpy:
        std::memcpy(other, x, n * sizeof(float));
        break;
      case Pass::kCompress:
        codec.compress(code, x, n);
        break;
      case Pass::kCompressWithFeedback:
        codec.compress_with_feedback(code, x, residual, residual, 1.0F, n);
        break;
      case Pass::kDecodeSet:
        codec.decode_set(other, code, n);
        break;
      case Pass::kDecodeAdd:
        codec.decode_add(other, code, n);
        break;
    }
  }
}

}  // namespace

extern "C" {

// What is used and whether that is the best here; `name` is one of isa_name's, or empty for the best. False: not here.
__attribute__((visibility("default"))) bool kernels_select(const char* name) {
  for (int isa = 0; isa <= static_cast<int>(best_isa()); ++isa)
    if (isa_name(static_cast<Isa>(isa)) == name) {
      select_isa(static_cast<Isa>(isa));
      return true;
    }
  return false;
}

__attribute__((visibility("default"))) const char* kernels_best() {
  static const std::string name(isa_name(best_isa()));
  return name.c_str();
}

// Seconds of `rounds` rounds, in each of them one of every pass: seconds[round * 5 + pass].
__attribute__((visibility("default"))) void kernels_time(const char* codec_name, std::size_t count, int rounds,
                                                         double* seconds) {
  const Codec& one = codec(codec_by_name(codec_name));
  Buffers buffers(count);
  for (int round = -1; round < rounds; ++round)  // one is not timed
    for (int pass = 0; pass < 5; ++pass) {
      auto start = std::chrono::steady_clock::now();
      run(static_cast<Pass>(pass), one, buffers, count);
      std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
      if (round >= 0) seconds[round * 5 + pass] = took.count();
    }
}
}
