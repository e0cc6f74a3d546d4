#include "base/block_pool.h"

#include <sys/mman.h>

#include <algorithm>
#include <limits>
#include <new>

namespace ringdp {
namespace {

constexpr std::size_t kMostBytes = std::numeric_limits<std::ptrdiff_t>::max() / 2;

constexpr std::size_t rounded_up(std::size_t value, std::size_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

void* pointer(uintptr_t address) { return reinterpret_cast<void*>(address); }

// 0 where the system refuses.
uintptr_t map_aligned(std::size_t bytes) {
  constexpr std::size_t kAlignment = BlockPool::kUnitBytes;
  void* const mapped = mmap(nullptr, bytes + kAlignment, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return 0;
  const auto begin = reinterpret_cast<uintptr_t>(mapped);
  const uintptr_t aligned = rounded_up(begin, kAlignment);
  if (aligned > begin) munmap(mapped, aligned - begin);
  if (const std::size_t behind = begin + kAlignment - aligned; behind > 0) munmap(pointer(aligned + bytes), behind);
  madvise(pointer(aligned), bytes, MADV_HUGEPAGE);  // advice: where it fails the pages are ordinary ones
  return aligned;
}

}  // namespace

BlockPool::~BlockPool() {
  for (const auto& [address, segment] : segments_) munmap(pointer(address), segment.bytes);
}

void* BlockPool::allocate(std::size_t bytes) noexcept try {
  if (bytes == 0 || bytes > kMostBytes) return nullptr;
  bytes = rounded_up(bytes, kGranuleBytes);
  const MutexLock lock(mutex_);
  auto fitting = free_.lower_bound({bytes, 0});
  if (fitting == free_.end()) {
    if (!add_segment(bytes)) {
      give_back(step_);  // the idle memory may be what the system lacks
      if (!add_segment(bytes)) return nullptr;
    }
    fitting = free_.lower_bound({bytes, 0});
  }
  const auto [found_bytes, address] = *fitting;
  const auto holder = segment_of(address);
  Segment& segment = holder->second;
  if (found_bytes > bytes) segment.ranges.emplace(address + bytes, Range{found_bytes - bytes, false});
  auto node = free_.extract(fitting);  // from here on nothing throws
  if (found_bytes > bytes) {
    node.value() = {found_bytes - bytes, address + bytes};
    free_.insert(std::move(node));
  }
  segment.ranges.at(address) = {bytes, true};
  in_use_bytes_ += bytes;
  stamp(holder->first, segment, address, bytes);
  return pointer(address);
} catch (const std::bad_alloc&) {
  return nullptr;
}

bool BlockPool::owns(const void* block) const noexcept {
  const auto address = reinterpret_cast<uintptr_t>(block);
  const MutexLock lock(mutex_);
  auto after = segments_.upper_bound(address);
  if (after == segments_.begin()) return false;
  const auto& [begin, segment] = *std::prev(after);
  return address - begin < segment.bytes;
}

void BlockPool::release(void* block) noexcept {
  const auto address = reinterpret_cast<uintptr_t>(block);
  const MutexLock lock(mutex_);
  const auto holder = segment_of(address);
  if (holder == segments_.end()) return;
  Segment& segment = holder->second;
  auto range = segment.ranges.find(address);
  if (range == segment.ranges.end() || !range->second.used) return;
  const std::size_t bytes = range->second.bytes;
  range->second.used = false;
  in_use_bytes_ -= bytes;
  stamp(holder->first, segment, address, bytes);
  range = merge(segment, range);
  free_.emplace(range->second.bytes, range->first);
  if (!kept_) give_back(step_);
}

void BlockPool::end_step() noexcept {
  const MutexLock lock(mutex_);
  if (++step_ > kKeptSteps) give_back(step_ - kKeptSteps);
}

void BlockPool::keep(bool kept) noexcept {
  const MutexLock lock(mutex_);
  kept_ = kept;
  if (!kept) give_back(step_);
}

BlockPool::Use BlockPool::use() const noexcept {
  const MutexLock lock(mutex_);
  return {in_use_bytes_, held_bytes_ - in_use_bytes_, mapped_bytes_};
}

// A free range of at least `bytes`.
bool BlockPool::add_segment(std::size_t bytes) {
  const std::size_t least = rounded_up(bytes, kUnitBytes);
  Segment segment{std::max(least, kSegmentBytes), {}, {}};
  uintptr_t address = map_aligned(segment.bytes);
  if (address == 0 && segment.bytes > least) {
    segment.bytes = least;
    address = map_aligned(least);
  }
  if (address == 0) return false;
  try {
    segment.ranges.emplace(address, Range{segment.bytes, false});
    segment.last_used.resize(segment.bytes / kUnitBytes);
    free_.emplace(segment.bytes, address);
    segments_.emplace(address, std::move(segment));
  } catch (const std::bad_alloc&) {
    free_.erase({segment.bytes, address});
    munmap(pointer(address), segment.bytes);
    throw;
  }
  mapped_bytes_ += segment.bytes;
  return true;
}

void BlockPool::stamp(uintptr_t segment_address, Segment& segment, uintptr_t begin, std::size_t bytes) {
  const std::size_t last = (begin - segment_address + bytes - 1) / kUnitBytes;
  for (std::size_t unit = (begin - segment_address) / kUnitBytes; unit <= last; ++unit) {
    if (segment.last_used[unit] == 0) held_bytes_ += kUnitBytes;
    segment.last_used[unit] = step_;
  }
}

// `released` is a free range that is not in free_. The result covers it and its free neighbours, and is not in free_
// either.
BlockPool::Ranges::iterator BlockPool::merge(Segment& segment, Ranges::iterator released) {
  if (const auto next = std::next(released); next != segment.ranges.end() && !next->second.used) {
    free_.erase({next->second.bytes, next->first});
    released->second.bytes += next->second.bytes;
    segment.ranges.erase(next);
  }
  if (released == segment.ranges.begin()) return released;
  const auto before = std::prev(released);
  if (before->second.used) return released;
  free_.erase({before->second.bytes, before->first});
  before->second.bytes += released->second.bytes;
  segment.ranges.erase(released);
  return before;
}

// All free memory that no block has covered since `last_step`; segments without any leave the address space.
void BlockPool::give_back(uint64_t last_step) {
  for (auto it = segments_.begin(); it != segments_.end();) {
    auto& [address, segment] = *it;
    for (const auto& [begin, range] : segment.ranges) {
      if (!range.used) give_back(address, segment, begin, range.bytes, last_step);
    }
    const bool unused = segment.ranges.size() == 1 && !segment.ranges.begin()->second.used;
    const bool empty =
        std::all_of(segment.last_used.begin(), segment.last_used.end(), [](auto step) { return step == 0; });
    if (!unused || !empty) {
      ++it;
      continue;
    }
    free_.erase({segment.bytes, address});
    munmap(pointer(address), segment.bytes);
    mapped_bytes_ -= segment.bytes;
    it = segments_.erase(it);
  }
}

// A unit that a block covers in part stays.
void BlockPool::give_back(uintptr_t segment_address, Segment& segment, uintptr_t begin, std::size_t bytes,
                          uint64_t last_step) {
  const std::size_t end = (begin - segment_address + bytes) / kUnitBytes;
  const auto old = [&](std::size_t unit) {
    return unit < end && segment.last_used[unit] != 0 && segment.last_used[unit] <= last_step;
  };
  for (std::size_t unit = rounded_up(begin - segment_address, kUnitBytes) / kUnitBytes; unit < end;) {
    std::size_t behind = unit;
    for (; old(behind); ++behind) segment.last_used[behind] = 0;
    if (behind > unit) {
      madvise(pointer(segment_address + unit * kUnitBytes), (behind - unit) * kUnitBytes, MADV_DONTNEED);
      held_bytes_ -= (behind - unit) * kUnitBytes;
    }
    unit = behind + 1;
  }
}

BlockPool::Segments::iterator BlockPool::segment_of(uintptr_t address) {
  const auto after = segments_.upper_bound(address);
  if (after == segments_.begin()) return segments_.end();
  const auto before = std::prev(after);
  return address - before->first < before->second.bytes ? before : segments_.end();
}

}  // namespace ringdp
