#include "transport/pair_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <utility>

#include "base/error.h"

namespace ringdp {
namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
constexpr unsigned kNoExecSeal = 0x0008;  // MFD_NOEXEC_SEAL, Linux 6.3

// The bytes of the control page in the file: the rings must be aligned to pages, of up to 64 KiB.
std::size_t control_span() {
  static const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  return std::max(PairMemory::kControlBytes, page);
}

std::size_t file_bytes(std::size_t ring_bytes) { return control_span() + 2 * ring_bytes; }
std::size_t mapped_bytes(std::size_t ring_bytes) { return control_span() + 4 * ring_bytes; }

std::string failed(const char* call, int error_number, const char* hint = "") {
  return std::string(call) + ": " + errno_text(error_number) + hint;
}

// Checked first: for a size above RLIMIT_FSIZE the kernel sends SIGXFSZ, which ends the process.
bool over_file_limit(std::size_t bytes, std::string& problem) {
  rlimit limit{};
  if (getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY || limit.rlim_cur >= bytes) return false;
  problem = "the limit on file sizes (ulimit -f) is " + std::to_string(limit.rlim_cur) + " bytes, " +
            std::to_string(bytes) + " are needed";
  return true;
}

Fd open_memory(std::string& problem) {
  // Without that flag the file may be executed, and some hosts refuse it (sysctl vm.memfd_noexec); older kernels do not
  // know the flag.
  int fd = memfd_create("ringdp", MFD_CLOEXEC | MFD_ALLOW_SEALING | kNoExecSeal);
  if (fd < 0 && errno == EINVAL) fd = memfd_create("ringdp", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) {
    bool filtered = errno == EPERM || errno == EACCES || errno == ENOSYS;
    problem = failed("memfd_create", errno, filtered ? " (a seccomp filter?)" : "");
  }
  return Fd(fd);
}

// Empty if the descriptor has the properties that `create` gives it.
std::string objection(int fd, std::size_t ring_bytes) {
  struct stat status{};
  if (fstat(fd, &status) != 0) return failed("fstat", errno);
  int seals = fcntl(fd, F_GET_SEALS);
  if (!S_ISREG(status.st_mode) || seals < 0) return "the descriptor is not memory that can be sealed";
  if ((seals & kSeals) != kSeals) return "the memory's size is not sealed";
  if (status.st_uid != geteuid()) return "the memory belongs to user " + std::to_string(status.st_uid);
  if ((status.st_mode & 07777) != 0600) return "others may open the memory";
  auto bytes = static_cast<std::size_t>(status.st_size);
  if (bytes != file_bytes(ring_bytes))
    return "the memory has " + std::to_string(bytes) + " bytes, " + std::to_string(file_bytes(ring_bytes)) +
           " are expected";
  // A missing page would be allocated at its first access; if that fails, the process dies of SIGBUS.
  if (static_cast<std::size_t>(status.st_blocks) * 512 < bytes) return "the memory is not allocated as a whole";
  return "";
}

}  // namespace

Fd PairMemory::create(std::size_t ring_bytes, std::string& problem) {
  if (!std::has_single_bit(ring_bytes) || ring_bytes < kMinRingBytes || ring_bytes > kMaxRingBytes)
    throw Error(ErrorKind::kValue, "a ring of " + std::to_string(ring_bytes) + " bytes cannot be shared");
  std::size_t bytes = file_bytes(ring_bytes);
  if (over_file_limit(bytes, problem)) return Fd();
  Fd memory = open_memory(problem);
  if (!memory) return Fd();
  auto length = static_cast<off_t>(bytes);
  int allocated = 0;
  if (fchmod(memory.get(), 0600) != 0) {
    problem = failed("fchmod", errno);
  } else if (ftruncate(memory.get(), length) != 0) {
    problem = failed("ftruncate", errno);
  } else {
    do {
      allocated = fallocate(memory.get(), 0, 0, length);
    } while (allocated != 0 && errno == EINTR);
    if (allocated != 0)
      problem = failed("fallocate", errno);
    else if (fcntl(memory.get(), F_ADD_SEALS, kSeals) != 0)
      problem = failed("sealing the memory", errno);
    else
      return memory;
  }
  return Fd();
}

std::optional<PairMemory> PairMemory::map(const Fd& memory, std::size_t ring_bytes, std::string& problem) {
  problem = objection(memory.get(), ring_bytes);
  if (!problem.empty()) return std::nullopt;
  std::size_t bytes = mapped_bytes(ring_bytes);
  void* reserved = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) {
    problem = failed("mmap", errno, errno == ENOMEM ? " (the limit on address space, ulimit -v?)" : "");
    return std::nullopt;
  }
  PairMemory mapped;
  mapped.base_ = static_cast<std::byte*>(reserved);
  mapped.ring_bytes_ = ring_bytes;
  auto place = [&](std::byte* at, std::size_t length, std::size_t offset) {
    int flags = MAP_SHARED | MAP_FIXED | MAP_POPULATE;
    return mmap(at, length, PROT_READ | PROT_WRITE, flags, memory.get(), static_cast<off_t>(offset)) != MAP_FAILED;
  };
  bool placed = place(mapped.base_, control_span(), 0);
  for (int which = 0; which < 2; ++which)
    for (std::size_t copy = 0; copy < 2; ++copy)
      placed = placed && place(mapped.ring(which) + copy * ring_bytes, ring_bytes,
                               control_span() + static_cast<std::size_t>(which) * ring_bytes);
  if (!placed) {
    problem = failed("mmap", errno);
    return std::nullopt;
  }
  if (madvise(mapped.base_, bytes, MADV_DONTFORK) != 0) {
    problem = failed("madvise", errno);
    return std::nullopt;
  }
  return mapped;
}

std::byte* PairMemory::ring(int which) const {
  return base_ + control_span() + static_cast<std::size_t>(which) * 2 * ring_bytes_;
}

PairMemory::PairMemory(PairMemory&& other) noexcept
    : base_(std::exchange(other.base_, nullptr)), ring_bytes_(other.ring_bytes_), generation_(other.generation_) {}

PairMemory& PairMemory::operator=(PairMemory&& other) noexcept {
  if (this != &other) {
    reset();
    base_ = std::exchange(other.base_, nullptr);
    ring_bytes_ = other.ring_bytes_;
    generation_ = other.generation_;
  }
  return *this;
}

void PairMemory::reset() noexcept {
  // A forked child does not have the mapping, and may have another one at this address.
  if (base_ != nullptr && generation_ == fork_generation()) munmap(base_, mapped_bytes(ring_bytes_));
  base_ = nullptr;
}

}  // namespace ringdp
