// A buffer between guard bytes: intact() finds writes to them, ASan also reads. One thread.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace ringdp::testing {

// `count` elements, `offset` of them behind an address aligned to 64; all bytes are kPoison at first.
template <class T>
class Guarded {
 public:
  explicit Guarded(std::size_t count, std::size_t offset = 0) : count_(count), begin_(kGuard + offset * sizeof(T)) {
    size_ = (end() + 2 * kGuard) / kGuard * kGuard;
    bytes_.reset(static_cast<unsigned char*>(std::aligned_alloc(kGuard, size_)));
    std::memset(bytes_.get(), kPoison, size_);
    guard(true);
  }
  Guarded(const std::vector<T>& values, std::size_t offset) : Guarded(values.size(), offset) {
    std::copy(values.begin(), values.end(), data());
  }
  Guarded(Guarded&&) = default;
  Guarded& operator=(Guarded&&) = delete;
  ~Guarded() {
    if (bytes_ != nullptr) guard(false);
  }

  T* data() { return reinterpret_cast<T*>(bytes_.get() + begin_); }
  std::size_t size() const { return count_; }
  T& operator[](std::size_t i) { return data()[i]; }
  bool holds(const std::vector<T>& wanted) {
    return wanted.size() == count_ && (count_ == 0 || std::memcmp(data(), wanted.data(), count_ * sizeof(T)) == 0);
  }
  bool intact() {
    guard(false);
    bool intact = true;
    for (std::size_t i = 0; i < size_; i = i + 1 == begin_ ? end() : i + 1) intact &= bytes_.get()[i] == kPoison;
    guard(true);
    return intact;
  }

 private:
  static constexpr std::size_t kGuard = 64;
  static constexpr unsigned char kPoison = 0xa5;

  std::size_t end() const { return begin_ + count_ * sizeof(T); }
  void guard([[maybe_unused]] bool up) {
#if defined(__SANITIZE_ADDRESS__)
    if (up) {
      __asan_poison_memory_region(bytes_.get(), begin_);
      __asan_poison_memory_region(bytes_.get() + end(), size_ - end());
    } else {
      __asan_unpoison_memory_region(bytes_.get(), size_);
    }
#endif
  }

  struct Free {
    void operator()(unsigned char* bytes) const { std::free(bytes); }
  };
  std::size_t count_, begin_, size_ = 0;
  std::unique_ptr<unsigned char, Free> bytes_;
};

}  // namespace ringdp::testing
