// GradientPool: a reducer's part in the memory that is kept for gradients. The process has one BlockPool, and one
// c10::Allocator for CPU tensors in front of torch's, installed for the first reducer that takes part and never
// removed, since tensors refer to it. It takes blocks of 1 MiB and more from the pool that a thread allocates while it
// runs a backward announced by during_backward, and blocks of 2 MiB and more while a Scope lives; all else it hands on
// to torch's allocator. Blocks return to the pool from any thread. When no reducer takes part any more, idle memory
// goes back to the kernel.
//
// Owned by the GradientLayout, used under the reducer's lock.
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

  // While it lives, this thread's large allocations come from the pool.
  class Scope {
   public:
    explicit Scope(bool on);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    const bool on_;
  };

  // `wanted` is not enough: where another library has replaced torch's allocator there is no pool, and one log line
  // says so.
  explicit GradientPool(bool wanted);
  ~GradientPool();
  GradientPool(const GradientPool&) = delete;
  GradientPool& operator=(const GradientPool&) = delete;

  Scope scope() const { return Scope(on_); }
  // Of the backward that runs in this thread, and of those nested in it. It lasts until the result is destroyed: the
  // backward's graph task keeps it in a callback, and is destroyed however the backward ends. Null: no part in the
  // pool.
  std::shared_ptr<void> during_backward() const;

  static Use use();  // of the process
  static bool owns(const void* memory);

 private:
  const bool on_;
};

}  // namespace ringdp
