// The floating-point mode that kernels need: round to nearest, subnormals kept. The mode belongs to the thread, which
// inherits it from its parent, and users change it (torch.set_flush_denormal): the bits must not depend on which
// thread runs a kernel. So the thread that drives operations has a FloatModeScope; it costs nothing where the mode is
// the default.
#pragma once

#include <cstdint>

namespace ringdp {

class FloatModeScope {
 public:
  FloatModeScope() : before_(read()) {
    if (before_ != wanted(before_)) write(wanted(before_));
  }
  ~FloatModeScope() {
    if (before_ != wanted(before_)) write(before_);
  }
  FloatModeScope(const FloatModeScope&) = delete;
  FloatModeScope& operator=(const FloatModeScope&) = delete;

 private:
#if defined(__x86_64__)
  using Register = uint32_t;  // MXCSR: bits 13 and 14 round, 15 flushes results, 6 flushes operands
  static Register wanted(Register mode) { return mode & ~uint32_t{0xe040}; }
  static Register read() { return __builtin_ia32_stmxcsr(); }
  static void write(Register mode) { __builtin_ia32_ldmxcsr(mode); }
#elif defined(__aarch64__)
  using Register = uint64_t;  // FPCR: bits 22 and 23 round, 24 flushes, 25 makes one default NaN, 19 flushes halves
  static Register wanted(Register mode) { return mode & ~uint64_t{0x03c80000}; }
  static Register read() {
    Register mode;
    asm volatile("mrs %0, fpcr" : "=r"(mode));
    return mode;
  }
  static void write(Register mode) { asm volatile("msr fpcr, %0" : : "r"(mode)); }
#else
  using Register = int;  // no flush to zero known here
  static Register wanted(Register mode) { return mode; }
  static Register read() { return 0; }
  static void write(Register) {}
#endif

  Register before_;
};

}  // namespace ringdp
