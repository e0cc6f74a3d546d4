// BlockPool: blocks of memory of 4 KiB and more that cost page faults only once. Released blocks keep their pages,
// merge with released neighbours, and serve later requests of any size. A huge page that no block has covered for
// kKeptSteps steps goes back to the kernel.
//
// Memory is mapped in segments aligned to 2 MiB with MADV_HUGEPAGE; where the kernel has no huge pages the pages are
// ordinary ones. It is private: a forked child has a copy-on-write copy of the blocks and of the pool.
//
// Owned by the process-wide allocator (torch/device/gradient_pool.h), or by a test. Any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "base/thread_safety.h"

namespace ringdp {

class BlockPool {
 public:
  static constexpr std::size_t kUnitBytes = std::size_t{2} << 20;       // a huge page
  static constexpr std::size_t kSegmentBytes = std::size_t{128} << 20;  // of address space, at least; not of memory
  static constexpr std::size_t kGranuleBytes = 4096;  // sizes are rounded up to it, addresses are aligned to it
  static constexpr uint64_t kKeptSteps = 10;

  struct Use {
    std::size_t in_use_bytes = 0;
    std::size_t idle_bytes = 0;    // of the memory that the pool holds, in no block
    std::size_t mapped_bytes = 0;  // of address space
  };

  BlockPool() = default;
  ~BlockPool();  // unmaps all, also blocks in use
  BlockPool(const BlockPool&) = delete;
  BlockPool& operator=(const BlockPool&) = delete;

  // Uninitialised memory; null where the system refuses, or for 0 bytes.
  void* allocate(std::size_t bytes) noexcept;
  bool owns(const void* block) const noexcept;
  // Does nothing if `block` does not come from allocate.
  void release(void* block) noexcept;

  // A step is over: memory that was in no block for kKeptSteps of them goes back to the kernel.
  void end_step() noexcept;
  // With false, released blocks go back to the kernel at once, as does all memory that is idle now. Initially true.
  void keep(bool kept) noexcept;
  Use use() const noexcept;

  // Around fork(), in the thread that calls it, so that no other thread holds the lock in the child.
  void lock_for_fork() noexcept RINGDP_ACQUIRE(mutex_) { mutex_.lock(); }
  void unlock_after_fork() noexcept RINGDP_RELEASE(mutex_) { mutex_.unlock(); }

 private:
  struct Range {
    std::size_t bytes;
    bool used;
  };
  using Ranges = std::map<uintptr_t, Range>;  // by address
  struct Segment {
    std::size_t bytes;
    Ranges ranges;                    // without gaps; two neighbours are never both free
    std::vector<uint64_t> last_used;  // of each unit: the step in which a block last covered it; 0: it has no memory
  };
  using Segments = std::map<uintptr_t, Segment>;  // by address

  bool add_segment(std::size_t bytes) RINGDP_REQUIRES(mutex_);
  void stamp(uintptr_t segment_address, Segment& segment, uintptr_t begin, std::size_t bytes) RINGDP_REQUIRES(mutex_);
  Ranges::iterator merge(Segment& segment, Ranges::iterator released) RINGDP_REQUIRES(mutex_);
  void give_back(uint64_t last_step) RINGDP_REQUIRES(mutex_);
  void give_back(uintptr_t segment_address, Segment& segment, uintptr_t begin, std::size_t bytes, uint64_t last_step)
      RINGDP_REQUIRES(mutex_);
  Segments::iterator segment_of(uintptr_t address) RINGDP_REQUIRES(mutex_);

  mutable Mutex mutex_;
  Segments segments_ RINGDP_GUARDED_BY(mutex_);
  std::set<std::pair<std::size_t, uintptr_t>> free_
      RINGDP_GUARDED_BY(mutex_);  // by size: the smallest that fits is taken
  uint64_t step_ RINGDP_GUARDED_BY(mutex_) = 1;
  bool kept_ RINGDP_GUARDED_BY(mutex_) = true;
  std::size_t in_use_bytes_ RINGDP_GUARDED_BY(mutex_) = 0;
  std::size_t held_bytes_ RINGDP_GUARDED_BY(mutex_) = 0;  // of units with memory
  std::size_t mapped_bytes_ RINGDP_GUARDED_BY(mutex_) = 0;
};

}  // namespace ringdp
