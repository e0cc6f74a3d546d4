// VirtualMemory: addresses without memory. A read or write there ends the process, which shows that a simulation moves
// no bytes. Owned by the Simulation; any thread may compute with the addresses.
#pragma once

#include <cstddef>
#include <span>

namespace ringdp {

class VirtualMemory {
 public:
  explicit VirtualMemory(std::size_t bytes);  // throws Error(kSystem)
  ~VirtualMemory();
  VirtualMemory(const VirtualMemory&) = delete;
  VirtualMemory& operator=(const VirtualMemory&) = delete;

  std::span<std::byte> span() const { return {begin_, bytes_}; }

 private:
  std::byte* begin_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace ringdp
