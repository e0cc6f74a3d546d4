// CoreProbe: how fast a core computes now, by a loop that is always the same and takes about a microsecond. It keeps
// the core's floating point units busy, so it takes longer where a neighbour has them, too (the other thread of the
// core, perhaps another virtual machine's), where the clock is low, and on a slower processor. Nothing in the kernel's
// accounts shows the first. Value type; one for each thread that is measured.
#pragma once

namespace ringdp {

class CoreProbe {
 public:
  // Runs the loop.
  void sample() noexcept;
  // Of the samples since the last call, seconds; 0 without any.
  float take_mean() noexcept;

 private:
  static constexpr float kMost = 4.0F;  // times the shortest; what takes longer was interrupted

  float shortest_ = 0.0F;
  float sum_ = 0.0F;
  int samples_ = 0;
};

}  // namespace ringdp
