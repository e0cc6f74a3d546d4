#include "simulation/virtual_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>

#include "base/error.h"
#include "base/text.h"

namespace ringdp {

VirtualMemory::VirtualMemory(std::size_t bytes) : bytes_(std::max<std::size_t>(bytes, 1)) {
  void* at = mmap(nullptr, bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED)
    throw Error(ErrorKind::kSystem,
                "no address space for a buffer of " + std::to_string(bytes) + " bytes: " + errno_text(errno));
  begin_ = static_cast<std::byte*>(at);
}

VirtualMemory::~VirtualMemory() { munmap(begin_, bytes_); }

}  // namespace ringdp
