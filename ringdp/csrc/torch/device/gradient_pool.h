// GradientPool: a reducer's part in the memory that is kept for gradients. The process has one BlockPool, and one
// c10::Allocator for CPU tensors in front of torch's, installed for the first reducer that takes part and never
// removed, since tensors refer to it. It takes blocks of 1 MiB and more from the pool that a thread allocates while it
// runs a backward announced by during_backward, and blocks of 2 MiB and more while a Scope lives; other allocations
// are torch's allocator's. Blocks return to the pool from any thread. When the last reducer has left, idle memory goes
// back to the kernel.
//
// Owned by the Buckets, used under the reducer's lock.
#pragma once

#include <cstddef>
#include <memory>

namespace ringdp {

class GradientPool {
 public:
  struct Use {
    bool installed = false;
    std::size_t in_use_bytes = 0;
    std::size_t idle_bytes = 0;
  };

  // While it exists, this thread's large allocations come from the pool.
  class Scope {
   public:
    explicit Scope(bool on);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    const bool on_;
  };

  // `wanted` may have no effect: if another library has replaced torch's allocator there is no pool, and a log line.
  explicit GradientPool(bool wanted);
  ~GradientPool();
  GradientPool(const GradientPool&) = delete;
  GradientPool& operator=(const GradientPool&) = delete;

  Scope scope() const { return Scope(on_); }
  // Uses the pool in this thread's backward and those nested in it, until the result is destroyed: the backward's
  // graph task owns it in a callback, and is destroyed however the backward ends. Null: the pool is not used.
  std::shared_ptr<void> during_backward() const;

  static Use use();  // of the process
  static bool owns(const void* memory);

 private:
  const bool on_;
};

}  // namespace ringdp
