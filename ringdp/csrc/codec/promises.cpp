#include "codec/promises.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "base/error.h"
#include "kernels/elements.h"
#include "kernels/float_mode.h"

namespace ringdp {
namespace {

constexpr std::size_t kFence = 16 * 1024;  // guard bytes on either side of a buffer
constexpr std::size_t kUnit = 256;
constexpr std::array<std::size_t, 14> kCounts{1, 2, 31, 63, 64, 65, 255, 256, 257, 511, 1000, 1024, 5000, 8192};

using Floats = std::vector<float>;
using Bytes = std::vector<std::byte>;

// A buffer between guard bytes, `offset` bytes behind an aligned address.
template <class T>
class Fenced {
 public:
  Fenced(std::size_t count, std::byte fill, std::size_t offset = 0)
      : begin_(kFence + offset), bytes_(count * sizeof(T)), all_(bytes_ + offset + 2 * kFence, fill), fill_(fill) {}
  explicit Fenced(const std::vector<T>& values) : Fenced(values.size(), std::byte{0xa5}) {
    std::memcpy(data(), values.data(), bytes_);
  }
  T* data() { return reinterpret_cast<T*>(all_.data() + begin_); }
  std::vector<T> values() {
    std::vector<T> out(bytes_ / sizeof(T));
    std::memcpy(out.data(), data(), bytes_);
    return out;
  }
  bool intact() const {
    const auto untouched = [this](std::byte it) { return it == fill_; };
    const auto end = static_cast<std::ptrdiff_t>(begin_ + bytes_);
    return std::all_of(all_.begin(), all_.begin() + static_cast<std::ptrdiff_t>(begin_), untouched) &&
           std::all_of(all_.begin() + end, all_.end(), untouched);
  }

 private:
  std::size_t begin_, bytes_;
  Bytes all_;
  std::byte fill_;
};

// The same numbers in every run and on every machine.
class Numbers {
 public:
  explicit Numbers(uint64_t seed) : state_(seed) {}
  uint64_t next() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15ULL;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
    return z ^ (z >> 31);
  }
  // About a Gaussian.
  float normal() {
    float sum = 0.0f;
    for (int i = 0; i < 12; ++i) sum += static_cast<float>(next() >> 40) * 0x1p-24f;
    return sum - 6.0f;
  }

