// Prints a number for each loop over elements, of what it made of the same values: test_other_processors.py compares
// them between processors. The instruction set is the first argument. Without NaN, whose sign processors choose.
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "codec/codec.h"
#include "kernels/kernels.h"

namespace {

using namespace ringdp;

constexpr std::size_t kCount = 4099;  // ends within a vector and within a block

uint32_t drawn(uint32_t& random) { return random = random * 1664525U + 1013904223U; }

// Finite values of all magnitudes, zeros and subnormal ones among them; of integers any.
std::vector<std::byte> values(DType dtype, uint32_t seed) {
  std::vector<std::byte> bytes(kCount * dtype_size(dtype));
  for (std::byte& it : bytes) it = static_cast<std::byte>(drawn(seed) >> 24U);
  const auto keep_finite = [&](std::size_t width, std::size_t last,
                               unsigned mask) {  // an exponent that is not all ones
    for (std::size_t i = last; i < bytes.size(); i += width) bytes[i] &= static_cast<std::byte>(mask);
  };
  switch (dtype) {
    case DType::kFloat16:
      keep_finite(2, 1, 0xbf);
      break;
    case DType::kBfloat16:
      keep_finite(2, 1, 0xdf);
      break;
    case DType::kFloat32:
    case DType::kComplex64:
      keep_finite(4, 3, 0xdf);
      break;
    case DType::kFloat64:
    case DType::kComplex128:
      keep_finite(8, 7, 0xdf);
      break;
    case DType::kBool:
      for (std::byte& it : bytes) it &= std::byte{1};
      break;
    default:
      break;
  }
  return bytes;
}

void print(std::string_view what, const void* data, std::size_t bytes) {
  uint64_t hash = 14695981039346656037U;
  for (std::size_t i = 0; i < bytes; ++i) hash = (hash ^ static_cast<const unsigned char*>(data)[i]) * 1099511628211U;
  std::printf("%.*s %016llx\n", static_cast<int>(what.size()), what.data(), static_cast<unsigned long long>(hash));
}

void print(std::string_view what, const std::vector<std::byte>& it) { print(what, it.data(), it.size()); }
void print(std::string_view what, const std::vector<float>& it) { print(what, it.data(), it.size() * sizeof(float)); }

void reduce(DType dtype, ReduceOp op) {
  const ReduceKernels& it = reduce_kernels(dtype, op);
  const std::string name = std::string(dtype_name(dtype)) + " " + std::string(reduce_op_name(op));
  const std::vector<std::byte> a = values(dtype, 1), b = values(dtype, 2);
  std::vector<std::byte> out(a.size());
  it.combine(out.data(), a.data(), b.data(), kCount);
  print(name, out);
  if (it.divide != nullptr) {
    it.divide(out.data(), 3, kCount);
    print(name + " divide", out);
  }
  if (it.mean != nullptr) {
    it.mean(out.data(), a.data(), b.data(), 3, kCount);
    print(name + " mean", out);
  }
  if (it.load == nullptr) return;
  std::vector<float> sum(kCount);
  it.load(sum.data(), a.data(), kCount);
  it.accumulate(sum.data(), b.data(), kCount);
  it.store(out.data(), sum.data(), 3.0F, kCount);
  print(name + " by float32", out);
}

void encode(const Codec& it) {
  const std::string name(it.name);
  std::vector<float> x(kCount), residual(kCount), out(kCount, 0.5F);
  uint32_t random = 3;
  for (std::size_t i = 0; i < kCount; ++i) {
    x[i] = static_cast<float>(static_cast<int32_t>(drawn(random))) * 1e-12F;
    residual[i] = static_cast<float>(static_cast<int32_t>(drawn(random))) * 1e-14F;
  }
  std::vector<std::byte> code(it.encoded_bytes(kCount));
  it.compress(code.data(), x.data(), kCount);
  print(name + " compress", code);
  it.compress_with_feedback(code.data(), x.data(), residual.data(), residual.data(), 4.0F, kCount);
  print(name + " compress_with_feedback", code);
  print(name + " residual", residual);
  it.decode_add(out.data(), code.data(), kCount);
  print(name + " decode_add", out);
  it.decode_set(out.data(), code.data(), kCount);
  print(name + " decode_set", out);
}

}  // namespace

int main(int count, char** words) {
  const std::string wanted = count > 1 ? words[1] : "scalar";
  for (int isa = 0; isa <= static_cast<int>(best_isa()); ++isa)
    if (isa_name(static_cast<Isa>(isa)) == wanted) select_isa(static_cast<Isa>(isa));
  if (isa_name(current_isa()) != wanted) return 2;
  for (int dtype = 0; dtype < kDTypeCount; ++dtype)
    for (int op = 0; op < kReduceOpCount; ++op)
      if (reduction_supported(static_cast<DType>(dtype), static_cast<ReduceOp>(op)))
        reduce(static_cast<DType>(dtype), static_cast<ReduceOp>(op));
  for (const DType dtype : {DType::kFloat32, DType::kFloat64}) {
    std::vector<std::byte> x = values(dtype, 4), out(x.size());
    const std::vector<std::byte> y = values(dtype, 5);
    weigh(dtype)(out.data(), x.data(), 0.3, y.data(), 0.7, 3, kCount);
    print(std::string(dtype_name(dtype)) + " weigh", out);
    multiply(dtype)(x.data(), 0.1, kCount);
    print(std::string(dtype_name(dtype)) + " multiply", x);
  }
  for (const CodecId id : {CodecId::kFloat16, CodecId::kBfloat16, CodecId::kInt8, CodecId::kInt4, CodecId::kInt5,
                           CodecId::kInt6, CodecId::kNf4})
    encode(codec(id));
}
