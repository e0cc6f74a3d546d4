// CountedWork: while one exists, the kernels and codecs that its thread looks up touch no memory: they only count the
// bytes that they would have worked on. So operations can run on memory that does not exist (simulation/simulation.h).
// Other threads are not affected. A local variable of the thread that looks kernels up; one at a time on a thread.
#pragma once

#include <cstdint>
#include <utility>

namespace ringdp {

class CountedWork {
 public:
  struct Bytes {
    uint64_t added = 0;    // of results of sums, means and products
    uint64_t encoded = 0;  // of floats
    uint64_t decoded = 0;  // of floats
  };

  CountedWork() : outer_(std::exchange(here_, this)) {}
  ~CountedWork() { here_ = outer_; }
  CountedWork(const CountedWork&) = delete;
  CountedWork& operator=(const CountedWork&) = delete;

  static CountedWork* here() { return here_; }        // of this thread; null: kernels work
  Bytes take() { return std::exchange(bytes_, {}); }  // since the last call

  void added(uint64_t bytes) { bytes_.added += bytes; }
  void encoded(uint64_t bytes) { bytes_.encoded += bytes; }
  void decoded(uint64_t bytes) { bytes_.decoded += bytes; }

 private:
  static thread_local CountedWork* here_;

  CountedWork* const outer_;
  Bytes bytes_;
};

}  // namespace ringdp