 private:
  uint64_t state_;
};

Floats gaussian(std::size_t count, uint64_t seed, float scale = 1.0f) {
  Numbers numbers(seed);
  Floats x(count);
  for (float& it : x) it = numbers.normal() * scale;
  return x;
}

template <class T>
bool same(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

std::string elements(std::size_t count) { return std::to_string(count) + (count == 1 ? " element" : " elements"); }

struct Astray {};  // a guard byte was written

class Trial {
 public:
  explicit Trial(const Codec& codec) : codec_(codec) {}

  std::vector<std::string> run() {
    const FloatModeScope float_mode;
    try {
      for (const std::size_t count : kCounts) {
        for (const float scale : {1.0f, 1e-3f, 0.0f, 0x1p-140f}) plain(gaussian(count, count, scale));
        feedback(count);
        any_bytes(count);
        not_finite(count);
      }
      cuts();
    } catch (const Astray&) {
    } catch (const Error& error) {
      say(error.what());
    }
    return std::move(said_);
  }

 private:
  void say(const std::string& what) {
    if (std::find(said_.begin(), said_.end(), what) == said_.end()) said_.push_back(what);
  }

  template <class T>
  void expect_intact(const char* function, const Fenced<T>& memory, const char* what, std::size_t count) {
    if (memory.intact()) return;
    say(std::string(function) + " writes outside " + what + " of " + elements(count));
    throw Astray();
  }

  void expect_unchanged(const char* function, Fenced<float>& memory, const Floats& values) {
    expect_intact(function, memory, "its input", values.size());
    if (!same(memory.values(), values)) say(std::string(function) + " changes its input");
  }

  std::pair<Bytes, Encoded> compress(const Floats& values, std::byte fill = std::byte{0x5a}, std::size_t offset = 0) {
    Fenced<float> x(values);
    Fenced<std::byte> code(codec_.encoded_bytes(values.size()), fill, offset);
    const Encoded seen = codec_.compress(code.data(), x.data(), values.size());
    expect_intact("compress", code, "the code", values.size());
    expect_unchanged("compress", x, values);
    return {code.values(), seen};
  }

  Floats decode(const Bytes& bytes, std::size_t count, std::size_t offset = 0) {
    Fenced<std::byte> code(bytes.size(), std::byte{0xa5}, offset);
    std::memcpy(code.data(), bytes.data(), bytes.size());
    Fenced<float> out(count, std::byte{0x5a});
    codec_.decode_set(out.data(), code.data(), count);
    expect_intact("decode_set", out, "the output", count);
    expect_intact("decode_set", code, "its input", count);
    if (!same(code.values(), bytes)) say("decode_set changes the code");
    return out.values();
  }

  void plain(const Floats& x) {
    const std::size_t count = x.size();
    const auto [code, seen] = compress(x);
    if (seen != Encoded::kFinite) say("compress returns RINGDP_NOT_FINITE for finite elements");
    for (const std::size_t offset : {1, 2, 3, 7}) {
      const Bytes other = compress(x, std::byte(0xff >> offset), offset).first;
      if (!same(code, other))
        say("two calls of compress gave different codes of " + elements(count) +
            ": it must write every byte of the code, and depend on nothing but the elements");
      if (!same(decode(code, count), decode(code, count, offset)))
        say("two calls of decode_set gave different elements");
    }
    added(code, count);
  }

  void added(const Bytes& code, std::size_t count) {
    Floats wanted = gaussian(count, 7);
    Fenced<float> sum(wanted);
    const Floats decoded = decode(code, count);
    for (std::size_t i = 0; i < count; ++i) wanted[i] += decoded[i];
    codec_.decode_add(sum.data(), code.data(), count);
    expect_intact("decode_add", sum, "the sum", count);
    if (!same(sum.values(), wanted))
      say("decode_add does not give sum + decode_set, rounded once, of " + elements(count));
  }

  void feedback(std::size_t count) {
    const Floats x = gaussian(count, 11, 8.0f), residual = gaussian(count, 13, 0.01f);
    const float factor = 16.0f;
    Fenced<float> input(x), old(residual), next(count, std::byte{0x5a});
    Fenced<std::byte> code(codec_.encoded_bytes(count), std::byte{0x5a}, 1);
    const Encoded seen =
        codec_.compress_with_feedback(code.data(), input.data(), old.data(), next.data(), factor, count);
    const char* function = "compress_with_feedback";
    expect_intact(function, code, "the code", count);
    expect_intact(function, next, "the new residual", count);
    expect_unchanged(function, input, x);
    expect_unchanged(function, old, residual);
    if (seen != Encoded::kFinite) say(std::string(function) + " returns RINGDP_NOT_FINITE for finite elements");
    Floats v(count), wanted(count);
    for (std::size_t i = 0; i < count; ++i) v[i] = x[i] + factor * residual[i];
    const Bytes plainly = compress(v).first;
    if (!same(code.values(), plainly))
      say(std::string(function) + " does not give the code of x + factor * residual of " + elements(count));
    const Floats decoded = decode(plainly, count);
    for (std::size_t i = 0; i < count; ++i) wanted[i] = (v[i] - decoded[i]) / factor;
    if (!same(next.values(), wanted))
      say(std::string(function) + " does not leave (v - decode(code)) / factor of " + elements(count));
  }

  // Checks only where they are written.
  void any_bytes(std::size_t count) {
    Numbers numbers(count);
    Bytes code(codec_.encoded_bytes(count));
    for (const uint64_t kind : {0, 1, 2}) {
      for (std::byte& it : code)
        it = kind == 0 ? std::byte(numbers.next()) : kind == 1 ? std::byte{0xff} : std::byte{0};
      (void)decode(code, count);
      Fenced<float> sum(gaussian(count, 7));
      codec_.decode_add(sum.data(), code.data(), count);
      expect_intact("decode_add", sum, "the sum", count);
    }
  }

  void not_finite(std::size_t count) {
    for (const float value : {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
                              std::numeric_limits<float>::quiet_NaN()}) {
      Floats x = gaussian(count, count);
      const std::size_t at = count / 2;
      x[at] = value;
      const auto [code, seen] = compress(x);
      const std::string what = std::isnan(value) ? "a NaN" : "an infinity";
      if (seen != Encoded::kNonFinite) say("compress returns RINGDP_FINITE where " + what + " is among the elements");
      const Floats decoded = decode(code, count);
      const std::size_t begin = at / codec_.block * codec_.block, end = std::min(begin + codec_.block, count);
      const auto finite = [](float it) { return std::isfinite(it); };
      const auto* values = decoded.data();
      if (std::all_of(values + begin, values + end, finite))
        say(what + " decodes to finite elements: other ranks would not see the overflow");
      if (!std::all_of(values, values + begin, finite) || !std::all_of(values + end, values + count, finite))
        say(what + " decodes to elements that are not finite outside its block of " + std::to_string(codec_.block));
      const Floats zeros(count, 0.0f);
      Fenced<float> next(count, std::byte{0x5a});
      Fenced<std::byte> fed(code.size(), std::byte{0x5a});
      const Encoded again = codec_.compress_with_feedback(fed.data(), x.data(), zeros.data(), next.data(), 1.0f, count);
      expect_intact("compress_with_feedback", fed, "the code", count);
      expect_intact("compress_with_feedback", next, "the new residual", count);
      if (again != Encoded::kNonFinite)
        say("compress_with_feedback returns RINGDP_FINITE where " + what + " is among the elements");
    }
  }

  // Pieces give what the whole gives there.
  void cuts() {
    Floats x = gaussian(2000, 17);
    for (std::size_t i = 0; i < x.size(); ++i) x[i] *= static_cast<float>(1 + i / codec_.block);
    const Floats whole = decode(compress(x).first, x.size());
    for (const std::size_t step : {kUnit, std::size_t{3} * kUnit}) {
      Floats together;
      for (std::size_t begin = 0; begin < x.size(); begin += step) {
        const Floats piece(x.begin() + static_cast<std::ptrdiff_t>(begin),
                           x.begin() + static_cast<std::ptrdiff_t>(std::min(begin + step, x.size())));
        const Floats decoded = decode(compress(piece).first, piece.size());
        together.insert(together.end(), decoded.begin(), decoded.end());
      }
      if (!same(whole, together))
        say("pieces of " + std::to_string(step) +
            " elements decode to other elements than the whole: an element may depend on its block of " +
            std::to_string(codec_.block) + " alone");
    }
  }

  const Codec& codec_;
  std::vector<std::string> said_;
};

}  // namespace

std::vector<std::string> broken_promises(const Codec& codec) { return Trial(codec).run(); }

}  // namespace ringdp
