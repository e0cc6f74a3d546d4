// PairMemory: the memory that two processes of one host share, a page of counters and a ring of bytes each way. Every
// ring is mapped twice, one copy behind the other, so that any stretch of it is contiguous. A memfd of fixed size
// (sealed), with all pages allocated by its maker; nothing in the file system, and not in forked children. Owned by
// one channel.
#pragma once

#include <cstddef>
#include <optional>
#include <string>

#include "base/fd.h"

namespace ringdp {

class PairMemory {
 public:
  static constexpr std::size_t kControlBytes = 4096;                   // zero at first
  static constexpr std::size_t kMinRingBytes = std::size_t{64} << 10;  // a page, on some machines
  static constexpr std::size_t kMaxRingBytes = std::size_t{64} << 20;

  PairMemory() = default;
  ~PairMemory() { reset(); }
  PairMemory(PairMemory&& other) noexcept;
  PairMemory& operator=(PairMemory&& other) noexcept;
  PairMemory(const PairMemory&) = delete;
  PairMemory& operator=(const PairMemory&) = delete;

  // A descriptor to be handed to the peer, and to `map`. `ring_bytes`: a power of two from kMinRingBytes to
  // kMaxRingBytes. Empty, with the reason as text, if limits or filters of this process or host refuse.
  static Fd create(std::size_t ring_bytes, std::string& problem);

  // Maps the memory of `create`, made here or by the peer; refuses a descriptor of another kind, size, or with other
  // seals.
  static std::optional<PairMemory> map(const Fd& memory, std::size_t ring_bytes, std::string& problem);

  std::byte* control() const { return base_; }
  // Ring 0 carries what the maker sends, ring 1 what its peer sends. 2 · ring_bytes may be touched.
  std::byte* ring(int which) const;
  std::size_t ring_bytes() const { return ring_bytes_; }

 private:
  void reset() noexcept;

  std::byte* base_ = nullptr;
  std::size_t ring_bytes_ = 0;
  unsigned generation_ = fork_generation();
};

}  // namespace ringdp
